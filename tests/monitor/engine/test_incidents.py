"""What an incident says: the message, how sure one may be, the armed plan, the text that people read."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runwatch.checks import Check, Column, Level, Phase, Signals, Verdicts, all_checks
from runwatch.monitor.card.rulebook import Rulebook
from runwatch.monitor.engine.evaluate import Judged
from runwatch.monitor.engine.incidents import alert_text, certainty, due, followed, payload, series
from runwatch.monitor.engine.tick import Tick
from runwatch.monitor.store.incident import Incident
from runwatch.monitor.store.store import RunState
from runwatch.rules import Alert, AlertState, Moment, NodeState, NodeVerdict, PlanRules

RUNBOOKS = Path(__file__).parents[3] / "docs" / "runbooks"
NOW = 1.79e9 + 100
AT = Moment(attempt=0, step=81_716, tokens=1e9, time=1.79e9)
SPIKE = Incident(
    id="loss_spike-0001",
    check="loss_spike",
    state="firing",
    severity="critical",
    change="escalated",
    what="The loss is 0.5 nats above its trend.",
    value=0.5,
    limit=0.1,
    since=AT,
    last=AT,
    opened=1.79e9,
)


def alerts(**levels: Level) -> dict[str, Alert]:
    """Alerts of every check, firing where a level above ok is given."""
    found = {name: Alert(check=name, level=Level.OK, at=AT, value=0.02, limit=0.1) for name in all_checks()}
    for name, level in levels.items():
        state = AlertState.FIRING if level >= Level.WARN else AlertState.INACTIVE
        found[name] = Alert(
            check=name,
            state=state,
            level=level,
            severity=level,
            at=AT,
            value=0.3,
            limit=0.1,
            message="bad",
            last_bad=AT,
        )
    return found


def rows(count: int = 400) -> Signals:
    """Train rows with a loss."""
    step = np.arange(count)
    loss = Column(3 - step / count, np.ones(count, np.bool_))
    zeros = np.zeros(count)
    return Signals(
        zeros.astype(np.int32),
        step,
        step * 10.0,
        step * 1.0,
        np.full(count, Phase.TRAIN, np.int8),
        zeros.astype(np.bool_),
        {"train/loss": loss},
    )


def at_tick(**levels: Level) -> Tick:
    node = NodeVerdict("instability", "rewind_and_skip", NodeState.ARMED, "Half of it holds.", 0.5, ("loss_spike",))
    return Tick(
        run="demo",
        directory="runs/demo",
        now=1.79e9,
        rows=rows(),
        block=rows(0),
        judged=Judged(),
        attempts=["a0001"],
        records=400,
        rulebook=Rulebook({}, {"instability": PlanRules(mode="auto")}),
        receipts={},
        state=RunState(alerts=alerts(**levels)),
        links={"status": "http://x/"},
        nodes=(node,),
    )


CERTAINTY = {
    "No other check is firing.": {},
    "grad_norm agrees.": {"grad_norm": Level.WARN},
    "finite and grad_norm agree.": {"grad_norm": Level.WARN, "finite": Level.CRITICAL},
    "checkpoint, finite and grad_norm agree; eval_regression could not be judged.": {
        "grad_norm": Level.WARN,
        "finite": Level.CRITICAL,
        "checkpoint": Level.WARN,
        "eval_regression": Level.UNKNOWN,
    },
}


@pytest.mark.parametrize("sentence", CERTAINTY)
def test_it_says_which_checks_agree_and_which_were_silent(sentence: str) -> None:
    assert certainty("loss_spike", alerts(loss_spike=Level.CRITICAL, **CERTAINTY[sentence])) == sentence


def test_the_text_has_what_since_when_how_sure_the_plan_and_the_next_command() -> None:
    body = payload(SPIKE, all_checks()["loss_spike"], at_tick(loss_spike=Level.CRITICAL))
    text = alert_text(body)
    for part in (
        "demo: loss_spike is firing (critical, escalated)",
        "The loss is 0.5 nats above its trend.",
        "Worst value 0.5, limit 0.1; since step 81,716 (1,000,000,000 tokens)",
        "No other check is firing.",
        "rewind_and_skip of instability (auto) is armed at 50%: Half of it holds.",
        "Next: runwatch status runs/demo",
        "runbook: http://x/runbooks/loss_spike",
    ):
        assert part in text


@pytest.mark.parametrize("name", all_checks())
def test_the_alert_of_every_check_says_what_to_know_and_leads_to_a_runbook_that_exists(name: str) -> None:
    check, nothing = all_checks()[name], np.zeros(1)
    for reason in range(len(check.messages)):
        verdict = Verdicts(
            np.full(1, Level.CRITICAL, np.int8), nothing + 0.5, nothing + 0.1, np.full(1, reason, np.int8)
        )
        incident = SPIKE.model_copy(update={"id": f"{name}-0001", "check": name, "what": check.message(verdict, 0)})
        text = alert_text(payload(incident, check, at_tick(**{name: Level.CRITICAL})))
        for part in (
            f"demo: {name} is firing (critical, escalated)",
            incident.what,
            "Worst value 0.5, limit 0.1; since step 81,716 (1,000,000,000 tokens)",
            "No other check is firing.",
            "Next: runwatch",
            f"runbook: http://x/runbooks/{name}",
        ):
            assert part in text
    runbook = (RUNBOOKS / f"{name}.md").read_text(encoding="utf-8")
    for heading in ("Meaning", "Impact", "Diagnosis", "Mitigation"):
        assert heading.lower() in runbook.lower()


def test_a_value_that_is_not_finite_is_none_in_json_and_words_in_the_text() -> None:
    nan = SPIKE.model_copy(update={"value": float("nan"), "limit": float("inf")})
    body = payload(nan, all_checks()["loss_spike"], at_tick())
    assert (body["value"], body["limit"]) == (None, None)
    assert "Worst value not a finite number;" in alert_text(body)


DUE: dict[str, tuple[dict[str, Any], frozenset[str], str | None]] = {
    "new": ({}, frozenset(), "incident_opened"),
    "known": ({"notified": "firing critical", "notified_at": NOW - 59}, frozenset(), None),
    "known, but its value may have moved": (
        {"notified": "firing critical", "notified_at": NOW - 60},
        frozenset(),
        "incident_value",
    ),
    "known, but down": ({"notified": "firing critical", "notified_at": 0.0}, frozenset({"loss_spike"}), None),
    "known to be over": ({"notified": "resolved critical", "state": "resolved"}, frozenset(), None),
    "worse": ({"notified": "firing warning"}, frozenset(), "incident_updated"),
    "over": ({"notified": "firing critical", "state": "resolved"}, frozenset(), "incident_resolved"),
    "over before anybody knew": ({"state": "resolved"}, frozenset(), None),
    "held back while the run is down": ({}, frozenset({"loss_spike"}), None),
}


@pytest.mark.parametrize("case", DUE)
def test_people_are_notified_of_what_they_do_not_know(case: str) -> None:
    update, held_back, kind = DUE[case]
    incident = SPIKE.model_copy(update=update)
    assert due(incident, held_back, NOW) == kind
    assert incident.open == (incident.state == "firing" or kind == "incident_resolved")


def test_a_value_that_moves_at_every_tick_is_told_at_growing_pauses_and_at_least_every_quarter_hour() -> None:
    incident = SPIKE.model_copy(update={"notified": "firing critical", "notified_at": SPIKE.opened})
    times = [incident.notified_at]
    for now in np.arange(SPIKE.opened, SPIKE.opened + 86_400):
        if due(incident, frozenset(), float(now)) is not None:
            times.append(float(now))
            incident = incident.model_copy(update={"notified_at": float(now)})
    pauses = np.diff(times)
    assert (pauses.min(), pauses.max()) == (60, 900)
    assert np.all(np.diff(pauses) >= 0)
    assert len(times) < 150


def judged(*stretches: tuple[Level, int, float]) -> tuple[Verdicts, Signals]:
    """Verdicts of `finite`, a level, a length and a value each, and their rows."""
    level = np.concatenate([np.full(length, level, np.int8) for level, length, _ in stretches])
    value = np.concatenate([np.full(length, value) for _, length, value in stretches])
    return Verdicts(level, value, np.full(len(level), 0.1), np.zeros(len(level), np.int8)), rows(len(level))


def the_incident(*stretches: tuple[Level, int, float]) -> Incident:
    """The only incident of these verdicts."""
    verdicts, signals = judged(*stretches)
    _, incidents, _ = followed({}, {}, {"finite": verdicts}, signals, NOW)
    (found,) = incidents.values()
    return found


def test_an_incident_keeps_severity_sentence_value_and_limit_of_its_worst_record() -> None:
    found = the_incident((Level.WARN, 3, 9.0), (Level.CRITICAL, 1, 0.4), (Level.CRITICAL, 1, 0.7), (Level.WARN, 2, 8.0))
    assert (found.severity, found.value, found.limit, found.what) == ("critical", 0.7, 0.1, "The loss is 0.7.")
    assert (found.since.step, found.last.step, found.critical and found.critical.step) == (0, 6, 3)


def test_a_critical_incident_that_eases_stays_critical_with_the_value_that_was_critical() -> None:
    found = the_incident((Level.CRITICAL, 1, 0.4), (Level.WARN, 25, 0.2))
    assert (found.change, found.severity, found.value, found.what) == ("eased", "critical", 0.4, "The loss is 0.4.")


def test_bad_records_before_the_newest_good_one_of_a_block_count() -> None:
    found = the_incident((Level.WARN, 1, 0.2), (Level.OK, 3, 0.0), (Level.WARN, 1, 0.3), (Level.OK, 3, 0.0))
    assert (found.state, found.value, found.last.step) == ("firing", 0.3, 4)


def test_a_resolved_incident_says_what_resolved_it_and_keeps_its_worst_record() -> None:
    found = the_incident((Level.CRITICAL, 2, float("nan")), (Level.OK, 30, 0.02))
    assert (found.state, found.what) == ("resolved", "The loss is nan.")
    assert found.resolution == "The last 20 observations, up to step 21, are OK; the newest value is 0.02, limit 0.1."
    assert found.said == f"{found.resolution} At its worst: The loss is nan."
    text = alert_text(payload(found, all_checks()["finite"], at_tick()))
    assert text.startswith(f"demo: finite is resolved (critical, resolved)\n{found.said}\n")
    assert "Now" not in text


def test_a_resolved_incident_is_not_touched_by_the_next_one_of_its_check() -> None:
    verdicts, signals = judged((Level.CRITICAL, 2, 0.4), (Level.OK, 30, 0.02), (Level.WARN, 2, 0.9))
    _, incidents, _ = followed({}, {}, {"finite": verdicts}, signals, NOW)
    assert {key: (one.state, one.value) for key, one in incidents.items()} == {
        "finite-0001": ("resolved", 0.4),
        "finite-0002": ("firing", 0.9),
    }


def test_an_incident_stored_by_a_release_before_is_read_with_the_new_names() -> None:
    body = SPIKE.model_dump(mode="json", exclude={"critical", "resolution", "notified", "notified_at", "notified_text"})
    stored = Incident.model_validate({**body, "told": "firing critical", "told_at": 5.0, "words": "The loss"})
    assert stored == SPIKE.model_copy(
        update={"notified": "firing critical", "notified_at": 5.0, "notified_text": "The loss"}
    )


def with_name(name: str) -> Check:
    return replace(all_checks()["finite"], name=name, required=("train/loss",))


def test_the_plot_has_the_limit_only_where_the_check_judged_the_signal_itself() -> None:
    recent = rows()
    judged = Verdicts(
        np.zeros(50, np.int8), recent.columns["train/loss"].values[-50:], np.full(50, 9.0), np.zeros(50, np.int8)
    )
    found = series(SPIKE, with_name("level"), judged, recent)
    assert found is not None
    assert found["limit"][-50:] == [9.0] * 50
    assert set(found["limit"][:-50]) == {None}
    other = series(SPIKE, with_name("score"), replace(judged, value=judged.value + 1), recent)
    assert other is not None
    assert set(other["limit"]) == {None}
