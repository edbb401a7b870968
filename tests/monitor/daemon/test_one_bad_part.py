"""One bad part never stops the whole: after each fault a NaN fires, in the live daemon and after a restart."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from scripted import ScriptedTrainer

from runwatch.monitor.daemon.watched_run import Watch

OpenWatch = Callable[..., Watch]


def _mirror(run_dir: Path) -> Path:
    return run_dir / ".runwatch" / "audit.jsonl"


def _bad(kind: str, path: Path) -> None:
    match kind:
        case "a folder":
            path.mkdir()
        case "a dangling link":
            path.symlink_to(path.with_name("nowhere"))
        case "a pipe":
            os.mkfifo(path)
        case "a link to itself":
            path.symlink_to(path)


def _append(text: str) -> Callable[[Path], None]:
    def append(run_dir: Path) -> None:
        with _mirror(run_dir).open("a") as file:
            file.write(text)

    return append


FILES = {
    f"{kind} in {folder}": lambda run_dir, kind=kind, folder=folder, name=name: _bad(kind, run_dir / folder / name)
    for kind in ("a folder", "a dangling link", "a pipe", "a link to itself")
    for folder, name in (
        ("telemetry", "a0000.jsonl"),
        ("control/receipts", "x-0001.json"),
        ("control/requests", "x-0001.json"),
    )
}
MIRROR = {
    "a blank line in the mirror": _append("\n"),
    "a line that is no row in the mirror": _append('{"seq": "x"}\n'),
    "a line that is no JSON in the mirror": _append("row\n"),
    "a list in the mirror": _append("[]\n"),
    "no mirror": lambda run_dir: _mirror(run_dir).unlink(),
}
FAULTS: dict[str, Callable[[Path], None]] = {**FILES, **MIRROR}


def fires(watch: Watch) -> bool:
    with watch.store.transaction() as tx:
        return any(one.check == "finite" and one.state == "firing" for one in tx.incidents())


@pytest.mark.parametrize("restarted", [False, True], ids=["live", "after a restart"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_nan_fires_all_the_same(trainer: ScriptedTrainer, open_watch: OpenWatch, fault: str, restarted: bool) -> None:
    trainer.obeys = False  # it would wait at the pipe itself
    (trainer.run_dir / "control" / "requests").mkdir(parents=True, exist_ok=True)
    watch = open_watch(trainer.run_dir)
    watch.tick(trainer.train(50))
    FAULTS[fault](trainer.run_dir)
    if restarted:
        watch = open_watch(trainer.run_dir)
    watch.tick(trainer.train(5))
    trainer.fault, trainer.shift = trainer.step + 1, float("nan")
    for _ in range(3):
        watch.tick(trainer.train(1))
    assert fires(watch)


@pytest.mark.parametrize("fault", [name for name in FILES if "telemetry" in name])
def test_telemetry_that_cannot_be_read_is_a_condition_until_it_can(
    trainer: ScriptedTrainer, open_watch: OpenWatch, fault: str
) -> None:
    watch = open_watch(trainer.run_dir)
    watch.tick(trainer.train(5))
    FAULTS[fault](trainer.run_dir)
    watch.tick(trainer.train(1))
    [condition] = [one for one in watch.conditions.listed() if one["kind"] == "segments"]
    assert "a0000.jsonl" in condition["message"]
    assert watch.unwell
    bad = trainer.run_dir / "telemetry" / "a0000.jsonl"
    bad.rmdir() if bad.is_dir() else bad.unlink()
    watch.tick(trainer.train(1))
    assert not [one for one in watch.conditions.listed() if one["kind"] == "segments"]
    assert not watch.unwell


@pytest.mark.parametrize("fault", [name for name in MIRROR if name != "a blank line in the mirror"])
def test_a_damaged_mirror_is_written_anew_from_the_database(
    trainer: ScriptedTrainer, open_watch: OpenWatch, fault: str
) -> None:
    watch = open_watch(trainer.run_dir)
    for _ in range(3):
        watch.tick(trainer.train(60))
    FAULTS[fault](trainer.run_dir)
    for _ in range(2):
        watch.tick(trainer.train(1))
    with watch.store.transaction() as tx:
        rows = tx.audit_rows()
    assert _mirror(trainer.run_dir).read_text() == "".join(row.line() for row in rows)
