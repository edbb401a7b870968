"""Opens watches on scripted runs that obey."""

import copy
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import obedient
import pytest

from runwatch.monitor.daemon.settings import DaemonConfig
from runwatch.monitor.daemon.watched_run import Watch
from runwatch.monitor.notify import Message, Notifier, Sent
from runwatch.monitor.notify.outbox import Outbox
from runwatch.monitor.store.store import open_store, sqlite_url

TINY: dict[str, Any] = {
    "version": 1,
    "run": {"name": "tiny", "hypothesis": ""},
    "seed": 3,
    "model": {
        "width": 16, "layers": 2, "heads": 2, "kv_heads": 1, "head_width": 8, "global_every": 2, "window": 8, "experts": 4,
        "experts_per_token": 2, "expert_width": 16, "shared_experts": 2, "shared_expert_width": 16, "latent_width": 8,
    },
    "hardware": {"devices": 1, "peak_flops_per_second": 1.0e11},
    "plan": {
        "token_budget": 5120,
        "context_length": 32,
        "sequences_per_step": 4,
        "learning_rate": {"peak": 0.01, "warmup_fraction": 0.1, "decay_fraction": 0.25, "final_fraction": 0.05},
        "mixture": {"stable": {"code": 0.5, "docs": 0.25, "prose": 0.25}, "decay": {"code": 0.25, "docs": 0.25, "prose": 0.5}},
        "checkpoint": {"every_steps": 10, "keep": 3},
        "eval": {"every_steps": 20, "sequences": 6},
    },
}  # fmt: skip
"""Opens watches on scripted runs that obey."""


@pytest.fixture(scope="session")
def tiny() -> dict[str, Any]:
    """A card for the real trainer."""
    return copy.deepcopy(TINY)


@pytest.fixture(scope="session")
def jax_cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where compiled programs are kept."""
    return os.environ.get("JAX_COMPILATION_CACHE_DIR") or str(tmp_path_factory.mktemp("jax-cache"))


class Sink:
    """A notifier that keeps what it was sent."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        kinds = ("incident_opened", "incident_updated", "incident_resolved", "plan_proposed", "plan_updated")
        self.notifier = Notifier("sink", frozenset(kinds), self._send)

    def _send(self, message: Message, remembered: dict[str, Any]) -> Sent:
        self.sent.append(message)
        return Sent(remembered)


@pytest.fixture
def sink() -> Sink:
    """Where the messages of a test's watches go."""
    return Sink()


@pytest.fixture
def open_watch(request: pytest.FixtureRequest, sink: Sink) -> "Callable[[obedient.Obedient], Watch]":
    """Opens a watch on a scripted run as a fresh daemon would; what it opened is closed after the test."""

    def open_one(trainer: "obedient.Obedient") -> Watch:
        store = open_store(sqlite_url(trainer.run_dir), "scripted")
        request.addfinalizer(store.close)
        outbox = Outbox(store, {"sink": sink.notifier}, lambda: trainer.clock)
        return Watch(trainer.run_dir, store, outbox, DaemonConfig(), "test")

    return open_one


@pytest.fixture
def begin(tmp_path: Path) -> Callable[..., "obedient.Obedient"]:
    """A scripted run in which one node will have something to do."""

    def begin_one(node: str, mode: str, rules: dict[str, Any] | None = None, **how: Any) -> "obedient.Obedient":
        trainer = obedient.Obedient(tmp_path / "run", node=node, **how)
        (trainer.run_dir / "run.yaml").write_text(json.dumps(obedient.card(node, mode, **(rules or {}))))
        return trainer

    return begin_one
