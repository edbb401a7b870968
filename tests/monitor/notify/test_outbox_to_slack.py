"""The real outbox before the real notifier: a bad day of Slack, and a daemon that is started again in the middle."""

from pathlib import Path
from typing import Any

import payloads
import pytest
from payloads import NOW, message
from pydantic import TypeAdapter
from slack_server import BOT_TOKEN, CHANNEL, Fault, SlackServer

from runwatch.monitor.notify import NotifyConfig, connect
from runwatch.monitor.notify.outbox import Outbox
from runwatch.monitor.store.store import Store, open_store

FAULTS = ["429", "500", "html", "accept_then_hang", "disconnect"]


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with_file = open_store(f"sqlite:///{tmp_path / 'state.db'}", "cpu-demo")
    yield with_file
    with_file.close()


def outbox(slack: SlackServer, store: Store, clock: list[float]) -> Outbox:
    data = {"kind": "slack", "channel": CHANNEL, "bot_token": BOT_TOKEN, "api_url": slack.url, "timeout_seconds": 1}
    notifier = connect(TypeAdapter(NotifyConfig).validate_python(data))
    return Outbox(store, {notifier.name: notifier}, clock=lambda: clock[0])


@pytest.mark.slow
def test_after_every_fault_and_a_restart_after_each_people_have_read_it_once(slack: SlackServer, store: Store) -> None:
    clock = [NOW]
    for method in ("chat.postMessage", "chat.update", "files.completeUploadExternal"):
        slack.faults[method] += [Fault(kind, 2) for kind in FAULTS]
    with store.transaction() as tx:
        outbox(slack, store, clock).put(tx, message("incident_opened", payloads.incident()))
        outbox(slack, store, clock).put(tx, message("incident_resolved", payloads.incident("resolved")))
    for _ in range(40):
        outbox(slack, store, clock).deliver("slack")
        clock[0] += 400
    [root] = slack.roots()
    assert "loss_spike resolved" in root.shown()
    assert [post.text.split()[0] for post in slack.thread(root) if post.text] == ["The", "Resolved"]
    assert outbox(slack, store, clock).standing()["slack"]["pending"] == 0
