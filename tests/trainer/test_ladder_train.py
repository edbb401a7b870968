"""What a trained rung is summarised to: an interrupted one counts each step once."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from runwatch.trainer.ladder.train import rung_card, summary

CARD = Path(__file__).parents[2] / "trainer" / "cards" / "cpu.yaml"
STEPS = 200
TOKENS_PER_STEP = 1024


def record(attempt: str, step: int, *, lift: float = 0.0) -> dict[str, Any]:
    """A step of a loss that falls; `lift` makes a superseded one tell."""
    metrics = {"train/loss": 6 * (step + 1) ** -0.3 + lift, "optim/grad_norm": 1.0 + lift, "moe/drop_rate": 0.03}
    return {"attempt": attempt, "step": step, "tokens": step * TOKENS_PER_STEP, "phase": "train", **metrics}


def evaluation(attempt: str, step: int, loss: float) -> dict[str, Any]:
    return {**record(attempt, step), "phase": "eval", "eval/loss": loss}


def write(run_dir: Path, segments: dict[str, str]) -> Path:
    """A finished rung of `STEPS` steps in `run_dir`, with these segments."""
    (run_dir / "telemetry").mkdir(parents=True)
    rung = {"name": "small", "plan": {"token_budget": STEPS * TOKENS_PER_STEP}}
    card = rung_card(yaml.safe_load(CARD.read_text(encoding="utf-8")), rung)
    (run_dir / "run.yaml").write_text(yaml.safe_dump(card), encoding="utf-8")
    for name, text in segments.items():
        (run_dir / "telemetry" / f"{name}.jsonl").write_text(text, encoding="utf-8")
    return run_dir


def lines(records: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(one) + "\n" for one in records)


def test_an_interrupted_rung_is_summarised_as_one_that_was_not(tmp_path: Path) -> None:
    """Killed after step 150 in the middle of a line, resumed at step 100: steps 101 to 150 are in the telemetry twice."""
    whole = [record("a0001", step) for step in range(1, STEPS + 1)]
    first = [*whole[:100], *(record("a0001", step, lift=0.5) for step in range(101, 151))]
    again = [record("a0002", step) for step in range(101, STEPS + 1)]
    ends = [evaluation("a0001", 100, 2.0), evaluation("a0002", STEPS, 1.5)]
    torn = json.dumps(record("a0001", 151, lift=0.5))[:40]
    segments = {"a0001-00001": lines(first[:100]), "a0001-00002": lines([ends[0], *first[100:]]) + torn}
    resumed = write(tmp_path / "resumed", {**segments, "a0002-00001": lines([*again, ends[1]])})
    straight = write(tmp_path / "straight", {"a0001-00001": lines([*whole, *ends])})
    assert summary("small", resumed) == summary("small", straight)


def test_a_line_that_is_broken_elsewhere_is_not_passed_over(tmp_path: Path) -> None:
    text = lines([record("a0001", step) for step in range(1, STEPS + 1)])
    with pytest.raises(json.JSONDecodeError):
        summary("small", write(tmp_path / "broken", {"a0001-00001": "{broken\n" + text}))
