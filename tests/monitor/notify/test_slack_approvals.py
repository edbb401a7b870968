from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import payloads
import pytest
from payloads import message
from pydantic import TypeAdapter
from slack_server import APP_TOKEN, BOT_TOKEN, CHANNEL, Fault, SlackServer

from runwatch.monitor.notify import Notifier, NotifyConfig, connect
from runwatch.monitor.notify.slack_approvals import Answer, judge

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


JUDGED: dict[str, tuple[Answer, str]] = {
    "an approver's press asks for a reason": (Answer(ADA, "approve"), "ask_reason"),
    "so does one that rejects": (Answer(ADA, "reject"), "ask_reason"),
    "a stranger is refused whatever he presses": (Answer(EVE, "approve_twice"), "stranger"),
    "a stranger is refused whatever he sends": (Answer(EVE, "approve", "confirm"), "stranger"),
    "a reason approves": (Answer(ADA, "approve", "reason"), "approve"),
    "a reason rejects": (Answer(ADA, "reject", "reason"), "reject"),
    "what cannot be undone is asked again": (Answer(ADA, "approve_twice", "reason"), "ask_again"),
    "a second confirmation approves": (Answer(ADA, "approve_twice", "confirm"), "approve"),
    "an unknown button does nothing": (Answer(ADA, "explode"), "unknown"),
    "an unknown dialog does nothing": (Answer(ADA, "approve", "explode"), "unknown"),
}


@pytest.mark.parametrize(("answer", "meaning"), JUDGED.values(), ids=JUDGED.keys())
def test_an_answer_is_judged(answer: Answer, meaning: str) -> None:
    assert judge(answer, {ADA}) == meaning


@pytest.mark.parametrize(
    ("changed", "verbs"),
    [
        ({}, ["approve_twice", "reject"]),
        ({"plan": "rewind_and_skip", "actions": [{"action": "rewind"}]}, ["approve_twice", "reject"]),
        ({"plan": "halt", "actions": [{"action": "stop"}]}, ["approve_twice", "reject"]),
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


def test_a_decided_plan_loses_its_buttons_and_says_who_decided(slack: SlackServer) -> None:
    send = notifier(slack).send
    memory = send(message("plan_proposed", payloads.plan()), {}).remembered
    send(message("plan_updated", payloads.plan("approved")), memory)
    [root] = slack.roots()
    assert root.buttons() == []
    assert "by ada (U0ADA, Slack)" in root.shown()
    assert len(slack.thread(root)) == 1


@pytest.mark.slow
def test_an_approval_takes_a_reason_and_a_second_confirmation_by_a_named_person(
    slack: SlackServer, eventually: Eventually
) -> None:
    with listening(slack, eventually) as decisions:
        slack.press(ADA, "approve_twice", ID, envelope="e1")
        eventually(lambda: slack.views)
        slack.submit(EVE, slack.views[-1], "let me", envelope="e2")
        eventually(lambda: len(slack.views) == 2)
        assert "not on the list" in str(slack.views[-1])
        slack.submit(ADA, slack.views[0], "  ", envelope="e3")
        eventually(lambda: len(slack.views) == 3)
        assert slack.views[-1]["callback_id"] == "reason"
        slack.submit(ADA, slack.views[0], "The data is broken.", envelope="e4")
        eventually(lambda: len(slack.views) == 4)
        assert "cannot be undone" in str(slack.views[-1])
        assert decisions == []
        slack.submit(ADA, slack.views[-1], envelope="e5")
        eventually(lambda: len(slack.views) == 5)
        assert decisions == [(ID, True, "u0ada (U0ADA, Slack)", "The data is broken.")]
        assert f"{ID}: decided" in str(slack.views[-1])
        assert slack.acks == ["e1", "e2", "e3", "e4", "e5"]


@pytest.mark.slow
def test_a_stranger_is_told_so_and_decides_nothing(slack: SlackServer, eventually: Eventually) -> None:
    with listening(slack, eventually) as decisions:
        slack.press(EVE, "reject", ID)
        eventually(lambda: slack.ephemerals)
        assert "not on the list" in slack.ephemerals[0]["text"]
        assert slack.ephemerals[0]["user"] == EVE
        assert not slack.views
        slack.press(ADA, "reject", ID)
        eventually(lambda: slack.views)
        slack.submit(ADA, slack.views[-1], "Too early.")
        eventually(lambda: decisions)
        assert decisions == [(ID, False, "u0ada (U0ADA, Slack)", "Too early.")]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["429", "500", "hang", "disconnect"])
def test_a_dialog_that_does_not_open_is_told_to_the_one_who_pressed(
    slack: SlackServer, eventually: Eventually, kind: str
) -> None:
    with listening(slack, eventually):
        slack.faults["views.open"].append(Fault(kind, 5))
        slack.press(ADA, "approve", ID, envelope="e1")
        eventually(lambda: slack.ephemerals)
        assert "press again, or use `runwatch plan`" in slack.ephemerals[0]["text"]
        slack.press(ADA, "approve", ID, envelope="e2")
        eventually(lambda: slack.views)


@pytest.mark.slow
def test_a_cut_websocket_is_connected_again(slack: SlackServer, eventually: Eventually) -> None:
    with listening(slack, eventually) as decisions:
        slack.drop_sockets()
        eventually(lambda: slack.connections == 2)
        slack.press(ADA, "approve", ID)
        eventually(lambda: slack.views)
        slack.submit(ADA, slack.views[-1], "Fine.")
        eventually(lambda: decisions)


@pytest.mark.slow
def test_listening_starts_though_slack_is_down_at_first(eventually: Eventually) -> None:
    with SlackServer() as first:
        port = first.port
    listen = notifier(first).listen
    assert listen
    with closing(listen(lambda *_: "")), SlackServer(port) as slack:
        eventually(lambda: slack.sockets)
