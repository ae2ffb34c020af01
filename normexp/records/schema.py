"""What a run leaves on disk: file names, columns, statuses. Changes raise SCHEMA_VERSION."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

SCHEMA_VERSION: Final = 1

# Raise it when the same configuration, seed and data would give other numbers than before: run
# ids contain it, so old and new runs can never be mistaken for each other.
NUMERICS_VERSION: Final = 1

PLAN_FILE: Final = "experiment.json"
RUNS_FOLDER: Final = "runs"
CONFIG_FILE: Final = "config.yaml"
ENVIRONMENT_FILE: Final = "environment.json"
HISTORY_FILE: Final = "history.parquet"
SUMMARY_FILE: Final = "summary.json"
JOURNAL_FILE: Final = "journal.jsonl"
CHECKPOINT_FILE: Final = "checkpoint.ckpt"
COST_FILE: Final = "cost.json"

Status = Literal["completed", "diverged", "failed", "interrupted"]
STATUSES: Final[tuple[Status, ...]] = ("completed", "diverged", "failed", "interrupted")
# A second start leaves runs of these statuses alone; the others run again.
FINAL_STATUSES: Final[tuple[Status, ...]] = ("completed", "diverged")


class HistoryRow(NamedTuple):
    """One measured number of a run.

    Attributes:
        samples: Training samples consumed so far.
        update: Optimizer steps taken so far.
        epoch: ``samples`` divided by the size of the training split.
        evaluation: k of the k-th of n evaluations; None for rows of training.
        split: train, val or test.
        metric: Quantity, such as "loss" or "accuracy"; scores are fractions in [0, 1].
        value: The number; None means not logged, and NaN and infinities are kept apart.
        wall_s: Seconds since the run began, evaluation included. Other runs may have run
            beside this one, so it is no timing.
    """

    samples: int
    update: int
    epoch: float
    evaluation: int | None
    split: str
    metric: str
    value: float | None
    wall_s: float
