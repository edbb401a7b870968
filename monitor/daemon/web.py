"""What the daemon serves: metrics, health, the status document, its stream of changes, the status page, runbooks."""

import asyncio
import hmac
import socket
import threading
from collections.abc import AsyncIterator, Callable
from functools import partial
from html import escape
from importlib.resources import files

import orjson
import uvicorn
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from runwatch.monitor.act.approvals import DecisionError, decide
from runwatch.monitor.daemon.jobs import Daemon
from runwatch.monitor.daemon.metrics import Collector
from runwatch.monitor.daemon.receipts_http import ReceiptDesk
from runwatch.monitor.daemon.settings import address
from runwatch.monitor.show.explain import explanation

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
EVENT_SECONDS = 1.0
KEEP_ALIVE_EVENTS = 15
MAX_BODY_BYTES = 16_384
HEADERS = {"Content-Security-Policy": "frame-ancestors 'none'", "Cache-Control": "no-cache"}
"""Of the page: no other site may frame it, and an upgrade is seen at once."""


class DecisionBody(BaseModel):
    """What the page sends when someone decides on a plan."""

    model_config = ConfigDict(extra="forbid")

    approved: bool
    by: str = Field(min_length=1, max_length=100)
    reason: str = Field(min_length=1, max_length=2000)


def application(daemon: Daemon, ending: Callable[[], bool] = lambda: False) -> Starlette:
    """The web application of a daemon; streams end once `ending` says so."""
    collector = Collector(daemon.watch, daemon.counts)

    def metrics(_: Request) -> Response:
        return Response(collector.text(), media_type=METRICS_TYPE)

    def healthz(_: Request) -> Response:
        text = f"the last tick ended {daemon.age:.1f} s ago\n"
        return PlainTextResponse(text, status_code=200 if daemon.healthy else 503)

    def readyz(_: Request) -> Response:
        held = "".join(f"{condition['message']}\n" for condition in daemon.watch.conditions.listed())
        ready = daemon.ready and daemon.healthy
        return PlainTextResponse(f"{'ready' if ready else 'not ready'}\n{held}", status_code=200 if ready else 503)

    def status(_: Request) -> Response:
        if daemon.watch.status is None:
            return JSONResponse({"error": "the first tick has not ended yet"}, status_code=503)
        return Response(orjson.dumps(daemon.watch.status), media_type="application/json")

    def runbook(request: Request) -> Response:
        text = explanation(request.path_params["name"])
        body = f"<pre style='max-width:60em;margin:2em auto;white-space:pre-wrap'>{escape(text or 'unknown')}</pre>"
        return HTMLResponse(body, status_code=200 if text else 404)

    routes: list[BaseRoute] = [
        Route("/", _page),
        Route("/metrics", metrics),
        Route("/healthz", healthz),
        Route("/readyz", readyz),
        Route("/api/status", status),
        Route("/api/events", lambda _: StreamingResponse(_events(daemon, ending), media_type="text/event-stream")),
        Route("/api/plans/{id}/decision", partial(_decision, daemon), methods=["POST"]),
        Route("/api/receipts", ReceiptDesk(daemon.watch, daemon.config.receipts_token).receive, methods=["POST"]),
        Route("/runbooks/{name}", runbook),
    ]
    static = files("runwatch.monitor.show") / "static"
    if static.is_dir():
        routes.append(Mount("/static", StaticFiles(directory=str(static))))
    return Starlette(routes=routes)


def _page(_: Request) -> Response:
    page = files("runwatch.monitor.show") / "templates" / "status.html"
    if page.is_file():
        return HTMLResponse(page.read_text(encoding="utf-8"), headers=HEADERS)
    return HTMLResponse("<p>The run's status: <a href='api/status'>JSON</a>, <a href='metrics'>metrics</a></p>")


async def _decision(daemon: Daemon, request: Request) -> Response:
    """Store a person's decision on a plan.

    The token travels in the Authorization header, which no other site can make a browser send: no cookie, so nothing to forge.
    """
    token = daemon.config.approval_token
    if token is None:
        return _refused(
            403, "decisions over HTTP are disabled: set approval_token in runwatch.yaml, or use `runwatch plan approve`"
        )
    given = request.headers.get("authorization", "")
    if not hmac.compare_digest(given.encode(), f"Bearer {token.get_secret_value()}".encode()):
        return _refused(401, "the token is not the daemon's")
    raw = await request.body()
    try:
        body = DecisionBody.model_validate_json(raw if len(raw) <= MAX_BODY_BYTES else b"")
        chosen = partial(decide, approved=body.approved, by=body.by, reason=body.reason)
        sentence = await run_in_threadpool(chosen, daemon.watch.store, request.path_params["id"])
    except ValidationError:
        return _refused(422, "send a JSON object with approved (true or false), by and reason")
    except DecisionError as error:
        return _refused(409, str(error))
    return JSONResponse({"sentence": sentence})


def _refused(code: int, why: str) -> Response:
    return JSONResponse({"error": why}, status_code=code)


async def _events(daemon: Daemon, ending: Callable[[], bool]) -> AsyncIterator[str]:
    """Server-sent events: the whole document under the name `status` whenever it has changed."""
    seen, idle = 0, 0
    while not ending():
        status = daemon.watch.status
        if status is not None and status["version"] != seen:
            seen, idle = status["version"], 0
            yield f"event: status\nid: {seen}\ndata: {orjson.dumps(status).decode()}\n\n"
        elif idle >= KEEP_ALIVE_EVENTS:
            idle = 0
            yield ": still here\n\n"
        idle += 1
        await asyncio.sleep(EVENT_SECONDS)


class WebServer:
    """The application on its own thread; `port` is the one it got."""

    def __init__(self, daemon: Daemon, listen: str) -> None:
        host, port = address(listen)
        self._socket = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        web = application(daemon, lambda: self._server.should_exit)
        config = uvicorn.Config(web, log_level="warning", access_log=False, lifespan="off")
        config.timeout_graceful_shutdown = 2
        self._server = uvicorn.Server(config)
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), name="web", daemon=True)

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def close(self) -> None:
        """Stop answering."""
        self._server.should_exit = True
        self._thread.join(10)
        self._socket.close()
