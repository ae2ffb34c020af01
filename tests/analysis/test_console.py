from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

from experiment_folder import ExperimentFolder
from rich.console import Console

from normexp.analysis import load_results, print_summary


def printed(folder: ExperimentFolder, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    print_summary(load_results(folder.path), console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_main_table_fits_100_columns(grid: ExperimentFolder) -> None:
    grid.add_run("batch_norm-4-2", 1, None, status="diverged", statistic_set=2)
    text = printed(grid)
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 100
    row = next(line for line in text.splitlines() if "1 diverged" in line and "of" in line)
    assert row.split() == [
        "batch_norm",
        "4",
        "2",
        "2",
        "1",
        "of",
        "2",
        "49.00",
        "[-]",
        "-",
        "1",
        "diverged",
    ]
    assert "16 runs: 15 completed, 1 diverged." in text
    assert "[-]: no interval where n < 3." in text


def test_numbers_by_hand(two_norms: ExperimentFolder) -> None:
    text = printed(two_norms)
    assert "92.00 [87.03, 96.97]" in text
    assert "[-]" not in text
    assert "2 of 2 cells have fewer than 5 completed runs" in text


def test_a_wide_table_loses_the_spread_and_no_run(make_experiment: Callable[..., Any]) -> None:
    names = ["norm", *(f"model.a_long_factor_{letter}" for letter in "abcd")]
    folder = make_experiment(names)
    cell = folder.add_cell("a", dict.fromkeys(names, "a_long_value"), seeds=[0, 1, 2])
    folder.add_run(cell, 0, 0.5)
    folder.add_run(cell, 1, 0.5)
    folder.add_run(cell, 2, None, status="diverged")
    text = printed(folder)
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 100
    assert "std" not in text
    words = text.split()
    assert "diverged" in words
    assert [word for word in words if word in ("2", "of", "3")][:3] == ["2", "of", "3"]
