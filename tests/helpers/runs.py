"""A seeded generator of realistic runs, shared by tests and by the detection benchmark.

`healthy(seed, ...)` draws an excerpt of a 400,000-step run of a large mixture of experts (18 s and 46M tokens a step,
as in the seed run): a `Run` under construction, one entry per train record, which `injections.py` may harm.
`Run.signals()` lays the records out in time, with the pauses of evaluations, checkpoints and restarts, and with the
tick rows that a reader would put into the gaps; `write` makes a run directory of it.

What is drawn and where it comes from: loss = power law (exponent 0.3) + autocorrelated noise; `odd` is the one-rank
loss of the recording `gpt2-124m-heavy-tailed-clean`. Right-skewed gradient norm that peaks at a third of the run, with
isolated blips (recording `gpt2-124m-shared-cluster-clean`). Drop rate 10 % at the start, then 0, then rising to some
3 %; jobs cut and resumed from the last checkpoint with a slow first step (recording `mixtral-8x7b-h100-spikes`).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from runwatch.checks import Column, Phase, Signals

Floats = NDArray[np.float64]

START = 1.79e9
STEP_SECONDS = 18.0
SEQUENCES = 11_264
CONTEXT = 4096
TOKENS_PER_STEP = SEQUENCES * CONTEXT
TOTAL_STEPS = 400_000
WARMUP, DECAY, FINAL = 0.02, 0.2, 0.05
DECAY_START = round(TOTAL_STEPS * (1 - DECAY))
PEAK_LEARNING_RATE = 3e-4
STABLE = {"code": 0.25, "math": 0.1, "web": 0.65}
DECAYED = {"code": 0.35, "math": 0.3, "web": 0.35}


@dataclass(frozen=True)
class Noise:
    """Noise of the loss: standard deviation in nats, AR(1) coefficient, degrees of freedom of Student's t (0: normal).

    A share `odd` of the records has a bad batch: a Pareto tail of 4 to 30 standard deviations up, for that record only
    (the recording `gpt2-124m-heavy-tailed-clean` has 60 above 6.9 and 7 above 19 in 18,073).
    """

    sigma: float
    correlation: float
    freedom: float = 0.0
    odd: float = 0.0

    def draw(self, rng: np.random.Generator, records: int) -> Floats:
        """One value per record, in nats."""
        noise = autoregressive(rng, records, self.correlation, self.freedom)
        bad = rng.random(records) < self.odd
        return self.sigma * (noise + bad * np.minimum(4 * (1 + rng.pareto(2.5, records)), 30))


NOISES: Mapping[str, Noise] = {
    "calm": Noise(0.008, 0.3),
    "typical": Noise(0.02, 0.3),
    "correlated": Noise(0.02, 0.7),
    "heavy": Noise(0.02, 0.2, freedom=4.0),
    "odd": Noise(0.09, 0.0, freedom=10.0, odd=0.013),
}


@dataclass(frozen=True)
class Event:
    """A record that is no train record: after train record `after`, `seconds` after the record before it.

    It has that record's attempt and step, unless it says otherwise (a process start does).
    """

    after: int
    phase: Phase
    seconds: float
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    attempt: int | None = None
    step: int | None = None


@dataclass
class Run:
    """A run under construction: arrays with one entry per train record, events between them, and its card.

    `seconds` is the wall time of each train record since the record before it, `silence` the quiet after the last one.
    `missing` marks records without a metric; a non-finite value is one that was written.
    """

    attempt: NDArray[np.int32]
    step: NDArray[np.int64]
    tokens: Floats
    seconds: Floats
    columns: dict[str, Floats]
    events: list[Event]
    card: dict[str, Any]
    silence: float = 0.0
    missing: dict[str, NDArray[np.bool_]] = field(default_factory=dict[str, NDArray[np.bool_]])

    def __len__(self) -> int:
        return len(self.step)

    def cut(self, last: int, silence: float = 0.0) -> None:
        """Nothing comes after train record `last` and its events, for `silence` seconds."""
        self._keep(np.arange(last + 1))
        self.events = [event for event in self.events if event.after <= last]
        self.silence = silence

    def drop(self, rows: slice) -> None:
        """Take train records out (and the events after them); later records keep their distance to their neighbours."""
        kept = np.delete(np.arange(len(self)), rows)
        place = np.searchsorted(kept, np.arange(len(self)))
        self.events = [replace(event, after=int(place[event.after])) for event in self.events if event.after in kept]
        self._keep(kept)

    def _keep(self, rows: NDArray[np.intp]) -> None:
        self.attempt, self.step = self.attempt[rows], self.step[rows]
        self.tokens, self.seconds = self.tokens[rows], self.seconds[rows]
        self.columns = {name: values[rows] for name, values in self.columns.items()}
        self.missing = {name: flags[rows] for name, flags in self.missing.items()}

    def signals(self, *, ticks: bool = True) -> tuple[Signals, NDArray[np.intp]]:
        """All records in time as arrays, and the row of each train record."""
        events = sorted(self.events, key=lambda event: event.after)  # a stable sort keeps each gap's own order
        after = np.array([event.after for event in events], np.intp)
        length = len(self) + len(events)
        train = np.arange(len(self)) + np.searchsorted(after, np.arange(len(self)), side="left")
        other = np.setdiff1d(np.arange(length), train)
        source = np.empty(length, np.intp)
        source[train], source[other] = np.arange(len(self)), np.maximum(after, 0)
        attempt, step, tokens = self.attempt[source], self.step[source], self.tokens[source]
        for row, event in zip(other.tolist(), events, strict=True):
            if event.step is not None and event.attempt is not None:
                attempt[row], step[row], tokens[row] = event.attempt, event.step, event.step * TOKENS_PER_STEP
        seconds, phase = np.empty(length), np.full(length, Phase.TRAIN, np.int8)
        seconds[train], seconds[other] = self.seconds, [event.seconds for event in events]
        phase[other] = [event.phase for event in events]
        time = START + self.step[0] * STEP_SECONDS + np.cumsum(seconds)
        columns = self._columns(length, train, other, events)
        signals = Signals(attempt, step, tokens, time, phase, np.zeros(length, np.bool_), columns)
        if not ticks:
            return signals, train
        signals, rows = with_ticks(signals, self.silence)
        return signals, rows[train]

    def _columns(
        self, length: int, train: NDArray[np.intp], other: NDArray[np.intp], events: Sequence[Event]
    ) -> dict[str, Column]:
        columns: dict[str, Column] = {}
        for name, values in self.columns.items():
            columns[name] = Column(np.full(length, np.nan), np.zeros(length, np.bool_))
            columns[name].values[train] = values
            columns[name].present[train] = ~self.missing.get(name, np.zeros(len(self), np.bool_))
        for row, event in zip(other, events, strict=True):
            for name, value in event.metrics.items():
                column = columns.setdefault(name, Column(np.full(length, np.nan), np.zeros(length, np.bool_)))
                column.values[row], column.present[row] = value, True
        return columns


def tick_schedule(seconds: float) -> Floats:
    """When tick rows are due in such a silence: at 10 s, then after max(10 s, a tenth of the silence so far) each."""
    due = [10.0]
    while due[-1] < seconds:
        due.append(due[-1] + max(10.0, 0.1 * due[-1]))
    return np.array(due)


def with_ticks(signals: Signals, silence: float) -> tuple[Signals, NDArray[np.intp]]:
    """The rows of `signals` with tick rows in the gaps and in the `silence` after the end, and where each row went."""
    gaps = np.append(np.diff(signals.time), silence)
    schedule = tick_schedule(float(gaps.max(initial=0.0)))
    counts = np.searchsorted(schedule, gaps, side="left")
    rows = np.arange(len(signals)) + np.cumsum(counts) - counts
    source = np.repeat(np.arange(len(signals)), counts + 1)
    nth = np.arange(len(source)) - rows[source]
    tick = nth > 0
    spread = signals.take(source)
    time = spread.time + np.where(tick, schedule[np.maximum(nth - 1, 0)], 0.0)
    columns = {
        name: Column(np.where(tick, np.nan, column.values), column.present & ~tick)
        for name, column in spread.columns.items()
    }
    return Signals(spread.attempt, spread.step, spread.tokens, time, spread.phase, tick, columns), rows


def autoregressive(rng: np.random.Generator, records: int, correlation: float, freedom: float = 0.0) -> Floats:
    """AR(1) noise of unit variance with normal or Student-t innovations, by convolution with its impulse response."""
    burn = 64  # 0.75 ** 64 is 1e-8
    innovations = rng.standard_t(freedom, records + burn) if freedom else rng.standard_normal(records + burn)
    spread = math.sqrt(freedom / (freedom - 2)) if freedom else 1.0
    response = correlation ** np.arange(burn) * (math.sqrt(1 - correlation**2) / spread)
    return np.convolve(innovations, response)[burn : burn + records]


def expected_loss(step: Floats) -> Floats:
    """The registered curve in nats: a power law, a faster fall in the decay, and the step of the decay's mixture."""
    through = np.clip((step - DECAY_START) / (TOTAL_STEPS - DECAY_START), 0, 1)
    decay = 0.1 * through * (1.5 - 0.5 * through) + 0.03 * (step > DECAY_START)
    return 1.3 + 20.0 * (step + 7.0) ** -0.3 - decay


def learning_rate(step: Floats) -> Floats:
    """Warmup, stable, decay: linear in and out."""
    through = np.clip((step - DECAY_START) / (TOTAL_STEPS - DECAY_START), 0, 1)
    return PEAK_LEARNING_RATE * np.minimum(np.minimum(1, step / (WARMUP * TOTAL_STEPS)), 1 - (1 - FINAL) * through)


def healthy(
    seed: int,
    *,
    records: int = 2500,
    first: int = 50_000,
    noise: str = "typical",
    crashes: Sequence[int] = (),
    checkpoint_every: int = 200,
    eval_every: int = 100,
    outage: tuple[float, float] = (20.0, 50.0),
) -> Run:
    """An excerpt of a healthy run: `records` train records from step `first` on (1 is the first of the run).

    Before each of the train records `crashes` the job is cut, and resumed from the last checkpoint; `outage` bounds the
    seconds until the new process writes its first record. The mixture moves to its decay shares at step `DECAY_START`,
    as the card plans and declares.
    """
    rng = np.random.default_rng([seed, first, records])
    attempt, step = _attempts(records, first, crashes, checkpoint_every)
    at = step.astype(np.float64)
    columns = (
        _optimization(rng, at, NOISES[noise])
        | _routing(rng, at)
        | _data(rng, step)
        | _speed(rng, records, first, crashes)
    )
    events = _pauses(rng, step, columns["train/loss"], checkpoint_every, eval_every)
    for begin in ([0] if first == 1 else []) + list(crashes):
        events += _start(rng, begin - 1, int(attempt[begin]), int(step[begin]) - 1, outage)
    run_card = card(f"synthetic-{seed}", checkpoint_every, eval_every)
    seconds = columns["throughput/step_time"].copy()
    return Run(attempt, step, at * TOKENS_PER_STEP, seconds, columns, events, run_card)


def _attempts(
    records: int, first: int, crashes: Sequence[int], every: int
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    attempt, step = np.zeros(records, np.int32), np.arange(first, first + records, dtype=np.int64)
    for crash in crashes:
        attempt[crash:] += 1
        checkpoint = step[crash - 1] // every * every
        step[crash:] -= step[crash] - 1 - max(checkpoint, first - 1)
    return attempt, step


def _optimization(rng: np.random.Generator, step: Floats, noise: Noise) -> dict[str, Floats]:
    records, through = len(step), step / TOTAL_STEPS
    violent = np.exp(-step / 40)
    error = rng.uniform(0, 0.006) * np.sin(2 * np.pi * (step / rng.uniform(5e4, 2e5) + rng.random()))
    loss = expected_loss(step) + error + noise.draw(rng, records) + 1.5 * violent * rng.standard_normal(records)
    blips = np.where(rng.random(records) < 1 / 5000, rng.uniform(3, 10, records), 1.0)
    shape = 0.28 * (1 + 0.8 * np.exp(-(((through - 0.33) / 0.2) ** 2))) + 4 * np.exp(-step / 150) + np.exp(-step / 1500)
    skew = rng.uniform(0.1, 0.25)
    return {
        "train/loss": loss,
        "train/z_loss": (95 + 25 * through + 40 * violent) * np.exp(0.02 * autoregressive(rng, records, 0.4)),
        "optim/grad_norm": shape * blips * np.exp(skew * autoregressive(rng, records, 0.3)),
        "optim/skipped_step": np.zeros(records),
        "optim/learning_rate": learning_rate(step),
        "params/norm": 900 + 60 * np.sqrt(through) + 0.01 * rng.standard_normal(records),
        "plan/token_budget": np.full(records, float(TOTAL_STEPS * TOKENS_PER_STEP)),
        "plan/decay_start_tokens": np.full(records, float(DECAY_START * TOKENS_PER_STEP)),
        "plan/lr_scale": np.ones(records),
        "telemetry/dropped_records": np.zeros(records),
    }


def _routing(rng: np.random.Generator, step: Floats) -> dict[str, Floats]:
    records, young = len(step), np.exp(-step / 40)
    blips = np.where(rng.random(records) < 1 / 1500, rng.uniform(1.3, 1.8, records), 1.0)
    drop = 0.1 * young + 0.002 + 0.03 * (1 - np.exp(-step / 3e4))
    return {
        "moe/drop_rate": drop * blips * np.exp(0.1 * autoregressive(rng, records, 0.5)),
        "moe/load_max_vio": (0.5 + 4 * young) * np.exp(0.12 * autoregressive(rng, records, 0.5)),
        "moe/load_entropy": 0.9975 - 0.25 * young - 0.0008 * np.abs(autoregressive(rng, records, 0.5)),
        "moe/dead_experts": np.floor(40 * young),
        "moe/router_bias_max": 0.4 + 0.12 * np.log(step + 1) * np.exp(0.01 * rng.standard_normal(records)),
    }


def _data(rng: np.random.Generator, step: NDArray[np.int64]) -> dict[str, Floats]:
    hashes = (step.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(12)
    columns: dict[str, Floats] = {
        "data/sample_fingerprint": hashes.astype(np.float64),
        "data/position": (step * SEQUENCES).astype(np.float64),
    }
    for source, share in STABLE.items():
        planned = np.where(step > DECAY_START, DECAYED[source], share)
        spread = np.sqrt(planned * (1 - planned) / SEQUENCES)
        columns[f"data/mixture/{source}"] = planned + spread * rng.standard_normal(len(step))
    return columns


def _speed(rng: np.random.Generator, records: int, first: int, crashes: Sequence[int]) -> dict[str, Floats]:
    slow = np.exp(0.006 * autoregressive(rng, records, 0.6))
    slow *= 1 + np.where(rng.random(records) < 1 / 400, rng.uniform(0.1, 1.5, records), 0)
    for begin in ([0] if first == 1 else []) + list(crashes):
        slow[begin : begin + 10] *= np.array([rng.uniform(3, 8), *np.linspace(1.4, 1.05, 9)])[: records - begin]
    seconds: Floats = STEP_SECONDS * slow
    tokens_per_second: Floats = TOKENS_PER_STEP / seconds
    mfu: Floats = 0.225 / slow
    return {
        "throughput/step_time": seconds,
        "throughput/tokens_per_second": tokens_per_second,
        "throughput/mfu": mfu,
    }


def _pauses(
    rng: np.random.Generator, step: NDArray[np.int64], loss: Floats, checkpoint_every: int, eval_every: int
) -> list[Event]:
    events: list[Event] = []
    trend = expected_loss(step.astype(np.float64))
    for after in np.flatnonzero((step % eval_every == 0) | (step % checkpoint_every == 0)).tolist():
        if step[after] % eval_every == 0:
            held_out = 0.02 + trend[after] + rng.normal(0, 0.003)
            events.append(Event(after, Phase.EVAL, 0.05))
            events.append(Event(after, Phase.EVAL, rng.uniform(40, 90), {"eval/loss": held_out}))
        if step[after] % checkpoint_every == 0:
            events.append(Event(after, Phase.CHECKPOINT, 0.05))
            events.append(Event(after, Phase.CHECKPOINT, rng.uniform(5, 40), {"checkpoint/step": float(step[after])}))
    return events


def _start(rng: np.random.Generator, after: int, attempt: int, step: int, outage: tuple[float, float]) -> list[Event]:
    """A process start: the outage, then initialisation, compilation and the restore of `step`."""
    return [
        Event(after, Phase.INIT, rng.uniform(*outage), attempt=attempt, step=step),
        Event(after, Phase.COMPILE, rng.uniform(30, 200), attempt=attempt, step=step),
        Event(after, Phase.RESTORE, rng.uniform(60, 300), attempt=attempt, step=step),
    ]


def card(name: str, checkpoint_every: int, eval_every: int) -> dict[str, Any]:
    """The run card, as `run.yaml` holds it."""
    stable = np.geomspace(1, DECAY_START, 300).round()
    steps = np.unique(np.concatenate([stable, np.linspace(DECAY_START + 1, TOTAL_STEPS, 40).round()]))
    loss = expected_loss(steps)
    return {
        "version": 1,
        "run": {"name": name, "hypothesis": "A synthetic run is judged as a real one.", "owner": "benchmark"},
        "model": {"experts": 384, "experts_per_token": 8, "router_bias_limit": 8.0},
        "plan": {
            "token_budget": TOTAL_STEPS * TOKENS_PER_STEP,
            "context_length": CONTEXT,
            "sequences_per_step": SEQUENCES,
            "learning_rate": {
                "peak": PEAK_LEARNING_RATE,
                "warmup_fraction": WARMUP,
                "decay_fraction": DECAY,
                "final_fraction": FINAL,
            },
            "mixture": {"stable": STABLE, "decay": DECAYED},
            "checkpoint": {"every_steps": checkpoint_every, "keep": 4},
            "eval": {"every_steps": eval_every, "sequences": 1024},
        },
        "ladder": {
            "registered": "2026-11-01T00:00:00Z",
            "hash": "sha256:synthetic",
            "curve": {
                "tokens": (steps * TOKENS_PER_STEP).tolist(),
                "loss": loss.tolist(),
                "low": (loss * 0.98).tolist(),
                "high": (loss * 1.02).tolist(),
            },
        },
    }


def records(signals: Signals) -> Iterator[dict[str, Any]]:
    """The rows that are no ticks as the flat records of the telemetry contract."""
    for row in np.flatnonzero(~signals.tick).tolist():
        record: dict[str, Any] = {
            "attempt": f"a{signals.attempt[row] + 1:04d}",
            "step": int(signals.step[row]),
            "tokens": int(signals.tokens[row]),
            "time": float(signals.time[row]),
            "phase": Phase(signals.phase[row]).name.lower(),
        }
        for name, column in signals.columns.items():
            if column.present[row]:
                record[name] = _written(float(column.values[row]))
        yield record


def _written(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")


def write(run: Run, directory: Path) -> None:
    """Write a run directory: the card (JSON is YAML) and one telemetry segment."""
    signals, _ = run.signals(ticks=False)
    (directory / "telemetry").mkdir(parents=True)
    (directory / "run.yaml").write_bytes(orjson.dumps(run.card, option=orjson.OPT_INDENT_2))
    lines = (orjson.dumps(record) for record in records(signals))
    (directory / "telemetry" / "00000.jsonl").write_bytes(b"".join(line + b"\n" for line in lines))
