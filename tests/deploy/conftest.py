"""Real Prometheus and Alertmanager on loopback, with the configuration of `deploy/` and short intervals."""

import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

import http_collector
import httpx
import pytest

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """One real server process: start, wait until ready, stop by its own process."""

    def __init__(self, command: list[str], url: str, log: Path) -> None:
        self.command, self.url, self.log = command, url, log
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> Self:
        """Start and wait until it says that it is ready."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self.command, stdout=log, stderr=log)
        deadline = time.monotonic() + 30
        while not self._ready():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)
        return self

    def stop(self) -> None:
        """End it as a service manager does, so that it writes its state."""
        if self.process is not None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(20)
            self.process = None

    def _ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/-/ready").is_success
        except httpx.TransportError:
            return False


@pytest.fixture
def eventually() -> Callable[..., None]:
    """Poll until a condition holds; fail after a generous deadline."""

    def wait(condition: Callable[[], object], seconds: float = 30.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "the condition did not come true in time"
            time.sleep(0.05)

    return wait


def tool(name: str) -> str:
    """The path of a program; the test is skipped where its Debian package is missing."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is missing: apt-get install prometheus prometheus-alertmanager")
    return path


@pytest.fixture(scope="session")
def find_tool() -> Callable[[str], str]:
    """`tool`, for the test modules."""
    return tool


@pytest.fixture
def collector() -> Iterator[object]:
    """The receiver of all webhooks."""
    with http_collector.Collector() as server:
        yield server


@pytest.fixture
def alertmanager(tmp_path: Path, collector: object) -> Iterator[Server]:
    """Alertmanager with `deploy/alertmanager/alertmanager.yml`, its receivers led to `collector`."""
    text = (DEPLOY / "alertmanager" / "alertmanager.yml").read_text()
    text = text.replace("http://localhost:9095", collector.url)  # type: ignore[attr-defined]
    config = tmp_path / "alertmanager.yml"
    config.write_text(
        re.sub(r"group_interval: \w+", "group_interval: 1s", text).replace("group_wait: 10s", "group_wait: 1s")
    )
    port = free_port()
    binary = tool("prometheus-alertmanager")
    command = [
        binary,
        f"--config.file={config}",
        f"--storage.path={tmp_path / 'alertmanager'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--cluster.listen-address=",
    ]
    server = Server(command, f"http://127.0.0.1:{port}", tmp_path / "alertmanager.log")
    yield server.start()
    server.stop()


@pytest.fixture(scope="module")
def prometheus_at() -> Iterator[Callable[..., Server]]:
    """Starts Prometheus with a configuration file, beside which it keeps its data; stopped at the end of the module."""
    started: list[Server] = []

    def start(config: Path, *options: str) -> Server:
        port = free_port()
        command = [
            tool("prometheus"),
            f"--config.file={config}",
            f"--storage.tsdb.path={config.parent / 'tsdb'}",
            "--rules.alert.resend-delay=1s",  # its first send may come before it knows Alertmanager
            f"--web.listen-address=127.0.0.1:{port}",
            *options,
        ]
        started.append(Server(command, f"http://127.0.0.1:{port}", config.with_suffix(".log")).start())
        return started[-1]

    yield start
    for server in started:
        server.stop()


@pytest.fixture
def prometheus(prometheus_at: Callable[..., Server]) -> Iterator[Callable[[Path], Server]]:
    """Starts Prometheus with a configuration file; stopped at the end of the test."""
    started: list[Server] = []

    def start(config: Path) -> Server:
        started.append(prometheus_at(config))
        return started[-1]

    yield start
    for server in started:
        server.stop()
