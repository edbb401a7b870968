"""Reading is reading: nothing of a run is created or changed by a command that only shows, and another user may run it."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from scripted import ScriptedTrainer

from runwatch.monitor.daemon.watched_run import Watch
from runwatch.monitor.store.store import Store, StoreError, open_store, read_store, sqlite_url

OpenWatch = Callable[..., Watch]
SHOWING = (
    ("plan", "list", "RUN"),
    ("plan", "preview", "RUN", "early_divergence"),
    ("audit", "show", "RUN"),
    ("audit", "verify", "RUN"),
    ("status", "RUN"),
    ("status", "RUN", "--json"),
    ("backtest", "RUN"),
    ("validate", "RUN"),
    ("report", "RUN", "--markdown", "made/report.md"),
    ("report", "RUN"),
)
HEALTH_OR_VERDICT = {0, 1, 2}
NOTHING_TO_SHOW = 69


@pytest.fixture
def watched(trainer: ScriptedTrainer, open_watch: OpenWatch) -> Path:
    """A run with an incident and a plan, whose daemon is there and does not move."""
    watch = open_watch(trainer.run_dir)
    for _ in range(20):
        trainer.train(10)
        watch.tick(trainer.clock)
    return trainer.run_dir


def files(run_dir: Path) -> dict[str, tuple[int, bytes]]:
    """Every file of a run, by name: when it was changed, and its content. The index of the log is memory, no content."""
    found = (path for path in run_dir.rglob("*") if path.is_file() and not path.name.endswith("-shm"))
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in found}


AS_NOBODY = """
import contextlib, io, os, shutil
from runwatch.monitor.cli import main
with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
    main()  # as root, so that what it imports is at hand: Python itself may lie where nobody else may read
shutil.rmtree("made", ignore_errors=True)
os.setgroups([]), os.setgid(65534), os.setuid(65534)
main()
"""


def shown(
    words: tuple[str, ...], run_dir: Path, out: Path, *, nobody: bool = False
) -> subprocess.CompletedProcess[str]:
    """The command as a process in `out`, as another user where that is asked for."""
    arguments = [word.replace("RUN", str(run_dir)) for word in words]
    program = ["-c", AS_NOBODY] if nobody else ["-m", "runwatch.monitor.cli"]
    return subprocess.run(
        [sys.executable, "-P", *program, *arguments],
        cwd=out,
        env={**os.environ, "HOME": str(out), "MPLCONFIGDIR": str(out)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("words", SHOWING, ids=" ".join)
def test_showing_a_watched_run_leaves_no_trace_in_it(watched: Path, tmp_path: Path, words: tuple[str, ...]) -> None:
    before = files(watched)
    out = tmp_path / "out"
    out.mkdir()
    done = shown(words, watched, out)
    assert done.returncode in HEALTH_OR_VERDICT, done.stderr
    assert files(watched) == before


@pytest.mark.parametrize("words", SHOWING, ids=" ".join)
def test_showing_a_run_that_nobody_watched_leaves_no_trace_in_it(
    trainer: ScriptedTrainer, tmp_path: Path, words: tuple[str, ...]
) -> None:
    trainer.train(200)
    before = files(trainer.run_dir)
    out = tmp_path / "out"
    out.mkdir()
    done = shown(words, trainer.run_dir, out)
    assert done.returncode in {*HEALTH_OR_VERDICT, NOTHING_TO_SHOW}, done.stderr
    assert "Traceback" not in done.stderr
    assert files(trainer.run_dir) == before


@pytest.fixture
def readable(watched: Path) -> Iterator[Path]:
    """The run, which anybody may read and nobody but root may write; the folders above it let others pass."""
    opened: list[tuple[Path, int]] = []
    for folder in watched.parents:
        mode = folder.stat().st_mode
        if mode & 0o005 != 0o005:
            opened.append((folder, mode))
            folder.chmod(mode | 0o005)
    yield watched
    for folder, mode in opened:
        folder.chmod(mode)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("daemon", ["runs", "has ended", "was killed"])
@pytest.mark.parametrize("words", [SHOWING[0], SHOWING[1], SHOWING[3], SHOWING[4], SHOWING[8]], ids=" ".join)
def test_another_user_is_shown_the_run(readable: Path, tmp_path: Path, words: tuple[str, ...], daemon: str) -> None:
    run_dir = readable
    if daemon != "runs":  # a copy has no process; without its log it is as a daemon leaves it that has ended
        run_dir = tmp_path / "copy"
        subprocess.run(["cp", "-r", readable, run_dir], check=True)
        (run_dir / ".runwatch" / "state.db-shm").unlink(missing_ok=True)
        if daemon == "has ended":
            open_store(sqlite_url(run_dir), "scripted").close()
    out = tmp_path / "out"
    out.mkdir()
    out.chmod(0o777)
    before = files(run_dir)
    done = shown(words, run_dir, out, nobody=True)
    assert done.returncode in HEALTH_OR_VERDICT, done.stderr
    assert files(run_dir) == before


def test_a_reader_sees_what_was_stored_while_it_is_open_and_does_not_wait_for_a_writer(
    trainer: ScriptedTrainer, open_watch: OpenWatch
) -> None:
    watch = open_watch(trainer.run_dir)
    trainer.train(5)
    watch.tick(trainer.clock)
    reader = read_store(sqlite_url(trainer.run_dir), "x")
    with watch.store.transaction() as writing:
        writing.put_setting("a", "1")
        with reader.transaction() as tx:
            assert tx.setting("a", "unknown") == "unknown"
    with reader.transaction() as tx:
        assert tx.setting("a", "unknown") == "1"
    reader.close()


@pytest.mark.slow
def test_postgresql_is_read_in_a_transaction_that_cannot_write(postgres: object) -> None:
    url = postgres.database()  # type: ignore[attr-defined]
    with pytest.raises(StoreError, match="holds no run"):
        read_store(url, "scripted")
    store = open_store(url, "scripted")
    reader = read_store(url, "scripted")
    with store.transaction() as writing:  # it does not wait for the writer's turn either
        writing.put_setting("a", "1")
        with reader.transaction() as tx:
            assert not tx.watched
    with pytest.raises(Exception, match="read-only"), reader.transaction() as tx:
        tx.put_setting("a", "2")
    _close(store, reader)


def _close(*stores: Store) -> None:
    for store in stores:
        store.close()


def test_a_run_without_a_tick_is_not_watched(trainer: ScriptedTrainer, tmp_path: Path) -> None:
    trainer.train(200)
    store = open_store(sqlite_url(trainer.run_dir), "scripted")
    with store.transaction() as tx:
        tx.put_setting("plans_enabled", "false")
    store.close()
    done = shown(("report", "RUN", "--markdown", "report.md"), trainer.run_dir, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Incidents are those of a backtest" in (tmp_path / "report.md").read_text()
