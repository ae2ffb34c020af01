"""Padding: what stands at invalid positions has no influence, and zero comes out there."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from normexp.contract._checks import DoesNotApply, contract_check
from normexp.contract._subject import (
    DISTINCT,
    Specimen,
    Subject,
    draw,
    make_mask,
    max_difference,
    tell,
)

_SHAPE = DISTINCT[1]


@contract_check(
    "Sequences take a mask exactly if the card says so; invalid positions have no influence and "
    "come out as zero.",
    fields=("takes_mask",),
)
def try_takes_mask(subject: Subject) -> Iterator[str]:
    """Put noise and NaN at invalid positions; compare with sequences cut short."""
    declared = subject.card.takes_mask
    if 1 not in subject.card.dims:
        if declared:
            yield "takes_mask=True is declared, but dims has no sequences [N, L, C] (1)"
            return
        raise DoesNotApply("there is no form for sequences [N, L, C]")
    has_argument = subject.has_mask_argument()
    if declared != has_argument:
        what = "has an" if has_argument else "has no"
        yield f"takes_mask={declared} is declared, but forward {what} argument mask"
        return
    if not declared:
        return
    specimen = subject.specimen(_SHAPE)
    yield from _try_influence(specimen)
    yield from _try_full_and_cut(subject, specimen)
    yield from _try_empty_row(specimen)


def _lengths_mask(lengths: list[int]) -> Tensor:
    return torch.arange(_SHAPE[1])[None] < torch.tensor(lengths)[:, None]


def _differentiate(
    specimen: Specimen, x: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Return output, input's gradient, parameters' gradients and buffers of a training pass."""
    x = x.clone().requires_grad_()
    parameters = {k: p.clone().requires_grad_() for k, p in specimen.parameters.items()}
    y, state = specimen.run(x, mask=mask, parameters=parameters)
    torch.autograd.backward((y * draw(tuple(y.shape), "loss")).sum())
    assert x.grad is not None
    gradients = {
        k: torch.zeros_like(p) if p.grad is None else p.grad for k, p in parameters.items()
    }
    return y.detach(), x.grad, gradients, {k: v.detach() for k, v in state.items()}


def _try_influence(specimen: Specimen) -> Iterator[str]:
    mask = make_mask(_SHAPE)
    invalid = ~mask[:, :, None]
    x = draw(_SHAPE, "mask")
    y, gradient, gradients, state = _differentiate(specimen, x, mask)
    if bool(y.masked_select(invalid).any()):
        yield "takes_mask: the output at invalid positions is not zero"
    if bool(gradient.masked_select(invalid).any()):
        yield "takes_mask: the input's gradient at invalid positions is not zero"
    for name, filling in (
        ("noise", 100.0 * draw(_SHAPE, "noise")),
        ("NaN", torch.tensor(torch.nan)),
    ):
        filled = torch.where(invalid, filling, x)
        again = _differentiate(specimen, filled.double(), mask)
        pairs = {"the output": (y, again[0]), "the input's gradient": (gradient, again[1])}
        pairs |= {f"the gradient of {k}": (gradients[k], again[2][k]) for k in gradients}
        pairs |= {f"the buffer {k}": (state[k], again[3][k]) for k in state}
        for what, (a, b) in pairs.items():
            if not max_difference(a.double(), b.double()) <= 1e-12:
                yield f"takes_mask: {name} at invalid positions of {tell(_SHAPE)} changes {what}"
        evaluated = specimen(filled.double(), mask=mask, training=False)
        if bool(evaluated.masked_select(invalid).any()):
            yield f"takes_mask: in evaluation, with {name} there, invalid positions are not zero"
        clean = specimen(x, mask=mask, training=False)
        if max_difference(evaluated, clean) > 1e-12:
            yield f"takes_mask: in evaluation, {name} at invalid positions changes the output"


def _try_full_and_cut(subject: Subject, specimen: Specimen) -> Iterator[str]:
    x = draw(_SHAPE, "mask")
    full = _lengths_mask([_SHAPE[1]] * _SHAPE[0])
    for training in (True, False):
        change = max_difference(
            specimen(x, mask=full, training=training), specimen(x, training=training)
        )
        if change > 1e-9:
            yield (
                f"takes_mask: a mask that is True everywhere changes the output by {change:.2g} "
                f"({'training' if training else 'evaluation'})"
            )
    length = 3
    masked = specimen(x, mask=_lengths_mask([length] * _SHAPE[0]))[:, :length]
    change = max_difference(masked, specimen(x[:, :length].contiguous()))
    if change > 1e-9:
        yield (
            f"takes_mask: sequences masked behind position {length} come out {change:.2g} "
            "different from sequences cut there"
        )


def _try_empty_row(specimen: Specimen) -> Iterator[str]:
    y, gradient, gradients, state = _differentiate(
        specimen, draw(_SHAPE, "mask"), _lengths_mask([5, 0, 4, 2, 5, 1])
    )
    tensors = {"the output": y, "the input's gradient": gradient, **gradients, **state}
    for what, tensor in tensors.items():
        if not bool(tensor.isfinite().all()):
            yield f"takes_mask: with a sequence without valid positions, {what} is not finite"
