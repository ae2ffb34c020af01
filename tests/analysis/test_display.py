from __future__ import annotations

import math

import pandas as pd
import pytest

from normexp.analysis.display import choose_score, short_names, show_number, show_value
from normexp.analysis.statistics import Summary


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (pd.NA, "-"),
        (math.nan, "-"),
        (0, "0"),
        (1234567, "1,234,567"),
        (123456.7, "123,457"),
        (0.000123456, "0.0001235"),
        (2.5, "2.5"),
        (math.inf, "inf"),
    ],
)
def test_numbers(value: object, text: str) -> None:
    assert show_number(value) == text


def test_values_are_written_as_in_yaml() -> None:
    assert [show_value(value) for value in (None, True, 0.1, 2, "x")] == [
        "null",
        "true",
        "0.1",
        "2",
        "x",
    ]


def test_short_names_stay_unique() -> None:
    names = short_names(["model.size", "data.size", "optimizer.lr"])
    assert list(names.values()) == ["model.size", "data.size", "lr"]


def test_an_accuracy_is_shown_as_error_with_its_bounds_swapped() -> None:
    score = choose_score(["test/accuracy", "test/loss"], "test")
    shown = score.convert(Summary(3, 0.75, 0.5, 0.5, 1.0))
    assert shown == Summary(3, 0.25, 0.5, 0.0, 0.5)
    assert score.label == "test error (%)"


def test_a_loss_is_shown_as_it_is() -> None:
    score = choose_score(["test/loss"], "test")
    summary = Summary(3, 0.75, 0.5, 0.5, 1.0)
    assert score.convert(summary) is summary
    assert (score.scale, score.label) == (1.0, "test loss (nats)")
