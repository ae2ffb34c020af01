"""Every YAML file names something that is there, and everything there has a YAML file."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import yaml

from normexp.config.choices import conf_dir, list_choices, list_params
from normexp.config.schema import CellConfig, OptimizerConfig, ScheduleConfig, TrainerConfig
from normexp.models import PLACEMENTS
from normexp.training.optim import OPTIMIZERS, SCHEDULES
from normexp.training.trackers import TRACKERS


def load(group: str, name: str) -> dict[str, Any]:
    return yaml.safe_load((conf_dir() / group / f"{name}.yaml").read_text())


# Norms, models and data sets: see their own folders.
@pytest.mark.parametrize(
    ("group", "names"),
    [
        ("optimizer", OPTIMIZERS.names()),
        ("schedule", SCHEDULES.names()),
        ("placement", sorted(PLACEMENTS)),
        ("logger", sorted([*TRACKERS, "none"])),
    ],
)
def test_choices_are_what_is_registered(group, names):
    assert list_choices(group) == names


@pytest.mark.parametrize("name", OPTIMIZERS.names())
def test_an_optimizer_is_written_out(name):
    config = load("optimizer", name)
    assert config["name"] == name
    assert set(config) == {field.name for field in dataclasses.fields(OptimizerConfig)}
    written = {key: float(value) for key, value in config["params"].items()}
    assert written == defaults(OPTIMIZERS.get(name))


@pytest.mark.parametrize("name", SCHEDULES.names())
def test_a_schedule_is_written_out(name):
    config = load("schedule", name)
    assert config["name"] == name
    assert set(config) == {field.name for field in dataclasses.fields(ScheduleConfig)}
    assert config["params"] == defaults(SCHEDULES.get(name))


@pytest.mark.parametrize("name", sorted(PLACEMENTS))
def test_a_placement_is_its_name(name):
    assert load("placement", name) == {"name": name}


@pytest.mark.parametrize("name", sorted(TRACKERS))
def test_a_tracker_is_written_out(name):
    assert load("logger", name) == {"trackers": {name: defaults(TRACKERS[name])}}


def defaults(entry: Any) -> dict[str, Any]:
    return {key: parameter.default for key, parameter in entry.parameters().items()}


def test_the_trainer_is_written_out():
    assert load("trainer", "default") == dataclasses.asdict(TrainerConfig())


def test_every_key_of_a_cell_is_in_the_base_file():
    base = load(".", "config")
    groups = {key.split("/")[-1] for entry in base["defaults"] if isinstance(entry, dict)
              for key in entry}  # fmt: skip
    filled_in = {"plugins_sha256"}
    keys = {field.name for field in dataclasses.fields(CellConfig)} - filled_in
    assert keys <= groups | set(base)


def test_folders_are_the_groups_of_the_schema():
    folders = {path.name for path in conf_dir().iterdir() if path.is_dir()}
    assert folders <= {field.name for field in dataclasses.fields(CellConfig)}


def test_no_file_names_python_code():
    for path in conf_dir().rglob("*.yaml"):
        assert "_target_" not in path.read_text(), path


def test_params_are_those_of_the_choice_made():
    assert "num_groups" not in list_params("norm", ["norm=batch_norm"])["batch_norm"]
    assert "num_groups" in list_params("norm", ["norm=group_norm"])["group_norm"]
    assert list(list_params("norm", ["norm=batch_norm,group_norm"])) == ["batch_norm", "group_norm"]
    # Without a choice the default one counts.
    assert list_params("norm", []) == list_params("norm", ["norm=batch_norm"])
    assert list_params("nope", []) == {}
