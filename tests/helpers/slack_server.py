"""A small Slack: the Web API methods and the Socket Mode that runwatch uses, on loopback.

It refuses what Slack refuses (token, Block Kit limits, unknown messages) and does on demand what Slack does on bad
days: `server.faults["chat.postMessage"].append(Fault("429", 2))` spoils the next call of that method.
"""

import base64
import contextlib
import hashlib
import json
import socket
import struct
import threading
from collections import defaultdict
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, BinaryIO, Self
from urllib.parse import parse_qsl, urlsplit

BOT_TOKEN = "xoxb-test"
APP_TOKEN = "xapp-test"
CHANNEL = "C0RUNS"
TEXT, PING, PONG, CLOSE = 0x1, 0x9, 0xA, 0x8


@dataclass(frozen=True)
class Fault:
    """What goes wrong: 429, 500, html, hang, accept_then_hang or disconnect; `seconds` of Retry-After or of hanging."""

    kind: str
    seconds: float = 1.0


@dataclass
class Post:
    """One message in a channel. `edits` counts chat.update calls; `files` are uploaded bytes."""

    channel: str
    ts: str
    text: str
    blocks: list[dict[str, Any]]
    thread_ts: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    edits: int = 0
    files: list[bytes] = field(default_factory=list)

    def shown(self) -> str:
        """All text of its blocks."""
        return "\n".join(_texts(self.blocks))

    def buttons(self) -> list[dict[str, Any]]:
        """The buttons of its action blocks."""
        return [element for block in self.blocks if block["type"] == "actions" for element in block["elements"]]


class RefusedError(Exception):
    """Slack answers `ok: false` with this error."""


class SlackServer:
    """The server; use as a context manager. `posts` is what a reader of the channel would see."""

    def __init__(self, port: int = 0) -> None:
        self.posts: list[Post] = []
        self.ephemerals: list[dict[str, Any]] = []
        self.calls: list[str] = []
        self.acks: list[str] = []
        self.views: list[dict[str, Any]] = []
        self.triggers: set[str] = set()
        self.faults: dict[str, list[Fault]] = defaultdict(list)
        self.uploads: dict[str, tuple[int, bytes]] = {}
        self.sockets: list[socket.socket] = []
        self.connections = 0
        self.lock = threading.RLock()
        self._clock = 1_790_000_000
        self._closing = threading.Event()
        handler = type("Handler", (_Handler,), {"slack": self})
        self._http = ThreadingHTTPServer(("127.0.0.1", port), handler)
        self._http.daemon_threads = True
        self.port = self._http.server_port
        self.url = f"http://127.0.0.1:{self.port}/api/"

    def __enter__(self) -> Self:
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self.drop_sockets()
        self._http.shutdown()
        self._http.server_close()

    def roots(self) -> list[Post]:
        """The messages of the channel itself."""
        return [post for post in self.posts if post.thread_ts is None]

    def thread(self, root: Post) -> list[Post]:
        """The replies to `root`."""
        return [post for post in self.posts if post.thread_ts == root.ts]

    def press(self, user: str, action_id: str, value: str, *, envelope: str = "e1") -> None:
        """A person presses a button: the event goes to the newest open websocket."""
        payload = {
            "type": "block_actions",
            "user": {"id": user, "username": user.lower()},
            "channel": {"id": CHANNEL},
            "container": {"type": "message", "channel_id": CHANNEL},
            "trigger_id": f"trigger-{len(self.calls)}-{envelope}",
            "actions": [{"type": "button", "action_id": action_id, "value": value}],
        }
        self.triggers.add(payload["trigger_id"])
        self.push({"type": "interactive", "envelope_id": envelope, "payload": payload})

    def submit(self, user: str, view: dict[str, Any], reason: str | None = None, *, envelope: str = "s1") -> None:
        """A person sends the dialog `view`; what it shows then becomes the newest of `views`."""
        values = {} if reason is None else {"reason": {"reason": {"type": "plain_text_input", "value": reason}}}
        payload = {
            "type": "view_submission",
            "user": {"id": user, "username": user.lower()},
            "view": {**view, "state": {"values": values}},
        }
        event = {"type": "interactive", "envelope_id": envelope, "accepts_response_payload": True, "payload": payload}
        self.push(event)

    def push(self, event: dict[str, Any]) -> None:
        """Send one event to the newest open websocket."""
        _write_frame(self.sockets[-1], TEXT, json.dumps(event).encode())

    def drop_sockets(self) -> None:
        """Cut every websocket without a closing handshake."""
        with self.lock:
            for connection in self.sockets:
                with contextlib.suppress(OSError, ValueError):
                    connection.shutdown(socket.SHUT_RDWR)
            self.sockets.clear()

    def wait(self, seconds: float) -> None:
        """Hang, but not beyond the server's own end."""
        self._closing.wait(seconds)

    def call(self, method: str, token: str, data: dict[str, Any]) -> dict[str, Any]:
        """Answer one Web API call.

        Raises:
            RefusedError: with Slack's name of the error.
        """
        expected = APP_TOKEN if method == "apps.connections.open" else BOT_TOKEN
        if token != expected:
            raise RefusedError("invalid_auth")
        handler = getattr(self, "_" + method.replace(".", "_"), None)
        if handler is None:
            raise RefusedError("unknown_method")
        with self.lock:
            return handler(data)

    def _chat_postMessage(self, data: dict[str, Any]) -> dict[str, Any]:  # noqa: N802  Slack's own name of the method
        _check_message(data)
        thread_ts = data.get("thread_ts")
        if thread_ts is not None:
            self._find(CHANNEL, thread_ts, "thread_not_found")
        post = Post(CHANNEL, self._next_ts(), data["text"], data.get("blocks") or [], thread_ts)
        post.metadata = data.get("metadata") or {}
        self.posts.append(post)
        return {"channel": post.channel, "ts": post.ts}

    def _chat_update(self, data: dict[str, Any]) -> dict[str, Any]:
        _check_message(data)
        post = self._find(data["channel"], data["ts"], "message_not_found")
        post.text, post.blocks = data["text"], data.get("blocks") or []
        post.edits += 1
        return {"channel": post.channel, "ts": post.ts}

    def _chat_postEphemeral(self, data: dict[str, Any]) -> dict[str, Any]:  # noqa: N802  Slack's own name
        _check_message(data)
        self.ephemerals.append(data)
        return {"message_ts": self._next_ts()}

    def _views_open(self, data: dict[str, Any]) -> dict[str, Any]:
        if data["trigger_id"] not in self.triggers:
            raise RefusedError("invalid_trigger_id")
        self.triggers.remove(data["trigger_id"])
        self._show_view(json.loads(data["view"]) if isinstance(data["view"], str) else data["view"])
        return {"view": self.views[-1]}

    def acknowledged(self, ack: dict[str, Any]) -> None:
        """Take an acknowledgement; one with a view changes the dialog that was sent."""
        with self.lock:
            self.acks.append(ack["envelope_id"])
            if ack.get("payload"):
                self._show_view(ack["payload"]["view"])

    def _show_view(self, view: dict[str, Any]) -> None:
        if not _view_within(view):
            raise RefusedError("invalid_arguments")
        self.views.append(view)

    def _conversations_history(self, data: dict[str, Any]) -> dict[str, Any]:
        return self._found([post for post in self.posts if post.thread_ts is None], data)

    def _conversations_replies(self, data: dict[str, Any]) -> dict[str, Any]:
        return self._found([post for post in self.posts if data["ts"] in (post.ts, post.thread_ts)], data)

    def _found(self, posts: list[Post], data: dict[str, Any]) -> dict[str, Any]:
        detailed = data.get("include_all_metadata") in (True, "1", 1)
        newest = list(reversed(posts))[: int(data.get("limit", 100))]
        return {"messages": [{"ts": post.ts, **({"metadata": post.metadata} if detailed else {})} for post in newest]}

    def _files_getUploadURLExternal(self, data: dict[str, Any]) -> dict[str, Any]:  # noqa: N802  Slack's own name
        name = f"F{len(self.uploads)}"
        self.uploads[name] = (int(data["length"]), b"")
        return {"upload_url": f"http://127.0.0.1:{self.port}/upload/{name}", "file_id": name}

    def upload(self, name: str, body: bytes) -> bool:
        """Take the bytes of an announced file; false if they are not as many as announced."""
        length, _ = self.uploads[name]
        self.uploads[name] = (length, body)
        return len(body) == length

    def _files_completeUploadExternal(self, data: dict[str, Any]) -> dict[str, Any]:  # noqa: N802  Slack's own name
        files = json.loads(data["files"]) if isinstance(data["files"], str) else data["files"]
        root = self._find(data["channel_id"], data["thread_ts"], "thread_not_found")
        contents = [self.uploads[file["id"]][1] for file in files]
        if not all(contents):
            raise RefusedError("file_not_found")
        post = Post(root.channel, self._next_ts(), data.get("initial_comment") or "", [], root.ts, files=contents)
        self.posts.append(post)
        return {"files": files}

    def _apps_connections_open(self, _: dict[str, Any]) -> dict[str, Any]:
        return {"url": f"ws://127.0.0.1:{self.port}/link?ticket=1"}

    def _find(self, channel: str, ts: str, error: str) -> Post:
        for post in self.posts:
            if (post.channel, post.ts) == (channel, ts):
                return post
        raise RefusedError(error)

    def _next_ts(self) -> str:
        self._clock += 1
        return f"{self._clock}.000100"


class _Handler(BaseHTTPRequestHandler):
    slack: SlackServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  the name is the standard library's
        """Say nothing."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = urlsplit(self.path).path
        method = path.removeprefix("/api/") if path.startswith("/api/") else "upload"
        fault = self._fault(method)
        if fault is not None and fault.kind != "accept_then_hang":
            self._spoil(fault)
            return
        status, answer = self._upload(path, body) if method == "upload" else self._api(method, body)
        if fault is not None:
            self._spoil(fault)
        else:
            self._reply(status, answer)

    def _fault(self, method: str) -> Fault | None:
        with self.slack.lock:
            self.slack.calls.append(method)
            waiting = self.slack.faults[method]
            return waiting.pop(0) if waiting else None

    def _upload(self, path: str, body: bytes) -> tuple[int, bytes]:
        accepted = self.slack.upload(path.rsplit("/", 1)[-1], body)
        return (200, b"OK") if accepted else (400, b"wrong length")

    def _api(self, method: str, body: bytes) -> tuple[int, bytes]:
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        data = json.loads(body) if "json" in self.headers.get("Content-Type", "") else dict(parse_qsl(body.decode()))
        try:
            answer = {"ok": True, **self.slack.call(method, token, data)}
        except RefusedError as error:
            answer = {"ok": False, "error": str(error)}
        return 200, json.dumps(answer).encode()

    def _spoil(self, fault: Fault) -> None:
        if fault.kind == "429":
            self._reply(429, b'{"ok": false, "error": "ratelimited"}', {"Retry-After": str(int(fault.seconds))})
        elif fault.kind == "500":
            self._reply(500, b"<html>oops</html>")
        elif fault.kind == "html":
            self._reply(200, b"<html>maintenance</html>")
        else:
            if fault.kind != "disconnect":
                self.slack.wait(fault.seconds)
            self.close_connection = True

    def _reply(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(body)

    def do_GET(self) -> None:
        """The websocket of Socket Mode (RFC 6455): shake hands, greet, answer pings, note the acknowledgements."""
        key = self.headers["Sec-WebSocket-Key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
        accept = base64.b64encode(hashlib.sha1(key.encode(), usedforsecurity=False).digest()).decode()
        self.send_response(101)
        for name, value in (("Upgrade", "websocket"), ("Connection", "Upgrade"), ("Sec-WebSocket-Accept", accept)):
            self.send_header(name, value)
        self.end_headers()
        self.close_connection = True
        stream = self.connection.makefile("wb", buffering=0)
        _write_frame(stream, TEXT, b'{"type": "hello", "num_connections": 1}')
        with self.slack.lock:
            self.slack.sockets.append(self.connection)
            self.slack.connections += 1
        with contextlib.suppress(OSError, ValueError, EOFError):
            self._serve_socket(stream)

    def _serve_socket(self, stream: BinaryIO) -> None:
        while True:
            opcode, data = _read_frame(self.rfile)
            if opcode == PING:
                _write_frame(stream, PONG, data)
            elif opcode == CLOSE:
                return
            elif opcode == TEXT:
                self.slack.acknowledged(json.loads(data))


def _write_frame(stream: Any, opcode: int, data: bytes) -> None:
    length = bytes([len(data)]) if len(data) < 126 else b"\x7e" + struct.pack("!H", len(data))
    frame = bytes([0x80 | opcode]) + length + data
    (stream.sendall if hasattr(stream, "sendall") else stream.write)(frame)


def _read_frame(stream: Any) -> tuple[int, bytes]:
    first, second = _exactly(stream, 2)
    length = second & 0x7F
    if length == 126:
        (length,) = struct.unpack("!H", _exactly(stream, 2))
    mask = _exactly(stream, 4) if second & 0x80 else b"\0\0\0\0"
    data = bytes(byte ^ mask[index % 4] for index, byte in enumerate(_exactly(stream, length)))
    return first & 0x0F, data


def _exactly(stream: Any, count: int) -> bytes:
    data = stream.read(count)
    if len(data) < count:
        raise EOFError
    return data


def _check_message(data: dict[str, Any]) -> None:
    """Slack's documented limits: https://docs.slack.dev/reference/block-kit/blocks."""
    if data.get("channel") != CHANNEL:
        raise RefusedError("channel_not_found")
    text = data.get("text") or ""
    if not text:
        raise RefusedError("no_text")
    if len(text) > 40_000:
        raise RefusedError("msg_too_long")
    blocks = data.get("blocks") or []
    if len(blocks) > 50 or not all(_LIMITS[block["type"]](block) for block in blocks):
        raise RefusedError("invalid_blocks")


def _text_within(text: dict[str, Any] | None, limit: int) -> bool:
    return text is None or 1 <= len(text["text"]) <= limit


def _section_within(block: dict[str, Any]) -> bool:
    fields = block.get("fields", [])
    whole = _text_within(block.get("text"), 3000) and (fields or block.get("text"))
    return bool(whole) and len(fields) <= 10 and all(_text_within(part, 2000) for part in fields)


def _actions_within(block: dict[str, Any]) -> bool:
    elements = block["elements"]
    names = [element["action_id"] for element in elements]
    return 1 <= len(elements) <= 25 and len(set(names)) == len(names) and all(map(_button_within, elements))


def _button_within(button: dict[str, Any]) -> bool:
    return _text_within(button["text"], 75) and len(button.get("value", "")) <= 2000


def _view_within(view: dict[str, Any]) -> bool:
    """https://docs.slack.dev/reference/views/modal-views; a view with an input needs a submit button."""
    inputs = any(block["type"] == "input" for block in view["blocks"])
    words = all(_text_within(view.get(name), 24) for name in ("title", "submit", "close"))
    size = len(view["blocks"]) <= 100 and len(view.get("private_metadata", "")) <= 3000
    allowed = size and (bool(view.get("submit")) or not inputs)
    return words and allowed and all(_LIMITS[block["type"]](block) for block in view["blocks"])


def _input_within(block: dict[str, Any]) -> bool:
    return _text_within(block["label"], 2000) and 1 <= block["element"].get("max_length", 3000) <= 3000


_LIMITS = {
    "header": lambda block: block["text"]["type"] == "plain_text" and _text_within(block["text"], 150),
    "section": _section_within,
    "context": lambda block: 1 <= len(block["elements"]) <= 10 and all(map(_context_within, block["elements"])),
    "divider": lambda _: True,
    "actions": _actions_within,
    "input": _input_within,
}


def _context_within(element: dict[str, Any]) -> bool:
    return _text_within(element, 3000)


def _texts(node: Any) -> list[str]:
    if isinstance(node, list):
        return [text for part in node for text in _texts(part)]
    if isinstance(node, dict):
        own = [node["text"]] if isinstance(node.get("text"), str) else []
        return own + [text for value in node.values() if not isinstance(value, str) for text in _texts(value)]
    return []
