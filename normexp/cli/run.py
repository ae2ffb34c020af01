"""The verb run: train an experiment's grid, measure its cost, write its report."""

from __future__ import annotations

from collections.abc import Sequence

from normexp.analysis import load_results, print_summary, write_report
from normexp.cli.train import count_statuses, exit_code, run_hydra
from normexp.errors import UserError, choices_hint
from normexp.launch.cost import measure_missing_costs


def run_experiment(arguments: Sequence[str]) -> int:
    """Train what is missing, measure what is missing, report.

    Args:
        arguments: Hydra overrides, ``experiment=NAME`` among them.

    Returns:
        The exit code.

    Raises:
        UserError: If no experiment is named, or a cell cannot work.
    """
    from normexp.config.choices import list_choices

    asks_help = any(word in ("-h", "--help", "--hydra-help") for word in arguments)
    names = [word.partition("=")[2] for word in arguments if word.startswith("experiment=")]
    if not asks_help and not any(names):
        expected = choices_hint("", list_choices("experiment"))
        raise UserError("experiment", "", f"name one, as in experiment=quickstart; {expected}")
    task = run_hydra(["--multirun", *arguments], verb="run")
    if task.folder is None:  # --cfg or --help: Hydra has printed what was asked
        return 0
    has_costs = measure_missing_costs(task.cells)
    path = write_report(task.folder)
    print_summary(load_results(task.folder))
    print(f"report: {path}")
    return max(exit_code(count_statuses(task)), 0 if has_costs else 1)
