"""Watches on scripted runs, an endpoint that listens for webhooks, and the databases of both kinds."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import http_collector
import postgres as real_postgres
import pytest
import scripted

from runwatch.monitor.daemon.settings import DaemonConfig
from runwatch.monitor.daemon.watched_run import Watch
from runwatch.monitor.notify import Notifier
from runwatch.monitor.notify.outbox import Outbox
from runwatch.monitor.store.store import Store, open_store, sqlite_url

OpenWatch = Callable[..., Watch]


@pytest.fixture
def open_watch(request: pytest.FixtureRequest) -> OpenWatch:
    """Opens a watch on a run directory as a fresh daemon would; what it opened is closed after the test."""

    def open_one(run_dir: Path, notifiers: dict[str, Notifier] | None = None, holder: str = "test") -> Watch:
        store = open_store(sqlite_url(run_dir), "scripted")
        request.addfinalizer(store.close)
        return Watch(run_dir, store, Outbox(store, notifiers or {}), DaemonConfig(), holder)

    return open_one


@pytest.fixture
def trainer(tmp_path: Path) -> "scripted.ScriptedTrainer":
    """A scripted run with the card that carries plans out without asking."""
    run = scripted.ScriptedTrainer(tmp_path / "run")
    (run.run_dir / "run.yaml").write_text(json.dumps(scripted.card()))
    return run


@pytest.fixture
def collector() -> Iterator[object]:
    """An HTTP endpoint that keeps what it is sent."""
    with http_collector.Collector() as server:
        yield server


@pytest.fixture(scope="session")
def postgres() -> Iterator[real_postgres.PostgresServer]:
    """A PostgreSQL server, one for all tests of a process."""
    folder = real_postgres.binaries()
    if folder is None:
        pytest.skip("no PostgreSQL here; deploy/install-services installs it")
    with real_postgres.PostgresServer(folder) as server:
        yield server


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.slow)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """An empty database of either kind."""
    url = f"sqlite:///{tmp_path / 'state.db'}"
    if request.param == "postgres":
        url = request.getfixturevalue("postgres").database()
    opened = open_store(url, "scripted")
    yield opened
    opened.close()
