"""The verb list: what can be chosen."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from normexp.errors import UserError, choices_hint


def show_list(kind: str, *, as_json: bool) -> int:
    """Print the choices of a kind, one row each.

    Args:
        kind: norms, models, data, placements or experiments.
        as_json: Print a JSON list of objects.

    Returns:
        The exit code.

    Raises:
        UserError: If there is no such kind.
    """
    if kind not in KINDS:
        raise UserError("list", kind, choices_hint(kind, KINDS))
    rows = KINDS[kind]()
    if as_json:
        print(json.dumps(rows, indent=1, default=list))
        return 0
    if kind == "placements":
        for row in rows:
            print(f"{row['name']}: {row['formula']}\n\n{row['drawing']}\n")
        return 0
    table = Table(title=f"{kind} (more with --json)", show_lines=kind == "experiments")
    columns = COLUMNS[kind]
    for column in columns:
        table.add_column(column, no_wrap=column == "name")
    for row in rows:
        table.add_row(*(_show(row[column]) for column in columns))
    Console().print(table)
    return 0


def _list_norms() -> list[dict[str, Any]]:
    from normexp.norms import NORMS

    return [
        {
            "name": entry.name,
            "statistics over": {
                f"{dims}-D": [" x ".join(axes) for axes in sets]
                for dims, sets in entry.card.statistic_sets.items()
            },
            "mixes samples": entry.card.mixes_samples,
            "same in eval": entry.card.is_same_in_eval,
            "state": ", ".join(entry.card.state),
            "formula": entry.card.formula,
            "source": entry.card.source,
        }
        for entry in NORMS
    ]


def _list_models() -> list[dict[str, Any]]:
    from normexp.models import MODELS

    return [{"name": entry.name, **dataclasses.asdict(entry.card)} for entry in MODELS]


def _list_data() -> list[dict[str, Any]]:
    from normexp.data import DATASETS

    rows = []
    for entry in DATASETS:
        card = dataclasses.replace(entry.card, check_files=None)
        facts = dataclasses.asdict(card)
        facts.pop("check_files")
        rows.append({"name": entry.name, **facts})
    return rows


def _list_placements() -> list[dict[str, Any]]:
    from normexp.models import PLACEMENTS

    return [dataclasses.asdict(placement) for placement in PLACEMENTS.values()]


def _list_experiments() -> list[dict[str, Any]]:
    from normexp.config.choices import conf_dir

    rows = []
    for path in sorted((conf_dir() / "experiment").glob("*.yaml")):
        about = yaml.safe_load(path.read_text())["experiment"]
        command = f"normexp run experiment={path.stem}"
        rows.append({"name": path.stem, "question": about["question"], "command": command})
    return rows


# What a terminal of 80 columns holds.
COLUMNS = {
    "norms": ("name", "statistics over", "mixes samples", "same in eval", "state"),
    "models": ("name", "placements", "description"),
    "data": ("name", "description", "num_classes", "image_shape", "needs_download"),
    "experiments": ("name", "question"),
}

KINDS: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "norms": _list_norms,
    "models": _list_models,
    "data": _list_data,
    "placements": _list_placements,
    "experiments": _list_experiments,
}


def _show(value: Any) -> str:
    """Return a value as a table cell."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return "\n".join(f"{key}: {_show(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        is_shape = all(isinstance(item, int) for item in value)
        return (" x " if is_shape else ", ").join(str(item) for item in value) or "-"
    return "-" if value in (None, "") else str(value)
