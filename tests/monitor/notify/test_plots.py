import io
import struct
from typing import Any

import numpy as np
import payloads
import pytest

from runwatch.monitor.notify.plots import plot

image = pytest.importorskip("matplotlib.image")


def pixels(payload: dict[str, Any]) -> Any:
    png = plot(payload)
    assert png
    return image.imread(io.BytesIO(png))


def test_the_plot_is_a_small_png() -> None:
    png = plot(payloads.incident())
    assert png
    assert struct.unpack("!II", png[16:24]) == (900, 360)


def test_the_limit_the_flagged_range_and_missing_values_are_drawn() -> None:
    series = payloads.SERIES
    drawn = pixels(payloads.incident())
    changes = {
        "limit": [None] * 20,
        "flagged": (400.0, 401.0),
        "values": [2.5] * 20,
    }
    for name, value in changes.items():
        assert not np.array_equal(drawn, pixels(payloads.incident(series={**series, name: value}))), name


@pytest.mark.parametrize("series", [None, {**payloads.SERIES, "steps": [], "values": [], "limit": []}])
def test_without_a_series_there_is_no_plot(series: Any) -> None:
    assert plot(payloads.incident(series=series)) is None
