"""A drill with real training: the trainer and the daemon as processes on a copy of a run that was trained first."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import yaml

from runwatch.monitor.drill.curve import registered
from runwatch.monitor.drill.evidence import gather
from runwatch.monitor.drill.links import Drill, Found, settled
from runwatch.monitor.drill.receiver import Receiver
from runwatch.monitor.read.run_directory import RunReader
from runwatch.monitor.store.store import StoreError, read_store, sqlite_url

CARD = "cards/drill.yaml"
WARM_UP_STEPS = 1000
"""Trained once: checks have their baselines by then, and the early checkpoints are behind."""
DEADLINE_STEP_SECONDS = 0.35
"""The deadline of a drill leaves so much time for each step that is left."""
PACE_SECONDS = 0.04
"""What each step of a drill waits: two trainings on two cores would jitter more than a straggler."""
PACED_STEPS = 520
"""So many of the warm-up's steps wait too: more than `throughput` looks back to."""
CLEAR_STEPS = 3
"""So far from a checkpoint a fault begins."""
START_SECONDS = 300.0
"""How long the trainer may take to its first step: it imports and compiles."""
PATIENCE_SECONDS = 90.0
"""How long the chain may take from the onset on."""
POLL_SECONDS = 0.5

NOTES = (
    f"the card is the package's {CARD}, with checks of its own for a small model on a machine that two trainings share",
    "every node is in mode auto; alerts go to the drill's own receiver only",
    f"every drill goes on from a copy of one run of {WARM_UP_STEPS:,} steps, whose own loss its curve is fitted to",
    f"each step waits {PACE_SECONDS} s, and the deadline leaves {DEADLINE_STEP_SECONDS} s for each step that is left",
)


class TrainingError(RuntimeError):
    """The trainer or the daemon did not start; the text says where to read on."""


@dataclass(frozen=True)
class Trained:
    """A run that was trained and stopped with a checkpoint at `step`; the next process is `attempt`."""

    folder: Path
    step: int
    attempt: str


@contextmanager
def process(folder: Path, name: str, command: list[str]) -> Generator[subprocess.Popen[bytes]]:
    """One of our own modules as a process with its output in FOLDER/NAME.log, ended when the block ends."""
    # `cat` writes the log, since under a full disk the process itself cannot.
    with (
        (folder / f"{name}.log").open("ab") as log,
        subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=log) as writer,  # noqa: S607 - of any system
    ):
        started = subprocess.Popen(  # noqa: S603 - our own modules
            [sys.executable, "-P", "-m", *command],
            stdout=writer.stdin,
            stderr=writer.stdin,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )
        if writer.stdin is not None:
            writer.stdin.close()
        try:
            yield started
        finally:
            _end(started)


def _end(started: subprocess.Popen[bytes]) -> None:
    started.send_signal(signal.SIGTERM)
    try:
        started.wait(10)
    except subprocess.TimeoutExpired:
        started.kill()
        started.wait()


def _train(folder: Path, *arguments: str) -> list[str]:
    return ["runwatch.trainer.train", str(folder), "--wandb", "off", *arguments]


def card() -> dict[str, Any]:
    """The card of a drill, as the package has it."""
    with as_file(files("runwatch.trainer") / CARD) as path:
        return yaml.safe_load(path.read_text(encoding="utf-8"))


def warm_up(folder: Path, say: Callable[[str], None]) -> Trained:
    """Train the run from which every drill starts, and register its curve.

    Raises:
        TrainingError: the trainer ended before it got there.
    """
    folder.mkdir(parents=True)
    document = card()
    (folder / "run.yaml").write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
    reader, step, until = RunReader(folder), 0, time.monotonic() + 2 * START_SECONDS
    pace = f"slow_step@{WARM_UP_STEPS - PACED_STEPS}:seconds={PACE_SECONDS}"
    with process(folder, "trainer", _train(folder, "--fault", pace)) as trainer:
        while step < WARM_UP_STEPS:
            if trainer.poll() is not None or time.monotonic() > until:
                raise TrainingError(f"the warm-up ended at step {step}; read {folder}/trainer.log")
            time.sleep(POLL_SECONDS)
            rows = reader.read(float("-inf"))
            reader.accept()
            step = max(step, int(rows.step[-1]) if len(rows) else 0)
            say(f"warm-up: step {step} of {WARM_UP_STEPS}")
    rows = RunReader(folder).read(float("-inf"))
    document["ladder"] = registered(rows, document["plan"]["token_budget"])
    (folder / "run.yaml").write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
    return Trained(folder, int(rows.step[-1]), "a0002")


def train_drill(drill: Drill, trained: Trained, folder: Path, receiver: Receiver, say: Callable[[str], None]) -> Found:
    """Run one drill in `folder` until its links are there or patience ends; what was found.

    Raises:
        TrainingError: a process did not start.
    """
    onset = _onset(trained.step + drill.offset + 1)
    _copied(trained, folder, receiver.url(drill.name))
    faults = [argument for fault in _faults(drill, trained.step, onset) for argument in ("--fault", fault)]
    with (
        process(folder, "daemon", ["runwatch.monitor.cli", "watch", str(folder)]) as daemon,
        process(folder, "trainer", _train(folder, *faults)) as trainer,
    ):
        watched = _Watched(drill, trained.attempt, onset, folder, receiver)
        return _until_settled(watched, daemon, trainer, _train(folder, *faults), say)


def _onset(step: int) -> int:
    """That step, or one soon after it that no checkpoint precedes.

    A kill can take the record of a checkpoint's end with it, and a checkpoint may take half an hour.
    """
    every = card()["plan"]["checkpoint"]["every_steps"]
    return step + CLEAR_STEPS if step % every < CLEAR_STEPS else step


def _faults(drill: Drill, begin: int, onset: int) -> list[str]:
    """The trainer's faults: the drill's own, and the pace that makes a shared machine's steps alike."""
    pace = [f"slow_step@{begin + 1}:seconds={PACE_SECONDS}"]
    if drill.slowed:
        pace.append(f"slow_step@{onset - 2}:seconds=0.25,steps=10")
    return [*pace, *(fault.format(step=onset) for fault in drill.faults)]


def _copied(trained: Trained, folder: Path, url: str) -> None:
    """The trained run as a run of its own that goes on now, with the daemon's settings beside it."""
    shutil.copytree(trained.folder, folder, ignore=shutil.ignore_patterns("*.log"))
    now = time.time()
    for path in sorted((folder / "telemetry").glob("*.jsonl")):
        records = [json.loads(line) for line in path.read_text().splitlines()]
        late = now - records[-1]["time"]
        path.write_text("".join(json.dumps({**one, "time": one["time"] + late}) + "\n" for one in records))
    document = yaml.safe_load((folder / "run.yaml").read_text())
    plan = document["plan"]
    left = plan["token_budget"] / (plan["context_length"] * plan["sequences_per_step"]) - trained.step
    plan["deadline"] = datetime.fromtimestamp(now + left * DEADLINE_STEP_SECONDS, UTC)
    (folder / "run.yaml").write_text(yaml.safe_dump(document, sort_keys=False))
    webhook = {"kind": "webhook", "url": url}
    daemon = {"listen": "127.0.0.1:0", "tick_seconds": 0.25, "notify": [webhook]}
    (folder / "runwatch.yaml").write_text(yaml.safe_dump(daemon))


@dataclass
class _Watched:
    """Where a running drill is looked at."""

    drill: Drill
    attempt: str
    onset: int
    folder: Path
    receiver: Receiver

    def look(self) -> Found:
        """What is there now."""
        if not (self.folder / ".runwatch" / "status.json").exists():
            return Found()
        store = read_store(sqlite_url(self.folder), "drill")
        try:
            return gather(self.folder, store, self.receiver.told(self.drill.name), self.attempt, self.onset)
        finally:
            store.close()


def _until_settled(
    watched: _Watched,
    daemon: subprocess.Popen[bytes],
    trainer: subprocess.Popen[bytes],
    again: list[str],
    say: Callable[[str], None],
) -> Found:
    found, until = Found(), time.monotonic() + START_SECONDS
    newest = trainer
    with ExitStack() as restarts:
        while time.monotonic() < until and not settled(watched.drill, found):
            time.sleep(POLL_SECONDS)
            before = found
            with suppress(StoreError):
                found = watched.look()
            if before.onset is None and found.onset is not None:
                until = time.monotonic() + PATIENCE_SECONDS
            if daemon.poll() is not None:
                raise TrainingError(f"the daemon ended; read {watched.folder}/daemon.log")
            if (newest.poll() or 0) > 0:
                raise TrainingError(f"the trainer ended; read {watched.folder}/trainer.log")
            if newest.returncode is not None and watched.drill.restarts:
                newest = restarts.enter_context(process(watched.folder, "trainer", again))
            say(f"{found.records} steps since the onset" if found.onset else "starting")
    return found
