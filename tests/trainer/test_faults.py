"""Faults change the data, the settings, the parameters or the process for as long as they say, and a rewind brings no passed one back."""

import itertools
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runwatch.trainer import checkpoint
from runwatch.trainer.config import Plan
from runwatch.trainer.faults import DEFAULTS, FaultError, Faults, check, parse
from runwatch.trainer.step import Knobs

Records = list[dict[str, Any]]

SOURCES = ["code", "docs", "code", "prose"]
KNOBS = Knobs(0.01, 1e-4, 0.01)


def batch(text: str, place: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens before, tokens after and loss weights after the fault."""
    tokens = np.tile(np.arange(33, dtype=np.uint8), (4, 1))
    after, weights = Faults((parse(text),), 1).batch(place, tokens, np.ones((4, 32), np.float32), SOURCES)
    return tokens, after, weights


@pytest.mark.parametrize("kind", DEFAULTS)
def test_every_kind_is_read_with_its_defaults(kind: str) -> None:
    fault = parse(f"{kind}@30")
    assert (fault.kind, fault.step, fault.args) == (kind, 30, DEFAULTS[kind])


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("lr_spke@3", "unknown kind 'lr_spke'; known: nan_batch"),
        ("lr_spike", "give the step as lr_spike@STEP"),
        ("lr_spike@x", "give the step"),
        ("lr_spike@3:size=2", "unknown argument 'size'; lr_spike takes steps, factor"),
        ("lr_spike@3:factor=big", "'big' is not a number"),
    ],
)
def test_a_fault_that_cannot_be_read_is_told_with_what_is_known(text: str, complaint: str) -> None:
    with pytest.raises(FaultError, match=complaint):
        parse(text)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("hang@3:phase=evaluation", "unknown phase 'evaluation'; known: train, eval, checkpoint"),
        ("label_shuffle@3:source=web", "unknown source 'web'; this run has code, docs, prose"),
        ("context_jump@3:factor=3", "sequences of 384 tokens do not divide the 1024 of a step"),
        ("context_jump@3:factor=0.5", "sequences of 0 tokens"),
    ],
)
def test_a_fault_that_this_run_cannot_carry_out_is_told_before_it_starts(text: str, complaint: str) -> None:
    with pytest.raises(FaultError, match=complaint):
        check([parse(text)], Plan())


def test_a_nan_batch_has_nan_loss_weights_at_its_place_only() -> None:
    assert np.isnan(batch("nan_batch@5", 5)[2]).all()
    assert not np.isnan(batch("nan_batch@5", 4)[2]).any()
    assert not np.isnan(batch("nan_batch@5", 6)[2]).any()


def test_corrupted_tokens_are_random_bytes_in_the_share_asked_for() -> None:
    before, after, _ = batch("corrupt_tokens@1:share=0.5", 9)
    assert 0.3 < np.mean(before != after) < 0.7
    np.testing.assert_array_equal(after, batch("corrupt_tokens@1:share=0.5", 9)[1])


def test_shuffled_labels_keep_the_bytes_of_their_source_and_leave_the_others() -> None:
    before, after, _ = batch("label_shuffle@1:source=code", 1)
    np.testing.assert_array_equal(before[[1, 3]], after[[1, 3]])
    assert (before[[0, 2]] != after[[0, 2]]).any(axis=1).all()
    np.testing.assert_array_equal(np.sort(after, axis=1), before)


def test_a_rate_spike_lasts_its_steps_and_does_not_come_again_after_a_rewind() -> None:
    faults = Faults((parse("lr_spike@10:factor=30,steps=3"),), 1)
    steps = [*range(8, 16), *range(8, 16)]
    raised = [n for n, step in enumerate(steps) if faults.knobs(step, KNOBS).learning_rate > 0.2]
    assert raised == [2, 3, 4]


def test_a_replay_and_a_skip_move_the_place_in_the_data_once() -> None:
    faults = Faults((parse("data_replay@5:back=2"), parse("data_skip@7:ahead=3")), 1)
    assert [faults.position(step, 40, 8) for step in (4, 5, 5, 7, 7)] == [40, 24, 40, 64, 40]


def test_a_balance_rate_runs_away_until_a_directive_sets_another() -> None:
    faults = Faults((parse("bias_runaway@3:rate=1,steps=4"),), 1)
    rates = [faults.knobs(step, KNOBS._replace(balance_rate=asked)).balance_rate for step, asked in
             [(2, 0.01), (3, 0.01), (4, 0.01), (5, 0.02), (6, 0.02), (7, 0.01)]]  # fmt: skip
    assert rates == [0.01, 1.0, 1.0, 0.02, 0.02, 0.01]


# --- in a real trainer process: 40 steps of the tiny card, beside the same run without faults ---------------------------------------

INSIDE = (
    "nan_batch@3", "corrupt_tokens@5:steps=2", "lr_spike@9:factor=30,steps=2", "label_shuffle@13:steps=2",
    "router_collapse@17", "bias_runaway@21:rate=1,steps=3", "data_skip@27:ahead=2", "data_replay@31:back=3", "context_jump@35",
)  # fmt: skip
"""What goes wrong in data, settings and parameters, one after the other."""

AROUND = (
    "slow_step@3:seconds=0.3,steps=3", "straggler@8:seconds=0.3,every=5,steps=8", "stale_checkpoint@10:steps=1",
    "hang@20:phase=eval,seconds=1", "telemetry_stop@23:steps=3", "hang@27:seconds=1", "hang@30:phase=checkpoint,seconds=1",
    "corrupt_checkpoint@30:steps=1", "clock_jump@32:seconds=-3600", "slow_step@33:seconds=1,steps=1", "kill@35",
)  # fmt: skip
"""What goes wrong in the process and on the disk. The slow step 33 lets the writer write what came before the kill."""


def with_faults(faults: tuple[str, ...]) -> list[str]:
    """The arguments of a trainer with these faults."""
    return [argument for fault in faults for argument in ("--fault", fault)]


@pytest.fixture(scope="module")
def clean(whole_run: Path, telemetry: Callable[[Path], Records]) -> dict[int, dict[str, Any]]:
    """The train record of each step without faults."""
    return {record["step"]: record for record in telemetry(whole_run) if record["phase"] == "train"}


@pytest.fixture(scope="module")
def inside(
    tmp_path_factory: pytest.TempPathFactory,
    write_card: Callable[..., None],
    train: Any,
    telemetry: Callable[[Path], Records],
) -> dict[int, dict[str, Any]]:
    """The train record of each step with the faults of `INSIDE`."""
    run_dir = tmp_path_factory.mktemp("inside")
    write_card(run_dir)
    done = train(run_dir, *with_faults(INSIDE))
    assert done.returncode == 0, done.stderr
    return {record["step"]: record for record in telemetry(run_dir) if record["phase"] == "train"}


@pytest.fixture(scope="module")
def around(
    tmp_path_factory: pytest.TempPathFactory, write_card: Callable[..., None], train: Any
) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A run with the faults of `AROUND` that was killed and went on; its folder, and how the second process ended."""
    run_dir = tmp_path_factory.mktemp("around")
    write_card(run_dir)
    assert train(run_dir, *with_faults(AROUND)).returncode == -signal.SIGKILL
    return run_dir, train(run_dir, *with_faults(AROUND))


def changed(clean: dict[int, Any], faulty: dict[int, Any], name: str) -> set[int]:
    """The steps at which a signal differs."""
    return {step for step in clean if clean[step][name] != faulty[step][name]}


@pytest.mark.slow
def test_bad_data_is_fed_at_its_steps_and_no_others(clean: dict[int, Any], inside: dict[int, Any]) -> None:
    assert (inside[3]["train/loss"], inside[3]["optim/skipped_step"]) == ("NaN", 1.0)
    assert all(isinstance(inside[step]["train/loss"], float) for step in inside if step != 3)
    assert {step for step in changed(clean, inside, "data/sample_fingerprint") if step < 27} == {5, 6, 13, 14}
    assert inside[6]["train/loss"] > clean[6]["train/loss"]


@pytest.mark.slow
def test_the_rate_spikes_and_the_router_collapses_and_runs_away(clean: dict[int, Any], inside: dict[int, Any]) -> None:
    assert changed(clean, inside, "optim/learning_rate") == {9, 10}
    assert inside[9]["optim/learning_rate"] == pytest.approx(30 * clean[9]["optim/learning_rate"])
    assert inside[17]["moe/load_max_vio"] == pytest.approx(1.0)  # all tokens on two of four experts
    assert inside[17]["moe/load_entropy"] == pytest.approx(0.5)
    assert inside[17]["moe/drop_rate"] > 0.3 > clean[17]["moe/drop_rate"]
    assert changed(clean, inside, "plan/balance_rate") == {21, 22, 23}
    assert inside[21]["moe/router_bias_max"] > 0.9 > inside[20]["moe/router_bias_max"]


@pytest.mark.slow
def test_the_data_order_jumps_ahead_and_back_and_the_context_grows(
    clean: dict[int, Any], inside: dict[int, Any]
) -> None:
    drawn = {step: inside[step]["data/position"] - inside[step - 1]["data/position"] for step in range(2, 41)}
    assert {step: count for step, count in drawn.items() if count != 4} == {
        27: 12,
        31: -8,
        **dict.fromkeys(range(35, 41), 1),
    }
    assert inside[31]["data/sample_fingerprint"] == inside[28]["data/sample_fingerprint"]
    assert inside[27]["data/sample_fingerprint"] == clean[29]["data/sample_fingerprint"]
    assert changed(clean, inside, "plan/context_length") == set(range(35, 41))
    assert {inside[step]["plan/context_length"] for step in range(35, 41)} == {128}


@pytest.mark.slow
def test_time_is_lost_where_the_fault_says(
    around: tuple[Path, subprocess.CompletedProcess[str]], telemetry: Callable[[Path], Records]
) -> None:
    records = [record for record in telemetry(around[0]) if record["attempt"] == "a0001"]
    times = {record["step"]: record["throughput/step_time"] for record in records if record["phase"] == "train"}
    assert all(times[step] >= 0.3 for step in (3, 4, 5, 10, 15))
    assert times[27] >= 1.0
    lost = {(a["phase"], a["step"]): b["time"] - a["time"] for a, b in itertools.pairwise(records)
            if a["phase"] == b["phase"] and a["phase"] in ("eval", "checkpoint")}  # fmt: skip
    assert lost["eval", 20] >= 1.0
    after = next(record for record in records if record["step"] == 31)
    begun = next(record for record in records if (record["phase"], record["step"]) == ("checkpoint", 30))
    assert after["time"] - begun["time"] >= 1.0
    assert {step for step in times if step <= 30} == set(range(1, 31)) - {23, 24, 25}


@pytest.mark.slow
def test_a_clock_jumps_and_a_kill_leaves_a_run_that_goes_on(
    around: tuple[Path, subprocess.CompletedProcess[str]], telemetry: Callable[[Path], Records]
) -> None:
    run_dir, resumed = around
    assert resumed.returncode == 0, resumed.stderr
    records = telemetry(run_dir)
    first = {r["step"]: r["time"] for r in records if r["phase"] == "train" and r["attempt"] == "a0001"}
    assert first[32] - first[31] < -3000
    assert [r["step"] for r in records if r["phase"] == "restore"] == [20]
    assert "skipping checkpoint a0001-step-000000030" in resumed.stderr


@pytest.mark.slow
def test_a_stale_checkpoint_is_left_out_and_a_torn_one_is_never_announced(
    around: tuple[Path, subprocess.CompletedProcess[str]], telemetry: Callable[[Path], Records]
) -> None:
    announced = [r["checkpoint/step"] for r in telemetry(around[0]) if "checkpoint/step" in r]
    assert announced == [20, 40]
    found = checkpoint.found(around[0] / "checkpoints")
    assert {(one.step, checkpoint.is_complete(one.path)) for one in found} - {(20, True)} == {(30, False), (40, True)}
