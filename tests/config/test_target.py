"""The target of an experiment: from the command line, into the plan, refused where none can be."""

from __future__ import annotations

from pathlib import Path

import pytest

from normexp.config.compose import to_cell
from normexp.config.metrics import TARGET_METRICS
from normexp.config.validate import check_fields
from normexp.errors import UserError
from normexp.launch.plan import PlannedCell, save_plan
from normexp.records import read_plan
from normexp.training.check import check_cell

METRIC, VALUE = "experiment.target.metric", "experiment.target.value"


def failure(composed, *overrides: str) -> str:
    with pytest.raises(UserError) as error:
        check_cell(to_cell(composed(*overrides)))
    text = str(error.value)
    assert "\n" not in text
    return text


def test_without_a_target_there_is_none(composed):
    for overrides in ([], ["experiment.target=null"]):
        config = to_cell(composed(*overrides))
        check_fields(config)
        assert config.experiment.plain_target() is None


@pytest.mark.parametrize("metric", TARGET_METRICS)
def test_a_target_on_the_command_line(composed, metric):
    config = to_cell(composed(f"{METRIC}={metric}", f"{VALUE}=0.5"))
    check_fields(config)
    assert config.experiment.plain_target() == {"metric": metric, "value": 0.5}


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        ((f"{METRIC}=val/los", f"{VALUE}=1"), f"{METRIC}=val/los: did you mean val/loss?"),
        ((f"{METRIC}=test/loss", f"{VALUE}=1"), f"{METRIC}=test/loss: "),
        ((f"{VALUE}=1",), f"{METRIC}=null: a target needs a metric; choices: val/accuracy"),
        ((f"{METRIC}=val/loss",), f"{VALUE}=null: a target needs the value of val/loss"),
        ((f"{METRIC}=val/loss", f"{VALUE}=0"), f"{VALUE}=0.0: a number above 0 is needed"),
        ((f"{METRIC}=val/loss", f"{VALUE}=nan"), f"{VALUE}=nan: a number above 0 is needed"),
        ((f"{METRIC}=val/accuracy", f"{VALUE}=98"), f"{VALUE}=98.0: accuracies are fractions"),
        (
            (f"{METRIC}=val/perplexity", f"{VALUE}=9", "data=digits"),
            f"{METRIC}=val/perplexity: digits has labels; val/loss or val/accuracy is needed",
        ),
    ],
)
def test_what_is_no_target_is_refused(composed, overrides, text):
    assert text in failure(composed, *overrides)


def test_the_plan_holds_the_target_and_the_cell_does_not_depend_on_it(composed, tmp_path: Path):
    small = ["data=digits", "model=mlp", f"output_root={tmp_path}"]
    plain = check_cell(to_cell(composed(*small)))
    config = to_cell(composed(*small, f"{METRIC}=val/loss", f"{VALUE}=2.2"))
    facts = check_cell(config)
    assert facts.cell == plain.cell
    save_plan(tmp_path / "e", [PlannedCell(config, facts)], axes=[], command="c")
    plan = read_plan(tmp_path / "e")
    assert plan is not None
    assert plan["target"] == {"metric": "val/loss", "value": 2.2}
