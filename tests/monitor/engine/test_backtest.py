import gzip
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from click.testing import CliRunner
from numpy.typing import NDArray

from runwatch.checks import Level, Phase, Signals, Verdicts, all_checks
from runwatch.monitor.commands.backtest import command, context
from runwatch.monitor.engine.backtest import backtest, level_of, steps_of
from runwatch.monitor.engine.evaluate import LiveJudge
from runwatch.monitor.engine.follow import Following
from runwatch.monitor.engine.incidents import followed
from runwatch.monitor.read.run_directory import RunReader
from runwatch.monitor.read.sources import Source, load

RECORDINGS = Path(__file__).parents[4] / "shared" / "recordings"
needs_recordings = pytest.mark.skipif(not RECORDINGS.is_dir(), reason=f"no recordings of real runs at {RECORDINGS}")


def losses(spike_at: int | None = None, nan_at: int | None = None, length: int = 300) -> list[float]:
    rng = np.random.default_rng(1)
    loss = 2.5 + 0.01 * rng.standard_normal(length)
    if spike_at is not None:
        loss[spike_at] += 0.5
    if nan_at is not None:
        loss[nan_at] = np.nan
    return loss.tolist()


def table(path: Path, loss: list[float]) -> str:
    path.write_text("step,loss\n" + "\n".join(f"{step},{value}" for step, value in enumerate(loss)))
    return str(path)


def invoke(*words: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(command, list(words))
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.exit_code, result.stdout, result.stderr


EXITS = {"a healthy run": ({}, 0), "a warning": ({"spike_at": 200}, 1), "a critical incident": ({"nan_at": 200}, 2)}


@pytest.mark.parametrize("case", EXITS)
def test_the_exit_code_is_the_worst_level(case: str, tmp_path: Path) -> None:
    arguments, code = EXITS[case]
    assert invoke(table(tmp_path / "run.csv", losses(**arguments)))[0] == code


def test_json_on_stdout_is_one_object_with_exactly_these_keys(tmp_path: Path) -> None:
    _, out, _ = invoke(table(tmp_path / "run.csv", losses(nan_at=200)), "--json")
    report = json.loads(out)
    assert set(report) == {"records", "attempts", "unknown_checks", "incidents"}
    assert (report["records"], report["attempts"]) == (300, 1)
    assert "throughput" in report["unknown_checks"]
    assert "finite" not in report["unknown_checks"]
    assert report["incidents"] == [
        {
            "check": "finite",
            "level": "critical",
            "first_step": 200,
            "last_step": 200,
            "first_critical_step": 200,
            "value": "NaN",
            "limit": "Infinity",
            "message": "The loss is nan.",
        }
    ]


def test_json_of_several_sources_is_a_list_with_their_names_and_goes_to_a_file(tmp_path: Path) -> None:
    names = [table(tmp_path / name, losses()) for name in ("a.csv", "b.csv")]
    code, out, _ = invoke(*names, "--json", str(tmp_path / "out.json"))
    report = json.loads((tmp_path / "out.json").read_text())
    assert [one["source"] for one in report] == names
    assert (code, out.count("no incidents")) == (0, 2)


def test_the_table_names_incidents_and_says_once_what_was_not_judged(tmp_path: Path) -> None:
    _, out, _ = invoke(table(tmp_path / "run.csv", losses(spike_at=200)))
    assert re.search(r"1 │ loss_spike │\s+200 │", out)
    assert "nats above its trend" in out
    assert out.count("Not judged") == 1


WRONG_USE = {
    "no such file": ["no/such/file.csv"],
    "an unknown check": ["{run}", "--set", "loss_spikes.z_limit=3"],
    "an unknown setting": ["{run}", "--set", "loss_spike.z=3"],
    "a setting out of its bounds": ["{run}", "--set", "loss_spike.min_jump_nats=-3"],
    "an unknown signal": ["{run}", "--map", "train/los=loss"],
    "an unknown unit": ["{run}", "--unit", "throughput/mfu=furlong"],
    "two sources to follow": ["{run}", "{run}", "--follow"],
}


@pytest.mark.parametrize("case", WRONG_USE)
def test_wrong_use_exits_with_64_and_a_sentence(case: str, tmp_path: Path) -> None:
    run = table(tmp_path / "run.csv", losses())
    code, out, err = invoke(*(word.format(run=run) for word in WRONG_USE[case]))
    assert (code, out) == (64, "")
    assert len(err.strip()) > 10
    assert "Traceback" not in err


def test_a_setting_from_the_command_line_changes_the_verdict(tmp_path: Path) -> None:
    run = table(tmp_path / "run.csv", losses(spike_at=200))
    assert invoke(run)[0] == 1
    assert invoke(run, "--set", "loss_spike.min_jump_nats=0.6")[0] == 0


def test_a_mistake_in_the_card_exits_with_65(tmp_path: Path) -> None:
    card = tmp_path / "run.yaml"
    card.write_text("version: 1\n")
    code, _, err = invoke(table(tmp_path / "run.csv", losses()), "--card", str(card))
    assert code == 65
    assert "run.yaml" in err


def test_the_page_holds_everything_it_needs(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra plots")
    page = tmp_path / "report.html"
    invoke(table(tmp_path / "<run> & co.csv", losses(spike_at=200)), "--html", str(page))
    text = page.read_text()
    assert text.count("<svg") == 2
    assert not re.search(r"(?:src|href)\s*=\s*[\"'](?!#)", re.sub(r"xlink:href=\"#", 'x="', text))
    assert "&lt;run&gt; &amp; co.csv" in text
    assert "<run>" not in text
    assert all(word in text for word in ("loss_spike", "What to do:", *all_checks()))


def test_a_page_of_an_empty_or_wholly_nan_run_can_be_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra plots")
    for name, loss in (("empty.csv", []), ("nan.csv", [float("nan")] * 5)):
        invoke(table(tmp_path / name, loss), "--html", str(tmp_path / f"{name}.html"))
        assert "<svg" in (tmp_path / f"{name}.html").read_text()


def levels(*stretches: tuple[Level, int]) -> NDArray[np.int8]:
    return np.concatenate([np.full(length, level, np.int8) for level, length in stretches])


OK, WARN, CRITICAL, UNKNOWN = Level.OK, Level.WARN, Level.CRITICAL, Level.UNKNOWN
MERGING: dict[str, tuple[NDArray[np.int8], list[tuple[int, int, Level]]]] = {
    "none": (levels((OK, 50)), []),
    "one row": (levels((OK, 5), (WARN, 1), (OK, 30)), [(5, 5, WARN)]),
    "19 ok between": (levels((WARN, 2), (OK, 19), (WARN, 1)), [(0, 21, WARN)]),
    "20 ok between": (levels((WARN, 2), (OK, 20), (WARN, 1)), [(0, 1, WARN), (22, 22, WARN)]),
    "unknown resolves nothing": (levels((WARN, 1), (UNKNOWN, 99), (CRITICAL, 1)), [(0, 100, CRITICAL)]),
    "worst level": (levels((WARN, 3), (CRITICAL, 2), (WARN, 3)), [(0, 7, CRITICAL)]),
    "until the end": (levels((OK, 9), (CRITICAL, 3)), [(9, 11, CRITICAL)]),
}


@pytest.mark.parametrize("case", MERGING)
def test_alarms_with_fewer_than_twenty_ok_observations_between_them_are_one_incident(case: str) -> None:
    level, expected = MERGING[case]
    length = len(level)
    verdicts = Verdicts(level, np.arange(length, dtype=float), np.zeros(length), np.zeros(length, np.int8))
    blank = np.full(length, np.nan)
    head = (np.zeros(length, np.int32), np.arange(length), blank, blank)
    signals = Signals(*head, np.full(length, Phase.TRAIN, np.int8), np.zeros(length, np.bool_), {})
    _, found, _ = followed({}, {}, {"progress": verdicts}, signals, 0.0)
    assert [(one.since.step, one.last.step, level_of(one)) for one in found.values()] == expected


def records_of(signals: Signals) -> list[dict[str, Any]]:
    """The rows of a recording as the records of a run directory."""
    names = {Phase(number): Phase(number).name.lower() for number in range(len(Phase))}
    records: list[dict[str, Any]] = []
    for row in np.flatnonzero(~signals.tick):
        head = {"attempt": f"a{signals.attempt[row]}", "step": int(signals.step[row])}
        head |= {"time": 1e9 + float(signals.time[row]), "phase": names[Phase(int(signals.phase[row]))]}
        head |= {} if np.isnan(signals.tokens[row]) else {"tokens": int(signals.tokens[row])}
        present = {name: float(col.values[row]) for name, col in signals.columns.items() if col.present[row]}
        records.append(head | {name: value if np.isfinite(value) else "NaN" for name, value in present.items()})
    return records


def write(run_dir: Path, records: list[dict[str, Any]], name: str = "000.jsonl") -> None:
    (run_dir / "telemetry").mkdir(exist_ok=True)
    with (run_dir / "telemetry" / name).open("ab") as file:
        file.write(b"".join(orjson.dumps(record) + b"\n" for record in records))


class Daemon:
    """The live path: reads the run directory from where the last one stopped, judges, accepts."""

    def __init__(self, run_dir: Path, cursor: dict[str, Any] | None) -> None:
        self.reader = RunReader(run_dir, cursor)
        self.judge = LiveJudge(all_checks(), self.reader.context, self.reader.history)
        self.settings, self.changes = context(run_dir, None, ())

    def tick(self, now: float) -> dict[str, Verdicts]:
        """The verdicts of what has come by `now`."""
        block = self.reader.read(now)
        judged = self.judge.judge(block, self.settings, self.changes)
        assert not judged.errors
        self.judge.accept(block, self.settings, self.changes)
        self.reader.accept()
        return dict(judged.verdicts)


LIVE = {
    "llama31-405b-clean.csv": 5,
    "gpt2-124m-three-attempts-nan.csv": 40,
    "llama31-8b-two-spikes.csv": 60,
    "wmt-transformer-spike-55.csv": 30,
}
"""The most records that arrive between two looks."""


@needs_recordings
@pytest.mark.parametrize("file", LIVE)
def test_the_live_path_with_random_restarts_gives_every_verdict_of_the_backtest(file: str, tmp_path: Path) -> None:
    records = records_of(load(RECORDINGS / file).signals)
    rng = np.random.default_rng(len(records))
    daemon, live = Daemon(tmp_path, None), list[dict[str, Verdicts]]()
    position = 0
    while position < len(records):
        more = records[position : position + int(rng.integers(1, LIVE[file] + 1))]
        waiting = more[0]["time"] - float(rng.uniform(0, 5))
        live.append(daemon.tick(waiting))
        write(tmp_path, more, f"{position // 500:03d}.jsonl")
        position += len(more)
        live.append(daemon.tick(more[-1]["time"]))
        if rng.random() < 0.1:
            daemon = Daemon(tmp_path, json.loads(json.dumps(daemon.reader.cursor())))
    whole = backtest(load(tmp_path), *context(tmp_path, None, ()))
    for name, expected in whole.verdicts.items():
        found = Verdicts.concatenate([block[name] for block in live if name in block])
        for part in ("level", "value", "limit", "reason"):
            np.testing.assert_array_equal(getattr(found, part), getattr(expected, part), f"{name} {part}")


def test_following_tells_an_incident_once_when_it_opens_and_when_it_is_over(tmp_path: Path) -> None:
    (tmp_path / "telemetry").mkdir()
    following = Following(Source(tmp_path), *context(tmp_path, None, ()))
    said: list[str] = []
    for step, loss in enumerate(losses(nan_at=100, length=200)):
        value = loss if np.isfinite(loss) else "NaN"
        record = {"attempt": "a", "step": step, "time": 1e9 + step, "phase": "train", "train/loss": value}
        write(tmp_path, [record])
        said += following.poll(1e9 + step)
    write(tmp_path, [{"attempt": "a", "step": 199, "time": 1e9 + 200, "phase": "finished"}])
    said += following.poll(1e9 + 201)
    assert [line for line in said if "finite" in line] == [
        "step 100: finite is firing. The loss is nan.",
        "step 120: finite is resolved. The last 20 observations, up to step 120, are OK; the newest value is 2.515.",
    ]
    assert following.worst is Level.CRITICAL
    assert following.finished


def test_a_packed_table_through_the_command_equals_the_plain_one(tmp_path: Path) -> None:
    plain = table(tmp_path / "run.csv", losses(spike_at=200))
    packed = tmp_path / "packed.csv.gz"
    packed.write_bytes(gzip.compress(Path(plain).read_bytes()))
    assert invoke(plain, "--json")[1] == invoke(str(packed), "--json")[1]


def test_an_incident_that_outlasts_an_attempt_that_starts_over_stays_one_as_it_does_live(tmp_path: Path) -> None:
    rows = [f"{attempt},{step},nan" for attempt in (1, 2) for step in range(1, 6)]
    (tmp_path / "twice.csv").write_text("attempt,step,loss\n" + "\n".join(rows) + "\n")
    found = [one for one in backtest(load(tmp_path / "twice.csv")).incidents if one.check == "finite"]
    assert [(one.since.attempt, one.since.step, one.last.attempt, one.last.step) for one in found] == [(0, 1, 1, 5)]
    assert steps_of(found[0]) == "1 to 5, 1 attempt later"


def test_an_incident_that_outlasts_a_resume_stays_one(tmp_path: Path) -> None:
    rows = [f"1,{step},{2.0 if step < 8 else 'nan'}" for step in range(1, 11)] + [
        f"2,{step},nan" for step in range(10, 15)
    ]
    (tmp_path / "resumed.csv").write_text("attempt,step,loss\n" + "\n".join(rows) + "\n")
    found = [one for one in backtest(load(tmp_path / "resumed.csv")).incidents if one.check == "finite"]
    assert [(one.since.step, one.last.step) for one in found] == [(8, 14)]
