"""The verb report."""

from __future__ import annotations

from pathlib import Path

from normexp.analysis import load_results, print_summary, write_report


def report_experiment(folder: Path) -> int:
    """Write an experiment's report from its records, and show its main table.

    Args:
        folder: The experiment's folder.

    Returns:
        The exit code.
    """
    path = write_report(folder)
    print_summary(load_results(folder))
    print(f"report: {path}")
    return 0
