"""Follow a run directory: telemetry segments as they grow, torn lines, attempts, tick rows in the silences.

A reader starts at a cursor and gives the rows after it. What it gave is given again until `accept` is called, so a tick
that fails loses nothing; the cursor goes to the store in the same transaction as what was made of the rows.
"""

import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from runwatch.checks import Signals
from runwatch.monitor.read.records import LINE_LIMIT, MalformedError, Problem, Rows

CHUNK_BYTES = 1 << 22
CHUNK_ROWS = 1 << 14
"""So many rows become arrays at a time: as tuples they take ten times the memory."""


@dataclass
class _Segment:
    """How far one file has been read; `line` counts from 1 and is the next one."""

    offset: int = 0
    line: int = 1


class RunReader:
    """The rows of a run, from a cursor on.

    `context` holds every row up to the cursor; drop it when it has been used.
    """

    def __init__(self, run_dir: Path, cursor: Mapping[str, Any] | None = None) -> None:
        self.folder = run_dir / "telemetry"
        self.accepted: Mapping[str, Any] = cursor or {}
        self._rows = Rows()
        self._time = float("-inf")
        self._lines = 0
        self._segments: dict[str, _Segment] = {}
        self._given: list[Signals] = []
        self.unreadable: dict[str, str] = {}
        """Segments that could not be read the last time, and why; the others were, and these are tried again."""
        self.context = self._read_until(self.accepted)

    @property
    def attempts(self) -> list[str]:
        """The attempts' names; `Signals.attempt` numbers them."""
        return self._rows.attempts

    @property
    def records(self) -> int:
        """Lines read so far, without those left out."""
        return self._lines - self._rows.malformed

    @property
    def malformed(self) -> int:
        """Lines left out so far."""
        return self._rows.malformed

    @property
    def problems(self) -> list[Problem]:
        """The first hundred things that were wrong."""
        return self._rows.problems

    def read(self, now: float) -> Signals:
        """Every row that nobody has accepted yet, tick rows up to `now` (Unix seconds) with them.

        Raises:
            OSError: the telemetry folder cannot be read. Of a segment that cannot, `unreadable` tells.
        """
        self.unreadable = {}
        for path in self._files():
            self._read_into(self._given, path, None)
        self._time = max(self._time, now)
        self._rows.pass_time(now)
        self._given = [Signals.concatenate([*self._given, self._rows.drain()])]
        return self._given[0]

    def cursor(self) -> dict[str, Any]:
        """Where reading stands, for the store."""
        segments = {name: [segment.offset, segment.line] for name, segment in self._segments.items()}
        return {"segments": segments, "time": self._time}

    def accept(self) -> None:
        """What `read` gave has been judged and stored."""
        self.accepted = self.cursor()
        self._given = []

    def history(self) -> Signals:
        """Every row that was accepted, read anew."""
        return RunReader(self.folder.parent, self.accepted).context

    def _files(self) -> list[Path]:
        """The segments in order of their names; none while there is no folder yet."""
        if not self.folder.is_dir():
            gone = self.folder if self.accepted.get("segments") else self.folder.parent
            if not gone.is_dir():
                raise FileNotFoundError(f"{gone} does not exist: the run directory has gone, or is not mounted")
            return []
        return sorted(self.folder.glob("*.jsonl"))

    def _read_until(self, cursor: Mapping[str, Any]) -> Signals:
        parts: list[Signals] = []
        segments = cursor.get("segments", {})
        for path in self._files():
            if path.name in segments:
                offset, line = segments[path.name]
                self._read_into(parts, path, offset)
                self._segments[path.name] = _Segment(offset, line)
        if cursor:
            self._time = cursor["time"]
            self._rows.pass_time(self._time)
        return Signals.concatenate([*parts, self._rows.drain()])

    def _read_into(self, parts: list[Signals], path: Path, stop: int | None) -> None:
        """Read one segment by itself: what cannot be read is set aside, and the others go on."""
        try:
            if not stat.S_ISREG(path.stat().st_mode):  # a pipe would be waited for, a folder cannot be read
                self.unreadable[path.name] = "is not a regular file"
                return
            parts += self._read_file(path, stop)
        except OSError as error:
            self.unreadable[path.name] = error.strerror or str(error)

    def _read_file(self, path: Path, stop: int | None) -> Iterator[Signals]:
        """Read whole lines from where the segment stands to `stop` (None: its end), as blocks of rows."""
        segment = self._segments.setdefault(path.name, _Segment())
        self._rows.file = f"telemetry/{path.name}"
        size = path.stat().st_size if stop is None else stop
        if size < segment.offset:
            self._rows.reject(segment.line, MalformedError("the segment has shrunk", "Append only, never rewrite"))
            segment.offset = size
        if size == segment.offset:
            return
        with path.open("rb") as file:
            file.seek(segment.offset)
            yield from self._read_lines(file, segment, size)

    def _read_lines(self, file: BinaryIO, segment: _Segment, stop: int) -> Iterator[Signals]:
        while segment.offset < stop:
            chunk = file.read(min(CHUNK_BYTES, stop - segment.offset))
            whole = chunk.rfind(b"\n") + 1
            if not whole and len(chunk) <= LINE_LIMIT:
                return  # a torn last line waits for its end
            whole = whole or len(chunk)
            for line in chunk[:whole].splitlines():
                if line.strip():
                    self._lines += 1
                    self._rows.read_line(line, segment.line)
                segment.line += 1
                if len(self._rows) >= CHUNK_ROWS:
                    yield self._rows.drain()
            segment.offset += whole
            file.seek(segment.offset)
