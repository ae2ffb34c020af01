"""Norms of weights: the effective weight of a raw one, in a convolution and a linear layer.

Legend: O outputs, M fan-in.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from normexp.contract._checks import DoesNotApply, contract_check
from normexp.contract._subject import Subject, draw, max_difference, tell
from normexp.contract._weight import LAYERS, NUM_INPUTS, NUM_OUTPUTS, WeightSpecimen
from normexp.contract.sums import classify_shrinking
from normexp.contract.transforms import find_loop
from normexp.norms import WeightCard


def _get_card(subject: Subject) -> WeightCard:
    """Return what the norm declares about weights; end the experiment if that is nothing."""
    if subject.card.weight is None:
        raise DoesNotApply("it does not act on weights")
    return subject.card.weight


def _eps_option(subject: Subject) -> str | None:
    """Return the option that holds the eps of the weight."""
    found = [name for name in ("weight_eps", "eps") if name in subject.option_names]
    return found[0] if found else None


def _without_eps(subject: Subject) -> dict[str, float]:
    option = _eps_option(subject)
    return {} if option is None else {option: 1e-12}


def _draw_input(kind: str) -> Tensor:
    """Return an input for the layer of a weight."""
    return draw((2, NUM_INPUTS) if kind == "linear" else (2, NUM_INPUTS, 4, 4), "weight_input")


@contract_check(
    "An effective weight depends on the fan-in of its own output and nothing else.",
    fields=("weight",),
)
def try_weight_fan_in(subject: Subject) -> Iterator[str]:
    """Look at the pattern of the Jacobian, by finite differences."""
    _get_card(subject)
    for kind in LAYERS:
        weight = WeightSpecimen(subject, kind)
        raw, step = weight.draw(), 1e-5
        base = weight.make(raw)
        if tuple(base.shape) != weight.shape:
            yield (
                f"weight: the effective weight of a {kind} {tell(weight.shape)} has the shape "
                f"{tell(base.shape)}"
            )
            continue
        rows = []
        for i in range(raw.numel()):
            moved = raw.clone()
            moved.view(-1)[i] += step
            rows.append(((weight.make(moved) - base) / step).flatten())
        found = torch.stack(rows, 1).abs() > 1e-7
        output = torch.arange(NUM_OUTPUTS).repeat_interleave(raw[0].numel())
        expected = output[:, None] == output[None]
        if not torch.equal(found, expected):
            low, high = int(found.sum(1).min()), int(found.sum(1).max())
            yield (
                f"weight: an effective weight of a {kind} {tell(weight.shape)} depends on {low} to "
                f"{high} raw weights; the fan-in of its output has {raw[0].numel()}"
            )


@contract_check(
    "Mean and scale of a raw weight go out exactly if the card says so.",
    fields=("weight.is_centring", "weight.is_scale_invariant"),
)
def try_weight_invariances(subject: Subject) -> Iterator[str]:
    """Add a constant to the raw weight; multiply it."""
    card = _get_card(subject)
    for kind in LAYERS:
        weight = WeightSpecimen(subject, kind, _without_eps(subject))
        raw = weight.draw()
        base = weight.make(raw)
        for name, declared, moved in (
            ("is_centring", card.is_centring, raw + 1.0),
            ("is_scale_invariant", card.is_scale_invariant, 4.0 * raw),
        ):
            change = max_difference(weight.make(moved), base)
            if declared != (change < 1e-6):
                yield (
                    f"weight.{name}={declared} is declared; on a {kind} {tell(weight.shape)} the "
                    f"effective weight changes by {change:.2g}"
                )


@contract_check(
    "The sum of squares of a weight is divided by what the card says.", fields=("weight.divisor",)
)
def try_weight_divisor(subject: Subject) -> Iterator[str]:
    """Double every element of the fan-in."""
    card = _get_card(subject)
    for kind in LAYERS:
        once = WeightSpecimen(subject, kind, _without_eps(subject))
        twice = WeightSpecimen(subject, kind, _without_eps(subject), inputs=2 * NUM_INPUTS)
        for weight in (once, twice):
            for value in weight.others.values():
                value.fill_(1.0)
        raw = once.draw()
        before, after = once.make(raw), twice.make(raw.repeat_interleave(2, 1))[:, ::2]
        ratio, size = float((before * after).sum() / before.square().sum()), raw[0].numel()
        expected = {
            "M": 1.0,
            "M-1": math.sqrt((2 * size - 1) / (2 * (size - 1))),
            None: math.sqrt(0.5),
        }
        found = [name for name, value in expected.items() if abs(ratio - value) < 1e-6]
        if card.divisor not in found:
            told = (found[0] or "none, a plain sum") if found else "none of the known ones"
            yield (
                f"weight.divisor={card.divisor} is declared; found {told}: with every element of "
                f"the fan-in of a {kind} {tell(once.shape)} doubled, the effective weight is "
                f"{ratio:.6f} times what it was"
            )


def _make_scaled(weight: WeightSpecimen, raw: Tensor, scale: float) -> Tensor:
    """Return the effective weight of a scaled raw one."""
    return weight.make(scale * raw)


@contract_check("eps stands where the weight's card says.", fields=("weight.eps_place",))
def try_weight_eps_place(subject: Subject) -> Iterator[str]:
    """Scale a raw weight under a large eps."""
    card, option = _get_card(subject), _eps_option(subject)
    if option is None:
        if card.eps_place is not None:
            yield (
                f"weight.eps_place={card.eps_place} is declared, but there is no option weight_eps"
            )
            return
        raise DoesNotApply("there is no eps for the weight")
    for kind in LAYERS:
        large = WeightSpecimen(subject, kind, {option: 0.5})
        tiny = WeightSpecimen(subject, kind, _without_eps(subject))
        raw = large.draw()
        raw = raw / raw.square().sum((*range(1, raw.ndim),), keepdim=True).sqrt()
        found: str | None = None
        if max_difference(large.make(0.1 * raw), tiny.make(0.1 * raw)) > 1e-9:
            found = classify_shrinking(partial(_make_scaled, large, raw))
        if found != card.eps_place:
            yield (
                f"weight.eps_place={card.eps_place} is declared; found "
                f"{found or 'no effect of eps'} on a {kind} {tell(large.shape)}"
            )


@contract_check(
    "The parameters beside the raw weight have the declared names and shapes.",
    fields=("weight.parameters",),
)
def try_weight_parameters(subject: Subject) -> Iterator[str]:
    """Compare them with the card; axes of extent 1 do not count."""
    card = _get_card(subject)
    for kind in LAYERS:
        weight = WeightSpecimen(subject, kind)
        found = {
            name.rpartition(".")[2]: tuple(n for n in p.shape if n != 1)
            for name, p in weight.others.items()
        }
        declared = {
            name: tuple(NUM_OUTPUTS if s == "O" else int(s) for s in symbols)
            for name, symbols in card.parameters.items()
        }
        if found != declared:
            yield (
                f"weight.parameters={declared} is declared for O={NUM_OUTPUTS}; a {kind} "
                f"has {found}"
            )


@contract_check(
    "A weight can be assigned, an effective one is kept so, and gradients reach the raw weight.",
    fields=("weight.parametrize",),
)
def try_weight_assignment(subject: Subject) -> Iterator[str]:
    """Assign the effective weight and read it again; differentiate; save and load."""
    _get_card(subject)
    for kind in LAYERS:
        weight = WeightSpecimen(subject, kind)
        module: Any = weight.module
        effective = weight.make(weight.draw())
        if torch.equal(effective, weight.draw()):
            yield f"weight.parametrize has no effect: the weight of a {kind} is the raw weight"
        with torch.no_grad():
            module.weight = effective.clone()
        # eps may take as much away.
        change = max_difference(module.weight, effective) / float(effective.abs().max())
        if change > 1e-3:
            yield (
                f"weight.parametrize: an effective weight of a {kind} {tell(weight.shape)}, "
                f"assigned and read again, has changed by {change:.2g} of its size"
            )
        x = _draw_input(kind)
        module(x).square().sum().backward()
        for name, parameter in module.named_parameters():
            if parameter.grad is None or not bool(parameter.grad.isfinite().all()):
                yield f"weight.parametrize: {name} of a {kind} gets no finite gradient"
        twin = WeightSpecimen(subject, kind).module
        twin.load_state_dict(module.state_dict(), strict=True)
        if not torch.equal(twin(x), module(x)):
            yield f"weight.parametrize: a {kind} loaded from another's state dict differs"


@contract_check("The effective weight is one function under vmap, compilation and in bfloat16.")
def try_weight_transforms(subject: Subject) -> Iterator[str]:
    """Stack raw weights under torch.vmap; compile a layer; compare bfloat16 with float64."""
    _get_card(subject)
    for kind in LAYERS:
        weight = WeightSpecimen(subject, kind)
        raws = torch.stack([weight.draw(), 2.0 + weight.draw()])
        if subject.card.is_vectorizable:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                stacked = torch.vmap(weight.make)(raws)
            loop = find_loop(caught)
            if loop is not None:
                yield f"weight, is_vectorizable: {loop}"
            difference = max(max_difference(stacked[i], weight.make(raws[i])) for i in range(2))
            if difference > 1e-9:
                yield (
                    f"weight, is_vectorizable: stacked weights of a {kind} differ by "
                    f"{difference:.2g}"
                )
        torch._dynamo.reset()
        x, compiled = (
            _draw_input(kind),
            torch.compile(weight.module, fullgraph=True, backend="aot_eager"),
        )
        difference = max_difference(compiled(x), weight.module(x))
        if difference > 1e-9:
            yield f"weight: compiled, the output of a {kind} differs by {difference:.2g}"
        half = WeightSpecimen(subject, kind)
        half.module.bfloat16()
        for key, value in half.module.named_parameters():
            weight.module.get_parameter(key).detach().copy_(value)
        raw = raws[0].bfloat16()
        found, expected = half.make(raw), weight.make(raw.double())
        tolerance = 4 * torch.finfo(torch.bfloat16).eps * expected.abs().max()
        if found.dtype != torch.bfloat16 or max_difference(found.double(), expected) > tolerance:
            yield f"weight: in bfloat16 the effective weight of a {kind} is not that of float64"
