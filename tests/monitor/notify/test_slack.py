import string
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import payloads
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from payloads import message
from pydantic import TypeAdapter
from slack_server import BOT_TOKEN, CHANNEL, Fault, SlackServer

from runwatch.monitor.notify import Message, Notifier, NotifyConfig, SendError, Sent, connect

ADA = "U0ADA"


def notifier(slack: SlackServer, **changed: object) -> Notifier:
    data = {"kind": "slack", "channel": CHANNEL, "bot_token": BOT_TOKEN, "mentions": [ADA], "api_url": slack.url}
    return connect(TypeAdapter(NotifyConfig).validate_python({**data, "timeout_seconds": 1.0, **changed}))


def tell(
    send: Callable[[Message, dict[str, Any]], Sent], told: Message, memory: dict[str, Any] | None = None
) -> dict[str, Any]:
    return send(told, memory or {}).remembered


OPENED = message("incident_opened", payloads.incident())
RESOLVED = message("incident_resolved", payloads.incident("resolved", step=480))


def test_an_incident_is_one_message_with_details_plot_and_resolution_in_its_thread(slack: SlackServer) -> None:
    send = notifier(slack).send
    memory = tell(send, OPENED)
    update = payloads.incident("updated", step=430, what="The loss is 1.2 nats above its trend (limit 0.3 nats).")
    memory = tell(send, message("incident_updated", update), memory)
    tell(send, RESOLVED, memory)

    [root] = slack.roots()
    assert root.edits == 2
    assert "loss_spike resolved" in root.shown()
    details, opened_plot, resolved, resolved_plot = slack.thread(root)
    assert "runwatch status" in details.text
    assert resolved.text.startswith("Resolved at step 480.")
    assert all(plot.files[0].startswith(b"\x89PNG") for plot in (opened_plot, resolved_plot))


def test_the_open_message_says_what_since_when_how_sure_what_is_armed_and_what_to_run(slack: SlackServer) -> None:
    tell(notifier(slack).send, OPENED)
    shown = slack.roots()[0].shown()
    for part in (
        "0.9 nats above its trend (limit 0.3 nats)",
        "since step 412 (1.69M tokens)",
        "grad_norm agrees",
        "rewind_and_skip is armed",
        "`runwatch status runs/cpu-demo`",
        "https://example.org/runbooks/loss_spike",
    ):
        assert part in shown


@pytest.mark.parametrize(
    ("severity", "mentioned"), [("critical", True), ("warning", False)], ids=["critical calls", "a warning does not"]
)
def test_only_a_critical_opening_mentions(slack: SlackServer, severity: str, *, mentioned: bool) -> None:
    memory = tell(notifier(slack).send, message("incident_opened", payloads.incident(severity=severity)))
    opening = slack.roots()[0].shown()
    assert (f"<@{ADA}>" in opening) == mentioned
    tell(notifier(slack).send, message("incident_resolved", payloads.incident("resolved", severity=severity)), memory)
    resolution = slack.roots()[0].shown() + slack.posts[-2].text
    assert ADA not in resolution


def test_an_escalation_calls_in_the_thread_since_an_edit_notifies_nobody(slack: SlackServer) -> None:
    send = notifier(slack).send
    memory = tell(send, message("incident_opened", payloads.incident(severity="warning")))
    memory = tell(send, message("incident_updated", payloads.incident("eased")), memory)
    tell(send, message("incident_updated", payloads.incident("escalated")), memory)
    assert slack.posts[-1].text.startswith(f"<@{ADA}> Now critical.")


def test_a_value_that_moves_is_edited_in_place_and_calls_nobody(slack: SlackServer) -> None:
    send = notifier(slack).send
    memory = tell(send, OPENED)
    posts = len(slack.posts)
    moved = payloads.incident(what="The loss is 1.4 nats above its trend (limit 0.3 nats).")
    tell(send, message("incident_value", moved), memory)
    [root] = slack.roots()
    assert (root.edits, len(slack.posts)) == (1, posts)
    assert "1.4 nats" in root.shown()
    assert "1.4 nats" in root.text
    assert ADA not in root.shown() + root.text


def test_the_same_content_again_is_not_sent_again(slack: SlackServer) -> None:
    send = notifier(slack).send
    memory = tell(send, OPENED)
    calls = len(slack.calls)
    assert tell(send, OPENED, memory) == memory
    assert len(slack.calls) == calls


def test_a_restart_edits_the_old_message(slack: SlackServer) -> None:
    memory = tell(notifier(slack).send, OPENED)
    tell(notifier(slack).send, RESOLVED, memory)
    assert len(slack.roots()) == 1


def test_a_deleted_message_is_posted_anew_with_its_thread(slack: SlackServer) -> None:
    send = notifier(slack).send
    memory = tell(send, OPENED)
    slack.posts.clear()
    memory = tell(send, RESOLVED, memory)
    [root] = slack.roots()
    assert memory["ts"] == root.ts
    assert [post.text.split()[0] for post in slack.thread(root) if post.text] == ["The", "Resolved"]


FAULTS = {
    "429 asks to wait": (Fault("429", 7), False, 7.0),
    "500 is tried again": (Fault("500"), False, None),
    "no JSON is tried again": (Fault("html"), False, None),
    "a timeout is tried again": (Fault("hang", 3), False, None),
    "a cut connection is tried again": (Fault("disconnect"), False, None),
}


@pytest.mark.parametrize("method", ["chat.postMessage", "files.getUploadURLExternal", "upload"])
@pytest.mark.parametrize(("fault", "permanent", "wait"), FAULTS.values(), ids=FAULTS.keys())
def test_a_send_that_failed_goes_on_where_it_stopped(
    slack: SlackServer, method: str, fault: Fault, *, permanent: bool, wait: float | None
) -> None:
    send = notifier(slack).send
    if fault.kind == "html" and method == "upload":
        fault = Fault("500")  # an upload is answered by its status alone
    slack.faults[method].append(fault)
    with pytest.raises(SendError) as failed:
        send(OPENED, {})
    assert failed.value.permanent is permanent
    assert failed.value.retry_after == wait
    tell(send, replace(OPENED, attempt=2), failed.value.remembered)
    [root] = slack.roots()
    assert [bool(post.files) for post in slack.thread(root)] == [False, True]


def test_a_message_that_arrived_though_its_answer_did_not_is_not_doubled(slack: SlackServer) -> None:
    send = notifier(slack).send
    memory: dict[str, object] = {}
    for attempt in (1, 2):
        slack.faults["chat.postMessage"].append(Fault("accept_then_hang", 3))
        with pytest.raises(SendError) as failed:
            send(replace(OPENED, attempt=attempt), memory)
        memory = failed.value.remembered or {}
    tell(send, replace(OPENED, attempt=3), memory)
    [root] = slack.roots()
    assert len(slack.thread(root)) == 2


def test_a_wrong_token_is_permanent(slack: SlackServer) -> None:
    with pytest.raises(SendError, match="invalid_auth") as failed:
        notifier(slack, bot_token="xoxb-old").send(OPENED, {})
    assert failed.value.permanent


def test_the_digest_is_quiet(slack: SlackServer) -> None:
    tell(notifier(slack).send, message("digest", payloads.digest()))
    shown = slack.roots()[0].shown()
    assert "4.1M of 12.3M (33.3 %)" in shown
    assert "2.3100 (+0.0300 against the curve)" in shown
    assert ADA not in shown


def test_every_digest_is_a_message_of_its_own_also_when_tried_twice(slack: SlackServer) -> None:
    send = notifier(slack).send
    first, second = (replace(message("digest", payloads.digest()), key=key, subject="digest") for key in "12")
    memory = tell(send, first)
    slack.faults["chat.postMessage"].append(Fault("accept_then_hang", 3))
    with pytest.raises(SendError) as failed:
        send(second, memory)
    tell(send, replace(second, attempt=2), failed.value.remembered)
    assert len(slack.roots()) == 2


def test_a_plan_that_needs_a_person_calls_in_its_thread(slack: SlackServer) -> None:
    send = notifier(slack).send
    memory = tell(send, message("plan_proposed", payloads.plan(severity="warning")))
    memory = tell(send, message("plan_updated", payloads.plan("requested", severity="warning")), memory)
    tell(send, message("plan_updated", payloads.plan("unverified")), memory)
    assert [ADA in post.text for post in slack.posts] == [False, False, True]


def test_data_cannot_mention_or_link(slack: SlackServer) -> None:
    tell(notifier(slack, mentions=[]).send, message("incident_opened", payloads.incident(what="<!channel> & <x|y>")))
    everything = "\n".join(post.shown() + post.text for post in slack.posts)
    assert "<!channel>" not in everything
    assert "&lt;!channel&gt; &amp; &lt;x|y&gt;" in everything


TEXT = st.text(string.ascii_letters + " \n<>&*", max_size=8000)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(what=TEXT, certainty=TEXT, lines=st.lists(TEXT, max_size=80))
def test_any_payload_stays_within_slacks_limits(
    slack: SlackServer, what: str, certainty: str, lines: list[str]
) -> None:
    send = notifier(slack, app_token="xapp-test", approvers=[ADA]).send
    odd = payloads.incident(what=what, certainty=certainty, run="r" * 200, series=None)
    tell(send, replace(message("incident_opened", odd), text="\n".join(lines)))
    tell(send, message("plan_proposed", payloads.plan(effects=lines, evidence=what, summary=certainty)))
    tell(send, message("digest", payloads.digest(incidents=lines)))
