"""The dead-man signal, as ping and as Watchdog alert, of real daemons: it stops when they cannot observe, and comes back."""

import json
import os
import signal
import sqlite3
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from http_collector import Collector
from postgres import PostgresServer
from processes import DaemonProcess, wait_for
from scripted import ScriptedTrainer

from runwatch.monitor.daemon.jobs import LONGEST_TICK_SECONDS, STALE_SECONDS, Daemon
from runwatch.monitor.daemon.settings import DaemonConfig
from runwatch.monitor.daemon.watched_run import Watch
from runwatch.monitor.notify import Message, Notifier, Sent
from runwatch.monitor.notify.outbox import Outbox

QUIET_SECONDS = 4.0  # four intervals of the daemons below
Fault = Callable[[DaemonProcess], Generator[None]]


def killed(daemon: DaemonProcess) -> Generator[None]:
    daemon.end(signal.SIGKILL)
    yield
    daemon.start()


def frozen(daemon: DaemonProcess) -> Generator[None]:
    assert daemon.process
    daemon.process.send_signal(signal.SIGSTOP)
    yield
    daemon.process.send_signal(signal.SIGCONT)


def stuck(daemon: DaemonProcess) -> Generator[None]:
    """Its loop waits for a file that never answers, as on a network file system that hangs."""
    card = daemon.run_dir / "run.yaml"
    kept = card.read_bytes()
    card.unlink()
    os.mkfifo(card)
    yield
    wait_for("somebody reads the card", lambda: _write_without_waiting(card, kept))
    card.unlink()
    card.write_bytes(kept)


def _write_without_waiting(fifo: Path, content: bytes) -> bool:
    try:
        writing = os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return False
    os.write(writing, content)
    os.close(writing)
    return True


def moved(name: str) -> Fault:
    """Something in the run directory is not there for a while."""

    def move(daemon: DaemonProcess) -> Generator[None]:
        there = daemon.run_dir / name
        aside = daemon.run_dir.with_name("aside")
        there.rename(aside)
        yield
        aside.rename(there)

    return move


def locked(daemon: DaemonProcess) -> Generator[None]:
    with closing(sqlite3.connect(daemon.run_dir / ".runwatch" / "state.db", timeout=60)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield
        other.rollback()


FAULTS: dict[str, Fault] = {
    "killed": killed,
    "frozen": frozen,
    "stuck": stuck,
    "run directory gone": moved(""),
    "telemetry gone": moved("telemetry"),
    "database moved": moved(".runwatch/state.db"),
    "database locked": locked,
}


class Observed:
    """A daemon that may be struck, and who listens to its signal."""

    def __init__(self, folder: Path, collector: Collector, **settings: Any) -> None:
        self.trainer = ScriptedTrainer(folder / "run")
        (folder / "run" / "run.yaml").write_text("version: 1\n")  # with mistakes: the daemon observes all the same
        self.trainer.clock = time.time() - 60
        self.trainer.train(50)
        self._collector, self._path = collector, f"/{folder.name.replace(' ', '-')}"
        listeners = [
            {"kind": "deadman", "url": f"{collector.url}{self._path}/ping"},
            {"kind": "alertmanager", "urls": [f"{collector.url}{self._path}"]},
        ]
        self.daemon = DaemonProcess(self.trainer.run_dir, deadman_seconds=1, notify=listeners, **settings)

    def pings(self) -> int:
        """Pings so far."""
        return sum(request.path == f"{self._path}/ping" for request in list(self._collector.requests))

    def watchdogs(self) -> int:
        """Watchdog alerts so far."""
        posts = [one for one in list(self._collector.requests) if one.path == f"{self._path}/api/v2/alerts"]
        alerts = [alert for post in posts for alert in json.loads(post.body)]
        return sum(alert["labels"]["alertname"] == "RunWatchdog" for alert in alerts)

    def counts(self) -> tuple[int, int]:
        """Both."""
        return self.pings(), self.watchdogs()

    def grows(self) -> bool:
        """Whether both signals come, from now on."""
        pings, watchdogs = self.counts()
        wait_for("a ping and a Watchdog", lambda: self.pings() > pings and self.watchdogs() > watchdogs)
        return True


@contextmanager
def struck(observed: Observed, fault: Fault) -> Iterator[None]:
    """The fault holds inside of the block."""
    course = fault(observed.daemon)
    next(course)
    try:
        yield
    finally:
        next(course, None)


@pytest.mark.slow
def test_the_signal_stops_in_every_case_in_which_a_daemon_cannot_observe_and_comes_back(
    tmp_path: Path, collector: Collector
) -> None:
    with ExitStack() as daemons:
        cases: dict[str, Observed] = {}
        for name in FAULTS:
            (tmp_path / name).mkdir()
            cases[name] = Observed(tmp_path / name, collector)
            daemons.enter_context(cases[name].daemon)
        assert all(one.grows() for one in cases.values())
        with ExitStack() as faults:
            for name, one in cases.items():
                faults.enter_context(struck(one, FAULTS[name]))
            wait_for("silence", lambda: _silent(*cases.values()))
        assert all(one.grows() for one in cases.values())


def _silent(*observed: Observed) -> bool:
    before = [one.counts() for one in observed]
    time.sleep(QUIET_SECONDS)
    return [one.counts() for one in observed] == before


@pytest.mark.slow
def test_the_signal_stops_while_postgresql_is_gone(
    tmp_path: Path, collector: Collector, postgres: PostgresServer
) -> None:
    (tmp_path / "fleet").mkdir()
    one = Observed(tmp_path / "fleet", collector, database=postgres.database())
    with one.daemon as daemon:
        assert one.grows()
        postgres.stop()
        wait_for("not ready", lambda: daemon.readiness() == 503)
        wait_for("silence", lambda: _silent(one))
        postgres.start()
        assert one.grows()


def test_a_tick_that_does_not_end_makes_the_daemon_blind_then_unhealthy(
    trainer: ScriptedTrainer, open_watch: Callable[..., Watch], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    listener = Notifier("ping", frozenset({"deadman"}), lambda message, _: told.append(message.key) or Sent({}))
    now = [0.0]
    clock = lambda: trainer.clock + now[0]  # noqa: E731  one line says it
    store = open_watch(trainer.run_dir).store
    watch = Watch(trainer.run_dir, store, Outbox(store, {"ping": listener}, clock), DaemonConfig(), "test")
    daemon = Daemon(watch, DaemonConfig(deadman_seconds=1), clock=clock, monotonic=lambda: now[0])
    trainer.train(20)
    assert daemon.tick()
    entered, released = threading.Event(), threading.Event()

    def hang(_: float) -> str:
        entered.set()
        released.wait()
        return "at last"

    monkeypatch.setattr(watch, "tick", hang)
    ticking = threading.Thread(target=daemon.tick)
    ticking.start()
    entered.wait()
    stands: list[tuple[bool, bool, int]] = []
    for now[0] in (1.0, STALE_SECONDS + 1, LONGEST_TICK_SECONDS + 1):
        daemon.deadman()
        watch.outbox.deliver("ping")
        stands.append((daemon.ready, daemon.healthy, len(told)))
    released.set()
    ticking.join()
    assert stands == [(True, True, 1), (False, True, 1), (False, False, 1)]


def test_a_daemon_that_stands_by_sends_no_signal_and_no_message(
    trainer: ScriptedTrainer, open_watch: Callable[..., Watch]
) -> None:
    heard: list[Message] = []
    listener = Notifier("all", frozenset({"deadman"}), lambda message, _: heard.append(message) or Sent({}))
    first, second = (open_watch(trainer.run_dir, {"all": listener}, holder) for holder in ("first", "second"))
    trainer.clock = time.time() - 20
    acting, standby = (Daemon(one, DaemonConfig(), clock=lambda: trainer.clock) for one in (first, second))
    trainer.train(20)
    assert acting.tick()
    assert standby.tick()
    standby.deadman()
    first.outbox.deliver("all")
    assert not heard
    acting.deadman()
    standby.send("all")
    assert not heard
    acting.send("all")
    assert [message.kind for message in heard] == ["deadman"]
