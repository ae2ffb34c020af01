"""The verbs train and sweep: what they run, print and record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from command_line import normexp

from normexp.records import find_runs, hold_lock, read_plan, read_summary

SMALL = [
    "model=mlp",
    "model.params.num_hidden_layers=1",
    "norm=no_norm",
    "budget.epochs=null",
    "budget.updates=8",
    "num_evaluations=2",
]


def plan(folder: Path) -> dict[str, Any]:
    found = read_plan(folder)
    assert found is not None
    return found


def test_train_runs_each_seed_of_one_cell(tmp_path: Path) -> None:
    outcome = normexp("train", *SMALL, "seeds=[3,5]")
    folder = tmp_path / "results" / "scratch"
    assert outcome.code == 0
    assert outcome.err.startswith("training 2 of 2 runs\n")
    assert outcome.out.startswith(f"2 completed; records: {folder}\n")
    assert [run.name for run in find_runs(folder)] == ["seed=3", "seed=5"]
    (cell,) = plan(folder)["cells"]
    assert cell["seeds"] == [3, 5]
    assert plan(folder)["command"] == "normexp train " + " ".join(SMALL) + " 'seeds=[3,5]'"
    config = yaml.safe_load((find_runs(folder)[0] / "config.yaml").read_text())
    assert config["seeds"] == [3]
    assert config["placement"] is None
    assert config["output_root"] == str(tmp_path / "results")
    # Only this folder was written: nothing of Hydra's own.
    assert [path.name for path in tmp_path.iterdir()] == ["results"]


def test_what_a_job_would_be_is_shown_and_nothing_runs(tmp_path: Path) -> None:
    outcome = normexp("train", *SMALL, "--cfg", "job", "--resolve")
    assert outcome.code == 0
    assert yaml.safe_load(outcome.out)["budget"] == {"epochs": None, "samples": None, "updates": 8}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("verb", ["run", "sweep"])
def test_a_sweep_shows_its_base_too(tmp_path: Path, verb: str) -> None:
    outcome = normexp(verb, "experiment=quickstart", "--cfg", "job")
    assert outcome.code == 0
    assert yaml.safe_load(outcome.out)["experiment"]["name"] == "quickstart"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("verb", ["run", "train", "sweep", "report", "status", "list", ""])
def test_every_verb_has_help(tmp_path: Path, verb: str) -> None:
    outcome = normexp(*verb.split(), "--help")
    assert (outcome.code, outcome.err) == (0, "")
    assert len(outcome.out) > 100
    assert list(tmp_path.iterdir()) == []


def test_a_run_can_be_made_again_from_its_record(tmp_path: Path) -> None:
    # R65: the record is complete; composing it again gives the same run.
    normexp("train", *SMALL, "seeds=[0]", "optimizer.lr=0.02")
    (run,) = find_runs(tmp_path / "results" / "scratch")
    config = yaml.safe_load((run / "config.yaml").read_text())
    words = [
        f"model.params.num_hidden_layers={config['model']['params']['num_hidden_layers']}",
        f"optimizer.lr={config['optimizer']['lr']}",
        f"model={config['model']['name']}",
        f"norm={config['norm']['name']}",
        "budget={epochs: null, updates: 8}",
        f"num_evaluations={config['num_evaluations']}",
        "name=again",
        "seeds=[0]",
    ]
    assert normexp("train", *words).code == 0
    (again,) = find_runs(tmp_path / "results" / "again")
    first, second = read_summary(run), read_summary(again)
    assert first is not None
    assert second is not None
    assert first["run_id"] == second["run_id"]
    assert first["metrics"] == second["metrics"]
    assert again.parent.name == run.parent.name


def test_a_divergence_is_an_outcome_and_no_failure(tmp_path: Path) -> None:
    command = ["train", *SMALL, "seeds=[0]", "optimizer.lr=1e30"]
    outcome = normexp(*command)
    assert outcome.code == 0
    assert outcome.out.startswith("1 diverged; ")
    (run,) = find_runs(tmp_path / "results" / "scratch")
    written = (run / "summary.json").stat().st_mtime_ns
    assert normexp(*command).code == 0
    assert (run / "summary.json").stat().st_mtime_ns == written


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a sweep over rates and seeds, trained by the local launcher."""
    root = tmp_path_factory.mktemp("swept")
    words = ["optimizer.lr=0.01,0.02", "seeds=[0],[1]", "name=swept", f"output_root={root}"]
    outcome = normexp("sweep", *SMALL, *words)
    assert outcome.code == 0, outcome.err
    assert outcome.out.startswith(f"4 completed; records: {root / 'swept'}\n")
    return root / "swept"


def test_a_sweep_trains_all_combinations(swept: Path) -> None:
    # Lists of seeds that vary are one cell with all of them; a seed is no factor.
    found = plan(swept)
    assert found["factors"] == ["optimizer.lr", "norm", "micro_batch_size"]
    assert [cell["factors"]["optimizer.lr"] for cell in found["cells"]] == [0.01, 0.02]
    assert [cell["seeds"] for cell in found["cells"]] == [[0, 1], [0, 1]]
    assert len(find_runs(swept)) == 4


def test_a_run_does_not_depend_on_the_sweep_around_it(swept: Path, tmp_path: Path) -> None:
    # Alone in this process and in a sweep's own process: the same bits.
    words = [*SMALL, "optimizer.lr=0.02", "seeds=[1]"]
    assert normexp("train", *words).code == 0
    (alone,) = find_runs(tmp_path / "results" / "scratch")
    one, other = read_summary(alone), read_summary(swept / "runs" / alone.parent.name / "seed=1")
    assert one is not None
    assert other is not None
    assert one["run_id"] == other["run_id"]
    assert one["metrics"] == other["metrics"]


def test_one_cell_by_itself_keeps_the_plan_of_the_others(swept: Path) -> None:
    before = plan(swept)["cells"]
    words = ["name=swept", f"output_root={swept.parent}", "seeds=[0]", "optimizer.lr=0.02"]
    assert normexp("train", *SMALL, *words).code == 0
    assert [cell["cell"] for cell in plan(swept)["cells"]] == [cell["cell"] for cell in before]
    assert [cell["seeds"] for cell in plan(swept)["cells"]] == [[0, 1], [0, 1]]


def test_the_launcher_of_hydra_does_the_same_in_this_process(tmp_path: Path) -> None:
    words = ["norm=no_norm,batch_norm", "seeds=[0]", "hydra/launcher=basic", "name=basic"]
    outcome = normexp("sweep", *SMALL, *words)
    assert outcome.code == 0, outcome.err
    assert outcome.out.startswith(f"2 completed; records: {tmp_path / 'results' / 'basic'}\n")
    assert len(plan(tmp_path / "results" / "basic")["cells"]) == 2
    assert plan(tmp_path / "results" / "basic")["factors"] == ["norm", "micro_batch_size"]


def test_a_second_sweep_waits_and_then_leaves_the_first_one_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "results" / "mine"
    waits = []

    def impatient(path: Path, **told: Any) -> Any:
        waits.append(told["timeout_s"])
        return hold_lock(path, **{**told, "timeout_s": 0.0})

    monkeypatch.setattr("normexp.launch.sweeper.hold_lock", impatient)
    with hold_lock(folder / ".lock", key="", held=""):
        outcome = normexp("sweep", *SMALL, "name=mine", "optimizer.lr=0.1,0.2")
    assert outcome.code == 2
    assert "another sweep is writing there; wait for it, or choose another name" in outcome.err
    # Its plan would have taken the place of the plan of the sweep that runs.
    assert read_plan(folder) is None
    assert find_runs(folder) == []
    assert waits == [5.0]
