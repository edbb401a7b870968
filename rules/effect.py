"""Whether what a plan asked for shows in the telemetry that came after its receipt."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runwatch.checks import Phase, Signals
from runwatch.rules import plan
from runwatch.rules.plan import Receipt
from runwatch.rules.world import World

MIXTURE_RECORDS = 10
"""The mean share of fewer records says little: a step of the CPU card holds eight sequences."""
LR_TOLERANCE = 0.05
"""Relative; a schedule that starts a step earlier or later still counts."""


@dataclass(frozen=True)
class Aftermath:
    """The world since a receipt: the train rows before and after it, told apart by the trainer's own clock."""

    world: World
    receipt: Receipt
    before: Signals
    after: Signals

    @staticmethod
    def of(world: World, receipt: Receipt) -> "Aftermath":
        """Cut the recent train rows of `world` at `receipt`."""
        recent = world.recent
        train, later = recent.trained, recent.time > receipt.time
        return Aftermath(
            world, receipt, recent.take(np.flatnonzero(train & ~later)), recent.take(np.flatnonzero(train & later))
        )

    def newest(self, name: str) -> float:
        """The newest value of a signal since the receipt, NaN if it was not seen."""
        values = self.after.values(name)
        return float(values[-1]) if len(values) else float("nan")


def missing_effects(actions: Sequence[plan.Action], receipt: Receipt, world: World) -> list[str]:
    """A sentence for each effect of `actions` that is not seen yet; none when all are."""
    seen = Aftermath.of(world, receipt)
    return [sentence for action in actions if (sentence := _SEEN[action.action](action, seen)) is not None]


def _token_budget(action: plan.SetTokenBudget, seen: Aftermath) -> str | None:
    return _shown("plan/token_budget", action.tokens, seen)


def _shown(name: str, wanted: float, seen: Aftermath) -> str | None:
    """None when the newest value of a signal is the one wanted."""
    value = seen.newest(name)
    if np.isclose(value, wanted, rtol=1e-6):
        return None
    return f"{name} should be {wanted:,.10g} but {_reads(value)}."


def _reads(value: float) -> str:
    return "was not seen" if np.isnan(value) else f"is {value:,.10g}"


def _lr_decay(action: plan.SetLrDecay, seen: Aftermath) -> str | None:
    hidden = _shown("plan/decay_start_tokens", action.start_tokens, seen)
    if hidden is not None:
        return hidden
    rows = seen.after.observed("optim/learning_rate")
    tokens, rate = seen.after.tokens[rows], seen.after.values("optim/learning_rate")
    decaying = tokens > action.start_tokens
    if not decaying.any():
        return None
    wanted = _decayed(tokens[decaying], action, seen.receipt.after.token_budget)
    off = np.abs(rate[decaying] / rate[decaying][0] * wanted[0] - wanted) / wanted[0]
    if off[-1] <= LR_TOLERANCE:
        return None
    return f"optim/learning_rate should follow the new schedule but is {off[-1]:.0%} off."


def _decayed(tokens: NDArray[np.float64], action: plan.SetLrDecay, budget: int) -> NDArray[np.float64]:
    """Fraction of the peak that linear decay leaves at `tokens`."""
    through = (tokens - action.start_tokens) / max(budget - action.start_tokens, 1)
    return 1 - (1 - action.final_fraction) * np.clip(through, 0, 1)


def _mixture(action: plan.SetDataMixture, seen: Aftermath) -> str | None:
    off = [
        sentence
        for source, share in sorted(action.shares.items())
        if (sentence := _share(f"data/mixture/{source}", share, seen)) is not None
    ]
    return " ".join(off) or None


def _share(name: str, share: float, seen: Aftermath) -> str | None:
    """None when the mean share is within three standard deviations of drawing that many sequences, and 0.02."""
    shares = seen.after.values(name)
    if len(shares) < MIXTURE_RECORDS:
        return f"{name} was seen in only {len(shares)} records; {MIXTURE_RECORDS} are needed."
    sequences = len(shares) * max(seen.world.planned.sequences_per_step, 1)
    allowed = 0.02 + 3 * np.sqrt(share * (1 - share) / sequences)
    mean = float(np.mean(shares))
    if abs(mean - share) <= allowed:
        return None
    return f"{name} should be {share:.2f} but is {mean:.2f} on average."


def _rewind(action: plan.Rewind, seen: Aftermath) -> str | None:
    """A later attempt that goes on right after the checkpoint, with the data order moved on by the skipped batches."""
    after = seen.after
    if not len(after):
        return "No step was trained since the rewind."
    if len(seen.before) and after.attempt[0] == seen.before.attempt[-1]:
        return "The rewind has not started a new attempt."
    step = int(after.step[0])
    if not action.checkpoint_step < step <= action.checkpoint_step + 2:
        return f"The run should continue after step {action.checkpoint_step:,} but continued at step {step:,}."
    return _skipped(action, seen)


def _skipped(action: plan.Rewind, seen: Aftermath) -> str | None:
    position, earlier = seen.after.values("data/position"), seen.before.values("data/position")
    if not len(position) or len(earlier) < 2:
        return "data/position was not seen before and after the rewind."
    batch = float(np.median(np.diff(earlier)))
    steps = seen.before.step[seen.before.observed("data/position")]
    wanted = earlier[-1] - (steps[-1] - action.checkpoint_step - action.skip_steps - 1) * batch
    if position[0] >= wanted - 1:
        return None
    return f"data/position should have jumped to {wanted:,.0f} but is {position[0]:,.0f}."


def _scale_lr(action: plan.ScaleLr, seen: Aftermath) -> str | None:
    return _shown("plan/lr_scale", seen.receipt.before.lr_scale * action.factor, seen)


def _setting(field: str, key: str) -> Callable[[Any, Aftermath], str | None]:
    """A number of the plan that steps show as `plan/<key>`; where a trainer never reports it, its receipt counts."""

    def seen_setting(action: Any, seen: Aftermath) -> str | None:
        if not len(seen.after):
            return "No step was trained since the receipt."
        wanted, after = getattr(action, field), getattr(seen.receipt.after, key)
        if seen.world.recent.has(f"plan/{key}"):
            return _shown(f"plan/{key}", wanted, seen)
        return None if np.isclose(wanted, after) else f"{key} should be {wanted:g} but the receipt says {after:g}."

    return seen_setting


def _checkpoint(action: plan.CheckpointNow, seen: Aftermath) -> str | None:
    del action
    saved = [checkpoint.step for checkpoint in seen.world.checkpoints]
    return None if saved and max(saved) >= seen.receipt.step else "No checkpoint was written since the receipt."


def _in_phase(*phases: Phase) -> Callable[[Any, Aftermath], str | None]:
    def seen_in_phase(action: Any, seen: Aftermath) -> str | None:
        del action
        names = " or ".join(phase.name.lower() for phase in phases)
        return None if seen.world.phase in phases else f"The run should be in phase {names}."

    return seen_in_phase


_SEEN: Mapping[str, Callable[[Any, Aftermath], str | None]] = {
    "set_token_budget": _token_budget,
    "set_lr_decay": _lr_decay,
    "set_data_mixture": _mixture,
    "rewind": _rewind,
    "scale_lr": _scale_lr,
    "set_z_loss_weight": _setting("weight", "z_loss_weight"),
    "set_capacity_factor": _setting("factor", "capacity_factor"),
    "set_balance_rate": _setting("rate", "balance_rate"),
    "set_context_length": _setting("tokens", "context_length"),
    "checkpoint_now": _checkpoint,
    "pause": _in_phase(Phase.PAUSED, Phase.FINISHED),
    "resume": _in_phase(Phase.TRAIN, Phase.EVAL, Phase.CHECKPOINT, Phase.FINISHED),
    "stop": _in_phase(Phase.FINISHED),
}
