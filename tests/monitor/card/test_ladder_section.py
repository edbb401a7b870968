"""The registered curve: nothing else in the card changes, tampering is noticed, changes are logged amendments."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from click.testing import CliRunner

from runwatch.monitor.card.ladder_fit import LadderError, fit_rungs
from runwatch.monitor.card.ladder_section import Change, active_parameters, register, spliced, verify
from runwatch.monitor.card.run_card import load_card
from runwatch.monitor.commands.ladder import ladder
from runwatch.monitor.report.ladder_figures import live_run, picture
from runwatch.monitor.store.store import open_store, sqlite_url
from runwatch.trainer.config import read_card
from runwatch.trainer.model import count

ROOT = Path(__file__).parents[3]
CARDS = sorted((ROOT / "trainer/cards").glob("*.yaml"))
RUNGS = ROOT / "trainer/ladder/cpu.json"
SECTION = {"hash": "new", "curve": [1, 2]}


@pytest.fixture(autouse=True)
def _few_bootstraps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The width of the band is the matter of other tests."""
    monkeypatch.setattr("runwatch.monitor.card.ladder_fit.OPTIONS", ("--bootstraps", "20"))


@pytest.fixture
def card(tmp_path: Path) -> Path:
    """The demo's card without its ladder, in a run directory."""
    text = (ROOT / "trainer/cards/cpu.yaml").read_text(encoding="utf-8")
    path = tmp_path / "run.yaml"
    path.write_text(text.partition("\nladder:")[0] + "\n", encoding="utf-8")
    return path


@pytest.fixture
def rungs(tmp_path: Path) -> Path:
    return Path(shutil.copy(RUNGS, tmp_path / "rungs.json"))


@pytest.mark.parametrize("path", CARDS, ids=lambda path: path.stem)
def test_parameters_are_counted_as_the_trainer_counts_them(path: Path) -> None:
    assert active_parameters(load_card(path).model) == count(read_card(path).model)[1]


LAYOUTS = {
    "none, at the end": ("a: 1  # one\n", "a: 1  # one\n", ""),
    "none, no last newline": ("a: 1", "a: 1\n", ""),
    "last": ("a: 1\nladder:\n  hash: old\n  curve: [1,\n    2]\n", "a: 1\n", ""),
    "in the middle": (
        "# top\na: 1\n\nladder: # ours\n  hash: old\n\n# of b\nb: {c: 2} # x\n",
        "# top\na: 1\n\n",
        "\n# of b\nb: {c: 2} # x\n",
    ),
    "first": (
        "ladder:\n  deep:\n    - x: [1]\n    - y\n# of a\na: |\n  ladder: no\n",
        "",
        "# of a\na: |\n  ladder: no\n",
    ),
    "empty": ("ladder:\na: 1\n", "", "a: 1\n"),
    "windows": ("a: 1\r\nladder: {hash: old}\r\nb: 2\r\n", "a: 1\r\n", "b: 2\r\n"),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_everything_around_the_section_stays_byte_for_byte(name: str) -> None:
    text, before, after = LAYOUTS[name]
    result = spliced(text, SECTION, "run.yaml")
    assert result.startswith(before + "ladder:")
    assert result.endswith(after)
    middle = result[len(before) : len(result) - len(after)]
    assert yaml.safe_load(middle) == {"ladder": SECTION}
    assert ("\r\n" in text) == ("\r\n" in middle)


@pytest.mark.parametrize("text", ["{a: 1, ladder: {hash: old}}", "a: 1\n...\n", "- a\n"])
def test_a_card_that_cannot_be_edited_in_place_is_refused(text: str) -> None:
    with pytest.raises(LadderError, match="as a block"):
        spliced(text, SECTION, "run.yaml")


def test_registering_writes_a_valid_card_and_a_second_time_is_refused(card: Path, rungs: Path) -> None:
    before = card.read_text(encoding="utf-8")
    register(card, rungs)
    text = card.read_text(encoding="utf-8")
    assert text.startswith(before)
    curve = load_card(card)
    assert curve.ladder is not None
    assert curve.ladder.curve.tokens[-1] == curve.plan.token_budget
    read_card(card)
    with pytest.raises(LadderError, match="amend it with --amend --by NAME --reason TEXT"):
        register(card, rungs)
    assert card.read_text(encoding="utf-8") == text


def test_tampering_with_the_section_or_the_rungs_is_noticed(card: Path, rungs: Path) -> None:
    register(card, rungs)
    assert verify(card, rungs)
    text, data = card.read_text(encoding="utf-8"), rungs.read_text(encoding="utf-8")
    for old, new in (
        ("w64-700", "w64-701"),
        ("registered: 2", "registered: 3"),
        ("    high: [", "    high: [9.9, "),
    ):
        changed = text.replace(old, new, 1)
        card.write_text(changed, encoding="utf-8")
        assert changed != text
        assert not verify(card, rungs), old
    card.write_text(text.replace("seed: 0", "seed: 1"), encoding="utf-8")
    assert verify(card, rungs), "the rest of the card is not part of the pre-registration"
    rungs.write_text(data.replace("75040", "75041", 1), encoding="utf-8")
    assert not verify(card, rungs)


def test_after_launch_only_a_logged_amendment_changes_the_curve(card: Path, rungs: Path, tmp_path: Path) -> None:
    register(card, rungs)
    was = load_card(card).ladder
    assert was is not None
    (tmp_path / "telemetry").mkdir()
    (tmp_path / "telemetry" / "000001.jsonl").write_text("")
    command = ["register", str(rungs), "--card", str(card)]
    refused = CliRunner().invoke(ladder, command)
    assert refused.exit_code != 0
    assert "the run has begun" in refused.output
    assert CliRunner().invoke(ladder, [*command, "--amend", "--by", "ada"]).exit_code != 0
    done = CliRunner().invoke(ladder, [*command, "--amend", "--by", "ada", "--reason", "a sixth rung"])
    assert done.exit_code == 0, done.output
    now = load_card(card).ladder
    assert now is not None
    assert [(one.by, one.reason, one.was) for one in now.amendments] == [("ada", "a sixth rung", was.hash)]
    assert verify(card, rungs)
    store = open_store(sqlite_url(tmp_path), "any")
    with store.transaction() as tx:
        (row,) = tx.audit_rows()
    store.close()
    assert row.kind == "ladder"
    assert "ada amended" in str(row.payload)
    assert was.hash in str(row.payload)


def test_a_first_registration_after_launch_is_an_amendment_too(card: Path, rungs: Path, tmp_path: Path) -> None:
    (tmp_path / "telemetry").mkdir()
    (tmp_path / "telemetry" / "000001.jsonl").write_text("")
    with pytest.raises(LadderError, match="the run has begun"):
        register(card, rungs)
    section = register(card, rungs, Change("ada", "forgotten"))
    assert section["amendments"][0]["was"] == "nothing was registered"


def test_fit_and_show_tell_the_fit_and_write_what_was_asked_for(rungs: Path, tmp_path: Path) -> None:
    data, picture, page = tmp_path / "fit.json", tmp_path / "ladder.png", tmp_path / "ladder.html"
    fitted = CliRunner().invoke(ladder, ["fit", str(rungs), "--held-out", "--json", str(data)])
    assert fitted.exit_code == 0, fitted.output
    assert "Held out: w" in fitted.output
    assert '"held_out": {' in data.read_text(encoding="utf-8")
    shown = CliRunner().invoke(ladder, ["show", str(rungs), "--png", str(picture), "--html", str(page)])
    assert shown.exit_code == 0, shown.output
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "<svg" in page.read_text(encoding="utf-8")


def test_show_draws_a_run_with_its_registered_curve(card: Path, rungs: Path, tmp_path: Path) -> None:
    register(card, rungs)
    (tmp_path / "telemetry").mkdir()
    records = [
        {
            "attempt": "a1",
            "step": step,
            "tokens": 1024 * step,
            "time": 1.8e9 + step,
            "phase": "train",
            "train/loss": 6.0 * step**-0.2,
            "optim/grad_norm": 1.5,
        }
        for step in range(1, 401)
    ]
    (tmp_path / "telemetry" / "a1-00001.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    live = live_run(tmp_path)
    assert live.tokens.tolist() == [1024 * step for step in range(1, 401)]
    assert live.trends["grad_norm"] == 1.5
    assert np.isnan(live.trends["drop_rate"])
    labels = [text.get_text() for text in picture(fit_rungs(rungs), live).axes[0].get_legend().get_texts()]
    assert {"w64-700, 232k", "cpu-demo", "registered, 95 % band"} <= set(labels)
    page = tmp_path / "ladder.html"
    shown = CliRunner().invoke(ladder, ["show", str(rungs), "--run", str(tmp_path), "--html", str(page)])
    assert shown.exit_code == 0, shown.output


@pytest.mark.slow
def test_train_starts_the_trainers_ladder_with_the_arguments_given() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "runwatch.monitor.cli", "ladder", "train", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "--rungs RUNGS" in done.stdout


def test_rungs_that_cannot_be_fitted_are_refused_in_the_trainers_own_words(rungs: Path) -> None:
    document = json.loads(rungs.read_text(encoding="utf-8"))
    rungs.write_text(json.dumps({**document, "rungs": document["rungs"][:3]}), encoding="utf-8")
    with pytest.raises(LadderError, match="cannot be fitted"):
        fit_rungs(rungs)


def test_a_missing_file_is_told_without_a_traceback(tmp_path: Path) -> None:
    result = CliRunner().invoke(ladder, ["fit", str(tmp_path / "none.json")])
    assert result.exit_code == 1, "click's own runner knows no other code; the console script exits with 65"
    assert "No such file" in result.output
