"""Which inputs an output depends on: statistic sets, their sizes, what is mixed.

The pattern of a Jacobian by finite differences of the training-mode forward pass, since a norm
may have a backward pass of its own. Patterns have the axes sample, position, channel of the output,
then the same of the input.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from normexp.contract._checks import DoesNotApply, contract_check
from normexp.contract._subject import DISTINCT, EQUAL, Shape, Specimen, Subject, draw, tell
from normexp.norms import StatisticSet, compute_statistic_set_size

_STEP = 1e-5
# Below it a difference is rounding; a dependence by chance as weak has no practical probability.
_THRESHOLD = 1e-7


def to_rows(x: Tensor) -> Tensor:
    """Return an input or output as ``[N, positions, C]``."""
    if x.ndim == 3:
        return x
    return x[:, None] if x.ndim == 2 else x.flatten(2).transpose(1, 2)


def measure_pattern(subject: Subject, shape: Shape) -> Tensor:
    """Return which inputs each output depends on, over several inputs.

    A maximum or a clamp may hide a dependence on one input: each sample is among the largest
    once and among the smallest once, and one input lies far from zero.
    """
    if ("pattern", shape) not in subject.known:
        specimen = subject.specimen(shape, is_plain=True)
        ramp = torch.linspace(0.5, 2.0, shape[0]).double().reshape(-1, *[1] * (len(shape) - 1))
        inputs = (
            ramp * draw(shape, "pattern", 0),
            ramp.flip(0) * draw(shape, "pattern", 1),
            30.0 + 8.0 * draw(shape, "pattern", 2),
        )
        patterns = torch.stack([_find_pattern(specimen, x) for x in inputs])
        subject.known["pattern", shape] = patterns.any(0)
    pattern: Tensor = subject.known["pattern", shape]
    return pattern


@torch.no_grad()
def _find_pattern(specimen: Specimen, x: Tensor) -> Tensor:
    """Return which inputs each output depends on at x, by moving one after the other."""
    y = specimen(x)
    step = _STEP * float(x.std())
    moved = x.clone()
    flat = moved.view(-1)
    columns = []
    for i in range(flat.numel()):
        before = flat[i].item()
        flat[i] = before + step
        columns.append(to_rows((specimen(moved) - y) / step))
        flat[i] = before
    index = to_rows(torch.arange(x.numel()).reshape(x.shape))
    jacobian = torch.stack(columns, -1)[..., index]
    size = jacobian.abs()
    return size > _THRESHOLD * size.max()


def expect_pattern(subject: Subject, specimen: Specimen) -> Tensor:
    """Return the pattern that the card's statistic sets say."""
    dims, shape = len(specimen.shape) - 2, specimen.shape
    sets = subject.card.statistic_sets[dims]
    patterns = [expect_one(axes, shape, specimen) for axes in sets]
    n, p, c = to_rows(torch.empty(shape)).shape
    diagonal = torch.eye(n * p * c, dtype=torch.bool).reshape(n, p, c, n, p, c)
    if subject.card.is_chained and patterns:
        total = patterns[0] | diagonal
        for pattern in patterns[1:]:
            first, second = total.reshape(n * p * c, -1), (pattern | diagonal)
            product = second.reshape(n * p * c, -1).double() @ first.double()
            total = (product > 0).reshape(diagonal.shape)
        return total
    return torch.stack([diagonal, *patterns]).any(0)


def expect_one(axes: StatisticSet, shape: Shape, specimen: Specimen) -> Tensor:
    """Return which inputs each output depends on through one statistic."""
    n, p, c = to_rows(torch.empty(shape)).shape

    def same(extent: int) -> Tensor:
        return torch.eye(extent, dtype=torch.bool)

    def whole(extent: int) -> Tensor:
        return torch.ones(extent, extent, dtype=torch.bool)

    def blocks(extent: int, size: int) -> Tensor:
        index = torch.arange(extent) // size
        return index[:, None] == index[None]

    samples, positions, channels = same(n), same(p), same(c)
    if "batch" in axes:
        samples = whole(n)
    elif "ghost" in axes:
        samples = blocks(n, int(specimen.options["ghost_size"]))
    if "position" in axes:
        positions = whole(p)
    if "channel" in axes:
        channels = whole(c)
    elif "group" in axes:
        channels = blocks(c, c // int(specimen.options["num_groups"]))
    elif "part" in axes:
        channels = torch.zeros(c, c, dtype=torch.bool)
        channels[:, : int(c * specimen.options["fraction"])] = True
    return (
        torch.einsum("nm,pq,cd->npcmqd", *(f.float() for f in (samples, positions, channels))) > 0
    )


def describe(pattern: Tensor) -> str:
    """Return in words what an output depends on."""
    n, p, c = pattern.shape[:3]
    across = {
        "batch": pattern & ~torch.eye(n, dtype=torch.bool)[:, None, None, :, None, None],
        "position": pattern & ~torch.eye(p, dtype=torch.bool)[None, :, None, None, :, None],
        "channel": pattern & ~torch.eye(c, dtype=torch.bool)[None, None, :, None, None, :],
    }
    names = [name for name, part in across.items() if bool(part.any())]
    counts = pattern.flatten(3).sum(3)
    low, high = int(counts.min()), int(counts.max())
    number = str(low) if low == high else f"{low} to {high}"
    where = f"across {' and '.join(names)}" if names else "only at its own place"
    return f"an output depends on {number} of the inputs, {where}"


def describe_sets(sets: tuple[StatisticSet, ...]) -> str:
    """Return in words what statistics are over."""
    return ", ".join("over " + " x ".join(axes) for axes in sets) or "none"


@contract_check(
    "An output depends on its own statistic sets and nothing else, whichever the extents.",
    fields=("statistic_sets", "is_chained"),
)
def try_statistic_sets(subject: Subject) -> Iterator[str]:
    """Compare the Jacobian's pattern with the one that the card's sets give."""
    card = subject.card
    for shape in [table[dims] for dims in card.dims for table in (DISTINCT, EQUAL)]:
        sets = card.statistic_sets[len(shape) - 2]
        specimen = subject.specimen(shape, is_plain=True)
        told = getattr(specimen.module, "statistic_sets", sets)
        if told != sets:
            yield (
                f"statistic_sets: the layer itself says {describe_sets(told)} on shape "
                f"{tell(shape)}, the card {describe_sets(sets)}"
            )
        found, expected = measure_pattern(subject, shape), expect_pattern(subject, specimen)
        if not torch.equal(found, expected):
            kind = "chained statistics " if card.is_chained else "statistics "
            fields = "statistic_sets, is_chained" if len(sets) > 1 else "statistic_sets"
            yield (
                f"{fields}: the card says {kind}{describe_sets(sets)}, so that "
                f"{describe(expected)}; found on shape {tell(shape)}: {describe(found)}"
            )
    if card.is_chained and all(len(sets) < 2 for sets in card.statistic_sets.values()):
        yield "is_chained=True is declared, but there is no second statistic"


@contract_check(
    "M, the size of a statistic set, is the number of inputs that an output depends on.",
    fields=("statistic_sets",),
)
def try_statistic_set_size(subject: Subject) -> Iterator[str]:
    """Count the inputs that an output depends on, where there is a single statistic."""
    sets = subject.card.statistic_sets
    dims_with_one = [dims for dims in subject.card.dims if len(sets[dims]) == 1]
    if not dims_with_one:
        raise DoesNotApply("M is counted for norms with one kind of statistic")
    for dims in dims_with_one:
        (axes,) = sets[dims]
        shape = DISTINCT[dims]
        specimen = subject.specimen(shape)
        declared = compute_statistic_set_size(axes, shape, specimen.options)
        found = int(measure_pattern(subject, shape).flatten(3).sum(3).min())
        if declared != found:
            yield (
                f"statistic_sets: {' x '.join(axes)} has {declared} elements on shape "
                f"{tell(shape)}, but an output depends on {found} inputs"
            )


@contract_check(
    "The output of a sample in training depends on its batch mates exactly if the card says so.",
    fields=("mixes_samples",),
)
def try_mixes_samples(subject: Subject) -> Iterator[str]:
    """Look for dependence between samples."""
    yield from _compare_mixing(subject, "mixes_samples", axis=0, dims=subject.card.dims)


@contract_check(
    "An output position depends on other positions exactly if the card says so.",
    fields=("mixes_positions",),
)
def try_mixes_positions(subject: Subject) -> Iterator[str]:
    """Look for dependence between positions."""
    dims = tuple(d for d in subject.card.dims if d > 0)
    if not dims:
        if subject.card.mixes_positions:
            yield "mixes_positions=True is declared, but features [N, C] have no positions"
            return
        raise DoesNotApply("features [N, C] have no positions")
    yield from _compare_mixing(subject, "mixes_positions", axis=1, dims=dims)


def _compare_mixing(
    subject: Subject, name: str, *, axis: int, dims: tuple[int, ...]
) -> Iterator[str]:
    """Compare a field with whether any output depends on another place along an axis."""
    declared = getattr(subject.card, name)
    for shape in (DISTINCT[d] for d in dims):
        pattern = measure_pattern(subject, shape)
        extent = pattern.shape[axis]
        view = [1] * 6
        view[axis] = view[axis + 3] = extent
        others = ~torch.eye(extent, dtype=torch.bool).reshape(view)
        found = bool((pattern & others).any())
        if found != declared:
            yield (f"{name}={declared} is declared, but on shape {tell(shape)} {describe(pattern)}")
