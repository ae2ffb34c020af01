from __future__ import annotations

import io

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


def test_numbers_by_hand(two_norms: ExperimentFolder) -> None:
    text = printed(two_norms)
    assert "92.00 [87.03, 96.97]" in text
    assert "2 of 2 cells have fewer than 5 completed runs" in text
