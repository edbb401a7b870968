"""A run is never started over by accident: its checkpoints say what they are of, also those of the release before."""

import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from runwatch.trainer import config
from runwatch.trainer.config import Card, Model, Plan, differing
from runwatch.trainer.data import DataOrder

SAMPLE = Path(__file__).parent / "samples" / "release-0.1.0.tar.gz"
"""A run of the tiny card that release 0.1.0 had trained when it was killed at step 27: a checkpoint at step 20, and a directive
that had shortened the budget to 36 steps and doubled the weight of the z-loss."""


@pytest.fixture
def before(tmp_path: Path) -> Path:
    """Its run directory, on the text that is installed here."""
    with tarfile.open(SAMPLE) as archive:
        archive.extractall(tmp_path, filter="data")
    run_dir = tmp_path / "ckpt-0.1.0"
    [manifest] = run_dir.glob("checkpoints/*/manifest.json")
    document = json.loads(manifest.read_text())
    document["meta"]["data"] = DataOrder(
        ("code", "docs", "prose"), 3, 32
    ).digest  # the text is that of installed packages
    manifest.write_text(json.dumps(document))
    return run_dir


@pytest.mark.slow
def test_a_checkpoint_of_the_release_before_is_gone_on_from_under_its_plan(
    before: Path, train: Any, telemetry: Callable[[Path], list[dict[str, Any]]]
) -> None:
    done = train(before)
    assert done.returncode == 0, done.stderr
    mine = [record for record in telemetry(before) if record["attempt"] == "a0002"]
    trained = [record for record in mine if record["phase"] == "train"]
    assert [record["step"] for record in mine if record["phase"] == "restore"] == [20]
    assert (trained[0]["step"], trained[-1]["step"]) == (21, 36)
    assert {record["plan/z_loss_weight"] for record in trained} == {0.0002}
    [loss] = [
        one["train/loss"]
        for one in telemetry(before)
        if (one["attempt"], one["step"]) == ("a0001", 20) and "train/loss" in one
    ]
    assert trained[0]["train/loss"] == pytest.approx(loss, abs=0.3), "it has not started over: that begins at 5.8"


CHANGES: dict[str, tuple[tuple[str, ...], Any]] = {
    "model.z_loss_weight was 0.0001 and is 0.5": (("model", "z_loss_weight"), 0.5),
    "model.capacity_factor was 1.15 and is 2.0": (("model", "capacity_factor"), 2.0),
    "seed was 3 and is 4": (("seed",), 4),
}


@pytest.mark.slow
@pytest.mark.parametrize("told", CHANGES)
def test_a_changed_card_stops_the_trainer_names_the_key_and_loses_no_checkpoint(
    whole_run: Path, tmp_path: Path, train: Any, told: str
) -> None:
    run_dir = tmp_path / "run"
    (run_dir / "checkpoints").mkdir(parents=True)
    for one in (whole_run / "checkpoints").iterdir():
        (run_dir / "checkpoints" / one.name).symlink_to(one)
    card = yaml.safe_load((whole_run / "run.yaml").read_text())
    (*sections, key), value = CHANGES[told]
    place = card
    for name in sections:
        place = place[name]
    place[key] = value
    (run_dir / "run.yaml").write_text(yaml.safe_dump(card))
    kept = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    done = train(run_dir)
    assert done.returncode == 64
    assert told in done.stderr.splitlines()[-1]
    assert "put the card back as it was, or begin a new run in another directory" in done.stderr
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == kept


def test_a_field_that_a_checkpoint_does_not_name_has_the_default_that_was_the_only_choice() -> None:
    stored = {key: value for key, value in Card().identity.items() if key != "model.qk_gain"}
    assert differing({"identity": stored}, Card()) is None
    assert differing({"identity": stored}, Card(model=Model(qk_gain=2.0))) == "model.qk_gain was 1.3 and is 2.0"


def test_a_field_of_a_later_release_is_not_overlooked() -> None:
    stored = {**Card().identity, "model.of_tomorrow": 1}
    assert differing({"identity": stored}, Card()) == "model.of_tomorrow is 1 there, and this release does not know it"


def test_the_hash_is_that_of_release_0_1_0(before: Path) -> None:
    [manifest] = before.glob("checkpoints/*/manifest.json")
    meta = json.loads(manifest.read_text())["meta"]
    card = config.read_card(before / "run.yaml")
    assert meta["card"] == card.hash
    assert differing(meta, card) is None
    other = differing(meta, Card(model=card.model, plan=Plan(context_length=64), seed=card.seed))
    assert other == "its model, batch or seed (release 0.1.0 did not say which)"
