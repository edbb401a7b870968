"""What is to be told is told: retried, in order, once a key, given up with a reason."""

from typing import Any

import pytest
from sqlalchemy import select

from runwatch.monitor.notify import Kind, Message, Notifier, SendError, Sent
from runwatch.monitor.notify.outbox import CLAIM_SECONDS, KEPT_SECONDS, Outbox, unsent
from runwatch.monitor.store.schema import OUTBOX
from runwatch.monitor.store.store import Store

KINDS: frozenset[Kind] = frozenset(
    {"incident_opened", "incident_updated", "incident_value", "incident_resolved", "digest"}
)


class Medium:
    """A notifier whose answers are set by the test."""

    def __init__(self, store: Store, refresh: float | None = None) -> None:
        self.now = 1000.0
        self.heard: list[Message] = []
        self.before: list[dict[str, Any]] = []
        self.answers: list[Exception] = []
        self.store = store
        self.notifier = Notifier("medium", KINDS, self.send, refresh_seconds=refresh)
        self.outbox = Outbox(store, {"medium": self.notifier}, clock=lambda: self.now)

    def send(self, message: Message, remembered: dict[str, Any]) -> Sent:
        """Hear it, and answer as set."""
        self.heard.append(message)
        self.before.append(remembered)
        if self.answers:
            raise self.answers.pop(0)
        return Sent({"count": remembered.get("count", 0) + 1})

    def put(self, key: str, kind: Kind = "incident_opened", subject: str = "a-0001") -> None:
        """Put one message into the outbox."""
        with self.store.transaction() as tx:
            self.outbox.put(tx, Message(key, kind, subject, "run", self.now, {"n": key}, f"text of {key}"))

    def deliver(self, after: float = 0.0) -> list[str]:
        """The keys heard in one delivery, `after` seconds later."""
        self.now += after
        known = len(self.heard)
        self.outbox.deliver("medium")
        return [message.key for message in self.heard[known:]]


@pytest.fixture
def medium(store: Store) -> Medium:
    return Medium(store)


def test_the_same_key_is_told_once(medium: Medium) -> None:
    medium.put("k")
    medium.put("k")
    assert medium.deliver() == ["k"]
    medium.put("k")
    assert medium.deliver(100) == []


def test_a_kind_that_nobody_wants_is_not_kept(medium: Medium) -> None:
    medium.put("k", "plan_proposed")
    assert medium.deliver() == []


def test_what_fails_is_tried_again_with_growing_pauses_and_the_same_key(medium: Medium) -> None:
    medium.answers = [SendError("busy"), SendError("busy")]
    medium.put("k")
    assert medium.deliver() == ["k"]
    assert medium.deliver(0.5) == []
    assert medium.deliver(0.6) == ["k"]
    assert medium.deliver(1.1) == []
    assert medium.deliver(1.0) == ["k"]
    assert [message.attempt for message in medium.heard] == [1, 2, 3]
    assert medium.deliver(1000) == []


def test_the_receivers_own_pause_is_kept(medium: Medium) -> None:
    medium.answers = [SendError("slow down", retry_after=120.0)]
    medium.put("k")
    medium.deliver()
    assert medium.deliver(119) == []
    assert medium.deliver(2) == ["k"]


@pytest.mark.parametrize("outage", [10.0, 240.0, 36_000.0])
@pytest.mark.parametrize("permanent", [False, True], ids=["away", "refuses"])
def test_a_page_is_sent_within_a_minute_of_the_receivers_return_however_long_it_was_away(
    medium: Medium, outage: float, permanent: bool
) -> None:
    medium.answers = [SendError("HTTP 401", permanent=permanent)] * 100_000
    medium.put("k")
    end = medium.now + outage
    while medium.now < end:
        medium.deliver(min(20.0, outage / 2))
    assert medium.outbox.standing()["medium"]["failing"] == 1
    medium.answers = []
    assert [key for _ in range(4) for key in medium.deliver(20)] == ["k"]
    assert medium.outbox.standing()["medium"] == {
        "pending": 0,
        "failing": 0,
        "failed": 0,
        "oldest": None,
        "error": None,
    }


def test_what_is_refused_for_itself_does_not_hold_up_what_comes_after_it(medium: Medium) -> None:
    medium.answers = [SendError("invalid blocks", permanent=True)]
    medium.put("opened")
    medium.deliver()
    medium.put("resolved", "incident_resolved")
    assert medium.deliver(1) == ["resolved"]


def test_a_receiver_that_takes_nothing_is_a_problem_with_its_answer_and_what_waits(medium: Medium) -> None:
    medium.answers = [SendError("HTTP 503")] * 2
    medium.put("k")
    medium.deliver()
    assert unsent("medium", medium.outbox.standing()["medium"]) is None, "one failure may be a restart"
    medium.deliver(10)
    assert unsent("medium", medium.outbox.standing()["medium"]) == (
        "medium takes no messages (HTTP 503); 1 message waits and will be sent again until taken"
    )


def test_an_alert_that_fires_is_sent_again_after_an_outage_longer_than_every_deadline(store: Store) -> None:
    medium = Medium(store, refresh=60)
    medium.put("opened")
    assert medium.deliver() == ["opened"]
    medium.answers = [SendError("down")] * 3 + [SendError("HTTP 404", permanent=True)] * 1_000
    for _ in range(500):
        medium.deliver(30)
    medium.answers = []
    assert medium.deliver(60) == ["opened"]
    assert medium.deliver(61) == ["opened"]


def test_what_is_long_over_is_pruned_and_what_fires_is_not(medium: Medium) -> None:
    for subject in ("a-0001", "b-0001"):
        medium.put(f"opened {subject}", subject=subject)
    medium.put("resolved", "incident_resolved", "a-0001")
    medium.deliver()
    medium.now += KEPT_SECONDS + 1
    medium.outbox.prune()
    with medium.store.transaction() as tx:
        assert set(tx.connection.scalars(select(OUTBOX.c.key))) == {"opened b-0001"}


def test_a_sender_stops_between_two_messages(medium: Medium) -> None:
    for number in range(3):
        medium.put(f"k{number}", subject=f"a-{number}")
    medium.outbox.deliver("medium", stopped=lambda: bool(medium.heard))
    assert [message.key for message in medium.heard] == ["k0"]


def test_a_message_past_its_deadline_is_given_up(medium: Medium) -> None:
    medium.put("k", "digest")
    assert medium.deliver(3601) == []
    assert medium.outbox.standing()["medium"]["failed"] == 1


def test_a_notifier_that_breaks_is_tried_again(medium: Medium) -> None:
    medium.answers = [ZeroDivisionError("a mistake")]
    medium.put("k")
    medium.deliver()
    assert medium.deliver(2) == ["k"]


def test_messages_of_one_subject_keep_their_order_and_others_pass(medium: Medium) -> None:
    medium.answers = [SendError("busy", retry_after=60)]
    medium.put("a1", "incident_opened", "a-0001")
    medium.put("b1", "incident_opened", "b-0001")
    medium.put("a2", "incident_resolved", "a-0001")
    assert medium.deliver() == ["a1", "b1"]
    assert medium.deliver(61) == ["a1", "a2"]


def test_an_update_that_nobody_has_seen_is_replaced_by_the_newer_one(medium: Medium) -> None:
    for number in range(3):
        medium.put(f"u{number}", "incident_updated")
    medium.put("r", "incident_resolved")
    assert medium.deliver() == ["r"]


def test_a_moved_value_replaces_no_escalation_but_is_replaced_by_one(medium: Medium) -> None:
    medium.put("v1", "incident_value")
    medium.put("v2", "incident_value")
    medium.put("escalated", "incident_updated")
    medium.put("v3", "incident_value")
    assert medium.deliver() == ["escalated", "v3"]


def test_of_what_comes_again_and_again_only_the_newest_is_kept(medium: Medium) -> None:
    medium.put("opened")
    for number in range(5):
        medium.put(f"v{number}", "incident_value")
        medium.put(f"d{number}", "digest", "digest")
        medium.deliver(60)
    with medium.store.transaction() as tx:
        assert set(tx.connection.scalars(select(OUTBOX.c.key))) == {"opened", "v4", "d4"}


def test_what_a_notifier_remembers_comes_back_per_subject_also_when_it_failed_half_way(medium: Medium) -> None:
    medium.answers = [SendError("half", remembered={"count": 41})]
    medium.put("a", subject="a-0001")
    medium.deliver()
    medium.deliver(5)
    medium.put("b", subject="b-0001")
    medium.deliver()
    assert medium.before == [{}, {"count": 41}, {}]


@pytest.fixture
def begun(medium: Medium) -> Medium:
    """A daemon died while it sent `k`."""

    def die(*_: Any) -> Sent:
        raise KeyboardInterrupt

    medium.put("k")
    dying = Outbox(medium.store, {"medium": Notifier("medium", KINDS, die)}, clock=lambda: medium.now)
    with pytest.raises(KeyboardInterrupt):
        dying.deliver("medium")
    return medium


def test_a_claim_that_was_never_recorded_is_sent_again(begun: Medium) -> None:
    assert begun.deliver(CLAIM_SECONDS - 1) == []
    assert begun.deliver(2) == ["k"]


def test_the_next_daemon_sends_at_once_what_the_last_one_had_begun(begun: Medium) -> None:
    assert begun.deliver(1) == []
    with begun.store.transaction() as tx:
        begun.outbox.take_over(tx)
    assert begun.deliver() == ["k"]


def test_a_take_over_leaves_alone_what_failed_and_what_this_daemon_sends_itself(medium: Medium) -> None:
    medium.answers = [SendError("busy", retry_after=50)]
    medium.put("failed", subject="a-0001")
    medium.put("sending", subject="b-0001")
    medium.deliver()
    heard: list[str] = []

    def send(message: Message, remembered: dict[str, Any]) -> Sent:
        with medium.store.transaction() as tx:
            outbox.take_over(tx)
        heard.append(message.key)
        return Sent(remembered)

    medium.put("own", subject="c-0001")
    outbox = Outbox(medium.store, {"medium": Notifier("medium", KINDS, send)}, clock=lambda: medium.now)
    outbox.deliver("medium")
    assert heard == ["own"]


def test_a_medium_that_forgets_is_told_again_while_an_incident_fires_and_a_while_after(store: Store) -> None:
    medium = Medium(store, refresh=60)
    medium.put("opened")
    told = medium.deliver
    assert told(0) == ["opened"]
    assert told(30) == []
    assert told(31) == ["opened"]
    medium.put("resolved", "incident_resolved")
    assert told(1) == ["resolved"]
    assert told(61) == ["resolved"]
    assert told(1000) == []
