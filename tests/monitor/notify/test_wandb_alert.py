from collections.abc import Iterator
from typing import Any

import payloads
import pytest
from payloads import message
from pydantic import TypeAdapter
from wandb_server import API_KEY, WandbServer

from runwatch.monitor.notify import Notifier, NotifyConfig, SendError, connect

pytest.importorskip("wandb")


@pytest.fixture
def wandb() -> Iterator[WandbServer]:
    with WandbServer() as server:
        yield server


def notifier(url: str, **changed: Any) -> Notifier:
    data = {"kind": "wandb", "entity": "lab", "project": "runs", "run_id": "live1", "api_key": API_KEY, "base_url": url}
    return connect(TypeAdapter(NotifyConfig).validate_python({**data, **changed}))


@pytest.mark.slow
def test_an_incident_is_an_alert_of_the_run_that_the_trainer_has_open(wandb: WandbServer) -> None:
    notifier(wandb.url).send(message("incident_opened", payloads.incident()), {})
    [alert] = wandb.alerts
    assert (alert["entityName"], alert["projectName"], alert["runName"]) == ("lab", "runs", "live1")
    assert (alert["title"], alert["severity"]) == ("cpu-demo: loss_spike critical", "ERROR")
    assert "0.9 nats above its trend (limit 0.3 nats)" in alert["text"]


@pytest.mark.slow
def test_a_w_and_b_that_is_down_is_tried_again_later() -> None:
    told = message("incident_opened", payloads.incident())
    with pytest.raises(SendError) as failed:
        notifier("http://127.0.0.1:9", timeout_seconds=2).send(told, {})
    assert not failed.value.permanent


def test_an_update_of_the_same_severity_is_no_alert(wandb: WandbServer) -> None:
    notifier(wandb.url).send(message("incident_updated", payloads.incident("eased")), {"severity": "critical"})
    assert wandb.operations == []
