"""The plan of a sweep: what varies, what is kept, what is left to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from normexp.config.schema import (
    BudgetConfig,
    CellConfig,
    DataConfig,
    ExperimentConfig,
    ModelConfig,
    NormConfig,
    OptimizerConfig,
    ScheduleConfig,
)
from normexp.errors import UserError
from normexp.launch.plan import (
    PlannedCell,
    common_folder,
    find_factors,
    flatten,
    missing_jobs,
    save_plan,
)
from normexp.records import hold_lock, read_plan, write_json
from normexp.training.check import check_cell


def test_settings_are_flat_and_short():
    assert flatten(
        {
            "norm": {"name": "group_norm", "params": {"num_groups": 8}, "roles": {}},
            "placement": None,
            "optimizer": {"name": "sgd", "lr": 0.1, "decay_roles": ["weight"], "params": {}},
            "budget": {"epochs": 4.0},
        }
    ) == {
        "norm": "group_norm",
        "norm.num_groups": 8,
        "placement": None,
        "optimizer": "sgd",
        "optimizer.lr": 0.1,
        "optimizer.decay_roles": ["weight"],
        "budget.epochs": 4.0,
    }


BASE = {"norm": "batch_norm", "norm.momentum": 0.1, "micro_batch_size": 2, "optimizer.lr": 0.1}
RUNNING = {**BASE, "evaluation.statistics": "running", "evaluation.batch_size": None}
BATCH = {**BASE, "evaluation.statistics": "batch", "evaluation.batch_size": 128}
GROUP = {"norm": "group_norm", "norm.num_groups": 8, "micro_batch_size": 2, "optimizer.lr": 0.1}


@pytest.mark.parametrize(
    ("settings", "axes", "factors"),
    [
        # Alone: the core factors are shown though nothing varies.
        ([BASE], [], ["norm", "micro_batch_size"]),
        # A parameter that comes and goes with the norm is none.
        ([BASE, GROUP], ["norm"], ["norm", "micro_batch_size"]),
        # The axes come first, in their order.
        (
            [BASE, {**GROUP, "micro_batch_size": 8}],
            ["micro_batch_size", "norm"],
            ["micro_batch_size", "norm"],
        ),
        # A parameter that varies under one and the same norm is one.
        (
            [BASE, {**BASE, "norm.momentum": 0.5}, GROUP],
            ["norm"],
            ["norm", "norm.momentum", "micro_batch_size"],
        ),
        # What varies without being an axis is found; an axis with one value is none.
        (
            [BASE, {**BASE, "optimizer.lr": 0.2}],
            ["norm"],
            ["optimizer.lr", "norm", "micro_batch_size"],
        ),
        # The size of evaluation batches goes with what they are for, unless it varies by itself.
        (
            [RUNNING, BATCH],
            ["evaluation.statistics"],
            ["evaluation.statistics", "norm", "micro_batch_size"],
        ),
        (
            [RUNNING, BATCH, {**BATCH, "evaluation.batch_size": 64}],
            [],
            ["evaluation.statistics", "evaluation.batch_size", "norm", "micro_batch_size"],
        ),
        # 1 and True, 2 and 2.0 are different settings; lists can be compared.
        (
            [{**BASE, "x": [1, 2], "y": 1}, {**BASE, "x": [2], "y": True}],
            [],
            ["x", "y", "norm", "micro_batch_size"],
        ),
    ],
)
def test_factors_are_what_varies(settings, axes, factors):
    assert find_factors(settings, axes) == factors


@pytest.fixture
def make(tmp_path: Path):
    """Return a function that makes a checked cell of an MLP on digits."""

    def make(norm: str = "no_norm", **changes: Any) -> PlannedCell:
        settings: dict[str, Any] = {
            "name": "mine",
            "output_root": str(tmp_path),
            "seeds": [0, 1],
            "data": DataConfig("digits"),
            "model": ModelConfig("mlp", {"num_hidden_layers": 1, "width": 4}),
            "norm": NormConfig(norm),
            "placement": None,
            "optimizer": OptimizerConfig("sgd", 0.1, 0.0),
            "schedule": ScheduleConfig("constant"),
            "budget": BudgetConfig(updates=20),
        }
        config = CellConfig(**{**settings, **changes})
        return PlannedCell(config, check_cell(config))

    return make


def summarize(cell: PlannedCell, seed: int, status: str) -> None:
    write_json(cell.folder / f"seed={seed}" / "summary.json", {"status": status})


def test_what_is_left_to_do_is_found_by_identity(make):
    # R59: completed and diverged runs are ends; the others run again.
    first = make(seeds=[0, 1, 2, 3, 4])
    for seed, status in enumerate(["completed", "diverged", "failed", "interrupted"]):
        summarize(first, seed, status)
    assert [job.seed for job in missing_jobs([first])] == [2, 3, 4]
    # Another name of the same thing is the same thing, another rate is not.
    same = make(seeds=[0], experiment=ExperimentConfig(title="new"))
    assert missing_jobs([same]) == []
    other = make(seeds=[0], optimizer=OptimizerConfig("sgd", 0.2, 0.0))
    assert len(missing_jobs([other])) == 1


def test_long_runs_start_first(make):
    short, long = make(seeds=[0]), make(seeds=[0], budget=BudgetConfig(updates=40))
    # An update of four micro-batches takes four forward passes.
    longest = make(seeds=[0], accumulation_steps=4)
    jobs = missing_jobs([short, long, longest])
    assert [job.cell for job in jobs] == [longest, long, short]
    assert [job.work / jobs[2].work for job in jobs] == [4.0, 2.0, 1.0]


def plan(tmp_path: Path) -> dict[str, Any]:
    found = read_plan(tmp_path / "mine")
    assert found is not None
    return found


def test_single_runs_of_no_experiment_add_up(make, tmp_path):
    folder = tmp_path / "mine"
    save_plan(folder, [make(seeds=[0, 3])], axes=[], command="first")
    save_plan(folder, [make(seeds=[0, 1])], axes=[], command="second")
    (entry,) = plan(tmp_path)["cells"]
    assert entry["seeds"] == [0, 1, 3]
    assert entry["factors"] == {"norm": "no_norm", "micro_batch_size": 32}
    save_plan(folder, [make("batch_norm", seeds=[5])], axes=["norm"], command="third")
    found = plan(tmp_path)
    assert [cell["factors"]["norm"] for cell in found["cells"]] == ["no_norm", "batch_norm"]
    assert [cell["seeds"] for cell in found["cells"]] == [[0, 1, 3], [5]]
    assert found["factors"] == ["norm", "micro_batch_size"]
    assert (found["experiment"], found["command"]) == (None, "first && second && third")


EXPERIMENT = ExperimentConfig(name="e", title="t", question="q?", figures=["convergence"])


def test_the_plan_of_an_experiment_replaces_the_one_before(make, tmp_path):
    folder = tmp_path / "mine"
    both = [make(norm, experiment=EXPERIMENT) for norm in ("no_norm", "batch_norm")]
    save_plan(folder, both, axes=["norm"], command="first")
    save_plan(folder, both[:1], axes=["norm"], command="second")
    found = plan(tmp_path)
    assert len(found["cells"]) == 1
    assert (found["experiment"], found["title"], found["question"]) == ("e", "t", "q?")
    assert (found["figures"], found["command"]) == (["convergence"], "second")


def test_one_cell_of_an_experiment_trained_by_itself_loses_none_of_the_others(make, tmp_path):
    folder = tmp_path / "mine"
    both = [make(norm, experiment=EXPERIMENT) for norm in ("no_norm", "batch_norm")]
    save_plan(folder, both, axes=["norm"], command="normexp run experiment=e")
    before = plan(tmp_path)
    save_plan(folder, both[1:], axes=[], command="normexp train", is_addition=True)
    assert plan(tmp_path) == before


def test_a_folder_belongs_to_one_experiment(make, tmp_path):
    folder = tmp_path / "mine"
    save_plan(folder, [make(experiment=EXPERIMENT)], axes=[], command="")
    assert common_folder([make(experiment=EXPERIMENT)]) == folder
    with pytest.raises(UserError, match=r"^name=mine: .* holds e; choose another name"):
        common_folder([make()])
    other = ExperimentConfig(name="other")
    with pytest.raises(UserError, match="holds e"):
        common_folder([make(experiment=other)])


def test_a_sweep_has_one_folder(make, tmp_path):
    with pytest.raises(UserError, match=r"^name=a,b: one value for the whole sweep"):
        common_folder([make(name="b"), make(name="a")])
    with pytest.raises(UserError, match=r"^output_root="):
        common_folder([make(), make(output_root=str(tmp_path / "other"))])


def test_two_processes_never_write_a_plan_at_once(make, tmp_path, monkeypatch):
    folder = tmp_path / "mine"
    waits = []

    def waiting_lock(path, **told):
        waits.append(told["timeout_s"])
        return hold_lock(path, **{**told, "timeout_s": 0.0})

    monkeypatch.setattr("normexp.launch.plan.hold_lock", waiting_lock)
    with (
        hold_lock(folder / ".plan.lock", key="", held=""),
        pytest.raises(UserError, match="another process is writing its plan"),
    ):
        save_plan(folder, [make()], axes=[], command="")
    assert read_plan(folder) is None
    assert waits[0] > 5
