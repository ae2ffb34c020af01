"""Every shipped experiment: composed, expanded, and each of its cells checked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from normexp.config.choices import conf_dir, list_choices
from normexp.config.compose import expand_grid, to_cell
from normexp.data import DATASETS
from normexp.training.check import check_cell
from normexp.training.resolve import resolve_cell

EXPERIMENTS = list_choices("experiment")


def test_the_promised_experiments_are_there():
    promised = {"quickstart", "statistic_set", "small_batch", "with_without_bn"}
    of_texts = {"pre_vs_post", "text_norms", "padding", "text_classification_norms"}
    assert promised | of_texts | {"batch_size_accumulation"} <= set(EXPERIMENTS)


def file_of(name: str) -> dict[str, Any]:
    return yaml.safe_load((conf_dir() / "experiment" / f"{name}.yaml").read_text())


def leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(item, f"{prefix}.{key}" if prefix else key)
    else:
        yield prefix, value


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_cell_of_an_experiment_can_be_trained(composed, name):
    overrides = [f"experiment={name}"]
    base = composed(*overrides)
    if DATASETS.get(base.data.name).card.needs_download:
        overrides.append("data=digits")
    grid = OmegaConf.to_container(base.experiment.grid, resolve=True)
    jobs, axes = expand_grid(grid, overrides)
    names = set()
    for job in jobs:
        cell = resolve_cell(to_cell(composed(*job)))
        names.add(check_cell(cell).cell)
        assert cell.experiment.name == cell.name == name
    assert len(names) == len(jobs), "two cells of the grid are the same"
    assert axes
    # Fewer than 5 seeds are no basis for an interval.
    assert len(base.seeds) >= 5


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_states_question_expectation_and_figures(composed, name):
    experiment = composed(f"experiment={name}").experiment
    assert experiment.title
    assert experiment.question.endswith("?")
    assert experiment.expected
    assert experiment.figures
    head = (conf_dir() / "experiment" / f"{name}.yaml").read_text().split("defaults:")[0]
    for word in ("Question:", "Command:", "Cost:", "Expected:", "Source:"):
        assert f"# {word}" in head
    assert f"normexp run experiment={name}" in head


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_command_line_wins_over_experiment_over_group_over_base(composed, name):
    # R62, by the values that were composed.
    written = file_of(name)
    config = composed(f"experiment={name}")
    for entry in written.pop("defaults"):
        ((group, choice),) = entry.items()
        group = group.split("/")[-1]
        for key, value in leaves(yaml.safe_load(
            (conf_dir() / group / f"{choice}.yaml").read_text()
        ), group):  # fmt: skip
            if key not in dict(leaves(written)):
                assert OmegaConf.select(config, key) == value, key
    for key, value in leaves(written):
        assert OmegaConf.select(config, key) == value, key
    overrides = ["seeds=[7]", "budget.epochs=1.5", "data=digits", "norm=no_norm", "name=mine"]
    config = composed(f"experiment={name}", *overrides)
    assert config.seeds == [7]
    assert config.budget.epochs == 1.5
    assert (config.data.name, config.norm.name, config.name) == ("digits", "no_norm", "mine")
    # The order of words on the command line does not matter.
    assert composed(*overrides, f"experiment={name}") == config


def test_a_group_wins_over_the_base(composed):
    config = composed("data=cifar10", "optimizer=adamw")
    assert config.data.augment.crop_padding == 4
    assert (config.optimizer.lr, config.optimizer.weight_decay) == (1e-3, 0.01)
    assert "nesterov" not in config.optimizer.params
