"""The loss, the gradient norm, the z-loss or the parameter norm is NaN or infinite.

What it does: looks at `train/loss`, `optim/grad_norm`, `train/z_loss` and `params/norm`, each where present, and
turns critical at the very record in which one of them is not finite. It has no window and needs no history.

Why it matters: a GPT-2 run logged loss NaN from its first step, twice, for 900 and 99 steps, with perfectly normal
throughput, until its job limit ended it (recording `gpt2-124m-three-attempts-nan`). The parameters are lost from the
first update on: every further step is wasted.

Warns and turns critical when: never warns. Critical at the first record with a non-finite value; ok again at the
first record that carries the signals and is finite.

Defaults: no settings. None of these four is ever NaN in a healthy run.

Does not see: a finite but absurd value (`loss_spike`, `grad_norm`, `logit_growth`); skipped steps (`grad_norm`).

What to do:

- Meaning: the arithmetic of the step overflowed, or its data was bad.
- Impact: parameters and optimizer state may be damaged; no later step is worth its cost.
- Diagnosis: which of the four went first (`runwatch status RUN_DIR`), whether the gradient norm grew before, and which
  batch it was (`data/sample_fingerprint`).
- Mitigation: the plan `rewind_and_skip` returns to a finite checkpoint and skips the batch. Approve it with `runwatch
  plan approve`, or pause the run.
"""

import numpy as np
from numpy.typing import NDArray

from runwatch.checks.check import Check, Settings, Verdicts, graded
from runwatch.checks.signals import Signals

NAMES = ("train/loss", "optim/grad_norm", "train/z_loss", "params/norm")


class FiniteSettings(Settings):
    """Nothing to set."""


def evaluate(signals: Signals, settings: FiniteSettings) -> Verdicts:
    """Critical where one of the four signals is present and not finite; UNKNOWN before any was seen (T records)."""
    del settings
    return Verdicts.worst_held(
        [_evaluate_one(signals, name, reason) for reason, name in enumerate(NAMES)], len(signals)
    )


def _evaluate_one(signals: Signals, name: str, reason: int) -> tuple[Verdicts, NDArray[np.intp]]:
    values = signals.values(name)
    broken = ~np.isfinite(values)
    observed = Verdicts(
        graded(broken, broken), values, np.full(len(values), np.inf), np.full(len(values), reason, np.int8)
    )
    return observed, signals.observed(name)


CHECK = Check(
    name="finite",
    evaluate=evaluate,
    settings=FiniteSettings,
    required=NAMES,
    optional=(),
    lookback=lambda _: 1,
    messages=(
        "The loss is {value}.",
        "The gradient norm is {value}.",
        "The z-loss is {value}.",
        "The parameter norm is {value}.",
    ),
)
