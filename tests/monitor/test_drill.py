"""`runwatch drill`: what each fault owes, and that a broken chain is named."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from runwatch.monitor.drill import Found, links, missing
from runwatch.monitor.drill_command import command
from runwatch.monitor.drill_matrix import COLUMNS, Drilled, cells, page
from runwatch.monitor.drill_table import DRILLS

CARD = Path(__file__).parents[2] / "trainer" / "cards" / "reference-535b.yaml"
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


def _replay(tmp_path: Path, *names: str, card: Path = CARD) -> tuple[Result, dict[str, dict[str, object]]]:
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
    assert "http" not in text
    assert len(cells(drilled)) == len(COLUMNS)


@pytest.mark.slow
def test_a_replay_in_the_shape_of_a_535b_card_pays_for_a_nan_batch_and_fires_nothing_without_a_fault(
    tmp_path: Path,
) -> None:
    result, drills = _replay(tmp_path, "nan_batch", "clean")
    assert result.exit_code == 0, result.output
    assert {link["name"]: link["state"] for link in drills["nan_batch"]["links"]} == dict.fromkeys(LINKS, "seen")  # type: ignore[union-attr]
    assert drills["clean"]["alarms"] == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["nothing_like_it"], "no drill nothing_like_it"), (["clean", "--no-train"], "go together")],
)
def test_a_wrong_command_line_is_refused_before_anything_starts(arguments: list[str], said: str) -> None:
    result = _drill(*arguments)
    assert result.exit_code == 2
    assert said in result.output
