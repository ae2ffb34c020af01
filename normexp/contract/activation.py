"""Norms that bring an activation, and norms that take a condition."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from normexp.contract._checks import DoesNotApply, contract_check
from normexp.contract._subject import Subject, draw, max_difference, tell


def _bend(subject: Subject, **settings: object) -> float:
    """Return how far the output is from odd, f(-x) = -f(x), as everything without a bend is."""
    bends = []
    for specimen in subject.specimens(is_generic=False, **settings):
        x = draw(specimen.shape, "activation")
        bends.append(max_difference(specimen(-x), -specimen(x)))
    return max(bends)


@contract_check(
    "It bends what it normalizes, as an activation does, exactly if the card says so; its builder "
    "then takes is_activated.",
    fields=("includes_activation",),
)
def try_includes_activation(subject: Subject) -> Iterator[str]:
    """Compare the output at x and -x."""
    declared = subject.card.includes_activation
    takes = "is_activated" in subject.entry.parameters()
    if takes != declared:
        what = "takes" if takes else "does not take"
        yield f"includes_activation={declared} is declared, but the builder {what} is_activated"
        return
    bend = _bend(subject)
    if declared != (bend > 1e-3):
        yield (
            f"includes_activation={declared} is declared, but the outputs at x and -x add up to "
            f"{bend:.2g} at most (0 without a bend)"
        )
    if declared:
        bend = _bend(subject, is_activated=False)
        if bend > 1e-6:
            yield (
                "includes_activation: with is_activated=False there is still a bend; the outputs "
                f"at x and -x add up to {bend:.2g}"
            )


@contract_check(
    "The parameters of plain_at exist, and at its values the activation does not bend.",
    fields=("plain_at",),
)
def try_plain_at(subject: Subject) -> Iterator[str]:
    """Set the parameters and compare the output at x and -x."""
    plain_at, card = subject.card.plain_at, subject.card
    for specimen in subject.specimens():
        unknown = plain_at.keys() - specimen.parameters.keys()
        if unknown:
            yield (
                f"plain_at names {', '.join(sorted(unknown))}; the parameters are "
                f"{', '.join(specimen.parameters) or 'none'}"
            )
            return
    if not plain_at and not card.includes_activation:
        raise DoesNotApply("it brings no activation")
    bend = _bend(subject, is_plain=True)
    if bend > 1e-6:
        yield f"plain_at={plain_at}: still a bend; outputs at x and -x add up to {bend:.2g}"


@contract_check(
    "It is called with a condition exactly if the card says so, and each sample sees its own only.",
    fields=("takes_condition",),
)
def try_takes_condition(subject: Subject) -> Iterator[str]:
    """Call it with and without, and change the condition of one sample."""
    if not subject.card.takes_condition:
        for specimen in subject.specimens():
            specimen(draw(specimen.shape, "condition"))
        return
    for specimen in subject.specimens():
        x = draw(specimen.shape, "condition")
        condition = specimen.condition(x)
        other = condition.clone()
        other[0] += 1.0
        y, moved = specimen(x, condition=condition), specimen(x, condition=other)
        if torch.equal(y[0], moved[0]):
            yield (
                f"takes_condition=True is declared, but on an input {tell(x.shape)} the output of "
                "a sample does not change with its condition"
            )
        if not torch.equal(y[1:], moved[1:]):
            yield "takes_condition: the condition of one sample changes the output of others"
        try:
            specimen.module(x)
        except TypeError:
            continue
        yield "takes_condition=True is declared, but the layer also works without a condition"
