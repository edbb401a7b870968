"""The run has become unstable and does not recover by itself.

What it does: fires when `finite` is critical, or when `loss_spike` has been critical for a set number of records
while `grad_norm` or `logit_growth` is pending or firing too. The second check tells an unstable optimizer from a bad
batch that the loss will recover from.

Why it matters: after a NaN every further step is wasted (recording `gpt2-124m-three-attempts-nan`: 900 steps). Of a
32B run about 5 % of the steps around 70,000 to 80,000 were spent in spikes or recovering from them (marin#1368).

Fires when: `finite` is critical; or `loss_spike` is critical for `spike_records` without a break of more than five, and
`grad_norm` or `logit_growth` is pending or firing. Everywhere in the run.

Defaults:

| setting               | default     | source |
| --------------------- | ----------- | --- |
| `spike_records`       | 20 records  | a guess: in the recordings a spike that recovers does so within about ten records |
| `margin_records`      | 10 records  | the state is damaged before the loss shows it: update norms spike first (marin#1368) |
| `skip_margin_records` | 10 records  | a guess: see below |
| `lr_factor`           | 0.8         | OPT-175B (Zhang et al. 2022, arXiv 2205.01068) lowered it at restarts; the size is a guess |
| `max_executions`      | 3           | the three-failure budget of the seed run's launch contract (marin#7929) |
| `cooldown_records`    | 30 records  | a guess |
| `verify_records`      | 100 records | a guess |

Both margins double with each execution. PaLM (Chowdhery et al. 2022, arXiv 2204.02311, section 5.1) went back about
100 steps and skipped 200 to 500 batches, and the spikes did not return.

Does not see: a loss that drifts away without spiking (`early_divergence`); collapsed routing (`routing_collapse`).

The plan: `rewind_and_skip` returns to the newest checkpoint that is complete, finite and older than the onset (not
than the alert) by the margin; skips the batches from there until past the newest bad record; and scales the learning
rate. Checks judge the new attempt without the superseded records. When it has been carried out `max_executions` times
and the run is unstable again, `early_divergence` takes over inside its window; after the window the run is paused and
a person is paged.

What to do:

- Meaning: the optimizer state or the parameters are damaged.
- Impact: no step since the onset is worth its cost.
- Diagnosis: `runwatch status RUN_DIR` shows which check fired first; `data/sample_fingerprint` names the batch.
- Mitigation: approve the rewind. If the trouble comes back at the same batch, look at the data; if at another one, at
  the learning rate and the logit z-loss weight.
"""

import numpy as np
from pydantic import Field

from runwatch.rules.alert import Alert
from runwatch.rules.execution import SPENT, Execution
from runwatch.rules.node import Condition, Node, Proposal, Refusal
from runwatch.rules.plan import Pause, PlanRules, Preconditions, Rewind, ScaleLr
from runwatch.rules.world import Checkpoint, World, critical_for, spent

WITNESSES = ("grad_norm", "logit_growth")
ONSET_REACH = 50
"""Records before the first critical one in which a warning still counts as the onset of the same trouble."""
LEVEL_RECORDS = 32
"""Records before the onset whose median loss is the healthy level."""
RECOVER_RECORDS = 10
"""Records after a rewind whose median is held against it."""


class InstabilitySettings(PlanRules):
    """When it fires, how far it goes back and what it leaves out."""

    max_executions: int = Field(default=3, ge=1)
    cooldown_records: int = Field(default=30, ge=0)
    verify_records: int = Field(default=100, ge=1)
    spike_records: int = Field(default=20, ge=1)
    """Records for which the loss must stay off; raising it gives the run more time to recover."""
    margin_records: int = Field(default=10, ge=0)
    """Records between the checkpoint and the onset; doubles with each execution."""
    skip_margin_records: int = Field(default=10, ge=0)
    """Batches left out past the newest bad record; doubles with each execution."""
    lr_factor: float = Field(default=0.8, gt=0, le=1)
    """What the learning rate is multiplied by at each execution."""


def condition(world: World, settings: InstabilitySettings) -> Condition:
    """1 when a value is not finite; else the share of the required records for which the loss has been off."""
    if critical_for(world.alerts.get("finite")) is not None:
        return Condition(1.0, world.alerts["finite"].message, ("finite",))
    lasting = critical_for(world.alerts.get("loss_spike"))
    if lasting is None:
        return Condition(0.0, "finite and loss_spike are not critical.")
    progress = min(1.0, (lasting.step + 1) / settings.spike_records)
    witnesses = tuple(name for name in WITNESSES if name in world.alerts and world.alerts[name].alive)
    reason = f"loss_spike has been critical for {lasting.step + 1} records; the plan needs {settings.spike_records}"
    if not witnesses:
        reason = f"{reason} and an alert of {' or '.join(WITNESSES)}."
        return Condition(min(progress, 0.9), reason, ("loss_spike",))
    states = " and ".join(f"{name} is {world.alerts[name].state.value}" for name in witnesses)
    reason = f"{reason}; {states}. {world.alerts['loss_spike'].message}"
    return Condition(progress, reason, ("loss_spike", *witnesses))


def propose(world: World, settings: InstabilitySettings) -> Proposal | Refusal:
    """`rewind_and_skip`, or why there is no checkpoint to go back to."""
    doubled = 2 ** rewinds(world)
    first, newest = onset(world)
    target = first - settings.margin_records * doubled
    good = [checkpoint for checkpoint in surviving(world) if checkpoint.step <= target]
    if not good:
        return Refusal(f"there is no complete, finite checkpoint at or before step {target:,}; a person must decide.")
    back = max(good, key=lambda checkpoint: checkpoint.step)
    skip = max(newest - back.step, 0) + settings.skip_margin_records * doubled
    rewind = Rewind(checkpoint_step=back.step, skip_steps=skip)
    go = f"Rewind from step {world.step:,} to the checkpoint of step {back.step:,}, {first - back.step:,} steps before"
    scale = world.plan.lr_scale * settings.lr_factor
    effects = (
        f"{go} the onset at step {first:,}; skip the next {skip:,} batches.",
        f"Multiply the learning rate by {settings.lr_factor:g}, to {scale:g} of the schedule.",
    )
    return Proposal(
        (rewind, ScaleLr(factor=settings.lr_factor)),
        effects,
        Preconditions(attempt=world.attempt),
        healthy_loss=healthy_loss(world, back.step, first),
    )


def exhausted(world: World, settings: InstabilitySettings) -> Proposal | Refusal:
    """What comes after the last rewind: `early_divergence` inside its window, a pause for a person after it."""
    del settings
    if handed_on(world):
        return Refusal("no rewinds are left; early_divergence takes over.", settled=True)
    effect = f"Pause the run at the next step boundary: {rewinds(world)} rewinds have not made it stable."
    return Proposal((Pause(),), (effect,), Preconditions(attempt=world.attempt))


def rewinds(world: World) -> int:
    """Rewinds carried out so far."""
    done = (one for one in world.executions if one.node == "instability" and one.state in SPENT)
    return sum(any(isinstance(action, Rewind) for action in one.actions) for one in done)


def handed_on(world: World) -> bool:
    """Whether the rewinds are used up, the run is unstable, and `early_divergence` may still act."""
    settings = world.settings.get("instability") or InstabilitySettings()
    if not isinstance(settings, InstabilitySettings) or rewinds(world) < settings.max_executions:
        return False
    return condition(world, settings).progress >= 1 and _early_plan_left(world)


def _early_plan_left(world: World) -> bool:
    early = world.settings.get("early_divergence") or PlanRules()
    inside = world.tokens <= getattr(early, "window_fraction", 0.25) * world.plan.token_budget
    return inside and early.mode != "observe" and spent("early_divergence", world) < early.max_executions


def onset(world: World) -> tuple[int, int]:
    """First and newest bad step of the trouble: a warning shortly before the first critical record belongs to it."""
    alerts = [world.alerts[name] for name in ("finite", "loss_spike", *WITNESSES) if name in world.alerts]
    alive = [alert for alert in alerts if alert.alive and alert.last_bad is not None]
    critical = [
        alert.critical_since.step
        for alert in alive
        if alert.check not in WITNESSES and alert.critical_since is not None and _current(alert)
    ]
    first = min(critical, default=world.step)
    warned = [alert.since.step for alert in alive if alert.since is not None and _current(alert)]
    early = [step for step in warned if first - ONSET_REACH <= step <= first]
    newest = [alert.last_bad.step for alert in alive if alert.last_bad is not None and _current(alert)]
    return min([first, *early]), max([first, *newest])


def _current(alert: Alert) -> bool:
    """Whether the life of the alert lies in the newest attempt."""
    return alert.since is not None and alert.at is not None and alert.since.attempt == alert.at.attempt


def surviving(world: World) -> list[Checkpoint]:
    """Checkpoints that no rewind has superseded."""
    kept = list(world.checkpoints)
    for execution in world.executions:
        if execution.receipt is None or execution.receipt.status != "applied":
            continue
        for action in execution.actions:
            if isinstance(action, Rewind):
                step, when = action.checkpoint_step, execution.receipt.time
                kept = [one for one in kept if one.step <= step or one.time > when]
    return kept


def healthy_loss(world: World, back: int, first: int) -> float | None:
    """The level (nats) that the loss of this attempt had, with room for its noise; None when it was never seen.

    The higher of two levels: right after the checkpoint at step `back`, and before the onset at step `first`. Early in
    a run the loss falls much in between, so its noise is that of neighbouring steps (their differences have twice its
    variance). Of rows from long ago there are those right after each checkpoint.
    """
    recent = world.recent
    rows = recent.observed("train/loss")
    values, step = recent.values("train/loss"), recent.step[rows]
    usable = (recent.attempt[rows] == recent.attempt[-1:]) & (step < first) & np.isfinite(values)
    values, step = values[usable], step[usable]
    before = values[-LEVEL_RECORDS:]
    if len(before) < RECOVER_RECORDS:
        earlier = [one.healthy_loss for one in world.executions if one.node == "instability"]
        return earlier[-1] if earlier else None
    resumed = values[step > back][:RECOVER_RECORDS]
    level = max(float(np.median(before)), float(np.median(resumed)) if len(resumed) else -np.inf)
    jumps = np.abs(np.diff(before))[np.diff(step)[-len(before) + 1 :] == 1]
    noise = 1.4826 * float(np.median(jumps)) / np.sqrt(2) if len(jumps) else 0.0
    return level + max(0.05, 3 * noise)


def recovered(execution: Execution, world: World) -> bool | None:
    """Whether the loss of the new attempt is finite and back at its level; None while there are too few records."""
    if execution.receipt is None or not any(isinstance(action, Rewind) for action in execution.actions):
        return True
    rows = world.recent.observed("train/loss")
    after = world.recent.values("train/loss")[world.recent.time[rows] > execution.receipt.time][-RECOVER_RECORDS:]
    if len(after) < RECOVER_RECORDS:
        return None
    level = np.inf if execution.healthy_loss is None else execution.healthy_loss
    return bool(np.isfinite(after).all() and np.median(after) <= level)


NODE = Node(
    name="instability",
    plan="rewind_and_skip",
    checks=("finite", "loss_spike", *WITNESSES),
    settings=InstabilitySettings,
    window=lambda _: (0.0, float("inf")),
    condition=condition,
    propose=propose,
    rank=1,
    recovered=recovered,
    exhausted=exhausted,
)
