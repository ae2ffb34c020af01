"""What the formula leaves: means, factors, and what a set with a single value gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from normexp.contract._checks import DoesNotApply, contract_check
from normexp.contract._subject import (
    Shape,
    Subject,
    draw,
    max_difference,
    tell,
)
from normexp.contract.sums import without_eps
from normexp.errors import UserError
from normexp.norms import Axis

Change = Callable[[Tensor], Tensor]

# Invariant means: to rounding and to what eps leaves. Not invariant: visibly so.
_SAME, _DIFFERENT = 1e-4, 1e-2


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
    yield from _try_invariance(subject, "is_shift_invariant", lambda x: x + 300.0, "adding 300 to")


@contract_check(
    "A positive factor on the whole input in training changes nothing, but for eps, exactly if "
    "the card says so.",
    fields=("is_scale_invariant",),
)
def try_is_scale_invariant(subject: Subject) -> Iterator[str]:
    """Multiply the input, in a fresh layer and in one past every warm-up."""
    yield from _try_invariance(subject, "is_scale_invariant", lambda x: 4.0 * x, "4 times")


def _try_invariance(
    subject: Subject, name: str, change: Callable[[Tensor], Tensor], what: str
) -> Iterator[str]:
    """Declared True must hold in every state of a layer, False must show in one."""
    declared = getattr(subject.card, name)
    for specimen in subject.specimens(**without_eps(subject)):
        # An eps that no option takes away is negligible for the larger inputs only; an activation
        # that saturates may hide a factor there.
        sizes = (30.0,) if declared else (1.0, 30.0)
        differences = []
        for x in (size * draw(specimen.shape, name) for size in sizes):
            differences += [
                max_difference(specimen(change(x), state=state), specimen(x, state=state))
                for state in (specimen.state, specimen.age())
            ]
        yield from _judge(
            name, declared, max(differences), f"{what} the input of shape {tell(specimen.shape)}"
        )


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
