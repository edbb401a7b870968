"""Faults change the data, the settings or the parameters for as long as they say, and a rewind does not bring a passed one back."""

import numpy as np
import pytest

from runwatch.trainer.faults import DEFAULTS, FaultError, Faults, parse
from runwatch.trainer.step import Knobs

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
