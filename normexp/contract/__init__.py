"""The contract suite: proves a norm's card by experiment, all fields but text.

``check_norm`` runs all checks on one norm; ``normexp check`` prints them. A check is a function
that yields one message a fault; it registers under its name, and tests run every norm through
every check.
"""

from __future__ import annotations

from normexp.contract import (
    activation,
    axes,
    form,
    formula,
    gains,
    kernels,
    masks,
    numerics,
    parts,
    state,
    sums,
    transforms,
    weights,
)
from normexp.contract._checks import Check, Fault, Outcome, Verdict, in_order, run_check
from normexp.contract._subject import Subject
from normexp.norms import NormCard
from normexp.registry import Entry

__all__ = [
    "CHECKS",
    "Check",
    "Fault",
    "Outcome",
    "Subject",
    "Verdict",
    "check_norm",
    "run_check",
    "run_checks",
]


# The order in which a reader meets them.
CHECKS: dict[str, Check] = in_order(
    form,
    axes,
    parts,
    sums,
    formula,
    gains,
    state,
    masks,
    activation,
    kernels,
    transforms,
    numerics,
    weights,
)


def run_checks(entry: Entry[NormCard]) -> list[Outcome]:
    """Run every check on a norm.

    Args:
        entry: The norm, as its registry holds it.

    Returns:
        One outcome a check.
    """
    subject = Subject(entry)
    return [run_check(check, subject) for check in CHECKS.values()]


def check_norm(entry: Entry[NormCard]) -> list[Fault]:
    """Return what a norm's card says and experiments do not confirm; empty if all is true.

    Args:
        entry: The norm, as its registry holds it.

    Examples:
        >>> from normexp.norms import NORMS
        >>> check_norm(NORMS.get("layer_norm"))
        []
    """
    return [
        Fault(outcome.check.name, message)
        for outcome in run_checks(entry)
        if outcome.verdict == "fault"
        for message in outcome.messages
    ]
