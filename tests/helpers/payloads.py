"""Messages as the daemon writes them, for the tests of every notifier."""

from typing import Any

from runwatch.monitor.notify import Kind, Message

NOW = 1_790_000_600.0
SERIES = {
    "signal": "train/loss",
    "unit": "nats",
    "steps": [float(step) for step in range(400, 420)],
    "values": [2.5] * 12 + [3.4, None, 3.6, 3.5, 3.4, 3.5, 3.4, 3.5],
    "limit": [2.8] * 20,
    "flagged": (412.0, 419.0),
}


def incident(change: str = "fired", **changed: Any) -> dict[str, Any]:
    """An incident's payload; `changed` keys replace the usual ones."""
    state = "resolved" if change == "resolved" else "firing"
    return {
        "id": "cpu-demo-loss_spike-0001",
        "run": "cpu-demo",
        "check": "loss_spike",
        "severity": "critical",
        "state": state,
        "change": change,
        "summary": "The loss left its own trend suddenly.",
        "what": "The loss is 0.9 nats above its trend (limit 0.3 nats).",
        "value": 0.9,
        "limit": 0.3,
        "since_step": 412,
        "since_tokens": 1_687_552.0,
        "since_time": NOW - 30,
        "step": 419,
        "opened": NOW - 28,
        "resolved": NOW if state == "resolved" else None,
        "agreeing": ["grad_norm"],
        "certainty": "grad_norm agrees; eval_regression cannot tell yet.",
        "plan": "rewind_and_skip is armed (confirm).",
        "command": "runwatch status runs/cpu-demo",
        "links": {"runbook": "https://example.org/runbooks/loss_spike", "dashboard": "https://example.org/d/run"},
        "series": SERIES,
        **changed,
    }


def plan(state: str = "proposed", **changed: Any) -> dict[str, Any]:
    """A plan execution's payload: the shorter budget waits for a decision."""
    return {
        "id": "early_divergence-0001",
        "run": "cpu-demo",
        "node": "early_divergence",
        "plan": "shorten_budget",
        "mode": "confirm",
        "state": state,
        "severity": "critical",
        "summary": "Cut the token budget from 12.3M to 6.1M and decay from 3.5M tokens on.",
        "evidence": "ladder_deviation critical since step 412 (1.7M tokens).",
        "actions": [{"action": "set_token_budget", "tokens": 6_144_000}],
        "effects": ["token budget 12.3M → 6.1M", "decay start 9.8M → 3.5M tokens"],
        "step": 431,
        "tokens": 1_765_376.0,
        "proposed": NOW,
        "expires": NOW + 600,
        "by": None if state == "proposed" else "ada (U0ADA, Slack)",
        "reason": None if state == "proposed" else "by button in Slack",
        "commands": {"Approve": "runwatch plan approve runs/cpu-demo early_divergence-0001"},
        "links": {"runbook": "https://example.org/runbooks/early_divergence"},
        **changed,
    }


def digest(**changed: Any) -> dict[str, Any]:
    """A digest's payload."""
    return {
        "run": "cpu-demo",
        "step": 1000,
        "tokens": 4_096_000.0,
        "token_budget": 12_288_000.0,
        "loss": 2.31,
        "expected_loss": 2.28,
        "mfu": 0.41,
        "tokens_per_second": 29_300.0,
        "eta": NOW + 3600,
        "incidents": ["loss_spike is critical since step 412."],
        "plans": [],
        "links": {"dashboard": "https://example.org/d/run"},
        **changed,
    }


def message(kind: Kind, payload: dict[str, Any], *, attempt: int = 1, time: float = NOW) -> Message:
    """`payload` as a message; the plain text has every line of the alert."""
    subject = payload.get("id", f"digest-{time:.0f}")
    lines = [payload.get("what") or payload.get("summary") or "digest", payload.get("command", "")]
    key = f"{subject}/{kind}/{payload.get('change', payload.get('state', ''))}"
    return Message(key, kind, subject, payload["run"], time, payload, "\n".join(lines), attempt)
