"""What stands in the formula: mean, divisor, eps, invariances, what a single value gives."""

from __future__ import annotations

import math
from collections.abc import Iterator
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
from normexp.errors import UserError
from normexp.norms import Axis, compute_statistic_set_size

# Invariant means: to rounding and to what eps leaves. Not invariant: visibly so.
_SAME, _DIFFERENT = 1e-4, 1e-2
_TINY_EPS = 1e-12


def without_eps(subject: Subject) -> dict[str, Any]:
    """Return the option that makes eps negligible, where there is one."""
    return {"eps": _TINY_EPS} if "eps" in subject.option_names else {}


@contract_check(
    "A constant on the whole input goes out with the mean exactly if the card says so.",
    fields=("is_centring",),
)
def try_is_centring(subject: Subject) -> Iterator[str]:
    """Move the input; where evaluation has a running mean, move that along."""
    declared, shift = subject.card.is_centring, 10.0
    for specimen in subject.specimens(is_plain=True):
        x = draw(specimen.shape, "centring")
        if "running_mean" in specimen.state:
            mean = specimen.state["running_mean"]
            moved = {**specimen.state, "running_mean": mean + shift}
            change = max_difference(
                specimen(x + shift, training=False, state=moved), specimen(x, training=False)
            )
            what = f"moving running_mean and the input by {shift:g}"
        else:
            change = max_difference(specimen(x + shift), specimen(x))
            what = f"adding {shift:g} to the input"
        yield from _judge(
            "is_centring", declared, change, f"{what} of shape {tell(specimen.shape)}"
        )


def _judge(name: str, declared: bool, change: float, what: str) -> Iterator[str]:
    """Compare a field that says "nothing changes" with how much something did."""
    if declared and change > _SAME:
        yield f"{name}=True is declared, but {what} changes the output by {change:.2g}"
    if not declared and change < _DIFFERENT:
        yield f"{name}=False is declared, but {what} changes the output by {change:.2g} only"


@contract_check(
    "Adding a constant to the whole input in training changes nothing exactly if the card says so.",
    fields=("is_shift_invariant",),
)
def try_is_shift_invariant(subject: Subject) -> Iterator[str]:
    """Add a constant, in a fresh layer and in one past every warm-up."""
    yield from _try_invariance(subject, "is_shift_invariant", lambda x: x + 10.0, "adding 10 to")


@contract_check(
    "A positive factor on the whole input in training changes nothing, but for eps, exactly if "
    "the card says so.",
    fields=("is_scale_invariant",),
)
def try_is_scale_invariant(subject: Subject) -> Iterator[str]:
    """Multiply the input, in a fresh layer and in one past every warm-up."""
    yield from _try_invariance(subject, "is_scale_invariant", lambda x: 4.0 * x, "4 times")


def _try_invariance(subject: Subject, name: str, change: Any, what: str) -> Iterator[str]:
    """Declared True must hold in every state of a layer, False must show in one."""
    declared = getattr(subject.card, name)
    for specimen in subject.specimens(**without_eps(subject)):
        x = draw(specimen.shape, name)
        differences = [
            max_difference(specimen(change(x), state=state), specimen(x, state=state))
            for state in (specimen.state, specimen.age())
        ]
        yield from _judge(
            name, declared, max(differences), f"{what} the input of shape {tell(specimen.shape)}"
        )


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
    where = along.get(axis, 2 if len(shape) == 3 else 1)
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


def classify_shrinking(output: Any) -> str:
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


@contract_check(
    "A statistic set with a single value gives what the card says, at one sample and at two.",
    fields=("single_value",),
)
def try_single_value(subject: Subject) -> Iterator[str]:
    """Build inputs on which the smallest statistic set has one value."""
    card = subject.card
    if not any(card.statistic_sets.values()):
        if card.single_value is not None:
            yield f"single_value={card.single_value} is declared, but no statistics are"
            return
        raise DoesNotApply("there are no statistics")
    for dims in card.dims:
        if not card.statistic_sets[dims]:
            continue
        axes = min(card.statistic_sets[dims], key=len)
        at_one, shape = _try_single(subject, dims, axes, num_samples=1)
        at_two, _ = _try_single(subject, dims, axes, num_samples=2)
        found = at_one
        if at_two is not None and at_two != at_one:
            found = f"{at_one} at N=1, else {at_two}"
        if found != card.single_value:
            yield (
                f"single_value={card.single_value} is declared; found {found} where "
                f"{' x '.join(axes)} has one value (inputs like {tell(shape)})"
            )


def _try_single(
    subject: Subject, dims: int, axes: tuple[Axis, ...], *, num_samples: int
) -> tuple[str | None, Shape]:
    """Return what comes out of sets of one value; None if there are none with so many samples."""
    num_positions, num_channels = 4, 8
    options: dict[str, Any] = {}
    if "batch" in axes and num_samples > 1:
        return None, ()
    if "ghost" in axes:
        options["ghost_size"] = 1
    if "position" in axes:
        num_positions = 1
    if "channel" in axes:
        num_channels = 1
    if "group" in axes:
        options["num_groups"] = num_channels
    if "part" in axes:
        options["fraction"] = 1 / num_channels
    positions = {0: (), 1: (num_positions,), 2: (num_positions, 1)}[dims]
    shape = (num_samples, num_channels, *positions)
    if dims == 1:
        shape = (num_samples, num_positions, num_channels)
    if "num_groups" in subject.option_names and num_channels % 2:
        options["num_groups"] = 1
    x = draw(shape, "single")
    x = x + x.sign()  # well away from zero
    try:
        specimen = subject.specimen(shape, is_generic=False, is_plain=True, **options)
        y = specimen(x)
    except (ValueError, UserError, RuntimeError):
        return "raises", shape
    return _name_single(x, y), shape


def _name_single(x: Tensor, y: Tensor) -> str:
    """Return in the card's words what came out."""
    if not bool(y.isfinite().all()):
        return "NaN or infinity"
    if float(y.abs().max()) < 1e-6:
        return "zero"
    if max_difference(y, x.sign()) < 1e-3:
        return "sign"
    if bool((y.abs() > 100 * x.abs()).all()):
        return "amplified"
    return "finite"
