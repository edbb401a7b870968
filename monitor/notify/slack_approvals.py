"""Approve and Reject by button over Socket Mode: for named people, and twice for what cannot be taken back."""

import logging
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from slack_sdk import WebClient
from slack_sdk.errors import SlackClientError
from slack_sdk.socket_mode import SocketModeClient
from slack_sdk.socket_mode.client import BaseSocketModeClient
from slack_sdk.socket_mode.request import SocketModeRequest
from slack_sdk.socket_mode.response import SocketModeResponse

from runwatch.monitor.notify import Decide, SlackConfig
from runwatch.monitor.notify.slack_blocks import confirmation, escape, section

LOG = logging.getLogger(__name__)
CONFIRM_WITHIN_SECONDS = 120.0
RECONNECT_SECONDS = (1.0, 60.0)
PING_SECONDS = 2.0
"""The client gives a cut connection up after five failed pings, so a cut costs ten seconds."""


@dataclass(frozen=True)
class Press:
    """One press of a button. `asked` is when (seconds) this person was asked to confirm this execution, if ever."""

    user: str
    verb: str
    asked: float | None


def judge(press: Press, approvers: Collection[str], now: float) -> str:
    """What a press means: approve, reject, ask, cancel, or why it is refused (stranger, late, unknown)."""
    if press.user not in approvers:
        return "stranger"
    if press.verb == "confirm":
        in_time = press.asked is not None and now - press.asked <= CONFIRM_WITHIN_SECONDS
        return "approve" if in_time else "late"
    return press.verb if press.verb in ("approve", "reject", "ask", "cancel") else "unknown"


REFUSALS = {
    "stranger": "You are not on the list of people who may decide on plans of this run (`approvers`).",
    "late": f"A confirmation counts for {CONFIRM_WITHIN_SECONDS:.0f} seconds after Approve: press Approve again.",
    "unknown": "This button is not known any more.",
    "cancel": "Nothing was decided.",
}


class Approvals:
    """Listens on the websocket until closed; connects again by itself."""

    def __init__(self, config: SlackConfig, web: WebClient, decide: Decide) -> None:
        self._approvers = frozenset(config.approvers)
        self._web, self._decide = web, decide
        self._asked: dict[tuple[str, str], float] = {}
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
        client.send_socket_mode_response(SocketModeResponse(envelope_id=request.envelope_id))
        payload = request.payload
        if request.type != "interactive" or payload.get("type") != "block_actions":
            return
        for action in payload["actions"]:
            self._on_press(payload, action["action_id"], action.get("value", ""))

    def _on_press(self, payload: dict[str, Any], verb: str, execution_id: str) -> None:
        user, now = payload["user"]["id"], time.monotonic()
        meaning = judge(Press(user, verb, self._asked.pop((execution_id, user), None)), self._approvers, now)
        if meaning == "ask":
            self._asked[execution_id, user] = now
            self._answer(payload, f"Approve {execution_id}? It cannot be taken back.", confirmation(execution_id))
        elif meaning in ("approve", "reject"):
            by = f"{payload['user'].get('username', user)} ({user}, Slack)"
            sentence = self._decide(execution_id, meaning == "approve", by, "by button in Slack")
            self._answer(payload, sentence, [section(escape(sentence))])
        else:
            self._answer(payload, REFUSALS[meaning], [section(REFUSALS[meaning])])

    def _answer(self, payload: dict[str, Any], text: str, blocks: list[dict[str, Any]]) -> None:
        """Tell the one who pressed, and nobody else; the decision itself is shown by the next edit of the message."""
        try:
            channel, user = payload["channel"]["id"], payload["user"]["id"]
            self._web.chat_postEphemeral(channel=channel, user=user, text=text, blocks=blocks)
        except (SlackClientError, OSError) as error:
            LOG.warning("Slack: could not answer %s: %s", payload["user"]["id"], error)
