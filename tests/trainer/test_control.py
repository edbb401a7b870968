"""A directive is applied whole or not at all, once, and always answered."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from runwatch.trainer.control import ACTIONS, Boundary, Control, RejectedError, apply, receipt
from runwatch.trainer.plan import PUBLIC, PlanState

NOW = 1790000100.0
PLAN = PlanState(
    12_288_000, 9_830_400, 0.05, ((0, {"code": 0.6, "docs": 0.2, "prose": 0.2}),), 1.0, 1e-4, 1.15, 0.01, 128
)
AT = Boundary("a0001", 431, 1_765_376, 3448, 1024, ("code", "docs", "prose"), (300, 400))


def directive(*actions: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"version": 1, "id": "d", "actions": list(actions), **more}


@pytest.mark.parametrize(
    ("action", "change"),
    [
        ({"action": "set_token_budget", "tokens": 9_900_000}, {"token_budget": 9_900_000}),
        (
            {"action": "set_lr_decay", "start_tokens": 2_000_000, "final_fraction": 0.1},
            {"decay_start_tokens": 2_000_000, "final_fraction": 0.1},
        ),
        (
            {"action": "set_data_mixture", "shares": {"code": 0.5, "prose": 0.5}},
            {"mixture": {"code": 0.5, "prose": 0.5}},
        ),
        ({"action": "rewind", "checkpoint_step": 400, "skip_steps": 3}, {}),
        ({"action": "scale_lr", "factor": 0.5}, {"lr_scale": 0.5}),
        ({"action": "set_z_loss_weight", "weight": 0.01}, {"z_loss_weight": 0.01}),
        ({"action": "set_capacity_factor", "factor": 2}, {"capacity_factor": 2}),
        ({"action": "set_balance_rate", "rate": 0.1}, {"balance_rate": 0.1}),
        ({"action": "set_context_length", "tokens": 64}, {"context_length": 64}),
        ({"action": "checkpoint_now"}, {}),
        ({"action": "pause"}, {"paused": True}),
        ({"action": "resume"}, {"paused": False}),
        ({"action": "stop"}, {}),
    ],
)
def test_an_action_changes_what_it_names_and_nothing_else(action: dict[str, Any], change: dict[str, Any]) -> None:
    assert apply(PLAN, directive(action), AT, NOW).plan.public() == {**PLAN.public(), **change}


def test_the_table_above_has_every_action() -> None:
    marks: list[pytest.Mark] = test_an_action_changes_what_it_names_and_nothing_else.pytestmark  # type: ignore[attr-defined]
    assert {row[0]["action"] for row in marks[0].args[1]} == set(ACTIONS)


def test_learning_rate_factors_multiply() -> None:
    once = apply(PLAN, directive({"action": "scale_lr", "factor": 0.5}), AT, NOW).plan
    assert apply(once, directive({"action": "scale_lr", "factor": 0.5}), AT, NOW).plan.lr_scale == 0.25


def test_every_good_directive_of_the_contract_is_accepted(contract: Path) -> None:
    files = sorted((contract / "directives").glob("*.json"))
    assert len(files) >= 6
    for file in files:
        document = json.loads(file.read_text())
        assert apply(PLAN, document, AT, NOW).plan.directives == (file.stem,)


def test_every_bad_directive_of_the_contract_is_rejected_with_its_reason(contract: Path) -> None:
    expected = json.loads((contract / "directives" / "bad" / "expected.json").read_text())
    for name, reason in expected.items():
        document = json.loads((contract / "directives" / "bad" / f"{name}.json").read_text())
        with pytest.raises(RejectedError) as caught:
            apply(PLAN, document, AT, NOW)
        assert reason in str(caught.value), name


def test_receipts_have_the_keys_of_the_contract(contract: Path) -> None:
    done = apply(PLAN, directive({"action": "pause"}), AT, NOW).plan
    for file in sorted((contract / "receipts").glob("*.json")):
        example = json.loads(file.read_text())
        ours = receipt("d", AT, PLAN, done, example["reason"])
        assert list(ours) == list(example)
        assert list(ours["before"]) == list(example["before"]) == list(PUBLIC)
        assert ours["status"] == example["status"]


@pytest.mark.parametrize(
    "junk", ["", "{", "[]", "null", '{"id": "other"}', '"text"', '{"version": 1, "id": "d", "actions": [3]}']
)
def test_a_request_that_is_no_directive_is_reported_and_never_raises(tmp_path: Path, junk: str) -> None:
    folder = tmp_path / "control" / "requests"
    folder.mkdir(parents=True)
    (folder / "d.json").write_text(junk)
    ((name, found),) = Control(tmp_path).poll()
    assert name == "d"
    if not isinstance(found, str):
        with pytest.raises(RejectedError, match="must be an object"):
            apply(PLAN, found, AT, NOW)


def test_a_request_is_seen_once_and_one_with_a_receipt_never(tmp_path: Path) -> None:
    folder = tmp_path / "control" / "requests"
    folder.mkdir(parents=True)
    for name in ("b", "a"):
        (folder / f"{name}.json").write_text(json.dumps(directive({"action": "pause"}, id=name)))
    control = Control(tmp_path)
    assert [name for name, _ in control.poll()] == ["a", "b"]
    assert control.poll() == []
    assert control.answer("a", receipt("a", AT, PLAN, PLAN, None))
    assert [name for name, _ in Control(tmp_path).poll()] == ["b"]
    assert [path.name for path in (tmp_path / "control" / "receipts").iterdir()] == ["a.json"]


def test_without_a_control_folder_nothing_is_asked(tmp_path: Path) -> None:
    assert Control(tmp_path).poll() == []


def test_a_plan_survives_its_checkpoint(contract: Path) -> None:
    document = json.loads((contract / "directives" / "early_divergence-0001.json").read_text())
    plan = apply(PLAN, document, AT, NOW).plan
    stored = json.loads(json.dumps(plan.to_json()))
    assert PlanState.from_json(stored) == plan
    assert dataclasses.replace(plan, directives=()) != PLAN
