"""A small W&B: the calls that an online run makes, on loopback; alerts are kept in `alerts`."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

API_KEY = "0123456789" * 4


class WandbServer:
    """The server; use as a context manager. `operations` are the GraphQL operations in order of arrival."""

    def __init__(self) -> None:
        self.alerts: list[dict[str, Any]] = []
        self.operations: list[str] = []
        self.bodies: list[str] = []
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"wandb": self}))
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()

    def answer(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        """The data of one GraphQL operation."""
        self.bodies.append(query[:200])
        for name, data in self._answers(variables).items():
            if name.lower() in query.lower():
                self.operations.append(name)
                return data
        self.operations.append(query[:80])
        return {}

    def _answers(self, variables: dict[str, Any]) -> dict[str, Any]:
        project = {"id": "p1", "name": "runs", "entity": {"id": "e1", "name": "lab"}}
        run = {
            "id": "r1",
            "name": variables.get("name") or "live1",
            "displayName": "live",
            "project": project,
            "historyLineCount": 0,
            "eventsLineCount": 0,
            "logLineCount": 0,
            "config": "{}",
            "tags": [],
            "summaryMetrics": "{}",
        }
        return {
            "notifyScriptableRunAlert": {"notifyScriptableRunAlert": {"success": True}},
            "upsertBucket": {"upsertBucket": {"bucket": run, "inserted": False}},
            "createRunFiles": {"createRunFiles": {"runID": "r1", "uploadHeaders": [], "files": []}},
            "viewer": {
                "viewer": {"id": "u1", "entity": "lab", "username": "ada", "flags": "{}", "teams": {"edges": []}}
            },
        }


class _Handler(BaseHTTPRequestHandler):
    wandb: WandbServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  the name is the standard library's
        """Say nothing."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        answer: dict[str, Any] = {}
        if self.path == "/graphql":
            asked = json.loads(body)
            if "notifyScriptableRunAlert" in asked["query"]:
                self.wandb.alerts.append(asked["variables"])
            answer = {"data": self.wandb.answer(asked["query"], asked.get("variables") or {})}
        self._reply(answer)

    def do_GET(self) -> None:
        self._reply({})

    do_PUT = do_GET  # noqa: N815  the name is the standard library's

    def _reply(self, answer: dict[str, Any]) -> None:
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
