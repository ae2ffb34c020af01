"""The verb status: every run with the word for how it stands."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from command_line import normexp

from normexp.records import HistoryRow, Journal, hold_lock, write_json, write_plan

WORDS = {0: "completed", 1: "diverged", 2: "failed", 3: "interrupted"}


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    """Seeds 0 to 3 have ended, 4 was killed, 5 is training, 6 was never started."""
    folder = tmp_path / "mine"
    cell = {"cell": "a-1", "factors": {"norm": "batch_norm", "placement": None}}
    plan = {"name": "mine", "factors": ["norm", "placement"]}
    write_plan(folder, {**plan, "cells": [{**cell, "seeds": list(range(7))}]})
    for seed, word in WORDS.items():
        summary = {
            "run_id": f"id{seed}",
            "status": word,
            "reason": "RuntimeError: boom" if word == "failed" else None,
            "totals": {"updates": 10 * seed},
            "metrics": {"test/loss": math.nan if word == "diverged" else 0.5},
        }
        write_json(folder / "runs" / "a-1" / f"seed={seed}" / "summary.json", summary)
    for seed in (4, 5):
        journal = Journal(folder / "runs" / "a-1" / f"seed={seed}")
        journal.append([HistoryRow(80, 10, 0.1, None, "train", "loss", 0.5, 1.0)])
        journal.close()
    return folder


def test_every_run_is_there_with_its_word(experiment: Path) -> None:
    with hold_lock(experiment / "runs" / "a-1" / "seed=5" / ".lock", key="", held=""):
        outcome = normexp("status", str(experiment), "--json")
    assert (outcome.code, outcome.err) == (0, "")
    runs = json.loads(outcome.out, parse_constant=pytest.fail)
    assert [run["seed"] for run in runs] == list(range(7))
    words = [*WORDS.values(), "interrupted", "running", "not run"]
    assert [run["status"] for run in runs] == words
    assert [run["updates"] for run in runs] == [0, 10, 20, 30, 10, 10, 0]
    assert [run["run_id"] for run in runs] == ["id0", "id1", "id2", "id3", None, None, None]
    assert runs[1]["metrics"] == {"test/loss": "NaN"}
    assert runs[2]["reason"] == "RuntimeError: boom"
    for run in runs:
        assert (run["cell"], run["norm"], run["placement"]) == ("a-1", "batch_norm", None)


def test_a_person_sees_counts_and_reasons(experiment: Path) -> None:
    outcome = normexp("status", str(experiment))
    assert outcome.code == 0
    assert "mine: 7 runs" in outcome.out
    assert "failed: a-1 seed 2: RuntimeError: boom\n" in outcome.out
    table = outcome.out[outcome.out.index("batch_norm") :].replace("│", " ")
    row = " ".join(table.partition("└")[0].split())
    ends = "1 completed, 1 diverged, 1 failed, 3 interrupted, 1 not run"
    assert row == f"batch_norm - {ends}"


def test_looking_changes_nothing(experiment: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in experiment.rglob("*")}
    assert normexp("status", str(experiment)).code == 0
    after = {path: path.stat().st_mtime_ns for path in experiment.rglob("*")}
    assert after == before
