"""Causal window arithmetic: what a record's past says, the same for a whole run and for its last rows.

Every function maps T observations to T results of which the one at t depends on the observations t - window + 1 to t
only. The results are exact: no sum in floating point whose rounding depends on where the array begins. NaN marks an
observation that says nothing; it is left out of a window but takes its place there, so that a window's reach is
bounded in observations.
"""

from collections.abc import Callable
from typing import Any

import bottleneck as bn
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

SIGMAS_PER_MAD = 1.4826
"""Standard deviation over median absolute deviation of a normal distribution."""

HUGE = 1e30
"""Magnitudes are cut here, so that differences and ratios of hostile but finite values stay finite."""

_FIXED = 2.0**20
"""Fixed-point scale of sums: integers in float64 add without rounding up to 2**53."""


def usable(values: Floats) -> Floats:
    """`values` with NaN for what is not finite and magnitudes cut at `HUGE`."""
    return np.where(np.isfinite(values), np.clip(values, -HUGE, HUGE), np.nan)


def lagged(values: Floats, by: int) -> Floats:
    """`values` from `by` observations ago; NaN where there are none."""
    result = np.empty(len(values))
    result[:by] = np.nan
    result[by:] = values[: max(len(values) - by, 0)]
    return result


def growth(values: NDArray[Any]) -> Floats:
    """Each value less the one before it; NaN at the first."""
    result = np.empty(len(values))
    result[:1] = np.nan
    np.subtract(values[1:], values[:-1], out=result[1:])
    return result


def rolling_median(values: Floats, window: int, at_least: int) -> Floats:
    """Median of each window; NaN where fewer than `at_least` of its observations are not NaN."""
    return _moving(bn.move_median, values, window, at_least)


def rolling_max(values: Floats, window: int, at_least: int = 1) -> Floats:
    """Maximum of each window; NaN where fewer than `at_least` of its observations are not NaN."""
    return _moving(bn.move_max, values, window, at_least)


def rolling_min(values: Floats, window: int, at_least: int = 1) -> Floats:
    """Minimum of each window; NaN where fewer than `at_least` of its observations are not NaN."""
    return _moving(bn.move_min, values, window, at_least)


def _moving(function: Callable[..., Floats], values: Floats, window: int, at_least: int) -> Floats:
    if len(values) < at_least:
        return np.full(len(values), np.nan)
    return function(values, window=min(window, len(values)), min_count=at_least)


def guarded_baseline(values: Floats, window: int, guard: int, at_least: int) -> Floats:
    """Median of the window that ended `guard` observations ago: a shift does not become its own normal at once."""
    return lagged(rolling_median(values, window, at_least), guard)


def guarded_scale(residuals: Floats, window: int, guard: int, at_least: int) -> Floats:
    """Robust standard deviation of the residuals of the window that ended `guard` observations ago (MAD about zero)."""
    return SIGMAS_PER_MAD * guarded_baseline(np.abs(residuals), window, guard, at_least)


def rolling_sum(values: Floats, window: int) -> Floats:
    """Sum of each window (shorter at the start), in steps of 2**-20 and NaN counted as zero.

    Exact while the magnitudes of all `values` together stay below 2**33.
    """
    total = _fixed_point_total(values)
    total[window:] -= total[:-window].copy()
    return total / _FIXED


def sum_since(values: Floats, first: NDArray[np.intp]) -> Floats:
    """At each observation the sum of `values` from the observation `first` on, it included. Exactness as in `rolling_sum`."""
    total = np.concatenate([np.zeros(1), _fixed_point_total(values)])
    return (total[1:] - total[first]) / _FIXED


def rolling_count(flags: Flags, window: int) -> NDArray[np.int64]:
    """How many of each window's flags are set."""
    count = np.cumsum(flags, dtype=np.int64)
    count[window:] -= count[:-window].copy()
    return count


def cusum(values: Floats, window: int) -> Floats:
    """The largest sum of any run of observations that ends here and is no longer than `window`; 0 if all are negative.

    Page's cumulative sum (Biometrika 41, 1954) with a bounded memory: the running total less its minimum over the
    window. Exactness as in `rolling_sum`.
    """
    total = np.concatenate([np.zeros(1), _fixed_point_total(values)])
    return (total - rolling_min(total, window + 1))[1:] / _FIXED


def _fixed_point_total(values: Floats) -> Floats:
    return np.cumsum(np.round(np.where(np.isfinite(values), values, 0.0) * _FIXED))


def lasting(flags: Flags, records: int) -> Flags:
    """Whether the last `records` observations are all set."""
    return rolling_count(flags, records) == records
