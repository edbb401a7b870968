"""A drill without training: a scripted trainer in the shape of any run card, watched by the live daemon's own tick.

Reading, judging, nodes, plans, store, outbox and webhook are the daemon's; only the trainer and the clock are scripted.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from runwatch.monitor.card.ladder_section import active_parameters
from runwatch.monitor.card.run_card import Card, load_card
from runwatch.monitor.daemon.settings import DaemonConfig
from runwatch.monitor.daemon.watched_run import Watch
from runwatch.monitor.drill.evidence import gather
from runwatch.monitor.drill.faults import HARMS, SAVES, SILENT
from runwatch.monitor.drill.links import Drill, Found, missing, settled
from runwatch.monitor.drill.receiver import Receiver
from runwatch.monitor.drill.scripted_trainer import MFU, SyntheticTrainer, stand_in_curve
from runwatch.monitor.notify import WebhookConfig
from runwatch.monitor.notify.outbox import Outbox
from runwatch.monitor.notify.webhook import connect
from runwatch.monitor.store.store import open_store, sqlite_url

START = 1.8e9
"""Unix seconds at which the clock of a replay begins."""
ONSET_SHARE = 0.06
"""Share of the token budget at which the fault comes: well inside the window of `early_divergence`."""
HISTORY = 700
"""Records before the onset: more than any check looks back to."""
HISTORY_SHARE = 0.12
"""Where the run is so short that this is less, it is the history."""
SEEN_ONE_BY_ONE = 40
"""Records since the onset of which each has a tick; later ticks have up to `BLOCK`."""
BLOCK = 50
SILENT_TICKS = 90
SILENT_SECONDS = 30.0
DEADLINE_FACTOR = 1.75
"""The deadline of a replay leaves so many times what a healthy run needs."""


@dataclass(frozen=True)
class Replayed:
    """The user's card as it is drilled, and what was changed on the copy, in sentences."""

    card: Card
    document: dict[str, Any]
    step_seconds: float
    changes: tuple[str, ...]

    @property
    def onset(self) -> int:
        """The first step of the fault."""
        steps = self.card.plan.token_budget // self.card.plan.tokens_per_step
        return max(round(ONSET_SHARE * steps), self.history) + 1

    @property
    def history(self) -> int:
        """Records before the onset."""
        steps = self.card.plan.token_budget // self.card.plan.tokens_per_step
        return min(HISTORY, round(HISTORY_SHARE * steps))

    @property
    def patience(self) -> int:
        """Records since the onset within which the chain must be there: nodes count in shares of the budget."""
        steps = self.card.plan.token_budget // self.card.plan.tokens_per_step
        settings = self.card.nodes.get("early_divergence", {})
        return 500 + round(1.5 * steps * settings.get("critical_fraction", 0.005))


def prepared(path: Path, step_seconds: float | None) -> Replayed:
    """The card as a drill needs it: nodes in mode auto, a curve, a deadline.

    Raises:
        CardError: the card has mistakes.
    """
    card = load_card(path)
    document = card.model_dump(mode="json", exclude_unset=True)
    seconds = step_seconds or _step_seconds(card)
    changes = [f"a step takes {seconds:.3g} s ({'as given' if step_seconds else f'from the model at an MFU of {MFU}'})"]
    document["nodes"] = {name: _auto(card.nodes.get(name, {})) for name in NODES}
    changes.append("every node is in mode auto, except those that the card leaves to observe")
    if card.ladder is None:
        document["ladder"] = stand_in_curve(card)
        changes.append("the card has no ladder: a stand-in curve is registered")
    steps = card.plan.token_budget / card.plan.tokens_per_step
    deadline = START + DEADLINE_FACTOR * steps * seconds
    document["plan"]["deadline"] = datetime.fromtimestamp(deadline, UTC).isoformat()
    changes.append(f"the deadline leaves {DEADLINE_FACTOR} times what a healthy run needs")
    return Replayed(Card.model_validate(document), document, seconds, tuple(changes))


NODES = ("early_divergence", "instability", "routing_collapse", "throughput_shortfall")


def _auto(settings: Mapping[str, Any]) -> dict[str, Any]:
    """A node that may act; one that the card lets only observe goes on doing so, and its drill says what is missing."""
    return {**settings, "mode": "observe" if settings.get("mode") == "observe" else "auto"}


def _step_seconds(card: Card) -> float:
    flops = 6.0 * active_parameters(card.model) * card.plan.tokens_per_step
    return flops / (MFU * card.hardware.devices * card.hardware.peak_flops_per_second)


def replay_drill(
    drill: Drill, replayed: Replayed, folder: Path, receiver: Receiver, say: Callable[[str], None]
) -> Found:
    """Run one drill in `folder`, in its own clock; what was found."""
    folder.mkdir(parents=True)
    (folder / "run.yaml").write_text(yaml.safe_dump(replayed.document, sort_keys=False), encoding="utf-8")
    onset = replayed.onset
    trainer = SyntheticTrainer(
        replayed.card,
        folder,
        step=onset - 1 - replayed.history,
        onset=onset,
        step_seconds=replayed.step_seconds,
        clock=START,
        harm=HARMS.get(drill.name),
        saves=SAVES[drill.name](onset) if drill.name in SAVES else float,
    )
    store = open_store(sqlite_url(folder), replayed.card.run.name)
    try:
        webhook = connect(WebhookConfig(kind="webhook", url=receiver.url(drill.name), timeout_seconds=10.0))
        outbox = Outbox(store, {"webhook": webhook}, lambda: trainer.clock)
        watch = Watch(folder, store, outbox, DaemonConfig(), "drill")
        trainer.train(replayed.history)
        _tick(watch, trainer)
        return _until_settled(_Replay(drill, replayed, trainer, watch, receiver), say)
    finally:
        store.close()


def _tick(watch: Watch, trainer: SyntheticTrainer) -> str:
    sentence = watch.tick(trainer.clock)
    watch.outbox.deliver("webhook")
    return sentence


@dataclass
class _Replay:
    """A replay at its onset."""

    drill: Drill
    replayed: Replayed
    trainer: SyntheticTrainer
    watch: Watch
    receiver: Receiver

    def look(self) -> Found:
        """What is there now."""
        told = self.receiver.told(self.drill.name)
        return gather(self.watch.run_dir, self.watch.store, told, "a0001", self.replayed.onset)


def _until_settled(replay: _Replay, say: Callable[[str], None]) -> Found:
    found, records = replay.look(), 0
    silent = replay.drill.name in SILENT
    ticks = 0
    while records < replay.replayed.patience and ticks < (SILENT_TICKS if silent else 10**6):
        block = 1 if records < SEEN_ONE_BY_ONE else min(BLOCK, records // 8)
        replay.trainer.train(block)
        replay.trainer.clock += SILENT_SECONDS if silent else 0.0
        records, ticks = records + block, ticks + 1
        sentence = _tick(replay.watch, replay.trainer)
        say(f"{records:,} steps since the onset")
        if ticks % 10 == 0 or " 0 changes of alerts, 0 messages" not in sentence:
            found = replay.look()
            if settled(replay.drill, found):
                return found
    return replay.look() if missing(replay.drill, found) else found
