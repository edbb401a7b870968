"""Any run that people have on disk to `Signals`: run directories, tables, JSON lines, W&B, TensorBoard, text logs.

Names are mapped by the vocabulary's aliases (`checks/signals.py`), by `--map`, and by `HEADS` for what is no signal.
A step that goes back in a source without attempts is a resume. A clock that begins again is made to go on, so that
attempts follow each other. Tick rows go into the silences of every source with a clock.
"""

import difflib
import gzip
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from runwatch.checks.signals import FAMILIES, VOCABULARY, Phase, Signal, Signals
from runwatch.monitor.read import formats
from runwatch.monitor.read.formats import Reader, SourceError
from runwatch.monitor.read.records import Problem, Rows, Target, resolve
from runwatch.monitor.read.run_directory import RunReader

HEADS: Mapping[str, tuple[str, ...]] = {
    "step": (
        "step", "global_step", "train/global_step", "trainer/global_step", "time/batch", "iteration", "iter", "Step",
        "_step",
    ),
    "tokens": (
        "tokens", "throughput/total_tokens", "throughput/total tokens", "num_input_tokens_seen",
        "train/num_input_tokens_seen", "n_tokens_seen", "time/token", "consumed tokens", "consumed_tokens",
        "total_tokens", "tokens_seen",
    ),
    "time": ("time", "_timestamp", "timestamp", "wall_time", "wall_time_s", "Wall time", "_runtime", "elapsed_s"),
    "attempt": ("attempt",),
    "run": ("run",),
    "phase": ("phase",),
}  # fmt: skip
"""What other logs call the head of a record, the best name first."""

CUMULATIVE = frozenset({"skipped_steps"})
"""Columns that count since the start (DeepSpeed): each row's value is what it adds to the one before."""

UNITS = {"percent": 0.01, "ratio": 1.0, "ms": 1e-3, "s": 1.0, "min": 60.0, "thousands": 1e3, "millions": 1e6}

UNIX_EPOCH_BEGINS = 1e8
"""Seconds; a smaller clock counts from the start of its process."""

RATIO_TOLERANCE = 0.01
"""A ratio signal is refused when more than this share of its values lies outside 0 to 1."""


@dataclass(frozen=True)
class Loaded:
    """A run as arrays, the attempts' names, and what a reader of the result should know."""

    source: str
    signals: Signals
    attempts: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    starts: tuple[int, ...] = ()
    """Rows at which another run begins, in a file that holds several (a column `run`)."""

    @property
    def records(self) -> int:
        """Rows that the source holds (ticks are ours)."""
        return int((~self.signals.tick).sum())


@dataclass(frozen=True)
class Naming:
    """How the names of a source are read: `--map ours=theirs` and `--unit signal=percent`."""

    mapping: Mapping[str, str] = field(default_factory=dict[str, str])
    units: Mapping[str, float] = field(default_factory=dict[str, float])

    @staticmethod
    def parse(maps: Sequence[str], units: Sequence[str]) -> "Naming":
        """From the words of the command line.

        Raises:
            SourceError: a word is not `name=value`, or names no signal or unit.
        """
        mapping = {_known(ours, maps=True): theirs for ours, theirs in map(_pair, maps)}
        return Naming(mapping, {_known(ours, maps=False): _unit(unit) for ours, unit in map(_pair, units)})

    def resolve(self, name: str) -> Target | None:
        """The signal that `name` means in this source."""
        ours = next((ours for ours, theirs in self.mapping.items() if theirs == name and ours not in HEADS), None)
        target = resolve(name) if ours is None else Target(ours, rank=-1)
        return replace(target, factor=self.units[target.signal]) if target and target.signal in self.units else target

    def heads(self, head: str) -> tuple[str, ...]:
        """The names under which `head` may come, the best first."""
        return (self.mapping[head],) if head in self.mapping else HEADS[head]


def _pair(word: str) -> tuple[str, str]:
    name, equals, value = word.partition("=")
    if not name or not equals or not value:
        raise SourceError(f"{word!r} is not NAME=VALUE.")
    return name, value


def _known(name: str, *, maps: bool) -> str:
    names = [*VOCABULARY, *(HEADS if maps else ())]
    if name in names or name.rpartition("/")[0] in FAMILIES:
        return name
    nearest = difflib.get_close_matches(name, names, 1)
    hint = f"did you mean {nearest[0]}?" if nearest else "`runwatch signals` lists them."
    raise SourceError(f"{name!r} is not a canonical signal; {hint}")


def _unit(text: str) -> float:
    try:
        factor = UNITS[text] if text in UNITS else float(text)
    except ValueError:
        factor = 0.0
    if not 0 < factor < float("inf"):
        raise SourceError(f"{text!r} is not a unit; use {', '.join(UNITS)} or a factor.")
    return factor


class _Translator:
    """Foreign records, one after the other, to records of ours: head, attempts, clock, phase, counters."""

    def __init__(self, naming: Naming) -> None:
        self.naming = naming
        self.foreign_phases: dict[str, int] = {}
        self.run = ""
        self.unix_clock = False
        self._step_rank = len(HEADS["step"])
        self._step = -1
        self._trained = False
        self._attempt = 1
        self._base = 0.0
        self._clock = float("nan")
        self._counted: dict[str, float] = {}
        self._shapes: dict[tuple[str, ...], tuple[bool, bool]] = {}

    def translate(self, record: dict[str, Any]) -> dict[str, Any]:
        """One record; a step that cannot be used is left to `Rows` to refuse."""
        self._begin_run(str(self._first(record, "run") or self.run))
        trains, evaluates = self._shape(record)
        head: dict[str, Any] = {"phase": self._phase(record, trains, evaluates)}
        head["step"], head["attempt"] = self._place(record, head["phase"] == "train")
        if (tokens := self._first(record, "tokens")) is not None:
            head["tokens"] = tokens
        if (time := self._first(record, "time")) is not None:
            head["time"] = self._time(time)
        for name in CUMULATIVE & record.keys():
            record = self._difference(record, name)
        return record | head

    def _begin_run(self, run: str) -> None:
        if run != self.run:
            self._attempt += bool(self.run)
            self._step, self._counted, self.run = -1, {}, run

    def _shape(self, record: Mapping[str, Any]) -> tuple[bool, bool]:
        """Whether records with these keys carry signals of a train step, and of an evaluation."""
        keys = tuple(record)
        if keys not in self._shapes:
            targets = [target.signal for key in keys if (target := self.naming.resolve(key))]
            evaluates = [name.startswith("eval/") for name in targets]
            self._shapes[keys] = (not all(evaluates), any(evaluates))
        return self._shapes[keys]

    def _phase(self, record: Mapping[str, Any], trains: bool, evaluates: bool) -> str:
        name = str(record.get("phase", ""))
        if name and name.upper() not in Phase.__members__:
            self.foreign_phases[name] = self.foreign_phases.get(name, 0) + 1
            return "eval"
        return name.lower() or ("eval" if evaluates and not trains else "train")

    def _place(self, record: Mapping[str, Any], trains: bool) -> tuple[Any, str]:
        """Step and attempt. A later evaluation of an earlier step is no resume."""
        names = self.naming.heads("step")
        rank = next((rank for rank, name in enumerate(names) if name in record), len(names))
        self._step_rank = min(rank, self._step_rank)
        step = record[names[rank]] if rank == self._step_rank < len(names) else max(self._step, 0)
        named = self._first(record, "attempt")
        if not isinstance(step, int | float) or not -1 < step < 2**53:
            return step, str(named or self._attempt)
        if step < self._step and named is None:
            if trains or not self._trained:
                self._attempt += 1
            else:
                step = self._step
        self._step = int(step)
        self._trained = self._trained or trains
        return step, str(self._attempt if named is None else named)

    def _first(self, record: Mapping[str, Any], head: str) -> Any:
        return next((record[name] for name in self.naming.heads(head) if name in record), None)

    def _time(self, value: Any) -> Any:
        """Seconds that never go back: a clock that begins again goes on from where the last one was."""
        if isinstance(value, str):
            try:
                value = datetime.fromisoformat(value).timestamp()
            except ValueError:
                return value
        self.unix_clock = isinstance(value, int | float) and value >= UNIX_EPOCH_BEGINS
        if not isinstance(value, int | float) or not -1 < value < UNIX_EPOCH_BEGINS:
            return value
        if value + self._base < self._clock:
            self._base = self._clock
        self._clock = value + self._base
        return self._clock

    def _difference(self, record: dict[str, Any], name: str) -> dict[str, Any]:
        """What a counter has added since the last record; unknown at the first one and where it went back."""
        value = record[name]
        before = self._counted.get(name)
        if isinstance(value, int | float):
            self._counted[name] = value
            if before is not None and value >= before:
                return record | {name: value - before}
        return {key: found for key, found in record.items() if key != name}


class Source:
    """A source of any kind, read as far as it goes; `read` may be called again as it grows."""

    def __init__(self, path: Path, naming: Naming | None = None) -> None:
        self.path = path
        self.naming = naming or Naming()
        self.reader = open_reader(path)
        self.starts: list[int] = []
        self._translator = _Translator(self.naming)
        self._rows = Rows(resolver=self.naming.resolve, file=str(path))

    def read(
        self, *, end: bool = True, now: float = float("-inf"), progress: Callable[[int], None] = lambda _: None
    ) -> Signals:
        """The new rows, with the tick rows due by `now`. `end`: a last line without its end counts, no more will come."""
        if isinstance(self.reader, RunReader):
            signals = self.reader.read(now)
            self.reader.accept()
            return signals
        for count, (number, record) in enumerate(self.reader.read(end=end), start=1):
            run, translated = self._translator.run, self._translator.translate(record)
            if run and run != self._translator.run:
                self.starts.append(len(self._rows))
            self._rows.append(translated, number)
            if count % 1000 == 0:
                progress(count)
        if self._translator.unix_clock:
            self._rows.pass_time(now)
        return self._rows.drain()

    @property
    def attempts(self) -> tuple[str, ...]:
        """The attempts' names."""
        return tuple(self.reader.attempts if isinstance(self.reader, RunReader) else self._rows.attempts)

    def warnings(self) -> tuple[str, ...]:
        """Everything that was wrong or had to be decided."""
        if isinstance(self.reader, RunReader):
            return _told(self.reader.problems, self.reader.malformed)
        shadowed = tuple(
            f"{self.path}: {lost} means the same signal as {kept}: {kept} is used. Choose with --map."
            for lost, kept in self._rows.shadowed.items()
        )
        phases = tuple(
            f"{self.path}: {count} rows of phase {name} are not judged as training."
            for name, count in self._translator.foreign_phases.items()
        )
        return _told([*self.reader.problems, *self._rows.problems], self._rows.malformed) + shadowed + phases


def _told(problems: Sequence[Problem], malformed: int) -> tuple[str, ...]:
    more = (f"{malformed} lines or records were skipped in all.",) if malformed > len(problems) else ()
    return (*map(str, problems), *more)


def load(path: Path, naming: Naming | None = None, progress: Callable[[int], None] = lambda _: None) -> Loaded:
    """A whole source.

    Raises:
        SourceError: it cannot be read at all.
    """
    source = Source(path, naming)
    try:
        signals = source.read(progress=progress)
    except (OSError, EOFError) as error:
        raise SourceError(f"{path}: {error}") from error
    if isinstance(source.reader, RunReader):
        return Loaded(str(path), signals, source.attempts, source.warnings())
    signals, refused = refuse_wrong_units(_as_training(signals), str(path))
    empty = () if len(signals) else (f"{path}: no records. Name the step's column with --map step=NAME.",)
    warnings = source.warnings() + refused + empty
    return Loaded(str(path), signals, source.attempts, warnings, tuple(source.starts))


def load_run(run_dir: Path, cursor: Mapping[str, Any]) -> tuple[Loaded, int]:
    """A run directory, and how many of its rows lie before `cursor` (tick rows with them, as its daemon put them in).

    Raises:
        SourceError: it cannot be read.
    """
    try:
        reader = RunReader(run_dir, cursor)
        before, after = reader.context, reader.read(float("-inf"))
    except OSError as error:
        raise SourceError(f"{run_dir}: {error}") from error
    signals = Signals.concatenate([before, after])
    warnings = _told(reader.problems, reader.malformed)
    return Loaded(str(run_dir), signals, tuple(reader.attempts), warnings), len(before)


def _as_training(signals: Signals) -> Signals:
    """A source of evaluations only has no other steps than theirs."""
    if (signals.phase == Phase.EVAL).all():
        return replace(signals, phase=np.full(len(signals), Phase.TRAIN, np.int8))
    return signals


def refuse_wrong_units(signals: Signals, source: str) -> tuple[Signals, tuple[str, ...]]:
    """`signals` without those whose values cannot be ratios, and why."""
    kept = dict(signals.columns)
    told: list[str] = []
    for name in signals.columns:
        values = signals.values(name)
        values = values[np.isfinite(values)]
        outside = (values < 0) | (values > 1)
        if _vocabulary(name).unit == "ratio" and outside.sum() > RATIO_TOLERANCE * len(values):
            del kept[name]
            example = f"{values[outside][0]:g}"
            told.append(
                f"{source}: {name} is {example}, not a ratio of 0 to 1, and is ignored. Declare --unit {name}=percent."
            )
    return replace(signals, columns=kept), tuple(told)


def _vocabulary(name: str) -> Signal:
    return VOCABULARY[name] if name in VOCABULARY else FAMILIES[name.rpartition("/")[0]]


def open_reader(path: Path) -> Reader | RunReader:
    """The reader for what lies at `path`, told by names first and by content second.

    Raises:
        SourceError: nothing is there, or nothing that can be read, or more than one thing.
    """
    if path.is_dir():
        return _open_directory(path)
    if not path.is_file():
        raise SourceError(f"{path}: there is no such file or directory.")
    if path.suffix == ".wandb":
        return formats.WandbFile(path)
    if "tfevents" in path.name:
        return formats.EventFiles([path])
    return _open_text(path)


def _open_directory(path: Path) -> Reader | RunReader:
    if (path / "telemetry").is_dir() or (path / "run.yaml").is_file():
        return RunReader(path)
    events = sorted(path.rglob("*tfevents*"))
    if events and len({event.parent for event in events}) == 1:
        return formats.EventFiles(events)
    states = sorted(path.glob("checkpoint-*/trainer_state.json"), key=lambda state: _number_of(state.parent.name))
    found = [*path.glob("trainer_state.json")] or states[-1:]
    found += [*path.glob("*.wandb"), *path.glob("*/*.wandb"), *(event.parent for event in events)]
    found = found or sorted(one for kind in ("csv", "csv.gz", "jsonl", "jsonl.gz") for one in path.glob(f"*.{kind}"))
    if len(found) == 1:
        return open_reader(found[0])
    names = ", ".join(str(one) for one in dict.fromkeys(found))
    raise SourceError(f"{path}: holds {'several sources: ' + names if found else 'no source'}. Name one file.")


def _number_of(name: str) -> int:
    digits = re.search(r"(\d+)$", name)
    return int(digits[1]) if digits else -1


def _open_text(path: Path) -> Reader:
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        try:
            start = file.read(1 << 16).lstrip(b"\xef\xbb\xbf \t\r\n")
        except (OSError, EOFError) as error:
            raise SourceError(f"{path}: {error}") from error
    name = path.name.removesuffix(".gz")
    if name.endswith(".json") and b"log_history" in start + path.read_bytes():
        return formats.TrainerState(path)
    if start.startswith(b"{"):
        return formats.JsonLines(path)
    if name.endswith(".csv") or (b"," in start.split(b"\n")[0] and not name.endswith((".log", ".txt", ".out"))):
        return formats.Table(path)
    if b"iteration" in start or name.endswith((".log", ".txt", ".out")):
        return formats.MegatronLog(path)
    raise SourceError(f"{path}: not a supported format (run directory, CSV, JSONL, W&B, TensorBoard, logs).")
