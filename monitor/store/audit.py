"""The audit log: append-only, each row sealed with a hash over itself and the row before.

    hash = SHA-256(previous hash, newline, JSON of [seq, time, kind, payload])

Whoever changes, removes or inserts a row has to change every hash after it. The log lives in the database and is
mirrored, row for row, as `RUN_DIR/.runwatch/audit.jsonl`.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GENESIS = "0" * 64
"""What the first row has as its previous hash."""


@dataclass(frozen=True)
class AuditRow:
    """One row. `payload` is JSON text, kept as it was hashed; `time` in Unix seconds of the daemon."""

    seq: int
    time: float
    kind: str
    payload: str
    previous: str
    hash: str

    @property
    def sentence(self) -> str:
        """What happened, for people."""
        return str(json.loads(self.payload).get("sentence", self.kind))

    def columns(self) -> dict[str, Any]:
        """Its columns in the database."""
        return dict(self.__dict__)

    def line(self) -> str:
        """Its line in the mirror."""
        return json.dumps({**self.__dict__, "payload": json.loads(self.payload)}, sort_keys=True) + "\n"

    @staticmethod
    def of_line(line: str) -> "AuditRow":
        """Read a line of the mirror.

        Raises:
            ValueError: it is not such a line.
        """
        try:
            fields: dict[str, Any] = json.loads(line)
            fields["payload"] = _canonical(fields["payload"])
            return AuditRow(**fields)
        except (TypeError, KeyError) as error:
            raise ValueError(f"not a row of an audit log: {error}") from error


def _canonical(payload: Any) -> str:
    return json.dumps(payload, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def _hash(seq: int, time: float, kind: str, payload: str, previous: str) -> str:
    sealed = f"{previous}\n{json.dumps([seq, time, kind, payload], ensure_ascii=False)}"
    return hashlib.sha256(sealed.encode()).hexdigest()


def chained(seq: int, time: float, kind: str, payload: Mapping[str, Any], previous: str) -> AuditRow:
    """The row that comes after one with the hash `previous`."""
    text = _canonical(payload)
    return AuditRow(seq, time, kind, text, previous, _hash(seq, time, kind, text, previous))


def broken(rows: Iterable[AuditRow]) -> str | None:
    """What is wrong with a chain, or None."""
    expected, previous = 1, GENESIS
    for row in rows:
        if row.seq != expected:
            return f"row {expected} is missing: the next one is row {row.seq}"
        if row.previous != previous:
            return f"row {row.seq} does not follow row {row.seq - 1}: its previous hash is not that row's hash"
        if row.hash != _hash(row.seq, row.time, row.kind, row.payload, row.previous):
            return f"row {row.seq} ({row.kind}) was changed: its hash does not match"
        expected, previous = row.seq + 1, row.hash
    return None


def read_mirror(path: Path) -> list[AuditRow]:
    """Every row of the mirror; a torn last line is left out.

    Raises:
        ValueError: a line is no row; the text names it.
    """
    if not path.exists():
        return []
    rows: list[AuditRow] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(keepends=True), 1):
        if not line.endswith("\n"):
            break
        if not line.strip():
            continue
        try:
            rows.append(AuditRow.of_line(line))
        except ValueError as error:
            raise ValueError(f"{path}:{number}: {error}") from error
    return rows


def mirrored(path: Path) -> int:
    """The `seq` of the mirror's last whole row; what a crash tore off behind it is cut away.

    Raises:
        ValueError: that line is no row.
    """
    if not path.exists():
        return 0
    with path.open("rb+") as file:
        text = file.read()
        whole = text.rfind(b"\n") + 1
        file.truncate(whole)
    lines = [line for line in text[:whole].splitlines() if line.strip()]
    try:
        return int(json.loads(lines[-1])["seq"]) if lines else 0
    except (TypeError, KeyError) as error:
        raise ValueError(f"{path}: the last line is no row of an audit log") from error


def set_aside(path: Path) -> Path:
    """Rename a mirror that cannot be read, so that it is written anew from the database; where it is now."""
    number = len(list(path.parent.glob("damaged-audit-*.jsonl"))) + 1
    return path.rename(path.with_name(f"damaged-audit-{number:04d}.jsonl"))


def append(path: Path, rows: Iterable[AuditRow]) -> None:
    """Add rows to the mirror and wait until they are on disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(row.line() for row in rows)
        file.flush()
        os.fsync(file.fileno())
