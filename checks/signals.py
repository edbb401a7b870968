"""The vocabulary of signals, and a run's records as arrays.

`VOCABULARY` is the one table of names, units, meanings and of what other trainers call the same thing.
`Signals` holds T records: missing (`present` is false) and non-finite (present, and NaN or infinite) are different
things.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property

import numpy as np
from numpy.typing import NDArray


class Phase(IntEnum):
    """What the trainer is doing."""

    INIT = 0
    COMPILE = 1
    TRAIN = 2
    EVAL = 3
    CHECKPOINT = 4
    RESTORE = 5
    PAUSED = 6
    FINISHED = 7


@dataclass(frozen=True)
class Signal:
    """One canonical signal. `aliases` maps a foreign name to the factor that turns its value into our unit."""

    name: str
    unit: str
    meaning: str
    aliases: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True)
class Column:
    """One signal over T records: `values` (float64) count only where `present` (bool)."""

    values: NDArray[np.float64]
    present: NDArray[np.bool_]


@dataclass(frozen=True)
class Piece:
    """Rows `start` to `stop` that share one past: the surviving rows in `intervals`, oldest first."""

    start: int
    stop: int
    intervals: tuple[tuple[int, int], ...]

    def context(self, signals: "Signals", start: int, lookback: int, names: Sequence[str]) -> NDArray[np.intp]:
        """Rows before `start` (which lies in this piece) that a check may look at, ascending.

        They are the last `lookback` surviving rows and the rows of the last `lookback` observations of each of
        `names`.
        """
        past = [*self.intervals, (self.start, start)]
        wanted = [_last(past, lookback, None)]
        wanted += [_last(past, lookback, signals.observed(name)) for name in names if signals.has(name)]
        lowest = min((int(rows[0]) for rows in wanted if len(rows)), default=start)
        kept = np.zeros(start - lowest, np.bool_)
        for rows in wanted:
            kept[rows - lowest] = True
        return np.flatnonzero(kept) + lowest


def _last(past: Sequence[tuple[int, int]], count: int, among: NDArray[np.intp] | None) -> NDArray[np.intp]:
    """The last `count` rows in the intervals `past`, ascending, among the ascending rows `among` or among all."""
    found: list[NDArray[np.intp]] = [np.empty(0, np.intp)]
    for begin, end in reversed(past):
        if count <= 0:
            break
        if among is None:
            rows = np.arange(max(begin, end - count), end)
        else:
            low, high = np.searchsorted(among, (begin, end))
            rows = among[max(low, high - count) : high]
        found.append(rows)
        count -= len(rows)
    return np.concatenate(found[::-1])


@dataclass(frozen=True)
class Signals:
    """T records of one run, in the order in which they were written.

    `attempt` numbers the attempts in order of appearance; `tokens` and `time` (Unix seconds) are NaN where a source
    does not tell; `tick` marks rows that the reader put in because time passed without a record: they carry the last
    step, tokens and phase, and no metrics.
    """

    attempt: NDArray[np.int32]
    step: NDArray[np.int64]
    tokens: NDArray[np.float64]
    time: NDArray[np.float64]
    phase: NDArray[np.int8]
    tick: NDArray[np.bool_]
    columns: Mapping[str, Column]

    def __len__(self) -> int:
        return len(self.step)

    def has(self, name: str) -> bool:
        """Whether any record carries `name`."""
        return len(self.observed(name)) > 0

    def observed(self, name: str) -> NDArray[np.intp]:
        """The rows that carry `name`, ascending."""
        if name not in self._observed:
            column = self.columns.get(name)
            self._observed[name] = np.empty(0, np.intp) if column is None else np.flatnonzero(column.present)
        return self._observed[name]

    @cached_property
    def _observed(self) -> dict[str, NDArray[np.intp]]:
        return {}

    def values(self, name: str) -> NDArray[np.float64]:
        """The values of `name` where it was observed, one per row of `observed(name)`."""
        rows = self.observed(name)
        return self.columns[name].values[rows] if len(rows) else np.empty(0)

    def family(self, prefix: str) -> list[str]:
        """The names of all signals under `prefix/`, sorted."""
        return sorted(name for name in self.columns if name.startswith(f"{prefix}/"))

    def take(self, rows: NDArray[np.intp] | slice, among: Sequence[str] | None = None) -> "Signals":
        """Only `rows`, in that order; of the columns only those named in `among` or under one of these, if it is given."""
        columns = {
            name: Column(col.values[rows], col.present[rows])
            for name, col in self.columns.items()
            if among is None or name in among or name.rpartition("/")[0] in among
        }
        return Signals(
            self.attempt[rows],
            self.step[rows],
            self.tokens[rows],
            self.time[rows],
            self.phase[rows],
            self.tick[rows],
            columns,
        )

    @staticmethod
    def concatenate(parts: Sequence["Signals"]) -> "Signals":
        """Consecutive stretches of one run as one; a signal that a stretch lacks is missing there."""
        names = sorted({name for part in parts for name in part.columns})
        columns = {
            name: _join([part.columns.get(name) for part in parts], [len(part) for part in parts]) for name in names
        }
        return Signals(
            np.concatenate([part.attempt for part in parts]),
            np.concatenate([part.step for part in parts]),
            np.concatenate([part.tokens for part in parts]),
            np.concatenate([part.time for part in parts]),
            np.concatenate([part.phase for part in parts]),
            np.concatenate([part.tick for part in parts]),
            columns,
        )

    def pieces(self, moved: Sequence[int] = ()) -> Iterator[Piece]:
        """The run cut where its past changes, in order.

        A cut lies at the first train record of an attempt that resumes at or below a step trained before (rows from
        that step on are superseded and leave the past), and where the steps of a declared change in `moved` are first
        reached (the whole past goes).
        """
        key = tuple(moved)
        if key not in self._pieces:
            self._pieces[key] = tuple(self._cut(key))
        return iter(self._pieces[key])

    @cached_property
    def _pieces(self) -> dict[tuple[int, ...], tuple[Piece, ...]]:
        return {}

    @cached_property
    def trained(self) -> NDArray[np.bool_]:
        """Which rows are train records: of phase train, and no ticks."""
        return (self.phase == Phase.TRAIN) & ~self.tick

    def _cut(self, moved: Sequence[int]) -> Iterator[Piece]:
        rewinds = set(self._rewinds(self.trained))
        crossings = self._crossings(self.trained, moved)
        cuts = sorted(rewinds | crossings)
        past: list[tuple[int, int]] = []
        start = 0
        for stop in [*cuts, len(self)]:
            if stop > start:
                yield Piece(start, stop, tuple(past))
                past.append((start, stop))
            if stop in crossings:
                past.clear()
            elif stop in rewinds:
                self._supersede(past, int(self.step[stop]))
            start = stop

    def _rewinds(self, trained: NDArray[np.bool_]) -> list[int]:
        rows = np.flatnonzero(trained)
        if not len(rows):
            return []
        attempts = self.attempt[rows]
        first = rows[np.flatnonzero(np.diff(attempts, prepend=attempts[0]))]
        highest = np.maximum.accumulate(self.step[rows])
        before = highest[np.searchsorted(rows, first) - 1]
        return [int(row) for row in first[self.step[first] <= before]]

    def _crossings(self, trained: NDArray[np.bool_], moved: Sequence[int]) -> set[int]:
        rows = np.flatnonzero(trained)
        if not len(rows) or not len(moved):
            return set()
        reached = np.searchsorted(np.asarray(sorted(moved)), self.step[rows], side="right")
        return {int(row) for row in rows[1:][np.diff(reached) > 0]}

    def _supersede(self, past: list[tuple[int, int]], step: int) -> None:
        """Cut the rows from `step` on off the end of `past`."""
        while past:
            begin, end = past.pop()
            superseded = np.flatnonzero(self.step[begin:end] >= step)
            if not len(superseded):
                past.append((begin, end))
                return
            if superseded[0] > 0:
                past.append((begin, begin + int(superseded[0])))
                return


def _join(columns: Sequence[Column | None], lengths: Sequence[int]) -> Column:
    return Column(
        np.concatenate(
            [np.full(n, np.nan) if col is None else col.values for col, n in zip(columns, lengths, strict=True)]
        ),
        np.concatenate(
            [np.zeros(n, np.bool_) if col is None else col.present for col, n in zip(columns, lengths, strict=True)]
        ),
    )


def _table(*signals: Signal) -> Mapping[str, Signal]:
    return {signal.name: signal for signal in signals}


VOCABULARY: Mapping[str, Signal] = _table(
    Signal(
        "train/loss",
        "nats",
        "mean cross-entropy of the step's tokens",
        {
            "train/CE loss": 1,
            "train/CrossEntropyLoss": 1,
            "train/cross_entropy_loss": 1,
            "learning/loss": 1,
            "loss_metrics/global_avg_loss": 1,
            "lm loss": 1,
            "lm_loss": 1,
            "loss/train/total": 1,
            "loss": 1,
            "train_loss": 1,
            "train_loss_step": 1,
            "training_loss": 1,
        },
    ),
    Signal(
        "train/z_loss",
        "1",
        "mean of log(Z)^2 over the step's tokens, before its weight",
        {"train/Z loss": 1, "train/ZLoss": 1, "z_loss": 1, "learning/z_loss": 1},
    ),
    Signal(
        "optim/grad_norm",
        "1",
        "global gradient norm before clipping",
        {
            "optim/total grad norm": 1,
            "optim/total_grad_norm": 1,
            "grad/norm/total": 1,
            "learning/raw_grad_norm": 1,
            "grad-norm": 1,
            "grad norm": 1,
            "l2_norm/grad/global": 1,
            "grad_norm": 1,
            "train/grad_norm": 1,
            "gradient_norm": 1,
            "learning/grad_norm": 1,
        },
    ),
    Signal(
        "optim/skipped_step",
        "1",
        "1 when the optimizer left this step out",
        {"optim/step skipped": 1, "number of skipped iterations": 1, "skipped_steps": 1},
    ),
    Signal(
        "optim/learning_rate",
        "1",
        "learning rate of the main parameter group",
        {
            "optim/LR": 1,
            "optim/LR (group 0)": 1,
            "optim/learning_rate_group0": 1,
            "learning/current_learning_rate": 1,
            "learning-rate": 1,
            "learning rate": 1,
            "lr-DecoupledAdamW/group0": 1,
            "lr-AdamW/group0": 1,
            "lr-DecoupledLionW/group0": 1,
            "learning_rate": 1,
            "train/learning_rate": 1,
            "train/lr": 1,
            "lr": 1,
        },
    ),
    Signal(
        "params/norm",
        "1",
        "global parameter norm",
        {
            "optim/total_param_norm": 1,
            "params/norm/total": 1,
            "learning/param_norm": 1,
            "params-norm": 1,
            "params norm": 1,
            "l2_norm/param/global": 1,
            "param_norm": 1,
        },
    ),
    Signal(
        "moe/drop_rate",
        "ratio",
        "share of token-expert assignments over capacity, dropped",
        {"moe/drop_fraction": 1, "drop_rate": 1},
    ),
    Signal("moe/load_max_vio", "1", "worst layer of (max - mean) / mean tokens per expert"),
    Signal("moe/load_entropy", "ratio", "worst layer of load entropy over ln E"),
    Signal("moe/dead_experts", "experts", "experts without a token in this step, all layers"),
    Signal("moe/router_bias_max", "1", "largest magnitude of a router balance bias"),
    Signal(
        "throughput/tokens_per_second",
        "tokens/s",
        "tokens of the step over its wall time",
        {
            "throughput/tokens_per_sec": 1,
            "train/tok_per_sec": 1,
            "tokens_per_s": 1,
            "tokens_per_second": 1,
            "tokens_per_sec": 1,
            "tok_per_sec": 1,
            "train_tokens_per_second": 1,
            "throughput/device/TPS": 1,
            "throughput/device/tokens_per_second": 1,
            "throughput(tps)": 1,
            "perf/per_device_tokens_per_sec": 1,
        },
    ),
    Signal(
        "throughput/mfu",
        "ratio",
        "model FLOP/s over the devices' peak",
        {
            "throughput/device/MFU": 0.01,
            "mfu(%)": 0.01,
            "mfu_percent": 0.01,
            "throughput/device/mfu": 1,
            "perf/mfu": 1,
            "train/mfu": 1,
            "mfu": 1,
        },
    ),
    Signal(
        "throughput/step_time",
        "s",
        "wall time of the step",
        {
            "throughput/duration": 1,
            "perf/step_time_seconds": 1,
            "time_metrics/end_to_end(s)": 1,
            "iteration-time": 1,
            "elapsed time per iteration (s)": 1,
            "elapsed time per iteration (ms)": 0.001,
            "step_time_s": 1,
            "step_time": 1,
            "step_time_ms": 0.001,
            "train/dt": 1,
            "dt": 1,
            "dt_ms": 0.001,
            "iter_time": 1,
        },
    ),
    Signal(
        "eval/loss",
        "nats",
        "held-out loss",
        {
            "validation_metrics/loss": 1,
            "eval/avg_loss": 1,
            "lm loss validation": 1,
            "metrics/eval/LanguageCrossEntropy": 1,
            "eval_loss": 1,
            "val/loss": 1,
            "val_loss": 1,
            "valid_loss": 1,
            "validation_loss": 1,
            "eval/paloma/macro_loss": 1,
            "eval/lm/c4_en-validation/CE loss": 1,
            "eval/c4_en-validation/CrossEntropyLoss": 1,
            "eval_loss_c4": 1,
        },
    ),
    Signal("data/sample_fingerprint", "1", "52-bit hash of the step's sequences"),
    Signal("data/position", "sequences", "sequences drawn from the data order so far"),
    Signal("checkpoint/step", "step", "step of the newest complete, finite checkpoint"),
    Signal("plan/token_budget", "tokens", "token budget in force"),
    Signal("plan/decay_start_tokens", "tokens", "where the learning-rate decay begins"),
    Signal("plan/lr_scale", "1", "product of all scale_lr actions"),
    Signal("plan/z_loss_weight", "1", "logit z-loss weight of the step"),
    Signal("plan/capacity_factor", "1", "expert capacity factor of the step"),
    Signal("plan/balance_rate", "1", "size of the step's router-bias update"),
    Signal("plan/context_length", "tokens", "length of the step's sequences"),
    Signal("telemetry/dropped_records", "records", "records that the telemetry writer gave up, cumulative"),
)
FAMILIES: Mapping[str, Signal] = _table(
    Signal("data/mixture", "ratio", "share of the step's tokens from the source named last"),
)
