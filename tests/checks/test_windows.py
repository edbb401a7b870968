"""Each window function against a slow loop that says what it means."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runwatch.checks import windows

NAN = math.nan
sixteenths = st.integers(-160, 160).map(lambda number: number / 16)
series = st.lists(st.one_of(st.just(NAN), sixteenths), max_size=40)
sizes = st.integers(1, 12)
often = settings(max_examples=150, deadline=None)


def array(values: list[float]) -> windows.Floats:
    return np.array(values, dtype=np.float64)


def window(values: list[float], end: int, size: int) -> list[float]:
    """The observations of the window that ends at `end`, without NaN."""
    return [value for value in values[max(0, end - size + 1) : end + 1] if not math.isnan(value)]


@often
@given(series, sizes, sizes)
def test_rolling_median_minimum_and_maximum_leave_out_nan(values: list[float], size: int, at_least: int) -> None:
    at_least = min(at_least, size)
    for fast, slow in (
        (windows.rolling_median, np.median),
        (windows.rolling_min, np.min),
        (windows.rolling_max, np.max),
    ):
        seen = [window(values, end, size) for end in range(len(values))]
        wanted = [float(slow(found)) if len(found) >= at_least else NAN for found in seen]
        np.testing.assert_array_equal(fast(array(values), size, at_least), wanted)


@often
@given(series, sizes)
def test_rolling_sum_counts_nan_as_zero_and_is_exact(values: list[float], size: int) -> None:
    wanted = [sum(window(values, end, size)) for end in range(len(values))]
    np.testing.assert_array_equal(windows.rolling_sum(array(values), size), wanted)


@often
@given(st.lists(st.booleans(), max_size=40), sizes)
def test_rolling_count_and_lasting_look_at_the_last_flags(flags: list[bool], size: int) -> None:
    seen = [flags[max(0, end - size + 1) : end + 1] for end in range(len(flags))]
    given_flags = np.array(flags, dtype=np.bool_)
    np.testing.assert_array_equal(windows.rolling_count(given_flags, size), [sum(found) for found in seen])
    wanted = [len(found) == size and all(found) for found in seen]
    np.testing.assert_array_equal(windows.lasting(given_flags, size), wanted)


@often
@given(series, sizes)
def test_cusum_is_the_largest_sum_of_a_run_that_ends_here(values: list[float], size: int) -> None:
    filled = [0.0 if math.isnan(value) else value for value in values]
    wanted = [
        max(0.0, *(sum(filled[begin : end + 1]) for begin in range(max(0, end - size + 1), end + 1)))
        for end in range(len(filled))
    ]
    np.testing.assert_array_equal(windows.cusum(array(values), size), wanted)


@often
@given(series, st.integers(0, 45))
def test_lagged_is_the_value_of_so_many_observations_ago(values: list[float], by: int) -> None:
    wanted = [values[at - by] if at >= by else NAN for at in range(len(values))]
    np.testing.assert_array_equal(windows.lagged(array(values), by), wanted)


@often
@given(series, sizes, st.integers(0, 6), sizes)
def test_a_guarded_baseline_and_scale_end_before_the_guard(
    values: list[float], size: int, guard: int, at_least: int
) -> None:
    at_least = min(at_least, size)
    seen = [window(values, end - guard, size) if end >= guard else [] for end in range(len(values))]
    medians = [float(np.median(found)) if len(found) >= at_least else NAN for found in seen]
    spreads = [1.4826 * float(np.median(np.abs(found))) if len(found) >= at_least else NAN for found in seen]
    np.testing.assert_array_equal(windows.guarded_baseline(array(values), size, guard, at_least), medians)
    np.testing.assert_array_equal(windows.guarded_scale(array(values), size, guard, at_least), spreads)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: windows.rolling_median(x, 64, 8),
        lambda x: windows.rolling_sum(x, 64),
        lambda x: windows.cusum(x - 0.2, 64),
        lambda x: windows.guarded_scale(x, 60, 4, 8),
        lambda x: windows.rolling_count(x > 1, 64).astype(np.float64),
    ],
    ids=["rolling_median", "rolling_sum", "cusum", "guarded_scale", "rolling_count"],
)
def test_a_window_is_bitwise_the_same_wherever_its_array_begins(function: object) -> None:
    assert callable(function)
    values = np.random.default_rng(0).standard_normal(5000) * 1e3
    whole = function(values)
    for begin in (1, 17, 1000, 4900):
        np.testing.assert_array_equal(function(values[begin:])[64:], whole[begin + 64 :])


def test_usable_marks_what_is_not_finite_and_cuts_what_is_absurd() -> None:
    found = windows.usable(array([1.0, NAN, math.inf, -math.inf, 1e300, -1e300]))
    np.testing.assert_array_equal(found, [1.0, NAN, NAN, NAN, 1e30, -1e30])


def test_a_scale_of_normal_noise_is_its_standard_deviation() -> None:
    noise = 3.0 * np.random.default_rng(1).standard_normal(4000)
    assert windows.guarded_scale(noise, 4000, 0, 4000)[-1] == pytest.approx(3.0, rel=0.05)
