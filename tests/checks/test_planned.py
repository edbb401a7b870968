"""The registered loss and the learning rate are what the contract says, for checks and, in numbers, for the trainer."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runwatch.checks.planned import learning_rate_share, registered_loss
from runwatch.rules import Curve

CASES: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "contract" / "schedules" / "wsd.json").read_text()
)["cases"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_the_learning_rate_is_that_of_the_contract(case: dict[str, Any]) -> None:
    given = {name: case[name] for name in ("warmup_tokens", "decay_start_tokens", "token_budget", "final_fraction")}
    assert learning_rate_share(case["tokens"], **given) == pytest.approx(case["share"], abs=1e-12)


def test_the_registered_loss_is_straight_in_logarithms_and_nothing_outside() -> None:
    curve = Curve(tokens=(100.0, 10_000.0), loss=(4.0, 2.0), low=(3.9, 1.9), high=(4.1, 2.1))
    loss, low, high = registered_loss(curve, [99.0, 100.0, 1_000.0, 10_000.0, 10_001.0])
    assert np.isnan([loss[0], loss[-1], low[0], high[-1]]).all()
    assert loss[1:4] == pytest.approx([4.0, np.sqrt(8.0), 2.0])
    assert (low[1:4] < loss[1:4]).all()
    assert (loss[1:4] < high[1:4]).all()
