"""Which statistics there are, also where the set of one lies inside that of another.

There the pattern of the Jacobian is that of the larger set alone, but the size of its entries tells
them apart. Where an output depends on its own input and on statistics that are each a function of
sums over a set, its derivative by another input is a sum, over the sets that hold that input, of
one number a set and value of the input. So the derivatives of one output by inputs of equal value
must fit the sets, and each set must be needed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from normexp.contract._checks import DoesNotApply, contract_check
from normexp.contract._subject import DISTINCT, Shape, Specimen, Subject, draw, tell
from normexp.contract.axes import describe_sets, expect_one, to_rows
from normexp.norms import Axis, StatisticSet

# Inputs have one of these, so that many have the same.
_VALUES = (-0.8, 1.3)
_STEP = 1e-5
# Relative to the largest derivative of an output by another input.
_THRESHOLD = 1e-3
_NUM_INPUTS, _NUM_OUTPUTS = 4, 12

# The axes that a set may have for each axis of an input, with the option that an axis needs.
_CHOICES: tuple[tuple[tuple[Axis, str | None], ...], ...] = (
    (("batch", None), ("ghost", "ghost_size")),
    (("channel", None), ("group", "num_groups"), ("part", "fraction")),
    (("position", None),),
)


@contract_check(
    "The statistics are those over the declared sets, no more and no fewer, also where one set "
    "lies inside of another.",
    fields=("statistic_sets", "is_chained"),
)
def try_statistic_parts(subject: Subject) -> Iterator[str]:
    """Fit the derivatives by inputs of equal value to the declared sets, then to further ones."""
    card, is_told = subject.card, False
    for dims in card.dims:
        shape, declared = DISTINCT[dims], card.statistic_sets[dims]
        if not declared:
            continue
        specimen, derivatives = _measure(subject, shape)
        misfit, sizes = _fit(derivatives, declared, specimen)
        is_fitting = misfit < _THRESHOLD
        on = f"on shape {tell(shape)}"
        if card.is_chained:
            if is_fitting and len(declared) > 1 and min(sizes) > _THRESHOLD:
                is_told = True
                yield (
                    f"is_chained=True is declared, but {on} each statistic is one of the input "
                    "itself"
                )
            continue
        further = () if is_fitting else _find_further(derivatives, declared, specimen)
        if not is_fitting and not further:
            continue  # statistics that are no functions of plain sums, such as weighted ones
        is_told = True
        _, sizes = _fit(derivatives, declared + further, specimen)
        missing = [axes for axes, size in zip(declared, sizes, strict=False) if size < _THRESHOLD]
        if missing:
            yield (
                f"statistic_sets: the card says statistics {describe_sets(declared)}; found {on} "
                f"none {describe_sets(tuple(missing))}"
            )
        if further:
            yield (
                f"statistic_sets: the card says statistics {describe_sets(declared)}; found {on} "
                f"also one {describe_sets(further)}"
            )
    if not is_told:
        raise DoesNotApply("there are no statistics that can be told apart so")


def _measure(subject: Subject, shape: Shape) -> tuple[Specimen, list[tuple[Tensor, Tensor, int]]]:
    """Return (derivatives by all inputs, values of these, index) of some outputs, over inputs."""
    settings = {"num_bands": 1} if "num_bands" in subject.option_names else {}
    specimen = subject.specimen(shape, is_plain=True, **settings)
    if ("parts", shape) not in subject.known:
        values, rows = torch.tensor(_VALUES, dtype=torch.float64), []
        for number in range(_NUM_INPUTS):
            x = values[(draw(shape, "parts", number) > 0).long()]
            jacobian = _differentiate(specimen, x)
            step = max(1, x.numel() // _NUM_OUTPUTS)
            # A step that divides an extent would meet the same channels again and again.
            outputs = [(i * (step + 1)) % x.numel() for i in range(_NUM_OUTPUTS)]
            rows += [(jacobian[i], to_rows(x).flatten(), i) for i in outputs]
        subject.known["parts", shape] = rows
    return specimen, subject.known["parts", shape]


@torch.no_grad()
def _differentiate(specimen: Specimen, x: Tensor) -> Tensor:
    """Return the Jacobian by central differences, ``[outputs, inputs]`` in the order of rows."""
    index = to_rows(torch.arange(x.numel()).reshape(x.shape)).flatten()
    columns = []
    for i in index.tolist():
        step = torch.zeros_like(x)
        step.view(-1)[i] = _STEP
        difference = specimen(x + step) - specimen(x - step)
        columns.append(to_rows(difference / (2 * _STEP)).flatten())
    return torch.stack(columns, 1)


def _fit(
    derivatives: list[tuple[Tensor, Tensor, int]],
    sets: tuple[StatisticSet, ...],
    specimen: Specimen,
) -> tuple[float, list[float]]:
    """Return how far the derivatives are from a sum over the sets, and the size of each part."""
    patterns = [expect_one(axes, specimen.shape, specimen) for axes in sets]
    members = torch.stack([pattern.flatten(3).flatten(0, 2) for pattern in patterns], -1).double()
    misfit, sizes = 0.0, torch.zeros(len(sets), dtype=torch.float64)
    for found, values, output in derivatives:
        is_other = torch.arange(len(found)) != output
        scale = found[is_other].abs().max().clamp(min=1e-12)
        for value in _VALUES:
            chosen = is_other & (values == value)
            which, target = members[output][chosen], found[chosen, None] / scale
            if not len(target):
                continue
            parts = torch.linalg.lstsq(which, target, driver="gelsd").solution
            misfit = max(misfit, float((which @ parts - target).abs().max()))
            sizes = torch.maximum(sizes, parts[:, 0].abs())
    return misfit, sizes.tolist()


def _find_further(
    derivatives: list[tuple[Tensor, Tensor, int]],
    declared: tuple[StatisticSet, ...],
    specimen: Specimen,
) -> tuple[StatisticSet, ...]:
    """Return the fewest further sets, one or two, with which the derivatives fit; () if none do."""
    kinds = [
        [(), *((axis,) for axis, option in kind if option is None or option in specimen.options)]
        for kind in (_CHOICES if len(specimen.shape) > 2 else _CHOICES[:2])
    ]
    candidates = [
        axes
        for choice in itertools.product(*kinds)
        if (axes := tuple(itertools.chain(*choice))) and axes not in declared
    ]
    for number in (1, 2):
        for further in itertools.combinations(candidates, number):
            if _fit(derivatives, declared + further, specimen)[0] < _THRESHOLD:
                return further
    return ()
