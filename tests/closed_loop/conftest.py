"""Makes the scripted trainers importable (tests are no package) and opens watches on their runs."""

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runwatch.monitor.config import DaemonConfig
from runwatch.monitor.notify import Message, Notifier, Sent
from runwatch.monitor.outbox import Outbox
from runwatch.monitor.store import open_store, sqlite_url
from runwatch.monitor.watch import Watch

HERE = Path(__file__).parent
for _path in (HERE.parent / "monitor" / "scripted.py", HERE / "obedient.py"):
    if _path.stem not in sys.modules:
        _spec = importlib.util.spec_from_file_location(_path.stem, _path)
        assert _spec
        assert _spec.loader
        sys.modules[_path.stem] = importlib.util.module_from_spec(_spec)
        _spec.loader.exec_module(sys.modules[_path.stem])

import obedient  # noqa: E402 - it is importable from here on only


class Sink:
    """A notifier that keeps what it was sent."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        kinds = ("incident_opened", "incident_updated", "incident_resolved", "plan_proposed", "plan_updated")
        self.notifier = Notifier("sink", frozenset(kinds), self._send)

    def _send(self, message: Message, remembered: dict[str, Any]) -> Sent:
        self.sent.append(message)
        return Sent(remembered)


@pytest.fixture
def sink() -> Sink:
    """Where the messages of a test's watches go."""
    return Sink()


@pytest.fixture
def open_watch(request: pytest.FixtureRequest, sink: Sink) -> "Callable[[obedient.Obedient], Watch]":
    """Opens a watch on a scripted run as a fresh daemon would; what it opened is closed after the test."""

    def open_one(trainer: "obedient.Obedient") -> Watch:
        store = open_store(sqlite_url(trainer.run_dir), "scripted")
        request.addfinalizer(store.close)
        outbox = Outbox(store, {"sink": sink.notifier}, lambda: trainer.clock)
        return Watch(trainer.run_dir, store, outbox, DaemonConfig(), "test")

    return open_one


@pytest.fixture
def begin(tmp_path: Path) -> Callable[..., "obedient.Obedient"]:
    """A scripted run in which one node will have something to do."""

    def begin_one(node: str, mode: str, rules: dict[str, Any] | None = None, **how: Any) -> "obedient.Obedient":
        trainer = obedient.Obedient(tmp_path / "run", node=node, **how)
        (trainer.run_dir / "run.yaml").write_text(json.dumps(obedient.card(node, mode, **(rules or {}))))
        return trainer

    return begin_one
