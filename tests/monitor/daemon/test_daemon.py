"""The daemon as a real process: served pages, kill -9 at any moment, a clock that is set back, several failures at once."""

import json
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from scripted import ScriptedTrainer

from runwatch.monitor.daemon.jobs import Daemon
from runwatch.monitor.daemon.metrics import Collector
from runwatch.monitor.daemon.settings import DaemonConfig
from runwatch.monitor.daemon.watched_run import Watch
from runwatch.monitor.daemon.web import WebServer
from runwatch.monitor.store.audit import broken, read_mirror
from runwatch.monitor.store.store import open_store, sqlite_url

ROOT = Path(__file__).parents[3]
PATIENCE = 120.0
OpenWatch = Callable[..., Watch]


def wait_for(what: str, condition: Callable[[], Any]) -> Any:
    """The first true value of `condition`, within a generous time."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        if found := condition():
            return found
        time.sleep(0.05)
    pytest.fail(f"never happened: {what}")


def daemon(run_dir: Path) -> subprocess.Popen[bytes]:
    """`runwatch watch` on a free port; its log goes to RUN_DIR/daemon.log."""
    command = [sys.executable, "-P", "-m", "runwatch.monitor.cli", "watch", str(run_dir), "--listen", "127.0.0.1:0"]
    with (run_dir / "daemon.log").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log)


def status(run_dir: Path) -> dict[str, Any]:
    try:
        return json.loads((run_dir / ".runwatch" / "status.json").read_text())
    except FileNotFoundError:
        return {}


def state(run_dir: Path) -> str:
    """Where the newest execution stands, asked of the database behind the daemon's back."""
    try:
        with sqlite3.connect(f"file:{run_dir}/.runwatch/state.db?mode=ro", uri=True, timeout=10) as connection:
            found = connection.execute("SELECT state FROM executions ORDER BY ordinal DESC LIMIT 1").fetchone()
    except sqlite3.OperationalError:
        return ""
    finally:
        if "connection" in locals():
            connection.close()
    return found[0] if found else ""


@contextmanager
def training(trainer: ScriptedTrainer) -> Iterator[None]:
    """The scripted trainer in real time, twelve steps a second, until the block ends."""
    stop = threading.Event()

    def train() -> None:
        while not stop.wait(0.25):
            trainer.clock = time.time() - 3
            trainer.train(3)

    trainer.fault = 60
    thread = threading.Thread(target=train)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@pytest.mark.slow
def test_a_daemon_killed_at_each_arrow_of_a_plan_loses_nothing_and_does_nothing_twice(
    trainer: ScriptedTrainer,
) -> None:
    seen: list[str] = []
    process = daemon(trainer.run_dir)
    try:
        with training(trainer):
            while "verified" not in seen:
                known = len(seen)
                new = wait_for(
                    f"a state after {seen}", lambda: (now := state(trainer.run_dir)) not in {"", *seen} and now
                )
                seen.append(new)
                process.send_signal(signal.SIGKILL)
                process.wait()
                process = daemon(trainer.run_dir)
                assert len(seen) == known + 1
    finally:
        process.kill()
        process.wait()
    assert seen[-1] == "verified"
    whole(trainer)


@pytest.mark.slow
def test_a_daemon_killed_at_random_moments_ends_where_an_undisturbed_one_ends(trainer: ScriptedTrainer) -> None:
    moments = [1.1, 3.4, 2.2, 4.3, 2.9]
    process = daemon(trainer.run_dir)
    try:
        with training(trainer):
            for seconds in moments:
                time.sleep(seconds)
                process.send_signal(signal.SIGKILL)
                process.wait()
                process = daemon(trainer.run_dir)
            wait_for("the plan is verified", lambda: state(trainer.run_dir) == "verified")
    finally:
        process.kill()
        process.wait()
    whole(trainer)


def whole(trainer: ScriptedTrainer) -> None:
    """What an undisturbed daemon leaves: one directive, each change once, an audit log in order."""
    store = open_store(sqlite_url(trainer.run_dir), "scripted")
    with store.transaction() as tx:
        rows, executions, incidents = tx.audit_rows(), tx.executions(), tx.incidents()
    store.close()
    assert [(one.id, one.state.value) for one in executions] == [("early_divergence-0001", "verified")]
    assert [path.name for path in (trainer.run_dir / "control" / "requests").iterdir()] == [
        "early_divergence-0001.json"
    ]
    assert broken(rows) is None
    mirror = read_mirror(trainer.run_dir / ".runwatch" / "audit.jsonl")
    assert mirror == rows[: len(mirror)]
    plans = [row.sentence.split(": ")[0].removesuffix(".") for row in rows if row.kind == "plan"]
    name = "early_divergence-0001 (shorten_budget)"
    assert plans == [f"{name} is {word}" for word in ("proposed", "approved", "requested", "acknowledged", "verified")]
    told = [row.sentence.split(": ")[0] for row in rows if row.kind == "incident"]
    assert len(told) == len(set(told))
    assert "ladder_deviation-0001 is firing (critical)" in told
    assert len({one.id for one in incidents}) == len(incidents)


@pytest.mark.slow
def test_sigterm_ends_the_daemon_well_and_gives_the_lease_back(trainer: ScriptedTrainer) -> None:
    trainer.clock = time.time() - 100
    trainer.train(50)
    process = daemon(trainer.run_dir)
    try:
        wait_for("the first tick", lambda: status(trainer.run_dir))
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
    store = open_store(sqlite_url(trainer.run_dir), "scripted")
    with store.transaction() as tx:
        assert tx.take_lease("another", time.time(), 1.0)
    store.close()
    assert "Traceback" not in (trainer.run_dir / "daemon.log").read_text()


@pytest.fixture
def served(trainer: ScriptedTrainer, open_watch: OpenWatch) -> Iterator[tuple[Daemon, str]]:
    """A daemon whose ticks the test does, with its web server."""
    trainer.train(200)
    clock = [trainer.clock]
    one = Daemon(open_watch(trainer.run_dir), DaemonConfig(), clock=lambda: clock[0])
    server = WebServer(one, "127.0.0.1:0")
    server.start()
    yield one, f"http://127.0.0.1:{server.port}"
    server.close()


def get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:  # noqa: S310 - our own server
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_pages_before_and_after_the_first_tick(served: tuple[Daemon, str]) -> None:
    one, url = served
    assert get(f"{url}/healthz")[0] == 200
    assert get(f"{url}/readyz")[0] == 503
    assert get(f"{url}/api/status")[0] == 503
    assert get(f"{url}/metrics")[0] == 200
    assert one.tick()
    assert get(f"{url}/readyz") == (200, "ready\n")
    document = json.loads(get(f"{url}/api/status")[1])
    assert document["run"]["step"] == 200
    assert {check["name"] for check in document["checks"]} == set(one.watch.judge.checks)
    assert get(f"{url}/")[0] == 200
    assert "What to do" in get(f"{url}/runbooks/finite")[1]
    assert get(f"{url}/runbooks/nothing")[0] == 404


def test_events_send_the_document_when_it_changes(served: tuple[Daemon, str]) -> None:
    one, url = served
    one.tick()
    with urllib.request.urlopen(f"{url}/api/events", timeout=30) as stream:  # noqa: S310 - our own server
        assert stream.readline() == b"event: status\n"
        assert stream.readline() == b"id: 1\n"
        assert json.loads(stream.readline().removeprefix(b"data: "))["version"] == 1
        stream.readline()
        one.tick()
        assert stream.readline() == b"event: status\n"
        assert stream.readline() == b"id: 2\n"


def test_a_failed_tick_makes_the_daemon_not_ready_and_the_next_good_one_ready_again(
    served: tuple[Daemon, str], trainer: ScriptedTrainer
) -> None:
    one, url = served
    one.tick()
    blocked = trainer.run_dir / ".runwatch" / "status.json"
    blocked.unlink()
    blocked.mkdir()
    assert not one.tick()
    code, text = get(f"{url}/readyz")
    assert code == 503
    assert "the last tick failed" in text
    assert get(f"{url}/healthz")[0] == 200
    blocked.rmdir()
    assert one.tick()
    assert get(f"{url}/readyz")[0] == 200
    assert one.counts.failures == 1


def test_the_metrics_are_the_documented_ones_and_few(served: tuple[Daemon, str]) -> None:
    one, _ = served
    one.tick()
    text = Collector(one.watch, one.counts).text().decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    documented = {
        line.split("`")[1].removesuffix("_total")
        for line in (ROOT / "docs" / "metrics.md").read_text().partition("## The trainer's exporter")[0].splitlines()
        if line.startswith(("| `runwatch_", "| `process_"))
    }
    assert set(families) == documented
    assert sum(len(family.samples) for family in families.values()) < 2000
    firing = {
        (sample.labels["check"], sample.labels["severity"]): sample.value
        for sample in families["runwatch_alert_firing"].samples
    }
    assert firing["ladder_deviation", "critical"] == 1
    assert firing["ladder_deviation", "warning"] == 0
    [step] = families["runwatch_run_step"].samples
    assert (step.labels, step.value) == ({"run": "scripted"}, 200)
    assert {sample.labels["bound"] for sample in families["runwatch_run_expected_loss"].samples} == {
        "loss",
        "low",
        "high",
    }


def test_a_port_in_use_is_told_and_the_process_ends(served: tuple[Daemon, str], trainer: ScriptedTrainer) -> None:
    port = served[1].rpartition(":")[2]
    command = [sys.executable, "-P", "-m", "runwatch.monitor.cli", "watch", str(trainer.run_dir)]
    found = subprocess.run(
        [*command, "--listen", f"127.0.0.1:{port}"], capture_output=True, text=True, check=False, timeout=PATIENCE
    )
    assert found.returncode == 69
    assert f"cannot listen on 127.0.0.1:{port}" in found.stderr


def test_a_clock_set_back_stops_the_scheduler_and_the_liveness_thread_wakes_it(
    trainer: ScriptedTrainer, open_watch: OpenWatch
) -> None:
    """The scheduler then holds a start that lies an hour ahead, as after a clock that was set back by an hour."""
    trainer.train(20)
    one = Daemon(open_watch(trainer.run_dir), DaemonConfig(tick_seconds=0.2), clock=lambda: trainer.clock)
    one.start()
    try:
        wait_for("two ticks", lambda: one.counts.ticks >= 2)
        one.postpone(3600.0)
        before = one.counts.ticks
        wait_for("ticks go on", lambda: one.counts.ticks > before + 3)
    finally:
        one.close()


def test_the_service_manager_is_told_ready_alive_and_stopping(
    trainer: ScriptedTrainer, open_watch: OpenWatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "notify"
    monkeypatch.setenv("NOTIFY_SOCKET", str(path))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(path))
        manager.settimeout(PATIENCE)
        trainer.train(5)
        one = Daemon(open_watch(trainer.run_dir), DaemonConfig(), clock=lambda: trainer.clock)
        one.start()
        assert manager.recv(100) == b"WATCHDOG=1"
        one.close()
        heard = {manager.recv(100)}
        while b"STOPPING=1" not in heard:
            heard.add(manager.recv(100))
