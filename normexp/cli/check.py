"""The verb check: a norm's card, and whether experiments confirm it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import yaml
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from normexp.errors import UserError

if TYPE_CHECKING:
    from normexp.contract import Outcome
    from normexp.norms import NormCard


def check_card(
    name: str,
    *,
    plugins: Sequence[str] = (),
    options: Sequence[str] = (),
    as_json: bool = False,
) -> int:
    """Run the contract suite on one norm and print what it found.

    Args:
        name: The norm.
        plugins: Python files with norms of the user's own, imported first.
        options: ``name=value`` instead of a default, for a norm that does not fit the small inputs
            of the experiments (4 to 8 channels, 1 to 7 positions along an axis).
        as_json: Print a JSON list of objects, one a check.

    Returns:
        The exit code: 0 if experiments confirm the card, 1 if there are faults.

    Raises:
        UserError: If a file cannot be imported, there is no such norm, or no such option.
    """
    import torch

    from normexp.config.compose import load_plugins
    from normexp.contract import run_checks
    from normexp.norms import NORMS
    from normexp.norms.factory import check_options

    load_plugins(plugins)
    entry = NORMS.get(name, key="norm")
    given = _parse_options(options)
    check_options(entry, given, key="option")
    entry = dataclasses.replace(entry, build=partial(entry.build, **given))
    torch.set_num_threads(1)  # inputs are small, and last digits do not depend on the machine
    outcomes = run_checks(entry)
    has_faults = any(outcome.verdict == "fault" for outcome in outcomes)
    if as_json:
        rows = [
            {
                "check": outcome.check.name,
                "fields": list(outcome.check.fields),
                "verdict": outcome.verdict,
                "message": "; ".join(outcome.messages),
            }
            for outcome in outcomes
        ]
        print(json.dumps(rows, indent=1))
        return int(has_faults)
    _print_card(name, entry.card)
    _print_outcomes(outcomes)
    num_faults = sum(len(o.messages) for o in outcomes if o.verdict == "fault")
    if has_faults:
        verdict = f"{name}: {num_faults} fault{'s' if num_faults > 1 else ''}"
    else:
        verdict = f"{name}: experiments confirm the card"
    print(verdict)
    return int(has_faults)


def _parse_options(options: Sequence[str]) -> dict[str, Any]:
    """Return options as they would be in YAML."""
    given = {}
    for text in options:
        name, separator, value = text.partition("=")
        if not separator:
            raise UserError("option", text, "name=value is needed, as eps=1e-3")
        try:
            given[name] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise UserError(f"option.{name}", value, "a YAML value is needed") from None
    return given


def _print_card(name: str, card: NormCard) -> None:
    """Print what a norm declares, one field a row."""
    table = Table(title=f"{name} declares")
    table.add_column("field", no_wrap=True)
    table.add_column("value")
    for field in dataclasses.fields(card):
        value = getattr(card, field.name)
        if field.name == "weight" and value is not None:
            for part in dataclasses.fields(value):
                if part.name != "parametrize":
                    told = _show(part.name, getattr(value, part.name))
                    table.add_row(f"weight.{part.name}", escape(told))
        else:
            table.add_row(field.name, escape(_show(field.name, value)))
    Console().print(table)


def _show(field: str, value: Any) -> str:
    """Return a field's value in words."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return _SHOW[field](value) if field in _SHOW else str(value)


def _show_sets(sets: dict[int, tuple[tuple[str, ...], ...]]) -> str:
    shapes = {0: "[N, C]", 1: "[N, L, C]", 2: "[N, C, H, W]"}
    lines = []
    for dims, axes in sets.items():
        told = ", ".join(" x ".join(one) for one in axes) or "no statistics"
        lines.append(f"{shapes.get(dims, dims)}: {told}")
    return "\n".join(lines)


def _show_parameters(parameters: dict[str, tuple[str, ...]]) -> str:
    return ", ".join(f"{key} [{', '.join(axes)}]" for key, axes in parameters.items()) or "none"


_SHOW: dict[str, Callable[[Any], str]] = {
    "dims": lambda dims: ", ".join(str(d) for d in dims),
    "statistic_sets": _show_sets,
    "parameters": _show_parameters,
    "state": lambda names: ", ".join(names) or "none",
    "plain_at": lambda values: ", ".join(f"{k} = {v:g}" for k, v in values.items()) or "none",
}

_MARKS = {"pass": "pass ", "fault": "FAULT", "does not apply": "-    "}


def _print_outcomes(outcomes: Sequence[Outcome]) -> None:
    """Print a line a check, and below it its faults or why it does not apply."""
    width = max(len(outcome.check.name) for outcome in outcomes)
    for outcome in outcomes:
        reason = f"does not apply: {outcome.messages[0]}" if outcome.messages else ""
        told = reason if outcome.verdict == "does not apply" else outcome.check.proves
        print(f"{_MARKS[outcome.verdict]}  {outcome.check.name:<{width}}  {told}")
        if outcome.verdict == "fault":
            for message in outcome.messages:
                print(f"         {message}")
