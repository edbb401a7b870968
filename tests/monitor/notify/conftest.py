"""Shared servers of the notifiers' tests."""

import time
from collections.abc import Callable, Iterator

import http_collector
import pytest
import slack_server


@pytest.fixture
def slack() -> Iterator[object]:
    """A Slack of our own on loopback."""
    with slack_server.SlackServer() as server:
        yield server


@pytest.fixture
def collector() -> Iterator[object]:
    """An HTTP endpoint that keeps what it is sent."""
    with http_collector.Collector() as server:
        yield server


@pytest.fixture
def eventually() -> Callable[[Callable[[], object]], None]:
    """Poll until a condition holds; fail after a generous deadline."""

    def wait(condition: Callable[[], object], seconds: float = 90.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "the condition did not come true in time"
            time.sleep(0.02)

    return wait
