"""An HTTP endpoint on loopback that keeps every request; `answers` are given first come, then 200."""

import threading
import time
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self


@dataclass(frozen=True)
class Request:
    """One request as it came; `time` is monotonic seconds."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    time: float


class Collector:
    """The endpoint; use as a context manager. An answer is a status with headers; status 0 cuts the connection."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.answers: list[tuple[int, dict[str, str]]] = []
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"collector": self}))
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()


class _Handler(BaseHTTPRequestHandler):
    collector: Collector

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  the name is the standard library's
        """Say nothing."""

    def _keep(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        request = Request(self.command, self.path, dict(self.headers.items()), body, time.monotonic())
        self.collector.requests.append(request)
        status, headers = self.collector.answers.pop(0) if self.collector.answers else (200, {})
        if status == 0:
            return
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_POST = _keep  # noqa: N815  the names are the standard library's
