"""A run card that is edited under a running daemon: noticed, told key by key, audited, asked for author and reason."""

import json
from pathlib import Path
from typing import Any

import pytest
import scripted
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from scripted import ScriptedTrainer

from runwatch.monitor.commands.amend import command
from runwatch.monitor.daemon.amendments import AmendError, amend, described, key_changes
from runwatch.monitor.daemon.watched_run import Watch


def edit(trainer: ScriptedTrainer, **plan: Any) -> None:
    """Change keys of the card's plan, as a person with an editor does."""
    path = trainer.run_dir / "run.yaml"
    card = json.loads(path.read_text())
    card["plan"] |= plan
    path.write_text(json.dumps(card))


def rows(watch: Watch, *kinds: str) -> list[dict[str, Any]]:
    with watch.store.transaction() as tx:
        return [json.loads(row.payload) for row in tx.audit_rows() if row.kind in kinds]


def asked(watch: Watch) -> str | None:
    """What the daemon says of a change that nobody has signed."""
    found = [one["message"] for one in watch.conditions.listed() if one["kind"] == "unsigned card"]
    return found[0] if found else None


@pytest.fixture
def watched(trainer: ScriptedTrainer, open_watch: Any) -> Watch:
    """A run that has begun, with a daemon on it."""
    watch: Watch = open_watch(trainer.run_dir)
    watch.tick(trainer.train(20))
    return watch


def test_a_change_is_in_force_at_once_told_key_by_key_and_asked_about_until_it_is_signed(
    trainer: ScriptedTrainer, watched: Watch
) -> None:
    edit(trainer, token_budget=2048 * 1000, deadline="2027-01-01T00:00:00Z")
    watched.tick(trainer.train(20))
    assert watched.status is not None
    assert watched.status["run"]["declared_budget"] == 2048 * 1000
    told = asked(watched)
    assert told is not None
    assert f"plan.token_budget {scripted.BUDGET} → 2048000" in told
    assert "plan.deadline nothing → 2027-01-01T00:00:00Z" in told
    assert f"runwatch amend {trainer.run_dir}" in told
    assert watched.status["health"] == "degraded"
    sentence = amend(watched.store, trainer.run_dir, "ada", "the reservation ends earlier")
    assert sentence.startswith("ada amended the run card: the reservation ends earlier (plan.deadline nothing →")
    watched.tick(trainer.train(20))
    assert asked(watched) is None
    [signed] = rows(watched, "amendment")
    assert (signed["by"], signed["reason"]) == ("ada", "the reservation ends earlier")
    assert signed["changes"][1] == {"key": "plan.token_budget", "before": scripted.BUDGET, "after": 2048 * 1000}
    with pytest.raises(AmendError, match="nothing to sign"):
        amend(watched.store, trainer.run_dir, "ada", "again")


def test_several_edits_are_signed_as_one_against_what_was_signed_last(trainer: ScriptedTrainer, watched: Watch) -> None:
    for budget in (2048 * 1000, 1024 * 1000):
        edit(trainer, token_budget=budget)
        watched.tick(trainer.train(20))
    amend(watched.store, trainer.run_dir, "ada", "shorter")
    [signed] = rows(watched, "amendment")
    assert [(one["before"], one["after"]) for one in signed["changes"]] == [(scripted.BUDGET, 1024 * 1000)]
    assert len(rows(watched, "card")) == 3


def test_an_edit_that_is_taken_back_needs_nobody(trainer: ScriptedTrainer, watched: Watch) -> None:
    before = (trainer.run_dir / "run.yaml").read_text()
    edit(trainer, token_budget=1024 * 1000)
    watched.tick(trainer.train(20))
    (trainer.run_dir / "run.yaml").write_text(before)
    watched.tick(trainer.train(20))
    assert asked(watched) is None
    assert "changed back to the signed one" in rows(watched, "card")[-1]["sentence"]


def test_comments_and_layout_need_nobody(trainer: ScriptedTrainer, watched: Watch) -> None:
    path = trainer.run_dir / "run.yaml"
    path.write_text(f"# a remark\n{json.dumps(json.loads(path.read_text()), indent=2)}\n")
    watched.tick(trainer.train(20))
    assert asked(watched) is None
    assert "no key has changed" in rows(watched, "card")[-1]["sentence"]


def test_an_edit_before_launch_is_no_amendment(trainer: ScriptedTrainer, open_watch: Any) -> None:
    watch: Watch = open_watch(trainer.run_dir)
    watch.tick(trainer.clock)
    edit(trainer, token_budget=1024 * 1000)
    watch.tick(trainer.clock)
    assert asked(watch) is None
    assert "changed before launch" in rows(watch, "card")[-1]["sentence"]


def test_an_edit_while_the_daemon_was_down_is_noticed_by_the_next(
    trainer: ScriptedTrainer, watched: Watch, open_watch: Any
) -> None:
    edit(trainer, token_budget=1024 * 1000)
    again: Watch = open_watch(trainer.run_dir)
    again.tick(trainer.train(20))
    assert "plan.token_budget" in (asked(again) or "")


def test_an_edit_that_is_signed_before_the_daemon_looks_is_written_down_in_order(
    trainer: ScriptedTrainer, watched: Watch
) -> None:
    edit(trainer, token_budget=1024 * 1000)
    amend(watched.store, trainer.run_dir, "ada", "shorter")
    watched.tick(trainer.train(20))
    assert asked(watched) is None
    with watched.store.transaction() as tx:
        kinds = [row.kind for row in tx.audit_rows() if row.kind in {"card", "amendment"}]
    assert kinds == ["card", "card", "amendment"]


def test_an_amended_ladder_brings_author_and_reason_in_the_card(trainer: ScriptedTrainer, watched: Watch) -> None:
    path = trainer.run_dir / "run.yaml"
    card = json.loads(path.read_text())
    card["ladder"] |= {
        "hash": "sha256:1",
        "amendments": [{"time": "2026-12-03T00:00:00Z", "by": "bob", "reason": "a rung was wrong", "was": "sha256:0"}],
    }
    path.write_text(json.dumps(card))
    watched.tick(trainer.train(20))
    assert asked(watched) is None
    assert rows(watched, "amendment")[0]["sentence"].startswith("bob amended the run card: a rung was wrong")


def test_a_ladder_that_was_changed_by_hand_is_asked_about(trainer: ScriptedTrainer, watched: Watch) -> None:
    path = trainer.run_dir / "run.yaml"
    card = json.loads(path.read_text())
    card["ladder"]["curve"]["high"] = [5.6, 3.0]
    path.write_text(json.dumps(card))
    watched.tick(trainer.train(20))
    assert "ladder.curve.high [5.6, 2.15] → [5.6, 3.0]" in (asked(watched) or "")


def test_the_command_says_what_it_signed_or_what_is_wrong(
    trainer: ScriptedTrainer, watched: Watch, tmp_path: Path
) -> None:
    edit(trainer, token_budget=1024 * 1000)
    arguments = [str(trainer.run_dir), "--by", "ada", "--reason", "shorter"]
    assert "ada amended the run card: shorter (plan.token_budget" in CliRunner().invoke(command, arguments).output
    assert "nothing to sign" in CliRunner().invoke(command, arguments).output
    (trainer.run_dir / "run.yaml").write_text("version: 1\nrun: {nam: x}\n")
    assert "did you mean name" in CliRunner().invoke(command, arguments).output
    assert "not a directory" in CliRunner().invoke(command, [str(tmp_path / "x"), *arguments[1:]]).output


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text("abc", max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("xyz", min_size=1, max_size=2), inner, max_size=3)
    ),
    max_leaves=12,
)
CARDS = st.dictionaries(st.text("xyz", min_size=1, max_size=2), VALUES, max_size=4)


@given(CARDS, CARDS)
def test_two_cards_differ_in_a_key_exactly_when_their_values_differ(before: Any, after: Any) -> None:
    changes = key_changes(json.dumps(before), json.dumps(after))
    assert (not changes) == (
        before == after and json.dumps(before, sort_keys=True) == json.dumps(after, sort_keys=True)
    )
    back = key_changes(json.dumps(after), json.dumps(before))
    assert [(one["key"], one["after"], one["before"]) for one in back] == [
        (one["key"], one["before"], one["after"]) for one in changes
    ]
    assert len(described(changes)) < 1500
