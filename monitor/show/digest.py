"""The digest: the status document as one message."""

from collections.abc import Mapping

from runwatch.monitor.notify import Message
from runwatch.monitor.show.status import Status


def digest(status: Status, expected: float | None, links: Mapping[str, str], now: float, number: int) -> Message:
    """How the run stands, from the status document; `expected` is the registered loss at its tokens."""
    run = status["run"]
    body = {
        "run": run["name"],
        "step": run["step"],
        "tokens": run["tokens"],
        "token_budget": run["token_budget"],
        "loss": run["latest"].get("train/loss"),
        "expected_loss": expected,
        "mfu": run["latest"].get("throughput/mfu"),
        "tokens_per_second": run["tokens_per_second"],
        "eta": run["eta"],
        "incidents": [f"{one['check']}: {one['what']}" for one in status["incidents"] if one["state"] == "firing"],
        "plans": [f"{one['id']} is {one['state']}" for one in status["plans"] if one["open"]],
        "links": dict(links),
    }
    text = f"{run['name']}: {status['sentence']}"
    return Message(f"{run['name']}/digest/{number}", "digest", "digest", run["name"], now, body, text)
