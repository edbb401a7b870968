"""The generator of runs: seeded, laid out as the reader would, and honest about where an incident begins."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from injections import KINDS, Kind, inject
from runs import DECAY_START, NOISES, TOKENS_PER_STEP, expected_loss, healthy, tick_schedule, write

from runwatch.checks import Phase, Signals, all_checks
from runwatch.monitor.card.run_card import load_card
from runwatch.monitor.read.records import Rows, tick_times


def _read(directory: Path) -> Signals:
    rows = Rows()
    for number, line in enumerate((directory / "telemetry" / "00000.jsonl").read_bytes().splitlines(), start=1):
        rows.read_line(line, number)
    assert not rows.problems
    return rows.drain()


def _assert_equal(ours: Signals, theirs: Signals) -> None:
    for name in ("attempt", "step", "tokens", "phase", "tick"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name), name)
    np.testing.assert_allclose(ours.time, theirs.time, rtol=0, atol=1e-5)
    assert set(ours.columns) == set(theirs.columns)
    for name, column in ours.columns.items():
        np.testing.assert_array_equal(column.present, theirs.columns[name].present, name)
        np.testing.assert_array_equal(column.values, theirs.columns[name].values, name)


def test_the_same_seed_gives_the_same_run_and_another_seed_another() -> None:
    one, same, other = (healthy(seed, records=200).columns["train/loss"] for seed in (3, 3, 4))
    np.testing.assert_array_equal(one, same)
    assert not np.array_equal(one, other)


def test_a_written_run_is_read_back_as_the_signals_that_were_drawn(tmp_path: Path) -> None:
    run = healthy(5, records=900, first=1, noise="odd", crashes=(450, 700))
    write(run, tmp_path / "run")
    _assert_equal(run.signals()[0], _read(tmp_path / "run"))
    assert load_card(tmp_path / "run" / "run.yaml").plan.tokens_per_step == TOKENS_PER_STEP


@pytest.mark.parametrize("name", ["NaN loss, lasting", "Inf grad norm", "telemetry silence (100 records lost)"])
def test_a_harmed_run_is_read_back_too(name: str, tmp_path: Path) -> None:
    case = inject(next(kind for kind in KINDS if kind.name == name), 2)
    write(case.run, tmp_path / "run")
    _assert_equal(case.signals, _read(tmp_path / "run"))


@pytest.mark.parametrize("seconds", [9.0, 10.5, 25.0, 133.0, 4000.0, 1e6])
def test_tick_rows_come_when_the_reader_would_put_them(seconds: float) -> None:
    due = tick_schedule(seconds)
    np.testing.assert_allclose(due[due < seconds], tick_times(0.0, seconds))


def test_a_cut_job_resumes_from_its_last_checkpoint_and_repeats_its_batches() -> None:
    run = healthy(1, records=1000, first=10_001, crashes=(555,))
    assert run.step[554] == 10_555
    assert run.step[555] == 10_401
    fingerprints = run.columns["data/sample_fingerprint"]
    np.testing.assert_array_equal(fingerprints[400:555], fingerprints[555:710])
    opening = [event.phase for event in run.events if event.attempt == 1]
    assert opening == [Phase.INIT, Phase.COMPILE, Phase.RESTORE]


@pytest.mark.parametrize("name", NOISES)
def test_the_noise_has_its_scale_and_its_correlation(name: str) -> None:
    noise = NOISES[name]
    run = healthy(2, records=20_000, first=200_000, noise=name)
    residual = run.columns["train/loss"] - expected_loss(run.step.astype(np.float64))
    spread = 1.4826 * np.median(np.abs(residual - np.median(residual)))
    assert spread == pytest.approx(noise.sigma, rel=0.25)
    quiet = np.clip(residual - np.median(residual), -4 * spread, 4 * spread)
    assert np.corrcoef(quiet[1:], quiet[:-1])[0, 1] == pytest.approx(noise.correlation, abs=0.12)


def test_the_decay_brings_its_mixture_and_a_faster_fall() -> None:
    run = healthy(0, records=2000, first=DECAY_START - 999)
    code, rate = run.columns["data/mixture/code"], run.columns["optim/learning_rate"]
    assert code[:1000].mean() == pytest.approx(0.25, abs=0.01)
    assert code[1000:].mean() == pytest.approx(0.35, abs=0.01)
    assert np.all(np.diff(rate[:1000]) == 0)
    assert np.all(np.diff(rate[1001:]) < 0)


def test_there_are_forty_kinds_and_more_and_their_checks_exist() -> None:
    assert len(KINDS) >= 40
    assert len({kind.name for kind in KINDS}) == len(KINDS)
    assert {check for kind in KINDS for check in kind.checks} <= set(all_checks())


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_an_incident_leaves_all_records_before_its_onset_as_they_were(kind: Kind) -> None:
    case, twin = inject(kind, 7), inject(replace(kind, harm=lambda run, _: len(run) - 1), 7).signals
    signals = case.signals
    before = slice(0, int(np.flatnonzero(~signals.tick[: case.first])[-1]) + 1)
    assert 0 < case.first <= case.last <= case.known < len(signals)
    assert np.all(np.diff(signals.time) > 0)
    for name in ("step", "tokens", "time", "phase"):
        np.testing.assert_array_equal(getattr(signals, name)[before], getattr(twin, name)[before], name)
    for name, column in signals.columns.items():
        np.testing.assert_array_equal(column.values[before], twin.columns[name].values[before], name)
    assert kind.name.startswith("restart loop") or not _same(signals, twin)


def _same(one: Signals, other: Signals) -> bool:
    arrays = [(one.step, other.step), (one.tokens, other.tokens), (one.time, other.time)]
    arrays += [(column.values, other.columns[name].values) for name, column in one.columns.items()]
    return all(np.array_equal(a, b, equal_nan=True) for a, b in arrays)
