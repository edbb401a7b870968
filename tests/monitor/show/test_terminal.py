"""What the terminal shows beside the words of the status document."""

import time

import pytest

from runwatch.monitor.show.terminal import clock

NOW = 1_790_000_000.0


@pytest.mark.parametrize(
    ("hours", "form"), [(0, "%H:%M"), (11, "%H:%M"), (-11, "%H:%M"), (13, "%Y-%m-%d %H:%M"), (2400, "%Y-%m-%d %H:%M")]
)
def test_the_end_of_a_run_of_a_hundred_days_has_its_day(hours: float, form: str) -> None:
    at = NOW + 3600 * hours
    assert clock(at, NOW) == time.strftime(form, time.localtime(at))
