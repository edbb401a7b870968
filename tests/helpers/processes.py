"""Real daemon processes over a scripted trainer that writes in real time."""

import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import httpx
from scripted import ScriptedTrainer

PATIENCE = 120.0


def wait_for(what: str, condition: Callable[[], Any]) -> Any:
    """The first true value of `condition`, within a generous time."""
    until = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert time.monotonic() < until, f"never happened: {what}"
        time.sleep(0.05)
    return found


class DaemonProcess:
    """`runwatch watch` on a free port; use as a context manager. `settings` are those of `runwatch.yaml`."""

    def __init__(self, run_dir: Path, name: str = "daemon", **settings: Any) -> None:
        self.run_dir, self.log = run_dir, run_dir.parent / f"{name}.log"
        self._config = run_dir.parent / f"{name}.yaml"
        self._config.write_text(json.dumps({"listen": "127.0.0.1:0", **settings}))
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.end(signal.SIGKILL)

    def start(self) -> Self:
        """Start, and wait until its pages answer."""
        began = len(self.text())
        command = [sys.executable, "-P", "-m", "runwatch.monitor.cli", "watch", str(self.run_dir)]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen([*command, "--config", str(self._config)], stdout=log, stderr=log)
        found = wait_for("the daemon serves", lambda: re.search(r"status page on port (\d+)", self.text()[began:]))
        self.url = f"http://127.0.0.1:{found[1]}"
        return self

    def end(self, how: signal.Signals) -> None:
        """Send it this signal and wait until it is gone."""
        if self.process is not None:
            self.process.send_signal(how)
            self.process.wait(PATIENCE)
            self.process = None

    def text(self) -> str:
        """What it has logged."""
        return self.log.read_text() if self.log.exists() else ""

    def readiness(self) -> int:
        """The status of `/readyz`; 0 where nobody answers."""
        try:
            return httpx.get(f"{self.url}/readyz", timeout=30).status_code
        except httpx.TransportError:
            return 0

    def holds(self, condition: str) -> bool:
        """Whether it says so of itself on `/readyz`."""
        return condition in httpx.get(f"{self.url}/readyz", timeout=30).text


@contextmanager
def training(trainer: ScriptedTrainer, fault: int = 10**9) -> Generator[None]:
    """The scripted trainer in real time, twelve steps a second, until the block ends; its loss jumps at step `fault`."""
    stop = threading.Event()
    trainer.fault = fault

    def train() -> None:
        while not stop.wait(0.25):
            trainer.clock = time.time() - 3
            trainer.train(3)

    thread = threading.Thread(target=train)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
