"""The verb list: what can be chosen."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

import yaml
from rich import box
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
            print(f"{row['name']}: {row['formula']}\n")
            for family in ("images", "sequences"):
                if row[family] is not None:
                    print(f"{family}: {row[family]['formula']}\n\n{row[family]['picture']}")
        return 0
    if kind == "norms":
        console = Console()
        console.print(_norms_table(rows, is_wide=console.width >= 100))
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
    """Return every field of every card as plain data, inputs by their words."""
    from normexp.norms import NORMS, SHAPES

    words = {dims: shape.partition(" ")[0] for dims, shape in SHAPES.items()}
    rows = []
    for entry in NORMS:
        facts = dataclasses.asdict(dataclasses.replace(entry.card, weight=None))
        facts["statistic_sets"] = {
            words[dims]: sets for dims, sets in facts["statistic_sets"].items()
        }
        if entry.card.weight is not None:
            # What parametrizes a module is no data.
            facts["weight"] = {
                field.name: getattr(entry.card.weight, field.name)
                for field in dataclasses.fields(entry.card.weight)
                if field.name != "parametrize"
            }
        inputs = [words[dims] for dims in entry.card.dims]
        rows.append({"name": entry.name, "inputs": inputs, **facts})
    return rows


def _norms_table(rows: Sequence[dict[str, Any]], *, is_wide: bool) -> Table:
    """Return the columns that tell the norms apart; all of them where there is room."""
    from normexp.norms import SHAPES

    table = Table(
        title=f"norms (more with --json{'' if is_wide else ' or in 100 columns'})",
        caption=f"inputs: {', '.join(SHAPES.values())}",
        box=box.SIMPLE,
        show_edge=False,
        padding=0,
    )
    columns = ["name", "inputs", "statistics over", "mixes\nsamples", "same in\neval"]
    columns += ["state", "kernel\non CPU"] if is_wide else []
    for column in columns:
        table.add_column(column, no_wrap=column == "name", overflow="fold")
    for row in rows:
        # The sets of features are those of the others without the positions.
        sets = dict(row["statistic_sets"])
        if len(sets) > 1:
            sets.pop("features", None)
        over = list(dict.fromkeys(" x ".join(axes) for some in sets.values() for axes in some))
        if row["weight"] is not None:
            over.append("weight's fan-in")
        # The counter of batches says nothing that the others do not.
        state = [name for name in row["state"] if name != "num_batches_tracked"]
        cells = [
            row["name"],
            "all" if len(row["inputs"]) == len(SHAPES) else "\n".join(row["inputs"]),
            "\n".join(over) or "-",
            _show(row["mixes_samples"]),
            _show(row["is_same_in_eval"]),
        ]
        cells += ["\n".join(state) or "-", row["kernel_cpu"]] if is_wide else []
        table.add_row(*cells)
    return table


def _list_models() -> list[dict[str, Any]]:
    from normexp.models import MODELS

    return [{"name": entry.name, **dataclasses.asdict(entry.card)} for entry in MODELS]


def _list_data() -> list[dict[str, Any]]:
    """Return the cards, with inputs and targets in words; null is what only the data tell."""
    from normexp.data import DATASETS

    rows = []
    for entry in DATASETS:
        card = dataclasses.replace(entry.card, check_files=None)
        facts = dataclasses.asdict(card)
        facts.pop("check_files")
        if card.is_text:
            facts |= {"num_train_val": None, "num_test": None}
        inputs = "text" if card.is_text else _show(card.image_shape)
        targets = "next token" if card.num_classes is None else f"{card.num_classes} labels"
        rows.append({"name": entry.name, "inputs": inputs, "targets": targets, **facts})
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
    "models": ("name", "placements", "description"),
    "data": ("name", "description", "inputs", "targets", "needs_download"),
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
