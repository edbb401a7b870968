"""A command that is run once, whatever becomes of the daemon that started it.

The daemon starts this file as a process of its own, which runs the command and writes down how it ended. Killed
meanwhile, the daemon finds that word when it is back: a command that has ended well is not run again, one that still runs is
waited for, and what one did that was cut off (the machine went down) is unknown, so a person is paged.
"""

import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OUTPUT_BYTES = 400
"""Of what a command prints, the end is kept."""
NOT_STARTED = 127
"""The exit code for a program that cannot be started, as shells give it."""


class StillRunsError(Exception):
    """The command was started before and has not ended."""


class CutOffError(Exception):
    """The command was started before and was cut off: what it did is not known."""


@dataclass(frozen=True)
class Ended:
    """How a command ended: its exit code (negative: the signal) and the end of what it printed."""

    code: int
    output: str


def run_once(
    state: Path, argv: Sequence[str], given: bytes, *, timeout: float, cwd: Path, env: Mapping[str, str]
) -> Ended:
    """Run a command with `given` on its standard input, unless `state` says that it has ended with 0 before.

    Args:
        state: The file in which the command's end is written down; its neighbours `.lock`, `.in` and
            `.out` belong to it.
        argv: Program and arguments; no shell.
        given: What the command reads.
        timeout: Seconds after which the command and its children are killed.
        cwd: Where it runs.
        env: Variables beside the daemon's own.

    Raises:
        StillRunsError: it was started before and still runs.
        CutOffError: it was started before and nobody saw it end.
        OSError: the files cannot be written.
    """
    state = state.resolve()
    state.parent.mkdir(parents=True, exist_ok=True)
    with state.with_suffix(".lock").open("ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StillRunsError from error
        before = _read(state)
        if before is not None and before.code == 0:
            return before
        source = state.with_suffix(".in")
        _write(source, given)
        with source.open("rb") as stdin:
            subprocess.run(  # noqa: S603 - our own module; the command is the run card's, a list, without a shell
                [sys.executable, "-P", "-m", __name__, str(state), str(timeout), *argv],
                stdin=stdin,
                pass_fds=(lock.fileno(),),  # held until the command has ended, also when the daemon is killed
                start_new_session=True,
                cwd=cwd,
                env={**os.environ, **env},
                check=False,
            )
    ended = _read(state)
    if ended is None:
        raise CutOffError
    return ended


def _read(state: Path) -> Ended | None:
    """How the command ended; None when it was never started."""
    try:
        fields: dict[str, Any] = json.loads(state.read_bytes())
    except FileNotFoundError:
        return None
    if fields["state"] != "ended":
        raise CutOffError
    return Ended(int(fields["code"]), str(fields["output"]))


def _write(path: Path, content: bytes) -> None:
    """Put the file in place whole, and wait until it is on disk."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _run(argv: Sequence[str], timeout: float, printed: Path) -> Ended:
    """The command with its output in a file: a pipe would end what it leaves running in the background."""
    try:
        with printed.open("wb") as output:
            process = subprocess.Popen(argv, stdout=output, stderr=output, start_new_session=True)  # noqa: S603 - a list, without a shell
    except (OSError, ValueError) as error:
        return Ended(NOT_STARTED, f"cannot start {argv[0]}: {error}")
    late = ""
    try:
        process.wait(timeout)
    except subprocess.TimeoutExpired:
        late = f"killed after {timeout:g} s; "
        os.killpg(process.pid, signal.SIGKILL)
    return Ended(process.wait(), late + _tail(printed))


def _tail(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - OUTPUT_BYTES))
        return " ".join(file.read(OUTPUT_BYTES).decode(errors="replace").split())


def main(arguments: Sequence[str]) -> None:
    """`STATE TIMEOUT ARGV...`: run ARGV and write into STATE how it ended."""
    state, timeout, argv = Path(arguments[0]), float(arguments[1]), arguments[2:]
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # whoever stops the daemon lets the command end; its timeout is short
    _write(state, json.dumps({"state": "running", "argv": argv}).encode())
    ended = _run(argv, timeout, state.with_suffix(".out"))
    _write(state, json.dumps({"state": "ended", "code": ended.code, "output": ended.output}).encode())


if __name__ == "__main__":
    main(sys.argv[1:])
