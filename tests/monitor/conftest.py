"""Makes the scripted trainer importable as `scripted` (tests are no package), opens watches on its runs, and listens for webhooks."""

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from runwatch.monitor.config import DaemonConfig
from runwatch.monitor.notify import Notifier
from runwatch.monitor.outbox import Outbox
from runwatch.monitor.store import Store, open_store, sqlite_url
from runwatch.monitor.watch import Watch

if "scripted" not in sys.modules:
    _spec = importlib.util.spec_from_file_location("scripted", Path(__file__).with_name("scripted.py"))
    assert _spec
    assert _spec.loader
    sys.modules["scripted"] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules["scripted"])

if "http_collector" not in sys.modules:
    _spec = importlib.util.spec_from_file_location(
        "http_collector", Path(__file__).parents[1] / "notify" / "http_collector.py"
    )
    assert _spec
    assert _spec.loader
    sys.modules["http_collector"] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules["http_collector"])

for _name in ("postgres", "processes"):
    if _name not in sys.modules:
        _spec = importlib.util.spec_from_file_location(_name, Path(__file__).with_name(f"{_name}.py"))
        assert _spec
        assert _spec.loader
        sys.modules[_name] = importlib.util.module_from_spec(_spec)
        _spec.loader.exec_module(sys.modules[_name])

import http_collector  # noqa: E402  loaded above: tests are no package
import postgres as real_postgres  # noqa: E402  the same
import scripted  # noqa: E402  the same

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
