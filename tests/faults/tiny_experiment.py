"""A small experiment of four runs that resume, and how its results are compared."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd

from normexp.records import find_runs, read_history, read_journal, read_summary

YAML = """
# @package _global_
defaults:
  - override /data: digits
  - override /model: mlp
name: tiny
seeds: [0, 1]
micro_batch_size: 8
budget:
  epochs: 12
num_evaluations: 3
data:
  augment:
    crop_padding: 1
trainer:
  window_updates: 5
  checkpoint_interval_s: 0.01
experiment:
  name: tiny
  grid:
    - norm: [batch_norm, no_norm]
""".replace("\n# @package", "# @package", 1)

# Both tasks of texts, with running statistics of valid positions and, in the one, a leak.
TEXT_YAML = """
# @package _global_
defaults:
  - override /model: transformer
  - override /norm: batch_norm
  - override /placement: pre
  - override /optimizer: adamw
name: tiny
seeds: [0]
micro_batch_size: 4
accumulation_steps: 2
allow_leak: true
budget:
  epochs: null
  updates: 240
num_evaluations: 3
model:
  params:
    depth: 1
    width: 8
    num_heads: 2
    mlp_ratio: 1
trainer:
  window_updates: 2
  checkpoint_interval_s: 0.01
experiment:
  name: tiny
  grid:
    - data: [python_docs]
      data.params.context_length: [16]
      data.params.num_train: [100]
      data.params.num_val_topics: [1]
      data.params.num_test_topics: [1]
    - data: [docstrings]
      data.params.max_length: [24]
      data.params.max_vocabulary: [50]
""".replace("\n# @package", "# @package", 1)

# Of some 300 rows of a run: with fewer it is not about to end.
MOST_ROWS = 200

# Statistics of the machine's mood, not of the training.
UNSTEADY = ("wall_s",)


def write_experiment(folder: Path, content: str = YAML) -> Path:
    """Write the experiment below a folder for Hydra's --config-dir."""
    (folder / "experiment").mkdir(parents=True)
    (folder / "experiment" / "tiny.yaml").write_text(content)
    return folder


def results(experiment: Path) -> dict[str, Any]:
    """Return every number that training made: by run, histories and final metrics."""
    found = {}
    for run in find_runs(experiment):
        summary = read_summary(run)
        assert summary is not None, f"{run} has no summary"
        history = read_history(run).drop(columns=list(UNSTEADY))
        found[f"{run.parent.name}/{run.name}"] = {
            "status": summary["status"],
            "run_id": summary["run_id"],
            "metrics": repr(summary["metrics"]),
            "updates": summary["totals"]["updates"],
            "samples": summary["totals"]["samples"],
            "texts": [summary["totals"][key] for key in ("tokens", "targets", "padded_share")],
            # repr keeps every digit, and NaN equal to itself.
            "history": [repr(row) for row in history.itertuples(index=False, name=None)],
        }
    return found


def cells_table(experiment: Path) -> pd.DataFrame:
    """Return cells.csv as text, digit by digit."""
    return pd.read_csv(experiment / "tables" / "cells.csv", dtype=str, keep_default_na=False)


def statuses(experiment: Path) -> list[str | None]:
    """Return how the runs that have a folder ended; None for those without a summary."""
    summaries = [read_summary(run) for run in find_runs(experiment)]
    return [summary and summary["status"] for summary in summaries]


def has_come_to(experiment: Path, *, ended: int, rows: int) -> bool:
    """Tell whether so many runs have ended and another is in its middle, with a checkpoint."""
    runs = find_runs(experiment)
    done = [run for run in runs if (run / "summary.json").exists()]
    training = [run for run in runs if run not in done]
    return len(done) >= ended and any(
        rows <= len(read_journal(run)) <= MOST_ROWS and (run / "checkpoint.ckpt").exists()
        for run in training
    )


def wait_until(condition: Callable[[], bool], *, what: str, timeout_s: float = 120.0) -> None:
    """Wait for a condition; fail if it does not come true."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen in {timeout_s} s"
        time.sleep(0.005)
