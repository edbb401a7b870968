"""A daemon that dies anywhere in a tick leaves nothing half done: the next one goes on as if nothing had happened."""

import json
import tempfile
from collections.abc import Callable
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import scripted
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from runwatch.monitor.act import approvals
from runwatch.monitor.daemon import watched_run as watching
from runwatch.monitor.daemon.settings import DaemonConfig
from runwatch.monitor.daemon.watched_run import Watch
from runwatch.monitor.notify import Message, Notifier, Sent
from runwatch.monitor.notify.outbox import Outbox
from runwatch.monitor.store.audit import broken, read_mirror
from runwatch.monitor.store.store import open_store, sqlite_url

pytestmark = pytest.mark.slow

TICKS, STEPS = 14, 20
NAME = "early_divergence-0001"
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


@dataclass(frozen=True)
class Story:
    """How a plan goes: the node's settings, whether the trainer obeys, what a person says before tick `DECIDED`, the end."""

    rules: dict[str, Any]
    end: str
    obeys: bool = True
    says: bool | None = None


DECIDED = 10
ASKED = {"mode": "confirm", "expires_seconds": 100}
STORIES = {
    "auto": Story({"mode": "auto"}, "verified"),
    "approved": Story(ASKED, "verified", says=True),
    "turned down": Story(ASKED, "refused_by_person", says=False),
    "nobody decides": Story({**ASKED, "expires_seconds": 50}, "expired"),
    "no receipt": Story({"mode": "auto", "ack_seconds": 5}, "unacknowledged", obeys=False),
}


def run(run_dir: Path, crashes: dict[int, str], story: str = "auto") -> dict[str, Any]:
    """Train by script with a tick every `STEPS` steps, dying in the ticks of `crashes`; what is left in the end."""
    told = STORIES[story]
    trainer = scripted.ScriptedTrainer(run_dir, obeys=told.obeys)
    (run_dir / "run.yaml").write_text(json.dumps(scripted.card({"early_divergence": told.rules})))
    sink = Sink()
    for number in range(TICKS):
        trainer.train(STEPS)
        if number == DECIDED and told.says is not None:
            with pytest.MonkeyPatch.context() as patch, opened(run_dir, sink, lambda: trainer.clock) as watch:
                patch.setattr(approvals.time, "time", lambda: trainer.clock)
                approvals.decide(watch.store, NAME, approved=told.says, by="ana", reason="as agreed")
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
    requests = {path.name: path.read_text() for path in (run_dir / "control" / "requests").glob("*.json")}
    return {
        "audit": [row.hash for row in rows],
        "executions": executions,
        "incidents": incidents,
        "alerts": alerts,
        "requests": requests,
        "told": sink.sent,
    }


@cache
def whole(story: str) -> dict[str, Any]:
    """What a run leaves whose daemon never died."""
    with tempfile.TemporaryDirectory() as folder:
        result = run(Path(folder) / "run", {}, story)
    assert f'"state":"{STORIES[story].end}"' in result["executions"][0]
    asked = {f"{NAME}.json"} if STORIES[story].end in ("verified", "unacknowledged") else set()
    assert set(result["requests"]) == asked
    assert len(result["told"]) == len(set(result["told"])) > 2
    return result


CASES = [(story, point) for point in POINTS for story in ("auto", "approved")]
CASES += [(story, point) for point in ("before the commit", "after the commit") for story in [*STORIES][2:]]


@pytest.mark.parametrize(("story", "point"), CASES)
def test_dying_at_the_same_point_of_every_tick_changes_nothing(story: str, point: str, tmp_path: Path) -> None:
    assert run(tmp_path / "run", dict.fromkeys(range(TICKS), point), story) == whole(story)


@settings(
    max_examples=4, deadline=None, phases=[Phase.generate], suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    story=st.sampled_from([*STORIES]),
    crashes=st.dictionaries(st.integers(0, TICKS - 1), st.sampled_from(POINTS), min_size=1),
)
def test_dying_at_random_points_changes_nothing(
    story: str, crashes: dict[int, str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert run(tmp_path_factory.mktemp("random") / "run", crashes, story) == whole(story)
