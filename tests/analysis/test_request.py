from __future__ import annotations

from typing import Any

import pytest

from normexp.analysis import FIGURES, check_request
from normexp.errors import UserError

FACTORS = ["norm", "optimizer.lr", "model.depth"]


@pytest.mark.parametrize("metric", ["val/accuracy", "val/loss"])
def test_what_can_be_shown_is_accepted(metric: str) -> None:
    check_request(FIGURES.names(), {"factor": "optimizer.lr", "metric": metric}, FACTORS)


def test_nothing_asked_is_nothing_wrong() -> None:
    check_request([], None, [])
    check_request(["micro_batch"], None, [])


def test_validation_accuracy_is_the_default() -> None:
    check_request([], {"factor": "optimizer.lr"}, FACTORS)


@pytest.mark.parametrize("factor", ["norm.name", "model.params.depth"])
def test_long_keys_are_accepted_as_the_report_reads_them(factor: str) -> None:
    check_request([], {"factor": factor}, FACTORS)


def failure(figures: list[str], select: dict[str, Any] | None) -> UserError:
    with pytest.raises(UserError) as error:
        check_request(figures, select, FACTORS)
    return error.value


def test_an_unknown_figure_is_refused() -> None:
    error = failure(["micro_batch", "convergance"], None)
    assert error.key == "experiment.figures"
    assert "did you mean convergence? choices: convergence, " in str(error)


def test_a_factor_that_does_not_vary_is_refused() -> None:
    error = failure([], {"factor": "optimizer.rl", "metric": "val/loss"})
    assert error.key == "experiment.select.factor"
    assert "did you mean optimizer.lr? choices: model.depth, norm, optimizer.lr" in str(error)


def test_a_missing_factor_is_refused() -> None:
    assert failure([], {"metric": "val/loss"}).key == "experiment.select.factor"


@pytest.mark.parametrize("metric", ["test/accuracy", "test/loss", "train/loss", "accuracy"])
def test_only_validation_chooses(metric: str) -> None:
    error = failure([], {"factor": "optimizer.lr", "metric": metric})
    assert error.key == "experiment.select.metric"
    assert "selection must see the validation split alone" in str(error)
    assert "choices: val/accuracy, val/loss" in str(error)
