"""A daemon that dies anywhere in a tick leaves nothing half done: the next one goes on as if nothing had happened."""

import json
from collections.abc import Callable
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import scripted
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runwatch.monitor import watch as watching
from runwatch.monitor.audit import broken, read_mirror
from runwatch.monitor.config import DaemonConfig
from runwatch.monitor.notify import Message, Notifier, Sent
from runwatch.monitor.outbox import Outbox
from runwatch.monitor.store import open_store, sqlite_url
from runwatch.monitor.watch import Watch

TICKS, STEPS = 14, 20
POINTS = ("before the store", "before the commit", "after the commit", "after the directive", "after the mirror")


class Killed(BaseException):
    """The process is gone: nobody handles it."""


def crash(patch: pytest.MonkeyPatch, watch: Watch, point: str) -> None:
    """Make the next tick of `watch` die at a point between two of its steps."""

    def die(*_: Any, **__: Any) -> Any:
        raise Killed

    def after(name: str, owner: object) -> None:
        whole: Callable[..., Any] = getattr(owner, name)

        def then_die(*args: Any, **kwargs: Any) -> Any:
            whole(*args, **kwargs)
            raise Killed

        patch.setattr(owner, name, then_die)

    match point:
        case "before the store":
            patch.setattr(watching, "conclude", die)
        case "before the commit":
            after("_keep", watch)
        case "after the commit":
            patch.setattr(watch, "_accept", die)
        case "after the directive":
            after("write_requests", watching)
        case _:
            after("append", watching.audit)


class Sink:
    """A notifier that keeps what it was sent."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        kinds = ("incident_opened", "incident_updated", "incident_resolved", "plan_proposed", "plan_updated")
        self.notifier = Notifier("sink", frozenset(kinds), self._send)

    def _send(self, message: Message, remembered: dict[str, Any]) -> Sent:
        self.sent.append(message.key)
        return Sent(remembered)


@contextmanager
def opened(run_dir: Path, sink: Sink, clock: Callable[[], float]) -> Any:
    """A fresh daemon's watch."""
    store = open_store(sqlite_url(run_dir), "scripted")
    try:
        yield Watch(run_dir, store, Outbox(store, {"sink": sink.notifier}, clock), DaemonConfig(), "same host")
    finally:
        store.close()


def run(run_dir: Path, crashes: dict[int, str]) -> dict[str, Any]:
    """Train by script with a tick every `STEPS` steps, dying in the ticks of `crashes`; what is left in the end."""
    trainer = scripted.ScriptedTrainer(run_dir)
    (run_dir / "run.yaml").write_text(json.dumps(scripted.card()))
    sink = Sink()
    for number in range(TICKS):
        trainer.train(STEPS)
        with pytest.MonkeyPatch.context() as patch, opened(run_dir, sink, lambda: trainer.clock) as watch:
            if number in crashes:
                crash(patch, watch, crashes[number])
                with suppress(Killed):
                    watch.tick(trainer.clock)
        with opened(run_dir, sink, lambda: trainer.clock) as watch:
            watch.tick(trainer.clock)
            watch.outbox.deliver("sink")
    return left(run_dir, sink)


def left(run_dir: Path, sink: Sink) -> dict[str, Any]:
    """Everything that a run leaves, and that must not depend on when the daemon died."""
    store = open_store(sqlite_url(run_dir), "scripted")
    with store.transaction() as tx:
        rows = tx.audit_rows()
        executions = [one.model_dump_json() for one in tx.executions()]
        incidents = [one.model_dump_json() for one in tx.incidents()]
        alerts = {name: alert.model_dump_json() for name, alert in tx.load().alerts.items()}
    store.close()
    assert broken(rows) is None
    assert read_mirror(run_dir / ".runwatch" / "audit.jsonl") == rows
    requests = {path.name: path.read_text() for path in (run_dir / "control" / "requests").iterdir()}
    return {
        "audit": [row.hash for row in rows],
        "executions": executions,
        "incidents": incidents,
        "alerts": alerts,
        "requests": requests,
        "told": sink.sent,
    }


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a run leaves whose daemon never died."""
    result = run(tmp_path_factory.mktemp("whole") / "run", {})
    assert list(result["requests"]) == ["early_divergence-0001.json"]
    assert '"state":"verified"' in result["executions"][0]
    assert len(result["told"]) == len(set(result["told"])) > 4
    return result


@pytest.mark.parametrize("point", POINTS)
def test_dying_at_the_same_point_of_every_tick_changes_nothing(
    point: str, uninterrupted: dict[str, Any], tmp_path: Path
) -> None:
    assert run(tmp_path / "run", dict.fromkeys(range(TICKS), point)) == uninterrupted


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(crashes=st.dictionaries(st.integers(0, TICKS - 1), st.sampled_from(POINTS), min_size=1))
def test_dying_at_random_points_changes_nothing(
    crashes: dict[int, str], uninterrupted: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert run(tmp_path_factory.mktemp("random") / "run", crashes) == uninterrupted
