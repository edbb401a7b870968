"""The media that are an HTTP endpoint: webhook, dead man, Alertmanager."""

import hashlib
import hmac
import json
import math
import time
from dataclasses import replace
from typing import Any

import payloads
import pytest
from http_collector import Collector
from payloads import message
from pydantic import TypeAdapter

from runwatch.monitor.notify import Message, NotifyConfig, SendError, connect
from runwatch.monitor.notify.alertmanager import alerts

OPENED = message("incident_opened", payloads.incident())
RESOLVED = message("incident_resolved", payloads.incident("resolved"))


def config(kind: str, **given: Any) -> Any:
    return TypeAdapter(NotifyConfig).validate_python({"kind": kind, **given})


def send(kind: str, told: Message, **given: Any) -> dict[str, Any]:
    return connect(config(kind, **given)).send(told, {}).remembered


def test_a_webhook_gets_the_whole_message_signed_with_its_key(collector: Collector) -> None:
    send("webhook", OPENED, url=f"{collector.url}/hook", secret="s3cret")
    [request] = collector.requests
    assert json.loads(request.body)["payload"]["what"] == OPENED.payload["what"]
    assert request.headers["Idempotency-Key"] == OPENED.key
    seconds, digest = (part.split("=")[1] for part in request.headers["X-Runwatch-Signature"].split(","))
    assert digest == hmac.new(b"s3cret", f"{seconds}.".encode() + request.body, hashlib.sha256).hexdigest()


def test_a_webhook_says_null_for_nan(collector: Collector) -> None:
    send("webhook", message("incident_opened", payloads.incident(value=math.nan)), url=collector.url)
    assert json.loads(collector.requests[0].body)["payload"]["value"] is None


ANSWERS = {
    "refused for good": ((400, {}), True, None),
    "gone": ((410, {}), True, None),
    "asked to wait": ((429, {"Retry-After": "9"}), False, 9.0),
    "broken": ((500, {}), False, None),
    "down with a date": ((503, {"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}), False, None),
    "cut": ((0, {}), False, None),
}


@pytest.mark.parametrize(("answer", "permanent", "wait"), ANSWERS.values(), ids=ANSWERS.keys())
@pytest.mark.parametrize("kind", ["webhook", "alertmanager"])
def test_a_failure_says_whether_to_try_again(
    collector: Collector, kind: str, answer: tuple[int, dict[str, str]], *, permanent: bool, wait: float | None
) -> None:
    collector.answers.append(answer)
    given = {"urls": [collector.url]} if kind == "alertmanager" else {"url": f"{collector.url}/secret-path"}
    with pytest.raises(SendError) as failed:
        send(kind, OPENED, **given)
    assert (failed.value.permanent, failed.value.retry_after) == (permanent, wait)
    assert "secret-path" not in str(failed.value)


def test_one_member_of_an_alertmanager_cluster_is_enough(collector: Collector) -> None:
    send("alertmanager", OPENED, urls=["http://127.0.0.1:9", collector.url])
    assert len(collector.requests) == 1


def alertmanager(told: Message, known_as: dict[str, str] | None = None, resend: float = 60) -> list[dict[str, Any]]:
    return alerts(
        told, known_as, config("alertmanager", urls=["http://x"], resend_seconds=resend, labels={"team": "a"})
    )


def test_a_firing_alert_ends_far_ahead_and_a_resolved_one_when_it_was_resolved() -> None:
    [firing], [slow], [resolved] = alertmanager(OPENED), alertmanager(OPENED, resend=600), alertmanager(RESOLVED)
    assert firing["startsAt"] == resolved["startsAt"] == "2026-09-21T14:22:52.000+00:00"
    assert firing["endsAt"] == "2026-09-21T14:38:20.000+00:00"
    assert slow["endsAt"] == "2026-09-21T15:03:20.000+00:00"
    assert resolved["endsAt"] == "2026-09-21T14:23:20.000+00:00"


def test_sent_again_only_the_end_moves() -> None:
    [first], [second] = alertmanager(OPENED), alertmanager(replace(OPENED, time=OPENED.time + 60))
    assert first["endsAt"] < second["endsAt"]
    assert {**first, "endsAt": ""} == {**second, "endsAt": ""}


def test_an_escalation_ends_the_alert_of_the_old_severity() -> None:
    [warning] = alertmanager(message("incident_opened", payloads.incident(severity="warning")))
    critical, ended = alertmanager(OPENED, warning["labels"])
    assert critical["labels"] == {**warning["labels"], "severity": "critical"}
    assert (ended["labels"], ended["endsAt"]) == (warning["labels"], "2026-09-21T14:23:20.000+00:00")


def alive(age: float) -> Message:
    observed = {"run": "cpu-demo", "observed": time.time() - age, "until": time.time() + 180}
    return Message("alive", "deadman", "deadman", "cpu-demo", time.time(), observed, "step 419")


def test_the_dead_man_is_pinged(collector: Collector) -> None:
    send("deadman", alive(age=0), url=f"{collector.url}/ping/1")
    assert [(request.path, request.body) for request in collector.requests] == [("/ping/1", b"step 419")]


def test_an_old_ping_is_not_sent(collector: Collector) -> None:
    with pytest.raises(SendError, match="no longer current") as failed:
        send("deadman", alive(age=60), url=collector.url)
    assert failed.value.permanent
    assert collector.requests == []


SECRETS = {
    "the value itself": ({"secret": "from value"}, "from value"),
    "a file": ({"secret_file": "FILE"}, "from file"),
    "a variable": ({"secret_env": "RUNWATCH_TEST_SECRET"}, "from variable"),
}
BAD_SECRETS = {
    "two at once": ({"secret": "a", "secret_file": "FILE"}, "secret and secret_file are both set"),
    "no such file": ({"secret_file": "/nowhere/secret"}, "cannot read /nowhere/secret"),
    "no such variable": ({"secret_env": "RUNWATCH_TEST_MISSING"}, "RUNWATCH_TEST_MISSING is not set"),
}


@pytest.fixture
def with_files(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "secret").write_text("from file\n")
    monkeypatch.setenv("RUNWATCH_TEST_SECRET", "from variable")
    path = str(tmp_path / "secret")
    return lambda given: {key: path if value == "FILE" else value for key, value in given.items()}


@pytest.mark.parametrize(("given", "secret"), SECRETS.values(), ids=SECRETS.keys())
def test_a_secret_comes_from(with_files: Any, given: dict[str, str], secret: str) -> None:
    made = config("webhook", url="http://x", **with_files(given))
    assert made.secret.get_secret_value() == secret
    assert secret not in repr(made)


@pytest.mark.parametrize(("given", "complaint"), BAD_SECRETS.values(), ids=BAD_SECRETS.keys())
def test_a_secret_is_refused(with_files: Any, given: dict[str, str], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        config("webhook", url="http://x", **with_files(given))
