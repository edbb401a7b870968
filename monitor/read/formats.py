"""Readers of other people's logs: each yields (line or record number, flat record) under the names it finds.

Readers of growing files remember where they were: `read()` yields what is new, and a torn tail waits for its end.
"""

import csv
import gzip
import importlib
import json
import re
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import orjson

from runwatch.monitor.read.records import LINE_LIMIT, MalformedError, Problem, parse

Record = tuple[int, dict[str, Any]]


class SourceError(ValueError):
    """A source that cannot be read at all; the text names the place and the remedy."""


class Reader(Protocol):
    """What a source is read with. `read` yields the records since the last call; `end` says that no more will come."""

    problems: list[Problem]

    def read(self, *, end: bool) -> Iterator[Record]:
        """The new records."""
        ...


class Lines:
    """The complete lines of a growing file since the last call, numbered from 1; `.gz` is unpacked."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._number = 0
        self._rest = b""

    def read(self, *, end: bool) -> Iterator[tuple[int, bytes]]:
        """New lines without their ends; with `end` the last one may lack its own.

        A line above `LINE_LIMIT` comes cut to a little more than that, so that it can be told and costs no memory.
        """
        with gzip.open(self._path) if self._path.suffix == ".gz" else self._path.open("rb") as file:
            file.seek(self._offset)
            while block := file.read(1 << 20):
                self._offset += len(block)
                *whole, rest = (self._rest + block).split(b"\n")
                self._rest = rest[: LINE_LIMIT + 1]
                for line in whole:
                    self._number += 1
                    yield self._number, line.rstrip(b"\r")
        if end and self._rest:
            self._number += 1
            yield self._number, self._rest.rstrip(b"\r")
            self._rest = b""


class JsonLines:
    """One object a line; nested objects are flattened with `/`."""

    def __init__(self, path: Path) -> None:
        self.problems: list[Problem] = []
        self._path = path
        self._lines = Lines(path)

    def read(self, *, end: bool) -> Iterator[Record]:
        """The new objects."""
        for number, line in self._lines.read(end=end):
            if not line.strip():
                continue
            try:
                yield number, flatten(parse(line))
            except MalformedError as error:
                self.problems.append(Problem(str(self._path), number, error.reason, f"{error.remedy}; it is skipped"))


class Table:
    """CSV with a header line; an empty cell is a missing value."""

    def __init__(self, path: Path) -> None:
        self.problems: list[Problem] = []
        self._path = path
        self._lines = Lines(path)
        self._header: list[str] = []

    def read(self, *, end: bool) -> Iterator[Record]:
        """The new rows."""
        for number, line in self._lines.read(end=end):
            cells = self._cells(number, line)
            if not self._header:
                self._header = [name.strip() for name in cells]
            elif len(cells) == len(self._header):
                pairs = zip(self._header, cells, strict=True)
                yield number, {name: _number(cell) for name, cell in pairs if cell != ""}
            elif cells:
                reason = f"{len(cells)} cells under {len(self._header)} columns"
                self.problems.append(Problem(str(self._path), number, reason, "The row is skipped; fix or drop it"))

    def _cells(self, number: int, line: bytes) -> list[str]:
        try:
            return next(csv.reader([line.decode("utf-8-sig")]), [])
        except (csv.Error, UnicodeDecodeError) as error:
            problem = Problem(str(self._path), number, f"not CSV ({error})", "The row is skipped; write UTF-8")
            self.problems.append(problem)
            return []


class MegatronLog:
    """The text log of Megatron-LM, Megatron-DeepSpeed and their kin: ` iteration 10/ 100 | name: value | ...`."""

    ITERATION = re.compile(r"\biteration\s+(\d+)\s*/\s*\d+\s*\|(.*)")
    VALIDATION = re.compile(r"validation loss at iteration\s+(\d+)\b.*?lm loss value:\s*(\S+)")
    STAMP = re.compile(r"\[?(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:\.\d+)?)\]?")

    def __init__(self, path: Path) -> None:
        self.problems: list[Problem] = []
        self._lines = Lines(path)

    def read(self, *, end: bool) -> Iterator[Record]:
        """The records of new lines; every other line is the program's talk."""
        for number, raw in self._lines.read(end=end):
            line = raw.decode("utf-8", "replace")
            if found := self.ITERATION.search(line):
                yield number, {"step": int(found[1])} | self._clock(line) | self._fields(found[2])
            elif found := self.VALIDATION.search(line):
                yield number, {"step": int(found[1]), "phase": "eval", "eval/loss": _number(found[2])}

    def _clock(self, line: str) -> dict[str, Any]:
        """The line's own stamp, read as UTC: only differences are judged."""
        found = self.STAMP.search(line)
        return {"time": datetime.fromisoformat(found[1]).replace(tzinfo=UTC).timestamp()} if found else {}

    def _fields(self, text: str) -> dict[str, Any]:
        pairs = (field.rpartition(":") for field in text.split("|") if ":" in field)
        return {name.strip(): _number(value.strip()) for name, _, value in pairs}


class TrainerState:
    """Hugging Face `trainer_state.json`. The closing summary (with `train_runtime`) is no step and is left out."""

    def __init__(self, path: Path) -> None:
        self.problems: list[Problem] = []
        self._path = path

    def read(self, *, end: bool) -> Iterator[Record]:
        """All entries of `log_history`.

        Raises:
            SourceError: the file is not such a state.
        """
        del end
        try:
            history = json.loads(self._path.read_bytes())["log_history"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise SourceError(f"{self._path}: no trainer state with a log_history ({error!r}).") from error
        for number, entry in enumerate(history, start=1):
            if isinstance(entry, dict) and "train_runtime" not in entry:
                yield number, flatten(entry)


class WandbFile:
    """W&B's offline `.wandb` file (0.28 to 0.31), finished or still written to.

    A LevelDB-style log of protobuf records: 7 bytes of header (`:W&B`, magic 0xBEE1, version), then blocks of 32 KiB
    with chunks of crc32 (4 bytes), length (2), type (1: whole, 2: first, 3: middle, 4: last) and data.
    """

    BLOCK = 32768
    HEADER = struct.Struct("<4sHB")
    CHUNK = struct.Struct("<IHB")

    def __init__(self, path: Path) -> None:
        self.problems: list[Problem] = []
        self._path = path
        self._offset = self.HEADER.size
        self._number = 0
        self._parts: bytes | None = None

    def read(self, *, end: bool) -> Iterator[Record]:
        """The new history records.

        Raises:
            SourceError: it is no W&B file, or wandb is not installed.
        """
        del end
        record_type = _extra("wandb.proto.wandb_internal_pb2", "wandb").Record
        for data in self._records():
            self._number += 1
            record = record_type.FromString(data)
            if record.WhichOneof("record_type") == "history":
                yield self._number, self._history(record.history)

    def _history(self, history: Any) -> dict[str, Any]:
        items = {"/".join(item.nested_key) or item.key: _json_value(item.value_json) for item in history.item}
        return flatten({"_step": history.step.num} | items)

    def _records(self) -> Iterator[bytes]:
        with self._path.open("rb") as file:
            head = file.read(self.HEADER.size)
            if len(head) == self.HEADER.size and self.HEADER.unpack(head)[:2] != (b":W&B", 0xBEE1):
                raise SourceError(f"{self._path}: not a W&B file (its first bytes are {head!r}).")
            file.seek(self._offset)
            while (chunk := self._chunk(file)) is not None:
                kind, data = chunk
                if kind in (1, 2):
                    self._parts = data
                elif kind in (3, 4) and self._parts is not None:
                    self._parts += data
                if kind in (1, 4) and self._parts is not None:
                    yield self._parts

    def _chunk(self, file: BinaryIO) -> tuple[int, bytes] | None:
        """The next chunk (kind 0 for the padding or the loss of a block's rest); None where the file ends for now."""
        left = self.BLOCK - self._offset % self.BLOCK
        if left < self.CHUNK.size:
            return self._skip(file, left)
        head = file.read(self.CHUNK.size)
        if len(head) < self.CHUNK.size:
            return None
        crc, length, kind = self.CHUNK.unpack(head)
        data = file.read(min(length, left - self.CHUNK.size))
        if len(data) < length <= left - self.CHUNK.size:
            return None
        if zlib.crc32(data, zlib.crc32(bytes([kind]))) != crc:
            reason = f"the checksum of the record at byte {self._offset} is wrong"
            self.problems.append(Problem(str(self._path), 0, reason, "The rest of its 32 KiB block is skipped"))
            self._parts = None
            return self._skip(file, left)
        self._offset += self.CHUNK.size + length
        return kind, data

    def _skip(self, file: BinaryIO, length: int) -> tuple[int, bytes]:
        self._offset += length
        file.seek(self._offset)
        return 0, b""


def _extra(module: str, extra: str) -> Any:
    """A module of an optional package.

    Raises:
        SourceError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise SourceError(f"To read this source install the extra: pip install 'runwatch[{extra}]'.") from error


class EventFiles:
    """TensorBoard event files of one directory; each file is sorted by step, since tags arrive in their own order."""

    LENGTH = struct.Struct("<QI")

    def __init__(self, paths: Iterable[Path]) -> None:
        self.problems: list[Problem] = []
        self._paths = sorted(paths, key=lambda path: path.name)

    def read(self, *, end: bool) -> Iterator[Record]:
        """All scalars, one record per step and file.

        Raises:
            SourceError: tensorboard is not installed.
        """
        del end
        event_type = _extra("tensorboard.compat.proto.event_pb2", "tensorboard").Event
        number = 0
        for path in self._paths:
            events = sorted((event_type.FromString(data) for data in self._records(path)), key=lambda event: event.step)
            for step, group in groupby((event for event in events if event.summary.value), lambda event: event.step):
                number += 1
                yield number, {"step": step} | _scalars(list(group))

    def _records(self, path: Path) -> Iterator[bytes]:
        """The TFRecord frames: length, its checksum, data, its checksum; a torn last one is left."""
        with path.open("rb") as file:
            while len(head := file.read(self.LENGTH.size)) == self.LENGTH.size:
                length = self.LENGTH.unpack(head)[0]
                data = file.read(length + 4) if length < 1 << 31 else b""
                if len(data) < length + 4:
                    self.problems.append(Problem(str(path), 0, "the last event is torn", "It is skipped"))
                    return
                yield data[:-4]


def _scalars(events: list[Any]) -> dict[str, Any]:
    record: dict[str, Any] = {"time": max(event.wall_time for event in events)}
    for value in (value for event in events for value in event.summary.value):
        number = value.simple_value if value.HasField("simple_value") else _tensor_scalar(value.tensor)
        if number is not None:
            record[value.tag] = number
    return record


def _tensor_scalar(tensor: Any) -> float | None:
    for values in (tensor.float_val, tensor.double_val, tensor.int_val, tensor.int64_val):
        if len(values) == 1:
            return float(values[0])
    if len(tensor.tensor_content) == 4:
        return struct.unpack("<f", tensor.tensor_content)[0]
    return None


def flatten(record: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested objects under `/`-joined names; nulls are missing values and go."""
    flat: dict[str, Any] = {}
    for key, value in record.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}/")
        elif value is not None:
            flat[prefix + key] = value
    return flat


def _json_value(text: str) -> Any:
    """A JSON value; bare NaN and Infinity are taken, and what is no JSON is a missing value."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}.get(text)


def _number(text: str) -> float | int | str:
    """A cell as a number where it is one."""
    if text.isdecimal() and len(text) < 19:
        return int(text)
    try:
        return float(text)
    except ValueError:
        return text
