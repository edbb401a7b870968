from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import payloads
import pytest
from payloads import message
from pydantic import TypeAdapter
from slack_server import APP_TOKEN, BOT_TOKEN, CHANNEL, SlackServer

from runwatch.monitor.notify import Notifier, NotifyConfig, connect
from runwatch.monitor.notify.slack_approvals import CONFIRM_WITHIN_SECONDS, Press, judge

ADA, EVE, ID = "U0ADA", "U0EVE", "early_divergence-0001"
Eventually = Callable[[Callable[[], object]], None]
Decision = tuple[str, bool, str, str]


def notifier(slack: SlackServer) -> Notifier:
    data = {"kind": "slack", "channel": CHANNEL, "bot_token": BOT_TOKEN, "app_token": APP_TOKEN, "approvers": [ADA]}
    return connect(TypeAdapter(NotifyConfig).validate_python({**data, "api_url": slack.url, "timeout_seconds": 2}))


@contextmanager
def listening(slack: SlackServer, eventually: Eventually) -> Iterator[list[Decision]]:
    decisions: list[Decision] = []

    def decide(*decision: str | bool) -> str:
        decisions.append(decision)  # type: ignore[arg-type]
        return f"{decision[0]}: decided"

    listen = notifier(slack).listen
    assert listen
    with closing(listen(decide)):
        eventually(lambda: slack.sockets)
        yield decisions


JUDGED = {
    "an approver approves": (Press(ADA, "approve", None), "approve"),
    "an approver rejects": (Press(ADA, "reject", None), "reject"),
    "a stranger is refused whatever he presses": (Press(EVE, "confirm", 0.0), "stranger"),
    "what cannot be taken back is asked again": (Press(ADA, "ask", None), "ask"),
    "a confirmation in time approves": (Press(ADA, "confirm", 0.0), "approve"),
    "a confirmation nobody asked for is late": (Press(ADA, "confirm", None), "late"),
    "a confirmation after its time is late": (Press(ADA, "confirm", -CONFIRM_WITHIN_SECONDS), "late"),
    "an unknown button does nothing": (Press(ADA, "explode", None), "unknown"),
}


@pytest.mark.parametrize(("press", "meaning"), JUDGED.values(), ids=JUDGED.keys())
def test_a_press_is_judged(press: Press, meaning: str) -> None:
    assert judge(press, {ADA}, now=1.0) == meaning


@pytest.mark.parametrize(
    ("changed", "verbs"),
    [
        ({}, ["ask", "reject"]),
        ({"plan": "rewind_and_skip", "actions": [{"action": "rewind"}]}, ["ask", "reject"]),
        ({"plan": "halt", "actions": [{"action": "stop"}]}, ["ask", "reject"]),
        ({"plan": "retreat_context", "actions": [{"action": "set_context_length"}]}, ["approve", "reject"]),
        ({"state": "approved"}, []),
        ({"state": "expired"}, []),
    ],
    ids=["shorten_budget", "rewind", "stop", "harmless", "approved", "expired"],
)
def test_the_buttons_of_a_plan(slack: SlackServer, changed: dict[str, object], verbs: list[str]) -> None:
    notifier(slack).send(message("plan_proposed", payloads.plan(**changed)), {})
    buttons = slack.roots()[0].buttons()
    assert [button["action_id"] for button in buttons] == verbs
    assert [button["action_id"] for button in buttons if "confirm" in button] == [
        verb for verb in verbs if verb == "ask"
    ]


def test_a_decided_plan_loses_its_buttons_and_says_who_decided(slack: SlackServer) -> None:
    send = notifier(slack).send
    memory = send(message("plan_proposed", payloads.plan()), {}).remembered
    send(message("plan_updated", payloads.plan("approved")), memory)
    [root] = slack.roots()
    assert root.buttons() == []
    assert "by ada (U0ADA, Slack)" in root.shown()
    assert len(slack.thread(root)) == 1


@pytest.mark.slow
def test_approve_takes_a_second_confirmation_by_the_same_person(slack: SlackServer, eventually: Eventually) -> None:
    with listening(slack, eventually) as decisions:
        slack.press(ADA, "ask", ID, envelope="e1")
        eventually(lambda: slack.ephemerals)
        assert decisions == []
        slack.press(EVE, "confirm", ID, envelope="e2")
        eventually(lambda: len(slack.ephemerals) == 2)
        assert decisions == []
        slack.press(ADA, "confirm", ID, envelope="e3")
        eventually(lambda: decisions)
        assert decisions == [(ID, True, "u0ada (U0ADA, Slack)", "by button in Slack")]
        slack.press(ADA, "confirm", ID, envelope="e4")
        eventually(lambda: len(slack.ephemerals) == 4)
        assert len(decisions) == 1
        assert slack.acks == ["e1", "e2", "e3", "e4"]


@pytest.mark.slow
def test_a_stranger_is_told_so_and_decides_nothing(slack: SlackServer, eventually: Eventually) -> None:
    with listening(slack, eventually) as decisions:
        slack.press(EVE, "reject", ID)
        eventually(lambda: slack.ephemerals)
        assert "not on the list" in slack.ephemerals[0]["text"]
        assert slack.ephemerals[0]["user"] == EVE
        slack.press(ADA, "reject", ID)
        eventually(lambda: decisions)
        assert decisions[0][:2] == (ID, False)


@pytest.mark.slow
def test_a_cut_websocket_is_connected_again(slack: SlackServer, eventually: Eventually) -> None:
    with listening(slack, eventually) as decisions:
        slack.drop_sockets()
        eventually(lambda: slack.connections == 2)
        slack.press(ADA, "approve", ID)
        eventually(lambda: decisions)


@pytest.mark.slow
def test_listening_starts_though_slack_is_down_at_first(eventually: Eventually) -> None:
    with SlackServer() as first:
        port = first.port
    listen = notifier(first).listen
    assert listen
    with closing(listen(lambda *_: "")), SlackServer(port) as slack:
        eventually(lambda: slack.sockets)
