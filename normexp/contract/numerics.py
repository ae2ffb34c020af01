"""Numbers that computers do badly: half precision, huge and constant inputs, zeros."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from normexp.contract._checks import contract_check
from normexp.contract._subject import Call, Subject, draw

_HALVES = (torch.bfloat16, torch.float16)


def _differ(found: Tensor, expected: Tensor, tolerance: float) -> float:
    """Return by how many tolerances, relative to 1 plus the size, outputs differ at most."""
    size = 1.0 + expected.double().abs()
    distance = (found.double() - expected.double()).abs() / (tolerance * size)
    return float(distance.nan_to_num(nan=float("inf")).max())


@contract_check(
    "In bfloat16 and float16 it is as close to float32 as the type's digits allow, in both modes."
)
def try_half_precision(subject: Subject) -> Iterator[str]:
    """Compare with the float32 layer of the same numbers, also where squares overflow."""
    for call in subject.calls(dtype=torch.float32):
        specimen, mask = call.specimen, call.mask
        for dtype in _HALVES:
            half = subject.specimen(specimen.shape, dtype=dtype)
            specimen.parameters = {key: value.float() for key, value in half.parameters.items()}
            # Rounding of output, gain and shift: half a unit each; torch's CPU kernels that fold
            # the mean into the shift before they round cost |mean|/std more. 300^2 overflows
            # float16: statistics must be float32.
            tolerance = 4 * torch.finfo(dtype).eps
            state = half.stir()
            wide_state = {k: v.float() if v.is_floating_point() else v for k, v in state.items()}
            for scale, training in itertools.product((1.0, 300.0), (True, False)):
                x = (scale * draw(specimen.shape, "half")).to(dtype)
                y = half(x, mask=mask, training=training, state=state)
                where = f"{call.where} in {'training' if training else 'evaluation'}"
                if y.dtype != dtype:
                    yield f"an input {where} of {dtype} comes out as {y.dtype}"
                expected = specimen(x.float(), mask=mask, training=training, state=wide_state)
                excess = _differ(y, expected, tolerance)
                if not excess <= 1.0:
                    yield (
                        f"in {dtype}, values of size {scale:g} on {where}: the output differs "
                        f"from float32's by {excess:.2g} times what rounding explains"
                    )


@contract_check("Half-precision inputs go through a float32 layer under autocast.")
def try_autocast(subject: Subject) -> Iterator[str]:
    """Call the float32 layer on bfloat16 inputs, as after a convolution under autocast."""
    for call in subject.calls(dtype=torch.float32):
        specimen, mask = call.specimen, call.mask
        x = draw(specimen.shape, "autocast").bfloat16().requires_grad_()
        expected = specimen(x.detach().float(), mask=mask)
        condition = None
        if subject.card.takes_condition:
            condition = specimen.condition(x.float())
        with torch.autocast("cpu", torch.bfloat16):
            y = specimen(x, condition=condition, mask=mask)
        torch.autograd.backward(y.float().square().sum())
        excess = _differ(y.detach(), expected, 4 * torch.finfo(torch.bfloat16).eps)
        if not excess <= 1.0:
            yield (
                f"under autocast the output on {call.where} differs from float32's by "
                f"{excess:.2g} times what rounding explains"
            )
        if x.grad is None or not bool(x.grad.isfinite().all()):
            yield f"under autocast the gradient on {call.where} is not finite"


@contract_check("Constant inputs and zeros give finite outputs and gradients.")
def try_constant_inputs(subject: Subject) -> Iterator[str]:
    """Call it in float32 on inputs without variance, in both modes."""
    for call in subject.calls(dtype=torch.float32):
        for value in (0.0, 7.0):
            x = torch.full(call.specimen.shape, value)
            for training in (True, False):
                where = f"on a constant {value:g} of shape {call.where} in "
                where += "training" if training else "evaluation"
                yield from _check_finite(call, x, where, training=training)


def _check_finite(call: Call, x: Tensor, where: str, *, training: bool) -> Iterator[str]:
    """Yield what is not finite: output, gradients, buffers."""
    specimen = call.specimen
    x = x.clone().requires_grad_()
    parameters = {k: p.clone().requires_grad_() for k, p in specimen.parameters.items()}
    y, state = specimen.run(x, training=training, mask=call.mask, parameters=parameters)
    torch.autograd.backward(y.square().sum())
    gradients = {f"gradient of {k}": p.grad for k, p in {"x": x, **parameters}.items()}
    buffers = {f"buffer {k}": v for k, v in state.items()}
    for what, tensor in {"output": y, **gradients, **buffers}.items():
        if tensor is not None and not bool(tensor.isfinite().all()):
            yield f"{where} the {what} is not finite"


@contract_check("Far from zero the variance keeps its digits: a mean of 10,000 costs under 2%.")
def try_large_mean(subject: Subject) -> Iterator[str]:
    """Compare float32 with float64 on 10,000 plus noise; a one-pass variance fails."""
    for call in subject.calls(dtype=torch.float32):
        specimen, mask = call.specimen, call.mask
        x = (1e4 + draw(specimen.shape, "large_mean")).float()
        where = f"on 10,000 plus noise of shape {call.where}"
        yield from _check_finite(call, x, where, training=True)
        double = subject.specimen(specimen.shape)
        excess = _differ(specimen(x, mask=mask), double(x.double(), mask=mask), 0.02)
        if not excess <= 1.0:
            yield (
                f"{where} float32 differs from float64 by {excess * 0.02:.2g} of the output's size"
            )
