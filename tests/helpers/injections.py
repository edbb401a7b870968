"""Some fifty kinds of incident for the runs of `runs.py`, each with its true onset and the checks that should say it.

A kind changes a healthy run from train record `onset` on and returns the last train record that it harms. Sizes are
those of real incidents where there is one (named in the table), else the smallest that an operator would want to know.
Only the signals named are touched: no incident helps itself by shaking another signal too.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from runs import SEQUENCES, TOKENS_PER_STEP, Event, Run, healthy

from runwatch.checks import Phase, Signals

Harm = Callable[[Run, int], int]
SEATS = (5_000, 20_000, 50_000, 120_000, 250_000, 340_000)
"""First steps of the excerpts: fast descent, stable phase, decay."""
MOODS = ("calm", "typical", "correlated", "heavy")
GRACE = 300
"""Records after an incident's end in which an alarm still counts as its consequence."""


@dataclass(frozen=True)
class Kind:
    """One kind of incident: any of `checks` should speak within `horizon` train records (or seconds) of the onset."""

    name: str
    checks: tuple[str, ...]
    horizon: float
    harm: Harm
    unit: str = "records"
    align: tuple[int, int] = (1, 0)
    """Modulus and remainder of the step at the onset."""
    crashes: Sequence[int] = ()
    """Train records, counted from the onset, before which the job is cut and resumed."""
    records: int = 2500


@dataclass(frozen=True)
class Labelled:
    """A run with one incident: rows `first` to `last` of `signals` are it, `known` rows are its consequences too."""

    kind: Kind
    seed: int
    run: Run
    signals: Signals
    first: int
    last: int
    known: int


def inject(kind: Kind, seed: int) -> Labelled:
    """A run with an incident of that kind; seat, noise, onset and all draws follow from the seed."""
    rng = np.random.default_rng([seed, 77])
    first, noise = SEATS[seed % len(SEATS)], MOODS[(seed // len(SEATS) + seed) % len(MOODS)]
    modulus, remainder = kind.align
    onset = int(rng.integers(1250, 1450))
    onset -= (first + onset - remainder) % modulus
    crashes = [onset + crash for crash in kind.crashes]
    run = healthy(
        seed + zlib.crc32(kind.name.encode()), records=kind.records, first=first, noise=noise, crashes=crashes
    )
    last = kind.harm(run, onset)
    signals, rows = run.signals()
    written = np.flatnonzero(~signals.tick)
    begin = int(written[-1] if run.silence else rows[onset])
    ends = [int(rows[min(row, len(rows) - 1)]) for row in (last, last + GRACE)]
    if run.silence:
        ends = [len(signals) - 1] * 2
    return Labelled(kind, seed, run, signals, begin, ends[0], ends[1])


def _add(name: str, amount: Sequence[float] | Callable[[NDArray[np.float64]], NDArray[np.float64]]) -> Harm:
    """Add one amount per record, or a function of the records since the onset until the end."""

    def harm(run: Run, onset: int) -> int:
        values = run.columns[name]
        last = len(run) - 1 if callable(amount) else onset + len(amount) - 1
        since = np.arange(last + 1 - onset, dtype=np.float64)
        values[onset : last + 1] += amount(since) if callable(amount) else np.asarray(amount)
        return last

    return harm


def _scale(name: str, factor: Sequence[float] | Callable[[NDArray[np.float64]], NDArray[np.float64]]) -> Harm:
    """Multiply by one factor per record, or by a function of the records since the onset until the end."""

    def harm(run: Run, onset: int) -> int:
        values = run.columns[name]
        last = len(run) - 1 if callable(factor) else onset + len(factor) - 1
        since = np.arange(last + 1 - onset, dtype=np.float64)
        values[onset : last + 1] *= factor(since) if callable(factor) else np.asarray(factor)
        return last

    return harm


def _put(name: str, value: float, count: int) -> Harm:
    def harm(run: Run, onset: int) -> int:
        run.columns[name][onset : onset + count] = value
        return onset + count - 1

    return harm


def _all(*harms: Harm) -> Harm:
    return lambda run, onset: max(harm(run, onset) for harm in harms)


def _ramp(to: float, over: float) -> Callable[[NDArray[np.float64]], NDArray[np.float64]]:
    """From 0 to `to` over that many records, then staying."""
    return lambda since: to * np.minimum(1, (since + 1) / over)


def _growth(to: float, over: float) -> Callable[[NDArray[np.float64]], NDArray[np.float64]]:
    """A factor that grows exponentially from 1 to `to` over that many records, then stays."""
    return lambda since: to ** np.minimum(1, (since + 1) / over)


def _lasting(amount: float) -> Callable[[NDArray[np.float64]], NDArray[np.float64]]:
    return lambda since: np.full(len(since), amount)


def _slower(factor: Callable[[NDArray[np.float64]], NDArray[np.float64]], records: int = 10**6) -> Harm:
    """Steps take `factor` times as long."""

    def harm(run: Run, onset: int) -> int:
        rows = slice(onset, min(len(run), onset + records))
        by = factor(np.arange(rows.stop - onset, dtype=np.float64))
        run.seconds[rows] *= by
        run.columns["throughput/step_time"][rows] *= by
        run.columns["throughput/tokens_per_second"][rows] /= by
        run.columns["throughput/mfu"][rows] /= by
        return rows.stop - 1

    return harm


def _stragglers(since: NDArray[np.float64]) -> NDArray[np.float64]:
    """Every sixth step or so takes 2.5 times as long: one slow node in the collective."""
    return np.where(np.random.default_rng(len(since)).random(len(since)) < 0.17, 2.5, 1.0)


def _hang(last_event: Phase | None, seconds: float) -> Harm:
    """Nothing is written after the onset, or after the first record of that phase there."""

    def harm(run: Run, onset: int) -> int:
        starting = last_event in (Phase.INIT, Phase.COMPILE)
        run.cut(onset - 1 if starting else onset, silence=seconds)
        order = [event for event in run.events if event.after == len(run) - 1]
        phases = [event.phase for event in order]
        kept = order[: phases.index(last_event) + 1] if last_event is not None else order
        run.events = [event for event in run.events if event.after < len(run) - 1] + kept
        return len(run) - 1

    return harm


def _silence(run: Run, onset: int) -> int:
    """The writer gives up 100 records (a full disk), then goes on: training never stopped."""
    gap = slice(onset + 1, onset + 101)
    run.seconds[onset + 101] += run.seconds[gap].sum()
    run.drop(gap)
    run.columns["telemetry/dropped_records"][onset + 1 :] += 100
    return onset + 1


def _change_events(change: Callable[[Event, int], Event | None]) -> Harm:
    """Replace (or with None remove) events from the onset on; `change` is told the records since."""

    def harm(run: Run, onset: int) -> int:
        changed = [change(event, event.after - onset) if event.after >= onset else event for event in run.events]
        run.events = [event for event in changed if event is not None]
        return len(run) - 1

    return harm


def _without_step(event: Event, since: int) -> Event | None:
    """A checkpoint is begun and ends, but is never complete or finite."""
    del since
    return replace(event, metrics={}) if event.phase == Phase.CHECKPOINT else event


def _no_checkpoint(event: Event, since: int) -> Event | None:
    del since
    return None if event.phase == Phase.CHECKPOINT else event


def _worse_eval(amount: Callable[[int], float]) -> Callable[[Event, int], Event]:
    def change(event: Event, since: int) -> Event:
        loss = event.metrics.get("eval/loss")
        return event if loss is None else replace(event, metrics={"eval/loss": loss + amount(since)})

    return change


def _skipped_steps(run: Run, onset: int) -> int:
    run.columns["optim/skipped_step"][onset : onset + 20 : 4] = 1
    return onset + 16


def _mixture(run: Run, onset: int) -> int:
    run.columns["data/mixture/code"][onset:] += 0.2
    run.columns["data/mixture/web"][onset:] -= 0.2
    return len(run) - 1


def _data_moves(steps: int) -> Harm:
    """The data order jumps by that many steps' sequences, back (a replay) or forward (data skipped)."""

    def harm(run: Run, onset: int) -> int:
        columns = run.columns
        columns["data/position"][onset:] += steps * SEQUENCES
        if steps < 0:
            replayed = columns["data/sample_fingerprint"].copy()
            columns["data/sample_fingerprint"][onset:] = replayed[onset + steps : len(run) + steps]
        return len(run) - 1

    return harm


def _same_batches(run: Run, onset: int) -> int:
    """A loader that serves the batches of 300 steps ago again, and counts on as if nothing were."""
    fingerprints = run.columns["data/sample_fingerprint"]
    fingerprints[onset : onset + 100] = fingerprints[onset - 300 : onset - 200].copy()
    return onset + 99


def _step_back(run: Run, onset: int) -> int:
    run.step[onset:] -= 50
    run.tokens[onset:] -= 50 * TOKENS_PER_STEP
    return len(run) - 1


def _tokens_back(run: Run, onset: int) -> int:
    run.tokens[onset:] -= 50 * TOKENS_PER_STEP
    return len(run) - 1


def _half_batch(run: Run, onset: int) -> int:
    since = np.arange(1, len(run) - onset + 1)
    run.tokens[onset:] -= since * TOKENS_PER_STEP // 2
    run.columns["data/position"][onset:] -= since * SEQUENCES // 2
    return len(run) - 1


def _kinds() -> list[Kind]:
    return [*_loss_kinds(), *_optimizer_kinds(), *_routing_kinds(), *_speed_kinds(), *_state_kinds(), *_plan_kinds()]


def _loss_kinds() -> list[Kind]:
    loss, spike, either = "train/loss", ("loss_spike",), ("loss_spike", "ladder_deviation")
    heal = (4 * np.concatenate([[0.3, 0.8, 1.0], 0.94 ** np.arange(1, 80)])).tolist()
    swing = (0.4 * (-1.0) ** np.arange(40)).tolist()
    return [
        Kind("loss spike, one step, 0.3 nats", spike, 2, _add(loss, [0.3])),
        Kind("loss spike, one step, 1 nat", spike, 2, _add(loss, [1.0])),
        Kind("loss spike, one step, 3 nats", spike, 2, _add(loss, [3.0])),
        Kind("loss spike that heals, 4 nats", spike, 3, _all(_add(loss, heal), _scale("optim/grad_norm", [3, 20, 8]))),
        Kind("loss up by 0.03 nats, lasting", ("ladder_deviation",), 100, _add(loss, _lasting(0.03))),
        Kind("loss up by 0.1 nats, lasting", either, 10, _add(loss, _lasting(0.1))),
        Kind("loss up by 0.3 nats, lasting", either, 5, _add(loss, _lasting(0.3))),
        Kind("loss up by 1 nat, lasting", spike, 3, _add(loss, _lasting(1.0))),
        Kind("loss up by 3 nats, lasting", spike, 3, _add(loss, _lasting(3.0))),
        Kind("slow divergence, 0.1 nats in 100 steps", either, 150, _add(loss, _ramp(1.2, 1200))),
        Kind("oscillation of 0.4 nats", spike, 5, _add(loss, swing)),
        Kind("leaked data, -0.3 nats", ("ladder_deviation",), 30, _add(loss, _lasting(-0.3))),
        Kind("leaked data, -0.06 nats", ("ladder_deviation",), 100, _add(loss, _lasting(-0.06))),
        Kind("NaN loss, one step", ("finite",), 0, _put(loss, np.nan, 1)),
        Kind("NaN loss, lasting", ("finite",), 0, _put(loss, np.nan, 400)),
        Kind("Inf grad norm", ("finite",), 0, _put("optim/grad_norm", np.inf, 1)),
    ]


def _optimizer_kinds() -> list[Kind]:
    norm, z, grad, logit = "optim/grad_norm", "train/z_loss", ("grad_norm",), ("logit_growth",)
    bloom = [3.9, 9.9, 66, 600, 3980, 20]  # six steps of BLOOM 176B, recording bloom-176b-spike-fragment
    return [
        Kind("grad-norm outburst over six steps", grad, 6, _scale(norm, bloom)),
        Kind("grad norm x 3 in 600 steps", grad, 600, _scale(norm, _growth(3, 600))),
        Kind("grad norm past 4", grad, 400, _scale(norm, _growth(15, 300))),
        Kind("five skipped steps in twenty", grad, 20, _skipped_steps),
        Kind("z-loss x 2 in 800 steps", logit, 800, _scale(z, _growth(2, 800))),
        Kind("z-loss x 1.6 at once", logit, 50, _scale(z, _lasting(1.6))),
    ]


def _routing_kinds() -> list[Kind]:
    drop, balance = ("token_drop",), ("expert_balance",)
    rate, entropy, vio = "moe/drop_rate", "moe/load_entropy", "moe/load_max_vio"
    collapse = _all(_scale(vio, _growth(12, 20)), _add(entropy, _ramp(-0.3, 20)), _add(rate, _ramp(0.25, 20)))
    return [
        Kind("token drop to 40 % (context extension)", drop, 30, _add(rate, _lasting(0.37))),
        Kind("token drop to 10 %", drop, 200, _add(rate, _lasting(0.075))),
        Kind("expert collapse in 20 steps", balance, 40, collapse),
        Kind("load entropy falls by 0.15 in 400 steps", balance, 420, _add(entropy, _ramp(-0.15, 400))),
        Kind("router bias runs away", balance, 400, _scale("moe/router_bias_max", _growth(12, 300))),
        Kind("twelve dead experts", balance, 50, _add("moe/dead_experts", _lasting(12))),
    ]


def _speed_kinds() -> list[Kind]:
    slow, down, hour = ("throughput",), ("progress",), 3600.0
    return [
        Kind("MFU halves", slow, 40, _slower(_lasting(2.0))),
        Kind("one job 41 % slower (700 steps)", slow, 60, _slower(_lasting(1.41), 700)),
        Kind("throughput decays by 25 % in 1,000 steps", slow, 1100, _slower(_growth(4 / 3, 1000))),
        Kind("stragglers: every sixth step x 2.5", slow, 150, _slower(_stragglers)),
        Kind("hang in training", down, 600, _hang(None, hour), "seconds"),
        Kind("hang in evaluation", down, 3600, _hang(Phase.EVAL, 3 * hour), "seconds", (100, 0)),
        Kind("hang in a checkpoint", down, 3600, _hang(Phase.CHECKPOINT, 3 * hour), "seconds", (200, 0)),
        Kind("hang in initialisation", down, 5400, _hang(Phase.INIT, 4 * hour), "seconds", crashes=(0,)),
        Kind("hang in compilation", down, 5400, _hang(Phase.COMPILE, 4 * hour), "seconds", crashes=(0,)),
        Kind("telemetry silence (100 records lost)", down, 600, _silence, "seconds"),
        Kind(
            "restart loop without a new checkpoint",
            ("progress", "checkpoint"),
            330,
            lambda run, onset: min(onset + 280, len(run) - 1),
            align=(200, 61),
            crashes=tuple(range(0, 320, 40)),
        ),
    ]


def _state_kinds() -> list[Kind]:
    stale, worse = ("checkpoint",), ("eval_regression",)
    return [
        Kind("checkpoints stop", stale, 150, _change_events(_no_checkpoint), align=(200, 0)),
        Kind("checkpoints are never complete", stale, 150, _change_events(_without_step), align=(200, 0)),
        Kind("eval loss up by 0.15", worse, 5, _change_events(_worse_eval(lambda _: 0.15)), align=(100, 0)),
        Kind("eval loss up by 0.05", worse, 205, _change_events(_worse_eval(lambda _: 0.05)), align=(100, 0)),
        Kind(
            "eval loss rises by 0.08 in 1,000 steps",
            worse,
            1000,
            _change_events(_worse_eval(lambda since: 8e-5 * (since + 100))),
            align=(100, 0),
            records=3000,
        ),
    ]


def _plan_kinds() -> list[Kind]:
    off, rate = ("plan_conformance",), "optim/learning_rate"
    return [
        Kind("learning rate x 1.5", off, 20, _scale(rate, _lasting(1.5))),
        Kind("learning rate x 10 for five steps", off, 5, _scale(rate, [10.0] * 5)),
        Kind("learning rate drifts by 20 % in 500 steps", off, 400, _scale(rate, _growth(0.8, 500))),
        Kind("mixture off plan by 20 points", off, 60, _mixture),
        Kind("data replayed after a resume", off, 10, _data_moves(-100), crashes=(0,)),
        Kind("data skipped after a resume", off, 10, _data_moves(100), crashes=(0,)),
        Kind("data skipped", off, 10, _data_moves(50)),
        Kind("batches served again", off, 20, _same_batches),
        Kind("step goes back without a new attempt", off, 5, _step_back),
        Kind("tokens go back", off, 5, _tokens_back),
        Kind("batch halved", off, 30, _half_batch),
    ]


KINDS = _kinds()
