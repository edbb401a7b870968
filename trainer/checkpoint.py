"""Checkpoints that are finite, complete and atomic, or not there.

A checkpoint is a folder `<attempt>-step-<step>` with `arrays.npz` and `manifest.json` (hash of the arrays, and what the loop needs to
go on). It is written under a temporary name, read back, and renamed; so a kill at any moment leaves the old ones as they were. Names
sort in the order in which they were written, which is not the order of steps after a rewind.
"""

import hashlib
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

Arrays = Sequence[NDArray[Any]]


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or restored; the message says which and why."""


@dataclass(frozen=True)
class Found:
    """A complete checkpoint on disk."""

    path: Path
    step: int
    meta: dict[str, Any]


def save(folder: Path, attempt: str, step: int, arrays: Arrays, meta: dict[str, Any]) -> Path:
    """Write a checkpoint, or leave nothing.

    Raises:
        CheckpointError: a value is not finite, or the disk refused.
    """
    bad = [n for n, array in enumerate(arrays) if array.dtype.kind == "f" and not np.isfinite(array).all()]
    if bad:
        raise CheckpointError(f"step {step}: {len(bad)} of {len(arrays)} arrays are not finite; nothing was written")
    final, temporary = folder / f"{attempt}-step-{step:09d}", folder / f".tmp-{attempt}-{step}"
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        np.savez(temporary / "arrays.npz", *arrays)
        digest = _sync(temporary / "arrays.npz")
        manifest = orjson.dumps({"step": step, "sha256": digest, "meta": meta}, option=orjson.OPT_INDENT_2)
        (temporary / "manifest.json").write_bytes(manifest)
        _sync(temporary / "manifest.json")
        shutil.rmtree(final, ignore_errors=True)
        temporary.rename(final)
        _sync_folder(folder)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(f"step {step}: cannot write {final}: {error.strerror or error}") from error
    return final


def is_complete(path: Path) -> bool:
    """Whether the arrays on disk are those that were written."""
    try:
        manifest = orjson.loads((path / "manifest.json").read_bytes())
        return hashlib.sha256((path / "arrays.npz").read_bytes()).hexdigest() == manifest["sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        return False


def found(folder: Path) -> list[Found]:
    """Checkpoints with a readable manifest, in the order in which they were written."""
    named = [(path, _manifest(path)) for path in sorted(folder.glob("a*-step-*"))]
    return [Found(path, manifest["step"], manifest["meta"]) for path, manifest in named if manifest]


def load(path: Path) -> list[NDArray[Any]]:
    """The arrays of a checkpoint, in the order in which they were saved.

    Raises:
        CheckpointError: they are torn or altered.
    """
    if not is_complete(path):
        raise CheckpointError(f"{path} is torn or altered; remove the folder and resume from an earlier one")
    with np.load(path / "arrays.npz") as file:
        return [file[f"arr_{n}"] for n in range(len(file.files))]


def prune(folder: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints."""
    for old in found(folder)[: -max(1, keep)]:
        shutil.rmtree(old.path, ignore_errors=True)


def _manifest(path: Path) -> dict[str, Any] | None:
    try:
        manifest = orjson.loads((path / "manifest.json").read_bytes())
    except (OSError, ValueError):
        return None
    whole = (
        isinstance(manifest, dict) and isinstance(manifest.get("step"), int) and isinstance(manifest.get("meta"), dict)
    )
    return manifest if whole else None


def _sync(path: Path) -> str:
    """Push a file to the disk; returns its sha256."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
