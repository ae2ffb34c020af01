"""``normexp run`` from an experiment's YAML to its report, as a user starts it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from normexp.records import read_json, read_plan

EXPERIMENT = """\
# @package _global_
name: tiny
seeds: [0, 1]
budget: {epochs: null, updates: 12}
num_evaluations: 3
model: {params: {width: 8}}
experiment:
  name: tiny
  title: Tiny
  question: Does the whole path run?
  grid:
    - norm: [batch_norm, group_norm]
      micro_batch_size: [4, 8]
  figures: [micro_batch, statistic_set, convergence]
"""


def normexp(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "normexp", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder in which the tiny experiment has run."""
    folder = tmp_path_factory.mktemp("run")
    conf = folder / "conf" / "experiment"
    conf.mkdir(parents=True)
    (conf / "tiny.yaml").write_text(EXPERIMENT)
    done = normexp("run", "--config-dir", "conf", "experiment=tiny", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "8 completed" in done.stderr
    assert "report: " in done.stdout
    return folder


def test_tables_hold_every_cell(finished: Path) -> None:
    tables = finished / "results" / "tiny" / "tables"
    names = ("cells", "convergence", "timing", "memory")
    for name in names:
        for suffix in ("csv", "md", "tex"):
            assert (tables / f"{name}.{suffix}").stat().st_size > 0
    cells = pd.read_csv(tables / "cells.csv")
    assert len(cells) == 4
    assert (cells["num_seeds"] == 2).all()
    for statistic in ("mean", "std", "ci95_low", "ci95_high"):
        assert cells[f"test/accuracy_{statistic}"].notna().all()
    # The last of three stages has 2x2 maps: M is the micro-batch x 4, or a group of 4 channels x 4.
    by_arm = cells.set_index(["norm", "micro_batch_size"])["min_statistic_set"]
    assert by_arm["batch_norm", 4] == 16
    assert by_arm["batch_norm", 8] == 32
    convergence = pd.read_csv(tables / "convergence.csv")
    assert len(convergence) == 4 * 3
    timing = pd.read_csv(tables / "timing.csv")
    assert (timing["update_ms_median"] > 0).all()
    memory = pd.read_csv(tables / "memory.csv")
    saved = memory.set_index(["norm", "micro_batch_size"])["saved_for_backward_bytes"]
    # Activations double with the micro-batch; what does not is a mean and a scale a channel.
    assert saved["batch_norm", 8] == pytest.approx(2 * saved["batch_norm", 4], rel=0.02)


def test_figures_and_reports_stand(finished: Path) -> None:
    folder = finished / "results" / "tiny"
    for name in ("micro_batch", "statistic_set", "convergence"):
        for suffix in ("png", "svg", "pdf", "csv"):
            assert (folder / "figures" / f"{name}.{suffix}").stat().st_size > 0
    assert "Does the whole path run?" in (folder / "REPORT.md").read_text()
    html = (folder / "report.html").read_text()
    assert "Does the whole path run?" in html
    assert 'src="http' not in html
    assert 'href="http' not in html


def test_a_second_start_does_nothing_but_the_report(finished: Path) -> None:
    folder = finished / "results" / "tiny"
    records = sorted((folder / "runs").rglob("*.json"))
    before = {path: path.stat().st_mtime_ns for path in records}
    cells = (folder / "tables" / "cells.csv").read_bytes()
    done = normexp("run", "--config-dir", "conf", "experiment=tiny", cwd=finished)
    assert done.returncode == 0, done.stderr
    assert "training" not in done.stderr
    assert "measuring" not in done.stderr
    assert {path: path.stat().st_mtime_ns for path in records} == before
    assert (folder / "tables" / "cells.csv").read_bytes() == cells


def test_the_command_line_narrows_the_grid(finished: Path) -> None:
    done = normexp(
        "run",
        "--config-dir",
        "conf",
        "experiment=tiny",
        "norm=batch_norm",
        "seeds=[0]",
        "name=narrow",
        "micro_batch_size=8,16",
        cwd=finished,
    )
    assert done.returncode == 0, done.stderr
    plan = read_plan(finished / "results" / "narrow")
    assert plan is not None
    assert [cell["factors"] for cell in plan["cells"]] == [
        {"micro_batch_size": 8, "norm": "batch_norm"},
        {"micro_batch_size": 16, "norm": "batch_norm"},
    ]


def test_runs_record_their_conditions(finished: Path) -> None:
    paths = sorted((finished / "results" / "tiny" / "runs").rglob("environment.json"))
    assert len(paths) == 8
    for path in paths:
        environment = read_json(path)
        assert environment["torch"]
        assert environment["num_threads"] == 1
        assert environment["device"]
