from __future__ import annotations

import json
import math
from collections.abc import Callable

import pytest
from experiment_folder import ExperimentFolder

from normexp.analysis import load_results
from normexp.errors import UserError
from normexp.records.store import read_json

Make = Callable[..., ExperimentFolder]


def test_every_planned_run_has_a_row(make_experiment: Make) -> None:
    folder = make_experiment()
    cell = folder.add_cell("batch_norm-1", {"norm": "batch_norm"}, seeds=[0, 1, 2, 3])
    folder.add_run(cell, 0, 0.9)
    folder.add_run(cell, 1, None, status="failed", reason="it broke")
    folder.run_dir(cell, 2)
    runs = load_results(folder.path).runs
    assert runs["seed"].tolist() == [0, 1, 2, 3]
    assert runs["status"].tolist() == ["completed", "failed", "interrupted", "not_run"]
    assert runs["reason"].tolist() == [None, "it broke", None, None]


def test_runs_outside_the_plan_are_named_and_not_pooled(two_norms: ExperimentFolder) -> None:
    two_norms.add_run("batch_norm-aaaaaaaa", 7, 0.1)
    two_norms.run_dir("old-bbbbbbbb", 0)
    results = load_results(two_norms.path)
    assert results.extra_runs == ("batch_norm-aaaaaaaa/seed=7", "old-bbbbbbbb/seed=0")
    assert len(results.runs) == 6


def test_words_become_numbers_again(make_experiment: Make) -> None:
    folder = make_experiment()
    cell = folder.add_cell("a-1", {"norm": "batch_norm"})
    for seed, word in enumerate(("NaN", "Infinity", "-Infinity")):
        folder.add_run(cell, seed, word, status="diverged")
    values = load_results(folder.path).runs["test/accuracy"].tolist()
    assert math.isnan(values[0])
    assert values[1:] == [math.inf, -math.inf]


def test_null_and_integer_factors_stay_what_they_are(make_experiment: Make) -> None:
    folder = make_experiment(["norm", "norm.num_groups"])
    folder.add_cell("a-1", {"norm": "batch_norm", "norm.num_groups": None})
    folder.add_cell("b-1", {"norm": "group_norm", "norm.num_groups": 8})
    cells = load_results(folder.path).cells
    assert cells["norm.num_groups"].tolist() == [None, 8]
    assert [type(value) for value in cells["norm.num_groups"]] == [type(None), int]


def test_values_that_do_not_vary_come_from_the_configuration(two_norms: ExperimentFolder) -> None:
    results = load_results(two_norms.path)
    assert results.factors == ("norm",)
    assert results.cells["micro_batch_size"].tolist() == [8, 8]


def test_history_rows_carry_cell_and_seed_and_full_metric_names(
    two_norms: ExperimentFolder,
) -> None:
    history = load_results(two_norms.path).history
    assert set(history["metric"]) == {"train/loss", "val/loss", "val/accuracy"}
    assert history.groupby(["cell", "seed"]).size().tolist() == [6] * 6
    assert history["evaluation"].isna().sum() == 12


def test_a_folder_without_a_plan_is_refused(tmp_path: object) -> None:
    with pytest.raises(UserError, match=r"holds no experiment\.json"):
        load_results(str(tmp_path))


def test_two_configurations_in_a_cell_are_refused(two_norms: ExperimentFolder) -> None:
    two_norms.add_run("batch_norm-aaaaaaaa", 2, 0.94, config={"optimizer": {"lr": 0.2}})
    with pytest.raises(UserError, match="2 configurations: one for all its seeds"):
        load_results(two_norms.path)


def test_where_files_lie_is_no_other_configuration(two_norms: ExperimentFolder) -> None:
    data = {"name": "digits", "params": {"root": "/elsewhere"}}
    two_norms.add_run("batch_norm-aaaaaaaa", 2, 0.94, config={"data": data, "name": "other"})
    assert len(load_results(two_norms.path).runs) == 6


def test_a_seed_twice_is_refused(make_experiment: Make) -> None:
    folder = make_experiment()
    folder.add_cell("a-1", {"norm": "batch_norm"}, seeds=[0, 0, 1])
    with pytest.raises(UserError, match="each seed of a cell once"):
        load_results(folder.path)


def test_two_cells_under_one_label_are_refused(make_experiment: Make) -> None:
    folder = make_experiment()
    folder.add_cell("a-1", {"norm": "batch_norm", "optimizer.lr": 0.1})
    folder.add_cell("a-2", {"norm": "batch_norm", "optimizer.lr": 0.2})
    with pytest.raises(UserError, match="factors that tell the two cells apart"):
        load_results(folder.path)


def test_a_cell_without_a_factor_is_refused(make_experiment: Make) -> None:
    folder = make_experiment(["norm", "micro_batch_size"])
    folder.add_cell("a-1", {"norm": "batch_norm"})
    with pytest.raises(UserError, match="needs a value for micro_batch_size"):
        load_results(folder.path)


def test_a_record_of_another_run_is_refused(two_norms: ExperimentFolder) -> None:
    two_norms.add_run("batch_norm-aaaaaaaa", 2, 0.94, summary={"seed": 1})
    with pytest.raises(UserError, match="a record of batch_norm-aaaaaaaa/seed=2"):
        load_results(two_norms.path)


@pytest.mark.parametrize("name", ["summary.json", "environment.json", "history.parquet"])
def test_a_damaged_file_is_named(two_norms: ExperimentFolder, name: str) -> None:
    path = two_norms.run_dir("batch_norm-aaaaaaaa", 1) / name
    path.write_text("{")
    with pytest.raises(UserError, match="seed=1"):
        load_results(two_norms.path)


def test_an_experiment_that_has_not_started_loads(make_experiment: Make) -> None:
    folder = make_experiment()
    folder.add_cell("a-1", {"norm": "batch_norm"})
    results = load_results(folder.path)
    assert results.runs["status"].tolist() == ["not_run"] * 3
    assert results.history.empty
    assert results.costs.empty


def test_costs_are_flat(two_norms: ExperimentFolder) -> None:
    two_norms.add_cost("group_norm-aaaaaaaa", update_ms=4.0)
    path = two_norms.path / "runs" / "group_norm-aaaaaaaa" / "cost.json"
    cost = json.loads(path.read_text())
    cost["conditions"]["window"] = {"updates": 20}
    path.write_text(json.dumps(cost))
    row = load_results(two_norms.path).costs.iloc[0]
    assert row["cell"] == "group_norm-aaaaaaaa"
    assert [row[f"update_ms_{part}"] for part in ("median", "q25", "q75")] == [4.0, 3.0, 5.0]
    assert row["conditions.window"] == '{"updates": 20}'


def test_a_cell_twice_in_the_plan_is_refused(make_experiment: Make) -> None:
    folder = make_experiment()
    folder.add_cell("a-1", {"norm": "batch_norm"})
    folder.add_cell("a-1", {"norm": "group_norm"})
    with pytest.raises(UserError, match="each cell once"):
        load_results(folder.path)


@pytest.mark.parametrize("name", ["summary.json", "environment.json"])
def test_a_damaged_record_is_told_once_and_as_the_store_tells_it(
    two_norms: ExperimentFolder, name: str
) -> None:
    path = two_norms.run_dir("batch_norm-aaaaaaaa", 1) / name
    path.write_text("{")
    with pytest.raises(UserError) as store_error:
        read_json(path)
    with pytest.raises(UserError) as load_error:
        load_results(two_norms.path)
    assert str(load_error.value) == str(store_error.value)
    assert str(load_error.value).count(str(path)) == 1


def test_a_configuration_that_is_no_text_is_named(two_norms: ExperimentFolder) -> None:
    path = two_norms.run_dir("batch_norm-aaaaaaaa", 1) / "config.yaml"
    path.write_bytes(b"norm: \xff")
    with pytest.raises(UserError, match="a YAML configuration"):
        load_results(two_norms.path)
