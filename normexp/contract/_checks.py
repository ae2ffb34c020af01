"""What a check of the contract suite is, and how its verdict comes about."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Literal

from normexp.contract._subject import Subject

Experiment = Callable[[Subject], Iterator[str]]
Verdict = Literal["pass", "fault", "does not apply"]


class DoesNotApply(Exception):
    """Raised by an experiment that has nothing to try on this norm, with the reason."""


@dataclass(frozen=True)
class Fault:
    """One thing that a card says and an experiment does not confirm.

    Attributes:
        check: Name of the check that found it.
        message: What was declared, what was found, on which input.
    """

    check: str
    message: str


@dataclass(frozen=True)
class Check:
    """One experiment, or several of one kind.

    Attributes:
        name: Its name.
        proves: What a pass shows, in one sentence.
        fields: The fields of the card that it is about; empty for what every norm must do.
        experiment: Yields one message a fault; raises DoesNotApply.
    """

    name: str
    proves: str
    fields: tuple[str, ...]
    experiment: Experiment


@dataclass(frozen=True)
class Outcome:
    """What one check found on one norm.

    Attributes:
        check: The check.
        verdict: Whether the norm passes it, has faults, or gives it nothing to try.
        messages: The faults, or why there was nothing to try.
    """

    check: Check
    verdict: Verdict
    messages: tuple[str, ...] = ()


_CHECKS: dict[str, Check] = {}


def contract_check(
    proves: str, *, fields: tuple[str, ...] = ()
) -> Callable[[Experiment], Experiment]:
    """Return a decorator that registers an experiment under its function's name.

    Args:
        proves: What a pass shows, in one sentence.
        fields: The fields of the card that it is about.
    """

    def decorate(experiment: Experiment) -> Experiment:
        name = experiment.__name__.removeprefix("try_")
        _CHECKS[name] = Check(name, proves, fields, experiment)
        return experiment

    return decorate


def in_order(*modules: ModuleType) -> dict[str, Check]:
    """Return all checks by name, module by module.

    Args:
        *modules: Modules that register checks.

    Raises:
        ValueError: If a module that registered some is not among them.
    """
    order = [module.__name__ for module in modules]
    return dict(
        sorted(_CHECKS.items(), key=lambda item: order.index(item[1].experiment.__module__))
    )


def run_check(check: Check, subject: Subject) -> Outcome:
    """Run one check; an experiment that stops with an error is a fault of the norm too.

    Args:
        check: The check.
        subject: The norm.
    """
    if not subject.is_callable:
        return Outcome(check, "does not apply", ("the layer cannot be called, see dims",))
    messages: list[str] = []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            messages.extend(check.experiment(subject))
    except DoesNotApply as reason:
        if not messages:
            return Outcome(check, "does not apply", (str(reason),))
    except Exception as error:  # a user's layer may raise anything
        about = ", ".join(check.fields) or check.name
        messages.append(f"{about}: the experiment ended in {type(error).__name__}: {error}")
    told = tuple(" ".join(message.split()) for message in messages)
    return Outcome(check, "fault" if told else "pass", told)
