"""Slack: one message per incident, edited in place; details, plot and resolution in its thread.

What is remembered of an incident or plan: `channel` and `ts` of its message, a hash of what it shows, the severity
told, and the replies already in its thread. So a restart edits the old message, and a send that failed half way goes on where it
stopped. Retry and Retry-After are the outbox's.
"""

import hashlib
import http.client
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson
from slack_sdk import WebClient
from slack_sdk.errors import SlackApiError, SlackClientError

from runwatch.monitor.notify import Closable, Decide, Kind, Message, Notifier, SendError, Sent, SlackConfig
from runwatch.monitor.notify import slack_blocks as blocks
from runwatch.monitor.notify.plots import plot
from runwatch.monitor.notify.slack_approvals import Approvals

KINDS: frozenset[Kind] = frozenset(
    {
        "incident_opened",
        "incident_updated",
        "incident_value",
        "incident_resolved",
        "plan_proposed",
        "plan_updated",
        "digest",
    }
)
TRANSIENT = frozenset({"ratelimited", "internal_error", "fatal_error", "service_unavailable", "request_timeout"})
GONE = frozenset({"message_not_found", "cant_update_message", "edit_window_closed"})
SEARCHED_MESSAGES = 100
Memory = dict[str, Any]
Blocks = list[blocks.Block]


def connect(config: SlackConfig) -> Notifier:
    """The notifier for one channel."""
    web = WebClient(
        token=config.bot_token.get_secret_value(),
        base_url=config.api_url,
        timeout=max(1, round(config.timeout_seconds)),
        retry_handlers=[],
    )
    slack = Slack(config, web)
    return Notifier(
        name=config.name or config.kind,
        kinds=KINDS if config.kinds is None else frozenset(config.kinds),
        send=slack.send,
        listen=slack.listen if config.takes_decisions else None,
    )


@dataclass(frozen=True)
class Slack:
    """One channel of one workspace."""

    config: SlackConfig
    web: WebClient

    def send(self, message: Message, remembered: Memory) -> Sent:
        """Show `message` in the channel.

        Raises:
            SendError: with what has been shown so far.
        """
        memory = {**remembered, "replies": list(remembered.get("replies", []))}
        try:
            self._tell(message, memory)
        except SlackApiError as error:
            raise _refused(error, memory) from error
        except (SlackClientError, OSError, http.client.HTTPException) as error:
            wait = _wait(getattr(error, "headers", None))
            raise SendError(f"Slack cannot be reached: {error}", retry_after=wait, remembered=memory) from error
        return Sent(memory)

    def listen(self, decide: Decide) -> Closable:
        """Take decisions by button until closed."""
        return Approvals(self.config, self.web, decide)

    def _tell(self, message: Message, memory: Memory) -> None:
        if message.kind == "digest":
            self._tell_digest(message, memory)
        elif message.kind in ("plan_proposed", "plan_updated"):
            self._tell_plan(message, memory)
        else:
            self._tell_incident(message, memory)

    def _tell_digest(self, message: Message, memory: Memory) -> None:
        """Every digest is a message of its own."""
        if memory.get("digest") != message.key:
            memory.clear()
            memory["digest"] = message.key
        self._show(message, memory, lambda _: blocks.digest(message.payload))

    def _tell_incident(self, message: Message, memory: Memory) -> None:
        payload = message.payload
        self._show(message, memory, lambda mention: blocks.incident(payload, mention))
        self._reply(message, memory, "details", message.text)
        self._attach_plot(message, memory, "plot opened")
        if memory.get("severity") == "warning" and payload["severity"] == "critical":
            self._reply(message, memory, "escalated", f"Now critical. {payload['what']}", self._mentions(message))
        if message.kind == "incident_resolved":
            self._reply(message, memory, "resolved", f"Resolved at step {payload['step']:,}. {payload['what']}")
            self._attach_plot(message, memory, "plot resolved")
        memory["severity"] = payload["severity"]

    def _tell_plan(self, message: Message, memory: Memory) -> None:
        payload = message.payload
        buttons = self.config.takes_decisions
        self._show(message, memory, lambda mention: blocks.plan(payload, buttons=buttons, mention=mention))
        if payload["state"] not in ("proposed", "observed"):
            self._reply(message, memory, payload["state"], payload["summary"], self._mentions(message))

    def _mentions(self, message: Message) -> str:
        """Only a new, critical and unresolved message mentions people."""
        calls = (
            message.kind not in ("incident_resolved", "incident_value")
            and message.payload.get("severity") == "critical"
        )
        return " ".join(map(_mention, self.config.mentions)) if calls else ""

    def _show(self, message: Message, memory: Memory, render: Callable[[str], Blocks]) -> None:
        """Post the message of this subject, or edit it where it shows something else; only a first post mentions."""
        shown, text = render(""), blocks.cut(blocks.escape(message.text), blocks.FALLBACK)
        look = hashlib.sha256(orjson.dumps([shown, text])).hexdigest()
        if "ts" not in memory and message.attempt > 1:
            memory |= self._find(self.config.channel, None, _key(message))
        if "ts" in memory and memory.get("look") != look:
            self._edit(memory, shown, text)
        if "ts" not in memory:
            mentions = self._mentions(message)
            memory |= self._post(self.config.channel, f"{mentions} {text}", render(mentions), _key(message))
        memory["look"] = look

    def _edit(self, memory: Memory, shown: Blocks, text: str) -> None:
        """Edit the message; forget it, and its thread, where a person has deleted it."""
        try:
            self.web.chat_update(channel=memory["channel"], ts=memory["ts"], text=text, blocks=shown)
        except SlackApiError as error:
            if error.response.get("error") not in GONE:
                raise
            del memory["ts"]
            memory["replies"] = []

    def _reply(self, message: Message, memory: Memory, reply: str, text: str, mentions: str = "") -> None:
        """Put one reply into the thread, once."""
        if reply in memory["replies"]:
            return
        key = f"{_key(message)}/{reply}"
        if message.attempt == 1 or not self._find(memory["channel"], memory["ts"], key):
            text = f"{mentions} {blocks.escape(text)}".strip()
            parts = blocks.within(blocks.sections(text))
            self._post(memory["channel"], blocks.cut(text, blocks.FALLBACK), parts, key, memory["ts"])
        memory["replies"].append(reply)

    def _attach_plot(self, message: Message, memory: Memory, reply: str) -> None:
        png = None if reply in memory["replies"] else plot(message.payload)
        if png is None:
            return
        self.web.files_upload_v2(
            channel=memory["channel"],
            thread_ts=memory["ts"],
            content=png,
            filename=f"{message.subject}.png",
            title=message.payload["series"]["signal"],
            alt_txt=message.payload["what"],
        )
        memory["replies"].append(reply)

    def _post(self, channel: str, text: str, shown: Blocks, key: str, thread_ts: str | None = None) -> Memory:
        metadata = {"event_type": "runwatch", "event_payload": {"key": key}}
        answer = self.web.chat_postMessage(
            channel=channel, text=text.strip(), blocks=shown, thread_ts=thread_ts, metadata=metadata, unfurl_links=False
        )
        return {"channel": answer["channel"], "ts": answer["ts"]}

    def _find(self, channel: str, thread_ts: str | None, key: str) -> Memory:
        """The message with this key, among the newest: an earlier attempt may have arrived, only its answer not."""
        try:
            if thread_ts is None:
                answer = self.web.conversations_history(
                    channel=channel, limit=SEARCHED_MESSAGES, include_all_metadata=True
                )
            else:
                answer = self.web.conversations_replies(
                    channel=channel, ts=thread_ts, limit=SEARCHED_MESSAGES, include_all_metadata=True
                )
        except SlackApiError as error:
            if error.response.get("error") == "missing_scope":
                return {}  # Without the scope channels:history a doubled message is better than a lost one.
            raise
        for post in answer.get("messages") or ():
            if post.get("metadata", {}).get("event_payload", {}).get("key") == key:
                return {"channel": channel, "ts": post["ts"]}
        return {}


def _key(message: Message) -> str:
    """What the message is known by in the channel, where other runs tell of theirs too."""
    return message.key if message.kind == "digest" else f"{message.run}/{message.subject}"


def _mention(who: str) -> str:
    if who in ("here", "channel", "everyone"):
        return f"<!{who}>"
    return f"<!subteam^{who}>" if who.startswith("S") else f"<@{who}>"


def _refused(error: SlackApiError, memory: Memory) -> SendError:
    status, name = error.response.status_code, str(error.response.get("error"))
    is_answer = status == http.HTTPStatus.OK and re.fullmatch("[a-z_]+", name) is not None
    return SendError(
        f"Slack refused: {name} (HTTP {status})",
        permanent=is_answer and name not in TRANSIENT,
        retry_after=_wait(error.response.headers),
        remembered=memory,
    )


def _wait(headers: Any) -> float | None:
    wait = None if headers is None else headers.get("Retry-After")
    return float(wait) if wait is not None and str(wait).isdecimal() else None
