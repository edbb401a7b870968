"""What a plan would do: from a bare card, from a run directory, in words, numbers and pictures."""

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scripted
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st
from scripted import ScriptedTrainer

from runwatch.monitor.card.run_card import Card
from runwatch.monitor.cli import cli
from runwatch.monitor.daemon.watched_run import Watch
from runwatch.monitor.report.preview import described, moved, page, preview, world_of_card
from runwatch.monitor.report.recorded_run import gather
from runwatch.rules import Proposal, Refusal, World
from runwatch.rules.plan import SetLrDecay, SetTokenBudget

pytest.importorskip("matplotlib", reason="needs the extra plots")
from runwatch.monitor.report.plan_chart import chart_of, plan_after

OpenWatch = Callable[..., Watch]
INTERVAL = 100 * scripted.TOKENS


def untrained(rate: float | None = None, **plan: Any) -> World:
    document = scripted.card()
    document["plan"] |= plan
    return world_of_card(Card.model_validate(document), scripted.START, rate)


def run(*words: object) -> Result:
    return CliRunner().invoke(cli, ["plan", "preview", *map(str, words)])


@pytest.fixture
def card(tmp_path: Path) -> Path:
    """The scripted card as a file."""
    (tmp_path / "card.yaml").write_text(json.dumps(scripted.card()))
    return tmp_path / "card.yaml"


SAID = {
    "a shorter budget": (
        "early_divergence",
        "12%",
        0,
        "Token budget from 3,072,000 to 1,536,000 tokens (50% of the card's).",
    ),
    "the mixture": ("early_divergence", "12%", 0, "code 0.50 to 0.25, prose 0.50 to 0.75"),
    "a forecast": ("early_divergence", "0.12", 0, "The predicted final loss is 2."),
    "the mode": ("early_divergence", "12%", 0, "In mode auto the plan runs automatically."),
    "a closed window": (
        "early_divergence",
        "26%",
        1,
        "It would not be proposed: The run is at 26.0% of its token budget",
    ),
    "a rewind": ("instability", "50%", 0, "Rewind from step 1,500 to the checkpoint of step 1,400"),
    "no checkpoint yet": ("instability", "2%", 1, "no complete, finite checkpoint"),
    "a retreat": ("routing_collapse", "50%", 0, "Context length from 128 back to 64 tokens."),
    "no deadline": ("throughput_shortfall", "50%", 1, "the card has no deadline"),
}


@pytest.mark.parametrize("case", SAID)
def test_a_bare_card_tells(case: str, card: Path) -> None:
    node, share, code, sentence = SAID[case]
    result = run(node, "--card", card, "--at", share)
    assert sentence in result.output
    assert result.exit_code == code


def test_with_a_deadline_and_a_speed_the_budget_is_fitted_to_the_time_that_is_left() -> None:
    world = untrained(400.0, deadline=datetime.fromtimestamp(scripted.START + 5000, UTC))
    seconds = world.planned.deadline
    assert seconds is not None
    found = preview("throughput_shortfall", world, 0.1)
    assert found.world.now == pytest.approx(scripted.START + found.world.tokens / 400, abs=1)
    left = (seconds - found.world.now) * 400
    budget = next(action.tokens for action in _proposed(found.proposal).actions if isinstance(action, SetTokenBudget))
    assert found.world.tokens < budget <= found.world.tokens + left
    assert budget % INTERVAL == 0


def _proposed(proposal: Proposal | Refusal) -> Proposal:
    assert isinstance(proposal, Proposal), proposal
    return proposal


@given(st.floats(0.0, 0.25))
def test_the_picture_of_a_shorter_budget_keeps_to_its_actions(at: float) -> None:
    found = preview("early_divergence", untrained(), at)
    proposal = _proposed(found.proposal)
    chart = chart_of(found.world, "shorten_budget", proposal.actions, proposal.forecast)
    budget = next(action for action in proposal.actions if isinstance(action, SetTokenBudget)).tokens
    decay = next(action for action in proposal.actions if isinstance(action, SetLrDecay))
    (old_tokens, old_rate), (new_tokens, new_rate) = chart.rates
    assert chart.budgets == ((round(0.8 * scripted.BUDGET), scripted.BUDGET), (decay.start_tokens, budget))
    assert (old_tokens[-1], new_tokens[-1]) == (scripted.BUDGET, budget)
    assert (old_rate[-1], new_rate[-1]) == pytest.approx((0.05, decay.final_fraction))
    assert (np.diff(new_rate[new_tokens >= decay.start_tokens]) < 0).all()
    assert (new_rate <= np.interp(new_tokens, old_tokens, old_rate) + 1e-6).all()
    assert all(sum(shares.values()) == pytest.approx(1) for shares in chart.mixtures.values())
    assert chart.predictions is not None
    (old, *_), (new, low, high) = chart.predictions
    assert old < new
    assert low < new < high


def test_the_plan_after_its_actions_is_what_a_trainer_writes_in_its_receipt(
    trainer: ScriptedTrainer, open_watch: OpenWatch
) -> None:
    watch = open_watch(trainer.run_dir)
    for _ in range(15):
        watch.tick(trainer.train(20))
    (execution,) = gather(trainer.run_dir).executions
    assert execution.receipt is not None
    assert plan_after(execution.receipt.before, execution.actions) == execution.receipt.after


def test_the_preview_of_a_watched_run_is_what_the_daemon_proposes(
    trainer: ScriptedTrainer, open_watch: OpenWatch
) -> None:
    document = scripted.card({"early_divergence": {"mode": "confirm"}})
    (trainer.run_dir / "run.yaml").write_text(json.dumps(document))
    watch = open_watch(trainer.run_dir)
    for _ in range(15):
        watch.tick(trainer.train(20))
        with watch.store.transaction() as tx:
            if tx.executions():
                break
    recorded = gather(trainer.run_dir)
    (execution,) = recorded.executions
    assert recorded.world is not None
    proposal = _proposed(preview("early_divergence", recorded.world).proposal)
    assert (proposal.actions, proposal.effects, proposal.forecast) == (
        execution.actions,
        execution.effects,
        execution.forecast,
    )
    shown = run(trainer.run_dir, "early_divergence")
    assert all(effect in shown.output for effect in execution.effects)
    assert "In mode confirm the plan requires approval." in shown.output


def test_a_preview_changes_nothing(trainer: ScriptedTrainer) -> None:
    trainer.train(100)
    before = sorted(path for path in trainer.run_dir.rglob("*"))
    assert run(trainer.run_dir, "early_divergence", "--at", "12%").exit_code == 0
    assert sorted(path for path in trainer.run_dir.rglob("*")) == before


@given(st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_a_moved_run_has_the_checkpoints_and_the_time_of_its_place(first: float, second: float) -> None:
    world = moved(moved(untrained(1024.0), first), second)
    assert world.tokens <= second * scripted.BUDGET < world.tokens + scripted.TOKENS + 1
    assert world.step * scripted.TOKENS == world.tokens
    assert world.now == pytest.approx(scripted.START + world.step, abs=1)
    passed = [one.step for one in world.checkpoints]
    assert passed == sorted(set(passed))
    assert all(step <= world.step and step % 100 == 0 for step in passed)
    assert set(range(100, world.step + 1, 100)) == set(passed)


def test_the_png_and_the_page_are_written(card: Path, tmp_path: Path) -> None:
    picture, shown = tmp_path / "plan.png", tmp_path / "plan.html"
    result = run("early_divergence", "--card", card, "--at", "12%", "--png", picture, "--html", shown)
    assert result.exit_code == 0, result.output
    data = picture.read_bytes()
    assert data.startswith(b"\x89PNG")
    width, height = int.from_bytes(data[16:20]), int.from_bytes(data[20:24])
    assert width > 1000 < 2 * height
    text = shown.read_text()
    assert text.count("<svg") == 1
    assert all(word in text for word in ("Learning rate", "Data mixture", "Token budget", "ladder predicts", "1.54M"))
    assert "var(--trend)" in text


def test_the_page_of_a_refusal_says_why_without_a_picture() -> None:
    text = page(preview("early_divergence", untrained(), 0.3))
    assert "<svg" not in text
    assert "the window is 0% to 25%" in text


def test_without_a_ladder_nothing_is_predicted_and_the_picture_says_so() -> None:
    document = scripted.card()
    del document["ladder"]
    found = preview("early_divergence", world_of_card(Card.model_validate(document), scripted.START), 0.1)
    assert "No final loss is predicted" in "\n".join(described(found))
    assert "no ladder is registered." in page(found)


WRONG_USE = {
    "an unknown node": (["early_divergences", "--card", "{card}"], "did you mean early_divergence?"),
    "a share above one": (["instability", "--card", "{card}", "--at", "120%"], "between 0 and 100%"),
    "a share in words": (["instability", "--card", "{card}", "--at", "half"], "such as 12% or 0.12"),
    "no run": (["{card}/missing", "instability"], "is not a directory"),
    "a run and a card": ([".", "instability", "--card", "{card}"], "with --card CARD"),
    "no such card": (["instability", "--card", "{card}.none"], "card.yaml.none"),
    "no telemetry": (["{folder}", "instability"], "preview the card alone with --card"),
}


@pytest.mark.parametrize("case", WRONG_USE)
def test_wrong_use_is_told_with_the_remedy(case: str, card: Path) -> None:
    words, sentence = WRONG_USE[case]
    folder = card.parent / "declared"
    folder.mkdir()
    (folder / "run.yaml").write_text(card.read_text())
    result = run(*(word.format(card=card, folder=folder) for word in words))
    assert result.exit_code != 0
    assert sentence in result.output.replace("\n", " ")
    assert "Traceback" not in result.output
