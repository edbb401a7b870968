"""Shared servers and messages of the notifiers' tests; tests are no package, so the modules are loaded by path."""

import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest


def _load(name: str) -> ModuleType:
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
        assert spec
        assert spec.loader
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


for _name in ("payloads", "slack_server", "http_collector", "wandb_server"):
    _load(_name)


@pytest.fixture
def slack() -> Iterator[object]:
    """A Slack of our own on loopback."""
    with sys.modules["slack_server"].SlackServer() as server:
        yield server


@pytest.fixture
def collector() -> Iterator[object]:
    """An HTTP endpoint that keeps what it is sent."""
    with sys.modules["http_collector"].Collector() as server:
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
