"""Mean, spread and intervals: the one formula of each that every table and figure uses."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from scipy import stats


@dataclass(frozen=True)
class Summary:
    """What is known of one number from repeated runs.

    ``std`` divides by n - 1; ``ci95_low`` and ``ci95_high`` bound the mean by Student's t.
    All three are NaN for fewer than two values, and so is ``mean`` for none.
    """

    n: int
    mean: float
    std: float
    ci95_low: float
    ci95_high: float


def summarize(values: Iterable[float]) -> Summary:
    """Return the summary of the finite values; the others are left out and not counted in n.

    Sums are exact (``math.fsum``), so the order of the values cannot change a digit.

    Args:
        values: One value a run.

    Examples:
        >>> summarize([1.0, 3.0, float("nan")]).n
        2
        >>> round(summarize([1.0, 3.0]).std, 6)
        1.414214
    """
    finite = [float(value) for value in values if math.isfinite(value)]
    n = len(finite)
    mean = math.fsum(finite) / n if n else math.nan
    if n < 2:
        return Summary(n, mean, math.nan, math.nan, math.nan)
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in finite) / (n - 1))
    half = float(stats.t.ppf(0.975, n - 1)) * std / math.sqrt(n)
    return Summary(n, mean, std, mean - half, mean + half)


def compute_welch_difference(first: Summary, second: Summary) -> Summary:
    """Return the difference of two means with Welch's 95% interval.

    Args:
        first: The mean to subtract from.
        second: The mean to subtract.

    Returns:
        ``mean`` is the difference, ``n`` the smaller of both n and ``std`` the standard
        error of the difference. Interval and error are NaN unless both have two values.

    Source:
        Welch (1947), with the degrees of freedom of Satterthwaite.
    """
    difference = first.mean - second.mean
    n = min(first.n, second.n)
    if n < 2:
        return Summary(n, difference, math.nan, math.nan, math.nan)
    parts = [summary.std**2 / summary.n for summary in (first, second)]
    error = math.sqrt(sum(parts))
    if error == 0.0:
        return Summary(n, difference, 0.0, difference, difference)
    # By shares, as squares of variances leave the range of floats long before variances do.
    share = parts[0] / sum(parts)
    freedom = 1.0 / (share**2 / (first.n - 1) + (1.0 - share) ** 2 / (second.n - 1))
    half = float(stats.t.ppf(0.975, freedom)) * error
    return Summary(n, difference, error, difference - half, difference + half)
