"""Directives and receipts as files: requests written once and whole, receipts read and never trusted.

A request is named after its execution and its content follows from the stored execution alone, so writing it again
after a crash is the same file.
"""

import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Generic, TypeVar

import orjson
from pydantic import ValidationError

from runwatch.monitor.read.records import Problem
from runwatch.rules import Directive, Execution, ExecutionState, Receipt

RECEIPT_BYTES = 1 << 20
Document = TypeVar("Document", Directive, Receipt)


def write_json(path: Path, document: object, *, durable: bool = True) -> None:
    """Put a JSON document in place of `path`: all of it or nothing, also through a power cut if `durable`.

    The temporary file has one name, so that what a killed daemon left is overwritten.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as file:
        file.write(orjson.dumps(document, option=orjson.OPT_INDENT_2))
        file.flush()
        if durable:
            os.fsync(file.fileno())
    temporary.replace(path)
    if durable:
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def write_requests(run_dir: Path, executions: Iterable[Execution]) -> list[Directive]:
    """Write the request of every execution that waits for the trainer and has none yet; return the new ones.

    Raises:
        OSError: the folder cannot be written; the next tick tries again.
    """
    written: list[Directive] = []
    for execution in executions:
        path = run_dir / "control" / "requests" / f"{execution.id}.json"
        if execution.state is ExecutionState.REQUESTED and execution.actions and not path.exists():
            write_json(path, execution.directive.document())
            written.append(execution.directive)
    return written


class Folder(Generic[Document]):
    """The documents of one folder of `control/` by execution id; each file is read once, and again when it changes."""

    def __init__(self, folder: Path, kind: type[Document]) -> None:
        self._folder, self._kind = folder, kind
        self._seen: dict[str, tuple[int, int]] = {}
        self.found: dict[str, Document] = {}
        self.problems: dict[str, Problem] = {}

    @property
    def names(self) -> frozenset[str]:
        """The names of all files, the wrong ones with them, without their ending."""
        return frozenset(name.removesuffix(".json") for name in self._seen)

    def read(self) -> dict[str, Document]:
        """Every valid document; what is wrong with the others is in `problems` by file name."""
        for path in sorted(self._folder.glob("*.json")):
            try:
                facts = path.stat()
                stamp = (facts.st_mtime_ns, facts.st_size)
                if self._seen.get(path.name) != stamp:
                    self._read_one(path, facts)
                    self._seen[path.name] = stamp  # only now: what could not be read is tried again
            except OSError as error:
                place = f"control/{self._folder.name}/{path.name}"
                why = error.strerror or str(error)
                self.problems[path.name] = Problem(place, 0, why, "Make it readable; it is tried again until then")
        return self.found

    def _read_one(self, path: Path, facts: os.stat_result) -> None:
        place = f"control/{self._folder.name}/{path.name}"
        remedy = "Write it as docs/run-directory.md says, to a temporary file that is renamed; it is ignored until then"
        try:
            if not stat.S_ISREG(facts.st_mode):  # a pipe would be waited for
                raise ValueError("it is not a regular file")  # noqa: TRY301 - told like every other mistake
            if facts.st_size > RECEIPT_BYTES:
                raise ValueError(f"it has {facts.st_size:,} bytes")  # noqa: TRY301 - told like every other mistake
            document = self._kind.model_validate_json(path.read_bytes())
            if document.id != path.stem:
                raise ValueError(f"its id is {document.id!r}")  # noqa: TRY301 - told like every other mistake
        except (ValidationError, ValueError) as error:
            self.problems[path.name] = Problem(place, 0, _first_line(error), remedy)
            return
        self.problems.pop(path.name, None)
        self.found[document.id] = document


def receipts_of(run_dir: Path) -> Folder[Receipt]:
    """What the trainer did with each directive."""
    return Folder(run_dir / "control" / "receipts", Receipt)


def requests_of(run_dir: Path) -> Folder[Directive]:
    """The directives that were given, by the daemon and by others."""
    return Folder(run_dir / "control" / "requests", Directive)


def _first_line(error: ValueError) -> str:
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc'])) or 'it'}: {first['msg']}"
    return str(error).partition("\n")[0]
