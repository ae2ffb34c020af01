"""How the sum of squares becomes a denominator: what divides it, and where eps stands."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from normexp.contract._checks import DoesNotApply, contract_check
from normexp.contract._subject import (
    DISTINCT,
    Shape,
    Specimen,
    Subject,
    draw,
    max_difference,
    tell,
)
from normexp.norms import Axis, channel_axis, compute_statistic_set_size

_TINY_EPS = 1e-12


def without_eps(subject: Subject) -> dict[str, Any]:
    """Return the option that makes eps negligible, where there is one."""
    return {"eps": _TINY_EPS} if "eps" in subject.option_names else {}


@contract_check(
    "The sum of squares is divided by what the card says: doubling every element of a set tells "
    "M from M-1.",
    fields=("divisor",),
)
def try_divisor(subject: Subject) -> Iterator[str]:
    """Double the elements of the statistic sets along one of their axes."""
    card = subject.card
    has_statistics = any(card.statistic_sets.values())
    if not has_statistics:
        if card.divisor is not None:
            yield f"divisor={card.divisor} is declared, but no statistics are"
            return
        raise DoesNotApply("there are no statistics")
    for dims in card.dims:
        for axis in sorted({axis for axes in card.statistic_sets[dims] for axis in axes}):
            ratio, size = _double(subject, DISTINCT[dims], axis)
            found = _name_divisor(ratio, size if len(card.statistic_sets[dims]) == 1 else None)
            if found != (card.divisor or "none"):
                yield (
                    f"divisor={card.divisor} is declared; found {found}: "
                    f"with every element along {axis} of an input {tell(DISTINCT[dims])} doubled "
                    f"the output is {ratio:.6f} times what it was"
                )


def _name_divisor(ratio: float, size: int | None) -> str:
    """Return which divisor gives that ratio of outputs, of sets of that size."""
    if abs(ratio - 1.0) < 1e-6:
        return "M"
    if abs(ratio - math.sqrt(0.5)) < 1e-6:
        return "none"  # a plain sum
    if size is None:
        return "M-1" if 1.0 < ratio < 1.5 else "another one"
    # The sum of squares doubles; M - 1 becomes 2 M - 1.
    expected = math.sqrt((2 * size - 1) / (2 * (size - 1)))
    return "M-1" if abs(ratio - expected) < 1e-6 else "another one"


def _double(subject: Subject, shape: Shape, axis: Axis) -> tuple[float, int]:
    """Return how much the output grows when sets are doubled along an axis, and M before."""
    settings: dict[str, Any] = {"is_generic": False, "is_plain": True, **without_eps(subject)}
    if "num_bands" in subject.option_names:
        settings["num_bands"] = 1  # doubled signals spread over several bands in another way
    once = subject.specimen(shape, **settings)
    x = draw(shape, "divisor")
    along = {"batch": 0, "ghost": 0, "position": 1 if len(shape) == 3 else len(shape) - 1}
    where = along.get(axis, channel_axis(len(shape) - 2))
    doubled = x.repeat_interleave(2, where)
    if axis == "ghost":
        settings["ghost_size"] = 2 * once.options["ghost_size"]
    twice = subject.specimen(tuple(doubled.shape), **settings)
    # What does not grow with the input stays as it is.
    for key, value in once.parameters.items():
        if value.shape == twice.parameters[key].shape:
            twice.parameters[key] = value
    before, after = once(x), twice(doubled)
    if not bool(before.any()):  # a gain that starts at 0
        once, twice = (subject.specimen(s.shape, **settings) for s in (once, twice))
        for specimen in (once, twice):  # a gain of 1
            specimen.parameters = {k: p + 1.0 for k, p in specimen.parameters.items()}
        before, after = once(x), twice(doubled)
    kept = after.index_select(where, torch.arange(0, doubled.shape[where], 2))
    sets = subject.card.statistic_sets[len(shape) - 2]
    size = compute_statistic_set_size(sets[0], shape, once.options)
    return float((kept * before).sum() / before.square().sum()), size


@contract_check(
    "eps stands where the card says, told by how the output shrinks with its input; an eps "
    "without effect is found.",
    fields=("eps_place",),
)
def try_eps_place(subject: Subject) -> Iterator[str]:
    """Scale the input of a layer with a large eps."""
    declared = subject.card.eps_place
    if "eps" not in subject.option_names:
        if declared is not None:
            yield f"eps_place={declared} is declared, but the builder has no option eps"
            return
        raise DoesNotApply("there is no eps")
    for dims in subject.card.dims:
        found = find_eps_place(subject, DISTINCT[dims])
        if found != declared:
            yield (
                f"eps_place={declared} is declared; found on an input {tell(DISTINCT[dims])}: "
                f"{_EPS_FOUND[found]}"
            )


_EPS_FOUND = {
    None: "the option eps has no effect at all",
    "inside_sqrt": "eps stands inside the square root (inside_sqrt)",
    "outside_sqrt": "eps stands outside the square root (outside_sqrt)",
    "clamp": "eps is a lower bound (clamp)",
    "magnitude": "eps is added to the magnitude of the input (magnitude)",
    "unknown": "eps has an effect, but none that a place among the known ones has",
}


def find_eps_place(subject: Subject, shape: Shape) -> str | None:
    """Return where eps stands, found by experiment; "unknown" where nothing fits."""
    settings: dict[str, Any] = {"is_generic": False, "is_plain": True}
    large = subject.specimen(shape, eps=0.5, **settings)
    tiny = subject.specimen(shape, eps=_TINY_EPS, **settings)
    if not bool(large(draw(shape, "eps")).any()):  # a gain that starts at 0
        settings["is_generic"] = True
        large = subject.specimen(shape, eps=0.5, **settings)
        tiny = subject.specimen(shape, eps=_TINY_EPS, **settings)
    x = draw(shape, "eps")
    # Means of zero, so that distances to a running mean stay out of it.
    axes = (0, 1) if len(shape) == 3 else (0, *range(2, len(shape)))
    x = x - x.mean(axes, keepdim=True)
    if all(max_difference(large(t * x), tiny(t * x)) < 1e-9 for t in (1.0, 1e-3)):
        return None
    if max_difference(large(1e-7 * x), large(0 * x)) == 0:
        return "unknown"
    return classify_shrinking(lambda scale: _scaled(large, x, scale))


def _scaled(specimen: Specimen, x: Tensor, scale: float) -> Tensor:
    """Return the output of a scaled input; of scaled running statistics where those are fixed."""
    if not specimen.card.statistic_sets[x.ndim - 2] and "running_var" in specimen.state:
        var = torch.full_like(specimen.state["running_var"], scale**2)
        return specimen(x, state={**specimen.state, "running_var": var}) * scale
    return specimen(scale * x)


def classify_shrinking(output: Callable[[float], Tensor]) -> str:
    """Return where eps = 0.5 stands, from outputs at scaled inputs of size 1.

    With v the variance and t the scale, the output relative to that of huge inputs is
    1/sqrt(1 + eps/(t^2 v)) inside, 1/(1 + eps/(t sqrt(v))) outside, 1 above the bound of a clamp.

    Args:
        output: Takes the scale, returns the output.
    """
    limit = output(1e7)
    heavy = limit.abs() > 0.1 * limit.abs().max()

    def lack(scale: float) -> float:
        return float((limit[heavy] / output(scale)[heavy] - 1).median())

    faint, fainter = output(1e-6)[heavy].abs().median(), output(1e-7)[heavy].abs().median()
    if fainter > 0.3 * faint:
        return "magnitude"
    near, far = lack(200.0), lack(400.0)
    if abs(near) < 1e-9:
        return "clamp" if lack(0.01) > 1e-3 else "unknown"
    if abs(near / far - 4.0) < 0.1:
        return "inside_sqrt"
    return "outside_sqrt" if abs(near / far - 2.0) < 0.1 else "unknown"
