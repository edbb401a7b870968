"""Approve and Reject by button over Socket Mode: for named people, with a reason, confirmed where it cannot be undone.

A press opens a dialog that asks for the reason; where an approval cannot be undone, its answer opens a second one. The
state of the dialog travels in the dialog itself (`private_metadata`), so a restart in between loses nothing.
"""

import logging
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import orjson
from slack_sdk import WebClient
from slack_sdk.errors import SlackClientError
from slack_sdk.socket_mode import SocketModeClient
from slack_sdk.socket_mode.client import BaseSocketModeClient
from slack_sdk.socket_mode.request import SocketModeRequest
from slack_sdk.socket_mode.response import SocketModeResponse

from runwatch.monitor.notify import Decide, SlackConfig
from runwatch.monitor.notify import slack_blocks as blocks

LOG = logging.getLogger(__name__)
RECONNECT_SECONDS = (1.0, 60.0)
PING_SECONDS = 2.0
"""The client gives a cut connection up after five failed pings, so a cut costs ten seconds."""
Meaning = Literal["stranger", "unknown", "ask_reason", "ask_again", "approve", "reject"]
STRANGER = "You are not on the list of people who may approve or reject plans of this run (`approvers`)."
UNKNOWN = "This button is no longer valid."


@dataclass(frozen=True)
class Answer:
    """What a person did: pressed the button `verb`, or sent the dialog `dialog` (reason, confirm) that it opened."""

    user: str
    verb: str
    dialog: str | None = None


def judge(answer: Answer, approvers: Collection[str]) -> Meaning:
    """What `answer` leads to."""
    if answer.user not in approvers:
        return "stranger"
    if answer.verb not in blocks.VERBS or answer.dialog not in (None, "reason", "confirm"):
        return "unknown"
    if answer.dialog is None:
        return "ask_reason"
    if answer.verb == "approve_twice" and answer.dialog == "reason":
        return "ask_again"
    return "reject" if answer.verb == "reject" else "approve"


class Approvals:
    """Listens on the websocket until closed; connects again by itself."""

    def __init__(self, config: SlackConfig, web: WebClient, decide: Decide) -> None:
        self._approvers = frozenset(config.approvers)
        self._web, self._decide = web, decide
        self._closing = threading.Event()
        token = "" if config.app_token is None else config.app_token.get_secret_value()
        self._socket = SocketModeClient(app_token=token, web_client=web, concurrency=1, ping_interval=PING_SECONDS)
        self._socket.socket_mode_request_listeners.append(self._on_request)
        self._connecting = threading.Thread(target=self._connect, name="slack-approvals", daemon=True)
        self._connecting.start()

    def close(self) -> None:
        """Stop listening."""
        self._closing.set()
        self._connecting.join()
        self._socket.close()

    def _connect(self) -> None:
        """Connect for the first time, as often as it takes; from then on the client sees to it."""
        pause, longest = RECONNECT_SECONDS
        while not self._closing.is_set():
            try:
                self._socket.connect()
            except (SlackClientError, OSError) as error:
                LOG.warning("Socket Mode: cannot connect, next try in %.0f s: %s", pause, error)
                self._closing.wait(pause)
                pause = min(2 * pause, longest)
            else:
                return

    def _on_request(self, client: BaseSocketModeClient, request: SocketModeRequest) -> None:
        """Acknowledge within Slack's three seconds; the acknowledgement of a dialog carries what it shows next."""
        payload = request.payload
        submitted = request.type == "interactive" and payload.get("type") == "view_submission"
        view = self._on_dialog(payload) if submitted else None
        then = None if view is None else {"response_action": "update", "view": view}
        client.send_socket_mode_response(SocketModeResponse(envelope_id=request.envelope_id, payload=then))
        if request.type == "interactive" and payload.get("type") == "block_actions":
            for action in payload["actions"]:
                self._on_press(payload, action["action_id"], action.get("value", ""))

    def _on_press(self, payload: Mapping[str, Any], verb: str, execution_id: str) -> None:
        meaning = judge(Answer(payload["user"]["id"], verb), self._approvers)
        if meaning != "ask_reason":
            self._tell(payload, STRANGER if meaning == "stranger" else UNKNOWN)
            return
        try:
            self._web.views_open(
                trigger_id=payload["trigger_id"], view=blocks.ask_reason(blocks.Order(execution_id, verb))
            )
        except (SlackClientError, OSError) as error:
            LOG.warning("Slack: could not open the dialog for a reason: %s", error)
            self._tell(payload, f"Slack could not open the dialog ({error}): press again, or use `runwatch plan`.")

    def _on_dialog(self, payload: Mapping[str, Any]) -> blocks.Block:
        """What the dialog shows after it was sent: the second question, or what came of it."""
        user, view = payload["user"], payload["view"]
        order = blocks.Order(**orjson.loads(view["private_metadata"]))
        meaning = judge(Answer(user["id"], order.verb, view["callback_id"]), self._approvers)
        if meaning in ("stranger", "unknown"):
            return blocks.outcome(STRANGER if meaning == "stranger" else UNKNOWN)
        reason = order.reason or str(view["state"]["values"]["reason"]["reason"]["value"]).strip()
        if not reason:
            return blocks.ask_reason(order)
        if meaning == "ask_again":
            return blocks.ask_again(blocks.Order(order.execution, order.verb, reason))
        by = f"{user.get('username') or user.get('name') or user['id']} ({user['id']}, Slack)"
        return blocks.outcome(self._decide(order.execution, meaning == "approve", by, reason))

    def _tell(self, payload: Mapping[str, Any], text: str) -> None:
        """Answer the one who pressed, and nobody else; the next edit of the message shows the decision itself."""
        try:
            channel, user = payload["channel"]["id"], payload["user"]["id"]
            shown = [blocks.section(blocks.escape(text))]
            self._web.chat_postEphemeral(channel=channel, user=user, text=text, blocks=shown)
        except (SlackClientError, OSError) as error:
            LOG.warning("Slack: could not answer %s: %s", payload["user"]["id"], error)
