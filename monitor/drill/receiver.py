"""The drill's own webhook receiver on loopback: the only place to which the alerts of a drill go."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self


class Receiver:
    """Keeps the subject of every message by path; use as a context manager."""

    def __init__(self) -> None:
        self._told: dict[str, set[str]] = {}
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"keep": self._keep}))
        self._http.daemon_threads = True

    def __enter__(self) -> Self:
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()

    def url(self, drill: str) -> str:
        """Where the daemon of `drill` is to send its messages."""
        return f"http://127.0.0.1:{self._http.server_port}/{drill}"

    def told(self, drill: str) -> frozenset[str]:
        """Incidents and executions of which `drill` has told so far."""
        return frozenset(self._told.get(drill, ()))

    def _keep(self, path: str, message: dict[str, Any]) -> None:
        self._told.setdefault(path.strip("/"), set()).add(str(message["subject"]))


class _Handler(BaseHTTPRequestHandler):
    keep: Any

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name is the standard library's
        """Say nothing."""

    def do_POST(self) -> None:
        """Take one message."""
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.keep(self.path, json.loads(body))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()
