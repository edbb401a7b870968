"""One validator of a card: what the daemon accepts the trainer accepts, and the other way round."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from runwatch.monitor.card.run_card import CardError as DaemonError
from runwatch.monitor.card.run_card import load_card
from runwatch.trainer import config
from runwatch.trainer.config import CardError, read_card

CARDS = sorted((Path(__file__).parents[1] / "contract" / "cards").glob("*/*.yaml"))
SHARED = ("model", "hardware", "plan", "seed", "faults")


def accepted(path: Path) -> bool:
    try:
        load_card(path)
    except DaemonError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize("path", CARDS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_card_of_the_contract_has_the_same_result_in_both_readers(path: Path) -> None:
    if accepted(path):
        assert path.parent.name == "good"
        read_card(path)
        return
    assert path.parent.name == "bad"
    with pytest.raises(CardError, match=path.name):
        read_card(path)


LEAVES: list[tuple[str, ...]] = [
    ("seed",), ("faults",), ("hardware", "devices"), ("hardware", "waves"), ("hardware", "peak_flops_per_second"),
    *(("model", name) for name in asdict(config.Model())),
    *(("plan", name) for name in ("token_budget", "context_length", "sequences_per_step", "lm_head_optimizer", "deadline")),
    *(("plan", "learning_rate", name) for name in asdict(config.LearningRate())),
    *(("plan", "checkpoint", name) for name in ("every_steps", "keep")),
    *(("plan", "eval", name) for name in ("every_steps", "sequences")),
    ("plan", "mixture", "stable"), ("plan", "mixture", "decay"),
]  # fmt: skip
VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 600), st.floats(), st.sampled_from([5e10, 1e30, 2.0**80, "5e10", "64", "adam", ""]),
    st.just({"code": 0.5, "docs": 0.5}), st.just({"code": 1}), st.just([]), st.just(["nan_batch@3"]), st.just({}),
)  # fmt: skip


def _plain(value: Any) -> Any:
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


@settings(max_examples=300)
@given(changes=st.lists(st.tuples(st.sampled_from(LEAVES), VALUES), min_size=1, max_size=3))
def test_whatever_the_daemon_accepts_the_trainer_reads_as_the_same_values(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[tuple[str, ...], Any]]
) -> None:
    card: dict[str, Any] = yaml.safe_load(next(one for one in CARDS if one.stem == "minimal").read_text())
    for (*sections, key), value in changes:
        place = card
        for name in sections:
            place = place.setdefault(name, {}) if isinstance(place.get(name, {}), dict) else {}
        place[key] = value
    path = tmp_path_factory.mktemp("card") / "run.yaml"
    path.write_text(yaml.safe_dump(card))
    if not accepted(path):
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config, "_validate", lambda _: None)  # it is valid: the daemon's own reader has just said so
        mine = asdict(read_card(path))
    theirs = load_card(path).model_dump(include=set(SHARED))
    theirs["plan"].pop("deadline"), mine["plan"].pop("deadline")
    assert {name: _plain(value) for name, value in theirs.items()} == {
        name: _plain(value) for name, value in mine.items()
    }
