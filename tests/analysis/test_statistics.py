from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from scipy import stats

from normexp.analysis.statistics import Summary, compute_welch_difference, summarize

# With 2 degrees of freedom t has a closed form: (2p - 1) sqrt(2 / (1 - (2p - 1)^2)), 4.302653.
T2 = 0.95 * math.sqrt(2 / (1 - 0.95**2))
finite = st.floats(-1e6, 1e6)
# Far below 1e-80 the squares of variances in scipy's own formula are no longer numbers.
ordinary = finite.filter(lambda x: x == 0.0 or abs(x) > 1e-60)


def test_three_values_by_hand() -> None:
    summary = summarize([0.90, 0.92, 0.94])
    half = T2 * 0.02 / math.sqrt(3)
    assert summary.n == 3
    assert summary.mean == pytest.approx(0.92, abs=1e-15)
    assert summary.std == pytest.approx(0.02, rel=1e-12)
    assert summary.ci95_low == pytest.approx(0.92 - half, rel=1e-12)
    assert summary.ci95_high == pytest.approx(0.92 + half, rel=1e-12)


def test_std_divides_by_n_minus_1() -> None:
    assert summarize([1.0, 3.0]).std == math.sqrt(2.0)


def test_one_value_has_no_spread() -> None:
    summary = summarize([0.5])
    assert (summary.n, summary.mean) == (1, 0.5)
    assert all(math.isnan(x) for x in (summary.std, summary.ci95_low, summary.ci95_high))


def test_no_value_has_no_mean() -> None:
    assert summarize([]).n == 0
    assert math.isnan(summarize([]).mean)


def test_values_that_are_not_finite_are_not_counted() -> None:
    summary = summarize([1.0, math.nan, math.inf, -math.inf, 3.0])
    assert (summary.n, summary.mean) == (2, 2.0)


@given(st.lists(finite, min_size=2, max_size=12), st.randoms())
def test_order_changes_no_digit(values: list[float], random: object) -> None:
    shuffled = list(values)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert summarize(shuffled) == summarize(values)


@given(
    st.lists(ordinary, min_size=2, max_size=8, unique=True),
    st.lists(ordinary, min_size=2, max_size=8, unique=True),
)
@example([0.0, 1e-59], [0.0, 1e-59])
def test_welch_interval_is_that_of_scipy(first: list[float], second: list[float]) -> None:
    ours = compute_welch_difference(summarize(first), summarize(second))
    with np.errstate(all="ignore"):
        theirs = stats.ttest_ind(first, second, equal_var=False).confidence_interval(0.95)
    assume(math.isfinite(theirs.low))
    size = max(abs(x) for x in (*first, *second))
    assert ours.ci95_low == pytest.approx(theirs.low, rel=1e-6, abs=1e-9 * size)
    assert ours.ci95_high == pytest.approx(theirs.high, rel=1e-6, abs=1e-9 * size)


def test_welch_without_spread_is_the_difference_itself() -> None:
    both = compute_welch_difference(summarize([0.8, 0.8]), summarize([0.5, 0.5]))
    assert both.ci95_low == both.mean == both.ci95_high == pytest.approx(0.3, abs=1e-15)


def test_welch_of_tiny_numbers_stays_a_number() -> None:
    # Variances of 1e-220, whose squares are below the smallest float.
    both = compute_welch_difference(summarize([0.0, 1e-110]), summarize([0.0, 1e-110]))
    assert both.ci95_low < 0.0 < both.ci95_high


def test_welch_of_one_value_has_no_interval() -> None:
    both = compute_welch_difference(summarize([0.8]), Summary(3, 0.5, 0.1, 0.4, 0.6))
    assert both.n == 1
    assert both.mean == pytest.approx(0.3, abs=1e-15)
    assert math.isnan(both.ci95_low)
