"""The same metrics to a W&B run, from a thread of its own: nothing that W&B does is on the step's path.

Offline by default; a W&B that is not installed, slow or broken costs metrics there, never a step here.
"""

import contextlib
import queue
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

QUEUE_RECORDS = 4096

Mode = Literal["offline", "online"]


class WandbLog:
    """Logs to one W&B run below `folder`; `mode` is `offline` or `online`."""

    def __init__(self, folder: Path, name: str, config: Mapping[str, Any], mode: Mode) -> None:
        self.dropped = 0
        self._queue: queue.Queue[tuple[int, dict[str, Any]] | None] = queue.Queue(QUEUE_RECORDS)
        self._thread = threading.Thread(target=self._run, args=(folder, name, dict(config), mode), daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Queue the metrics of a step; when the queue is full they are dropped and counted."""
        try:
            self._queue.put_nowait((step, dict(metrics)))
        except queue.Full:
            self.dropped += 1

    def close(self, timeout: float = 20.0) -> None:
        """Finish the W&B run, waiting at most `timeout` seconds."""
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=1.0)
        self._thread.join(timeout)

    def _run(self, folder: Path, name: str, config: dict[str, Any], mode: Mode) -> None:
        try:
            import wandb  # noqa: PLC0415 - 1.2 s that the training loop must not wait for

            folder.mkdir(parents=True, exist_ok=True)
            settings = wandb.Settings(console="off", silent=True)
            run = wandb.init(project="runwatch", name=name, config=config, dir=folder, mode=mode, settings=settings)
            while (item := self._queue.get()) is not None:
                run.log({"step": item[0], **item[1]})
            run.finish()
        except Exception as error:  # noqa: BLE001 - whatever W&B raises, training goes on without it
            print(f"W&B is off for the rest of this attempt: {error}", file=sys.stderr)
