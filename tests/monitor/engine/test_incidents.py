"""What an incident says: the message, how sure one may be, the armed plan, the text that people read."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runwatch.checks import Check, Column, Level, Phase, Signals, Verdicts, all_checks
from runwatch.monitor.engine.incidents import (
    Incident,
    Surroundings,
    after,
    alert_text,
    certainty,
    payload,
    refreshed,
    series,
    to_tell,
)
from runwatch.rules import Alert, AlertState, Moment, NodeState, NodeVerdict, Reason, Transition

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
    found = {name: Alert(check=name, level=Level.OK, at=AT) for name in all_checks()}
    for name, level in levels.items():
        state = AlertState.FIRING if level >= Level.WARN else AlertState.INACTIVE
        found[name] = Alert(check=name, state=state, level=level, severity=level, at=AT, message="bad", last_bad=AT)
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


def around(**levels: Level) -> Surroundings:
    node = NodeVerdict("instability", "rewind_and_skip", NodeState.ARMED, "Half of it holds.", 0.5, ("loss_spike",))
    return Surroundings(
        "demo", "runs/demo", 1.79e9, alerts(**levels), (node,), {"instability": "auto"}, {"status": "http://x/"}, rows()
    )


CERTAINTY = {
    "No other check is in alarm.": {},
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
    body = payload(SPIKE, all_checks()["loss_spike"], None, around(loss_spike=Level.CRITICAL))
    text = alert_text(body)
    for part in (
        "demo: loss_spike is firing (critical, escalated)",
        "The loss is 0.5 nats above its trend.",
        "Value 0.5, limit 0.1; since step 81,716 (1,000,000,000 tokens)",
        "No other check is in alarm.",
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
        text = alert_text(payload(incident, check, None, around(**{name: Level.CRITICAL})))
        for part in (
            f"demo: {name} is firing (critical, escalated)",
            incident.what,
            "Value 0.5, limit 0.1; since step 81,716 (1,000,000,000 tokens)",
            "No other check is in alarm.",
            "Next: runwatch",
            f"runbook: http://x/runbooks/{name}",
        ):
            assert part in text
    runbook = (RUNBOOKS / f"{name}.md").read_text(encoding="utf-8")
    for heading in ("Meaning", "Impact", "Diagnosis", "Mitigation"):
        assert heading.lower() in runbook.lower()


def test_a_value_that_is_not_finite_is_none_in_json_and_words_in_the_text() -> None:
    nan = SPIKE.model_copy(update={"value": float("nan"), "limit": float("inf")})
    body = payload(nan, all_checks()["loss_spike"], None, around())
    assert (body["value"], body["limit"]) == (None, None)
    assert "Value not a finite number;" in alert_text(body)


TOLD: dict[str, tuple[dict[str, Any], frozenset[str], str | None]] = {
    "new": ({}, frozenset(), "incident_opened"),
    "known": ({"told": "firing critical", "told_at": NOW - 59}, frozenset(), None),
    "known, but its value may have moved": (
        {"told": "firing critical", "told_at": NOW - 60},
        frozenset(),
        "incident_value",
    ),
    "known, but down": ({"told": "firing critical", "told_at": 0.0}, frozenset({"loss_spike"}), None),
    "known to be over": ({"told": "resolved critical", "state": "resolved"}, frozenset(), None),
    "worse": ({"told": "firing warning"}, frozenset(), "incident_updated"),
    "over": ({"told": "firing critical", "state": "resolved"}, frozenset(), "incident_resolved"),
    "over before anybody knew": ({"state": "resolved"}, frozenset(), None),
    "held back while the run is down": ({}, frozenset({"loss_spike"}), None),
}


@pytest.mark.parametrize("case", TOLD)
def test_people_are_told_what_they_do_not_know(case: str) -> None:
    update, held_back, kind = TOLD[case]
    incident = SPIKE.model_copy(update=update)
    assert to_tell(incident, held_back, NOW) == kind
    assert incident.open == (incident.state == "firing" or kind == "incident_resolved")


def test_a_value_that_moves_at_every_tick_is_told_at_growing_pauses_and_at_least_every_quarter_hour() -> None:
    incident = SPIKE.model_copy(update={"told": "firing critical", "told_at": SPIKE.opened})
    times = [incident.told_at]
    for now in np.arange(SPIKE.opened, SPIKE.opened + 86_400):
        if to_tell(incident, frozenset(), float(now)) is not None:
            times.append(float(now))
            incident = incident.model_copy(update={"told_at": float(now)})
    pauses = np.diff(times)
    assert (pauses.min(), pauses.max()) == (60, 900)
    assert np.all(np.diff(pauses) >= 0)
    assert len(times) < 150


def test_a_firing_incident_follows_its_alert_and_a_calm_one_keeps_its_last_bad_record() -> None:
    bad = alerts(loss_spike=Level.CRITICAL)["loss_spike"].model_copy(update={"value": 0.7, "limit": 0.2})
    assert refreshed(SPIKE, bad).value == 0.7
    assert refreshed(SPIKE, bad.model_copy(update={"level": Level.OK, "value": 0.0})) == SPIKE


def test_a_resolved_incident_keeps_sentence_value_and_limit_of_one_record() -> None:
    calm = alerts()["loss_spike"].model_copy(
        update={"lives": 1, "since": AT, "at": AT, "message": "The newest bad record's.", "value": 0.01, "limit": 9.0}
    )
    over = after({SPIKE.id: SPIKE}, [Transition(Reason.RESOLVED, 0, calm)], NOW)[SPIKE.id]
    assert (over.state, over.what, over.value, over.limit) == ("resolved", SPIKE.what, SPIKE.value, SPIKE.limit)


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
