"""A real PostgreSQL server of our own on a unix socket, run by an unprivileged user: it refuses to start as root."""

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any, Self

import psycopg

PATIENCE = 90.0


def binaries() -> Path | None:
    """The folder with `initdb` and `postgres`; Debian keeps it off the PATH."""
    found = shutil.which("initdb")
    folders = [Path(found).parent] if found else sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    return next((folder for folder in reversed(folders) if (folder / "initdb").exists()), None)


def _unprivileged() -> dict[str, Any]:
    """Whom to run the server as: whoever runs the tests unless that is root."""
    if os.geteuid() != 0:
        return {}
    known = {entry.pw_name for entry in pwd.getpwall()}
    user = pwd.getpwnam("postgres" if "postgres" in known else "nobody")
    return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}


class PostgresServer:
    """The server; use as a context manager. It can be stopped and started again, frozen and thawed."""

    def __init__(self, folder: Path) -> None:
        self._binaries = folder
        self._as = _unprivileged()
        self.folder = Path(tempfile.mkdtemp(prefix="runwatch-postgres-"))
        if self._as:
            os.chown(self.folder, self._as["user"], self._as["group"])
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        command = [
            self._binaries / "initdb",
            "-D",
            self.folder / "data",
            "-U",
            "runwatch",
            "--auth=trust",
            "-E",
            "UTF8",
        ]
        ran = subprocess.run([*command, "--no-sync"], capture_output=True, check=False, cwd=self.folder, **self._as)
        assert ran.returncode == 0, ran.stderr.decode()
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop(signal.SIGQUIT)  # without a last checkpoint: nobody will read it again
        shutil.rmtree(self.folder)

    def start(self) -> Self:
        """Start, and wait until it answers."""
        command = [
            self._binaries / "postgres",
            "-D",
            self.folder / "data",
            "-k",
            self.folder,
            "-c",
            "listen_addresses=",
        ]
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen([*command, "-c", "fsync=off"], stdout=log, stderr=log, **self._as)
        until = time.monotonic() + PATIENCE
        while not self._answers():
            assert self.process.poll() is None, (self.folder / "server.log").read_text()
            assert time.monotonic() < until, (self.folder / "server.log").read_text()
            time.sleep(0.05)
        return self

    def _answers(self) -> bool:
        try:
            self._connect().close()
        except psycopg.OperationalError:
            return False
        return True

    def _connect(self) -> psycopg.Connection[Any]:
        return psycopg.connect(host=str(self.folder), user="runwatch", dbname="postgres", autocommit=True)

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """End it at once, and with it every connection."""
        if self.process is not None:
            self.process.send_signal(how)
            self.process.wait(PATIENCE)
            self.process = None

    def database(self, options: str = "") -> str:
        """The URL of a new, empty database."""
        name = f"test_{uuid.uuid4().hex}"
        with contextlib.closing(self._connect()) as connection:
            connection.execute(f"CREATE DATABASE {name}")
        return f"postgresql://runwatch@/{name}?host={self.folder}{options}"
