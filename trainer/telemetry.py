"""The telemetry writer: a bounded queue into append-only segments, which never blocks, fails or slows the training loop.

Standard library and orjson only, so that any Python trainer can use it: `Telemetry(run_dir / "telemetry", attempt).emit(record)`.
A thread of its own writes. When the disk is full or slow, records wait in the queue; when the queue is full the oldest go, are counted, and
the count travels in every later record as `telemetry/dropped_records`.
"""

import contextlib
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import orjson

QUEUE_RECORDS = 4096
SEGMENT_BYTES = 64 << 20
FLUSH_SECONDS = 0.05
"""The writer looks at the queue this often, and at once when a phase is entered: what lies before a checkpoint must be on disk
before the checkpoint is. Waking it at each step would let it take the interpreter lock from the step."""
RETRY_SECONDS = 0.5
"""How long the writer rests after the disk refused."""


def encode(record: Mapping[str, Any]) -> bytes:
    """One line of telemetry; NaN and infinities as the strings that the contract asks for."""
    return orjson.dumps({key: _plain(value) for key, value in record.items()}, default=str) + b"\n"


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value


class Telemetry:
    """Writes the records of one attempt at a time below `folder`.

    Args:
        folder: made when it is missing; a failure to make it is a full disk like any other.
        attempt: the name of the attempt, which starts the names of its segments (`a0001-00001.jsonl`).
        clock: Unix seconds, put into each record as `time`.
    """

    def __init__(
        self,
        folder: Path,
        attempt: str,
        *,
        clock: Callable[[], float] = time.time,
        queue_records: int = QUEUE_RECORDS,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        self.attempt = attempt
        self.muted = False
        self.dropped = 0
        self._folder, self._clock, self._segment_bytes = folder, clock, segment_bytes
        self._queue: deque[dict[str, Any]] = deque()
        self._limit = queue_records
        self._wake = threading.Event()
        self._closing = False
        self._file = _Segment(folder, segment_bytes)
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)
        self._thread.start()

    def emit(self, step: int, tokens: int, phase: str, metrics: Mapping[str, Any] | None = None) -> None:
        """Queue one record; costs a few microseconds, never waits and never raises."""
        if self.muted:
            return
        if len(self._queue) >= self._limit:
            with contextlib.suppress(IndexError):  # the writer may have taken it just now
                self._queue.popleft()
                self.dropped += 1
        record = {"attempt": self.attempt, "step": step, "tokens": tokens, "time": self._clock(), "phase": phase}
        if metrics:
            record.update(metrics)
        if phase == "train":
            record["telemetry/dropped_records"] = self.dropped
        self._queue.append(record)
        if phase != "train":
            self._wake.set()

    def close(self, timeout: float = 5.0) -> None:
        """Write out what is queued, waiting at most `timeout` seconds."""
        self._closing = True
        self._wake.set()
        self._thread.join(timeout)

    def _run(self) -> None:
        while True:
            self._wake.wait(FLUSH_SECONDS)
            self._wake.clear()
            closing = self._closing  # read before the last look at the queue
            written = self._drain()
            if closing:
                self._file.close()
                return
            if not written:
                time.sleep(RETRY_SECONDS)

    def _drain(self) -> bool:
        """Write what is queued; False when the disk refused. A record leaves the queue only once it is written."""
        while self._queue:
            record = self._queue[0]
            try:
                self._file.write(str(record["attempt"]), encode(record))
            except OSError:
                return False
            except (TypeError, ValueError):
                self.dropped += 1  # a metric that no JSON can hold
            with contextlib.suppress(IndexError):
                if self._queue[0] is record:
                    self._queue.popleft()
        return True


class _Segment:
    """The file being appended to; a new one for each attempt and past `limit` bytes."""

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder, self._limit = folder, limit
        self._descriptor: int | None = None
        self._attempt, self._number, self._size = "", 0, 0
        self._torn = False

    def write(self, attempt: str, line: bytes) -> None:
        """Append a line.

        Raises:
            OSError: the disk refused; the same line may be given again.
        """
        if self._descriptor is None or attempt != self._attempt or self._size >= self._limit:
            self._open(attempt)
        assert self._descriptor is not None  # noqa: S101 - _open set it or raised
        # After a partial write the torn line is ended first, so that it cannot swallow the next one.
        whole = b"\n" + line if self._torn else line
        done = os.write(self._descriptor, whole)
        self._size += done
        self._torn = done < len(whole)
        if self._torn:
            raise OSError("short write")

    def close(self) -> None:
        """Close the file, if one is open."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = None

    def _open(self, attempt: str) -> None:
        self.close()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._number = self._number + 1 if attempt == self._attempt else 1
        self._attempt = attempt
        path = self._folder / f"{attempt}-{self._number:05d}.jsonl"
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._size, self._torn = 0, False


def next_attempt(folder: Path) -> str:
    """The name of the attempt that starts now: one after the newest that has a segment in `folder`."""
    names = [path.name.split("-")[0] for path in folder.glob("a[0-9]*-*.jsonl")] if folder.is_dir() else []
    numbers = [int(name[1:]) for name in names if name[1:].isdigit()]
    return f"a{max(numbers, default=0) + 1:04d}"
