"""Whatever ends a sweep, a second start does what is missing, with the same numbers."""

from __future__ import annotations

import json
import multiprocessing.forkserver
import os
import signal
import sys
import threading
from pathlib import Path

import pytest
from command_line import Outcome, children_of, normexp, processes_of, started
from tiny_experiment import (
    TEXT_YAML,
    cells_table,
    has_come_to,
    results,
    statuses,
    wait_until,
    write_experiment,
)

from normexp.random import random_stream
from normexp.records import find_runs, read_plan, read_summary

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def command(verb: str, conf: Path, root: Path, *overrides: str) -> list[str]:
    flags = ["--config-dir", str(conf)]
    return [verb, "experiment=tiny", f"output_root={root}", *overrides, *flags]


@pytest.fixture(scope="module")
def conf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_experiment(tmp_path_factory.mktemp("conf"))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, conf: Path) -> Path:
    """The experiment's folder after a run that nothing disturbed."""
    root = tmp_path_factory.mktemp("undisturbed")
    outcome = normexp(*command("run", conf, root))
    assert outcome.code == 0, outcome.err
    assert statuses(root / "tiny") == ["completed"] * 4
    return root / "tiny"


def moment(index: int) -> tuple[int, int]:
    """Return a random moment: so many runs have ended, a further one has so many rows."""
    stream = random_stream(index, "moment of a kill")
    return int(stream.integers(0, 3)), int(stream.integers(8, 60))


@pytest.mark.parametrize(
    "index", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in range(1, 6))]
)
def test_a_run_that_was_killed_goes_on_to_the_same_numbers(
    conf: Path, undisturbed: Path, tmp_path: Path, index: int
) -> None:
    ended, rows = moment(index)
    folder = tmp_path / "tiny"
    with started(*command("run", conf, tmp_path), folder=tmp_path) as process:
        wait_until(lambda: has_come_to(folder, ended=ended, rows=rows), what="the moment")
        process.kill()
        process.wait()
        wait_until(lambda: not processes_of(process.pid), what="the end of its jobs")
    assert not (folder / "tables").exists()
    before = {run: (run / "summary.json").stat().st_mtime_ns for run in _ended(folder)}
    assert len(before) >= ended
    resumed = [run for run in find_runs(folder) if (run / "checkpoint.ckpt").exists()]
    assert resumed, "no run had a checkpoint: the test shows nothing of resuming"

    outcome = normexp(*command("run", conf, tmp_path))
    assert outcome.code == 0, outcome.err
    assert results(folder) == results(undisturbed)
    again, first = cells_table(folder), cells_table(undisturbed)
    assert len(again) == 2
    assert again.to_dict() == first.to_dict()
    # What had ended was left alone; what had not went on from its checkpoint.
    assert {run: (run / "summary.json").stat().st_mtime_ns for run in before} == before
    for run in resumed:
        summary = read_summary(run)
        assert summary is not None
        assert summary["totals"]["resumed_from_update"] > 0
    assert _strays(folder) == []


@pytest.mark.parametrize("kills", [[1], pytest.param([0, 1], marks=pytest.mark.slow)])
def test_runs_on_texts_that_were_killed_go_on_to_the_same_numbers(
    tmp_path: Path, kills: list[int]
) -> None:
    """Killed in the second run; or in the first, and once more in the second."""
    conf = write_experiment(tmp_path / "conf", TEXT_YAML)
    roots = [tmp_path / name for name in ("whole", "killed")]
    assert normexp(*command("sweep", conf, roots[0])).code == 0
    folder = roots[1] / "tiny"
    one_job = command("sweep", conf, roots[1], "hydra.launcher.num_jobs=1")
    for ended in kills:
        with started(*one_job, folder=tmp_path) as process:
            wait_until(lambda n=ended: has_come_to(folder, ended=n, rows=20), what="the moment")
            process.kill()
            process.wait()
            wait_until(lambda p=process: not processes_of(p.pid), what="the end of its jobs")
    assert normexp(*one_job).code == 0
    assert results(folder) == results(roots[0] / "tiny")
    totals = [read_summary(run)["totals"] for run in find_runs(folder)]
    assert len(totals) == 2
    assert sum(each["resumed_from_update"] > 0 for each in totals) == len(kills)
    assert all(each["tokens"] > 0 for each in totals)


def _ended(folder: Path) -> list[Path]:
    return [run for run in find_runs(folder) if (run / "summary.json").exists()]


def _strays(folder: Path) -> list[Path]:
    """Return files of unfinished writes, and those that only a run in training has."""
    names = ("checkpoint.ckpt", "checkpoint.partial", "journal.jsonl")
    return [
        path
        for path in folder.rglob("*")
        if path.name in names or (path.name.startswith(".") and not path.name.endswith(".lock"))
    ]


@pytest.mark.parametrize("whole_group", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_ctrl_c_is_recorded_and_a_second_start_does_the_rest(
    conf: Path, undisturbed: Path, tmp_path: Path, whole_group: bool
) -> None:
    # R54: never a success, nothing left running. A terminal tells the whole group.
    folder = tmp_path / "tiny"
    with started(*command("run", conf, tmp_path), folder=tmp_path) as process:
        wait_until(lambda: has_come_to(folder, ended=1, rows=8), what="the second run")
        (os.killpg if whole_group else os.kill)(process.pid, signal.SIGINT)
        assert process.wait(30) == 130
        wait_until(lambda: not processes_of(process.pid), what="the end of its jobs", timeout_s=10)
    told = (tmp_path / "stderr.txt").read_text()
    assert "normexp: interrupted; start again to do what is missing\n" in told
    assert "Traceback" not in told
    found = statuses(folder)
    assert "interrupted" in found
    # A run that was stopped before its first update has no summary; it passes for interrupted.
    assert set(found) <= {"interrupted", "completed", None}
    listed = json.loads(normexp("status", str(folder), "--json").out)
    assert len(listed) == 4
    assert {run["status"] for run in listed} <= {"completed", "interrupted", "not run"}

    assert normexp(*command("sweep", conf, tmp_path)).code == 0
    assert results(folder) == results(undisturbed)


def _kill_first_job(folder: Path, killed: list[int]) -> None:
    """Kill the process of the first run that trains, as a system short of memory would."""
    wait_until(lambda: has_come_to(folder, ended=0, rows=8), what="the first run")
    server = multiprocessing.forkserver._forkserver._forkserver_pid
    for worker in children_of(server):
        os.kill(worker, signal.SIGKILL)
        killed.append(worker)


def test_the_death_of_a_job_is_its_own(conf: Path, undisturbed: Path, tmp_path: Path) -> None:
    folder, killed = tmp_path / "tiny", []
    killer = threading.Thread(target=_kill_first_job, args=(folder, killed))
    killer.start()
    outcome = normexp(*command("sweep", conf, tmp_path, "hydra.launcher.num_jobs=1"))
    killer.join()
    assert len(killed) == 1
    assert outcome.code == 1
    assert sorted(map(str, statuses(folder))) == ["completed"] * 3 + ["failed"]
    (dead,) = [run for run in find_runs(folder) if read_summary(run)["status"] == "failed"]
    summary = read_summary(dead)
    assert summary["reason"] == "the process died of signal 9"
    assert 0 < summary["totals"]["updates"] < 1500
    assert summary["run_id"] == read_summary(undisturbed / dead.relative_to(folder))["run_id"]

    times = {
        run: (run / "summary.json").stat().st_mtime_ns for run in _ended(folder) if run != dead
    }
    outcome = normexp(*command("sweep", conf, tmp_path))
    assert outcome.code == 0
    assert "training 1 of 4 runs (3 on disk already)" in outcome.err
    assert {run: (run / "summary.json").stat().st_mtime_ns for run in times} == times
    assert results(folder) == results(undisturbed)


def test_a_third_start_has_nothing_to_do(conf: Path, undisturbed: Path) -> None:
    # R59: by identity, not by index; trackers and folders of files make no other cell.
    before = results(undisturbed)
    root = undisturbed.parent
    outcome = normexp(*command("sweep", conf, root, "trainer.checkpoint_interval_s=9"))
    assert (outcome.code, outcome.err) == (0, "all 4 runs are on disk already\n")
    assert outcome.out.startswith("4 completed; ")
    assert results(undisturbed) == before


def test_train_takes_one_cell_and_no_grid(conf: Path, undisturbed: Path) -> None:
    before = read_plan(undisturbed)
    outcome = normexp(*command("train", conf, undisturbed.parent, "seeds=[1]"))
    assert outcome.code == 2
    assert "experiment=tiny: is a grid of cells, and train takes one" in outcome.err
    assert read_plan(undisturbed) == before


def test_one_cell_trained_by_itself_keeps_the_plan_of_its_experiment(
    conf: Path, undisturbed: Path
) -> None:
    before = read_plan(undisturbed)
    words = command("train", conf, undisturbed.parent, "norm=no_norm", "seeds=[1]")
    assert normexp(*words).code == 0
    after = read_plan(undisturbed)
    assert before is not None
    assert after is not None
    assert len(after["cells"]) == 2
    assert after == before


BOOM = """
import torch
from normexp.norms import NORMS
from normexp.norms.no_norm import build_no_norm

class Boom(torch.nn.Identity):
    def forward(self, inputs):
        if inputs.device.type != "meta":
            raise RuntimeError("boom\\nsecond line")
        return inputs

@NORMS.register("boom_norm", NORMS.get("no_norm").card)
def build_boom_norm(num_features, *, dims):
    return Boom()
"""


def sweep_with_boom(tmp_path: Path, *overrides: str) -> Outcome:
    (tmp_path / "boom.py").write_text(BOOM)
    return normexp(
        *("sweep", "plugins=[boom.py]", "norm=boom_norm,no_norm", "model=mlp", "name=boom"),
        *("seeds=[0,1]", "budget.epochs=null", "budget.updates=8", *overrides),
    )


def test_runs_that_raise_fail_alone(tmp_path: Path) -> None:
    # R51: the others finish, the code tells, the failed ones are shown as failed.
    outcome = sweep_with_boom(tmp_path)
    assert outcome.code == 1
    assert outcome.out.startswith("2 completed, 2 failed; records: ")
    failed = [run for run in find_runs(tmp_path / "results/boom") if "boom" in run.parent.name]
    for run in failed:
        assert read_summary(run)["reason"] == "RuntimeError: boom"
        assert 'raise RuntimeError("boom' in (run / "error.txt").read_text()
    assert len(failed) == 2
    shown = normexp("status", "results/boom")
    assert shown.out.count("RuntimeError: boom") == 2
    # A second start tries the failed ones again, and them alone.
    assert "training 2 of 4 runs (2 on disk already)" in sweep_with_boom(tmp_path).err


def test_fail_fast_stops_at_the_first_failure(tmp_path: Path) -> None:
    # R52
    outcome = sweep_with_boom(
        tmp_path, "hydra.launcher.num_jobs=1", "hydra.launcher.fail_fast=true"
    )
    assert outcome.code == 1
    assert outcome.out.startswith("1 failed, 3 not run; records: ")
