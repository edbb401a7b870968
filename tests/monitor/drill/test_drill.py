"""`runwatch drill`: what each fault owes, and that a broken chain is named."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from rich.console import Console

from runwatch.monitor.commands.drill import Progress, command, run_all
from runwatch.monitor.drill.links import Drill, Found, links, missing
from runwatch.monitor.drill.matrix import COLUMNS, Drilled, cells, page, sentences
from runwatch.monitor.drill.table import DRILLS
from runwatch.monitor.drill.training import TrainingError

CARD = Path(__file__).parents[3] / "trainer" / "cards" / "reference-535b.yaml"
LINKS = [
    "quiet before",
    "detected",
    "alert",
    "node",
    "plan",
    "directive",
    "applied",
    "verified",
    "recovered",
    "no other plan",
]


def _drill(*arguments: str) -> Result:
    return CliRunner().invoke(command, list(arguments))


def _replay(tmp_path: Path, *names: str, card: Path = CARD) -> tuple[Result, dict[str, dict[str, Any]]]:
    out = tmp_path / "matrix.json"
    result = _drill("--no-train", *names, "--card", str(card), "--json", str(out))
    return result, {one["name"]: one for one in json.loads(out.read_text())["drills"]}


@pytest.mark.parametrize("name", DRILLS)
def test_silence_leaves_exactly_the_owed_links_missing(name: str) -> None:
    drill = DRILLS[name]
    owed = {"detected", "alert"} if drill.checks else set[str]()
    owed |= {"node", "plan", "directive", "applied", "verified"} if drill.node else set()
    owed |= {"recovered"} if drill.recovers else set()
    assert {link.name for link in missing(drill, Found())} == owed
    assert [link.name for link in links(drill, Found())] == LINKS


def test_the_page_says_each_missing_link_and_loads_nothing() -> None:
    drilled = Drilled(DRILLS["nan_batch"], Found(), 1.0)
    text = page([drilled], ["a note"], 1.0)
    assert "nan_batch: verified is missing" in text
    assert "a note" in text
    assert "http:" not in text
    assert "https:" not in text
    assert len(cells(drilled)) == len(COLUMNS)


def test_a_drill_whose_processes_do_not_start_is_broken_and_the_others_go_on() -> None:
    def play(drill: Drill, say: Callable[[str], None]) -> Found:
        say("starting")
        if drill.name == "clean":
            raise TrainingError("the daemon ended; read daemon.log")
        return Found()

    drilled = run_all([DRILLS["clean"], DRILLS["kill"]], play, Progress(Console(quiet=True)))
    assert [one.drill.name for one in drilled] == ["clean", "kill"]
    assert sentences(drilled)[0] == "clean could not be run: the daemon ended; read daemon.log"
    assert not drilled[0].held


@pytest.mark.slow
def test_every_plan_is_carried_out_in_the_shape_of_a_535b_card_and_nothing_fires_without_a_fault(
    tmp_path: Path,
) -> None:
    plans = {
        "nan_batch": "rewind_and_skip",
        "label_shuffle": "shorten_budget",
        "bias_runaway": "retreat_context",
        "slow_step": "fit_to_deadline",
    }
    result, drills = _replay(tmp_path, "clean", "kill", *plans)
    assert result.exit_code == 0, result.output
    assert {name: [e["plan"] for e in drills[name]["executions"]] for name in plans} == {
        name: [plan] for name, plan in plans.items()
    }
    assert drills["clean"]["alarms"] == []
    assert drills["kill"]["first"] == ["progress"]


@pytest.mark.slow
def test_a_node_that_only_observes_breaks_the_chain_and_the_missing_links_are_named(tmp_path: Path) -> None:
    card = yaml.safe_load(CARD.read_text()) | {"nodes": {"instability": {"mode": "observe"}}}
    card["plan"]["token_budget"] //= 40  # the drill waits for the chain in shares of the run
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(card))
    result, drills = _replay(tmp_path, "nan_batch", card=path)
    assert result.exit_code == 1
    assert "nan_batch: directive is missing" in result.output
    states = {link["name"]: link["state"] for link in drills["nan_batch"]["links"]}
    assert states["detected"] == "seen"
    assert states["directive"] == states["applied"] == states["verified"] == "missing"


@pytest.mark.slow
def test_a_real_training_survives_a_nan_batch_from_the_first_bad_record_to_the_loss_before_it(tmp_path: Path) -> None:
    out = tmp_path / "matrix.json"
    result = _drill("nan_batch", "--json", str(out))
    assert result.exit_code == 0, result.output
    (one,) = json.loads(out.read_text())["drills"]
    assert one["first"] == ["finite"]
    assert one["executions"][0]["plan"] == "rewind_and_skip"
    assert one["executions"][0]["state"] == "verified"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["nothing_like_it"], "unknown drill nothing_like_it"), (["clean", "--no-train"], "go together")],
)
def test_a_wrong_command_line_is_refused_before_anything_starts(arguments: list[str], said: str) -> None:
    result = _drill(*arguments)
    assert result.exit_code == 2
    assert said in result.output
