"""The exchange in waves against a loop over rows, the sharded model against that on one device, and a run on eight devices."""

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import yaml

from runwatch.trainer import checkpoint, moe
from runwatch.trainer.config import Card, CardError, Evaluation, Hardware, Model, Plan
from runwatch.trainer.parallel import ALONE, Layout, buffers, exchange, layout_of, rows_of

HERE = Path(__file__).parent
SMALL = Model(experts=8, experts_per_token=2, latent_width=4, expert_width=8)
TOKENS = 64


def choice_of(seed: int) -> moe.Choice:
    """Tokens of which each quarter prefers other experts, as those of a long sequence do."""
    random = np.random.default_rng(seed)
    scores = random.normal(size=(TOKENS, 8)) + np.repeat(random.normal(size=(4, 8)), TOKENS // 4, axis=0)
    experts = np.argsort(-scores, axis=1)[:, :2].astype(np.int32)
    return moe.Choice(*map(jax.numpy.asarray, (experts, random.random((TOKENS, 2), np.float32), np.zeros(8), 0.0)))


def experts_of(seed: int) -> dict[str, jax.Array]:
    random = np.random.default_rng(seed)
    shapes = {"expert_gate": (8, 4, 8), "expert_up": (8, 4, 8), "expert_down": (8, 8, 4)}
    return {name: jax.numpy.asarray(random.normal(size=shape), np.float32) for name, shape in shapes.items()}


def np_kept(experts: np.ndarray, devices: int, waves: int, pool: int, slots: int) -> np.ndarray:
    """Which of the assignments (T, K) find room at both gates, one row after the other."""
    kept, local = np.zeros(experts.shape, bool), SMALL.experts // devices
    queues: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for t, chosen in enumerate(experts):
        for k, expert in enumerate(chosen):
            queues.setdefault((t * devices // TOKENS, expert // local), []).append((t, k))
    for wave in range(waves):
        taken = np.zeros(SMALL.experts, int)
        for row in range(pool):
            for (_, _), queue in sorted(queues.items()):
                for t, k in queue[row * waves + wave :][:1]:
                    kept[t, k] = taken[experts[t, k]] < slots
                    taken[experts[t, k]] += kept[t, k]
    return kept


@pytest.mark.parametrize(("devices", "waves", "factor"), [(4, 1, 1.15), (4, 3, 1.15), (8, 2, 0.6), (1, 2, 1.0)])
def test_waves_drop_and_add_as_a_loop_over_rows_does(devices: int, waves: int, factor: float) -> None:
    layout, choice, params = Layout(devices, waves), choice_of(devices), experts_of(waves)
    latent = np.random.default_rng(7).normal(size=(TOKENS, 4)).astype(np.float32)
    out, dropped = jax.jit(exchange(SMALL, factor, layout))(latent, choice, params)
    experts = np.asarray(choice.experts)
    kept = np_kept(experts, devices, waves, *rows_of(factor, TOKENS // devices, SMALL, layout))
    assert int(dropped) == int((~kept).sum())
    assert int(dropped) > 0, "the case shows what it is for"
    every = np.asarray(moe.swiglu(latent, *params.values()))  # (E, T, L)
    weights = np.asarray(choice.weights) * kept
    expected = sum(weights[:, k, None] * every[experts[:, k], np.arange(TOKENS)] for k in range(2))
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-4)


def test_with_room_for_all_waves_drop_nothing() -> None:
    layout, latent = Layout(8, 3), np.ones((TOKENS, 4), np.float32)
    everyone = choice_of(0)._replace(experts=jax.numpy.tile(jax.numpy.array([[6, 7]]), (TOKENS, 1)))
    _, dropped = jax.jit(exchange(SMALL, math.inf, layout))(latent, everyone, experts_of(0))
    assert int(dropped) == 0


@pytest.mark.parametrize(
    ("layout", "buffer"),
    [
        (ALONE, (19,)),
        (Layout(1, 2), (64, 10)),
        (Layout(8, 1), (3, 19)),
        (Layout(8, 3), (1, 7)),
        (Layout(4, 1), (10, 19)),
    ],
)
def test_buffers_are_the_factor_times_the_even_share_at_both_gates(layout: Layout, buffer: tuple[int, ...]) -> None:
    """64 tokens with 2 choices among 8 experts: 16 assignments an expert, 1.15 times that."""
    assert buffers(1.15, TOKENS, SMALL, layout) == buffer


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"model": Model(experts=12)}, "12 model.experts"),
        ({"plan": Plan(context_length=30, sequences_per_step=6)}, "180 tokens a step"),
        ({"plan": Plan(eval=Evaluation(sequences=1), context_length=12, sequences_per_step=8)}, "12 tokens of an eval"),
    ],
)
def test_what_cannot_be_spread_over_the_devices_is_told(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(CardError, match=f"hardware.devices: {complaint}"):
        layout_of(Card(**changes, hardware=Hardware(devices=8)))


def test_more_devices_than_there_are_cannot_be_asked_for() -> None:
    jax.device_count()
    with pytest.raises(CardError, match=r"hardware\.devices: 8 are asked for, and JAX has 1 here"):
        layout_of(Card(hardware=Hardware(devices=8)))


def script(path: Path, environment: dict[str, str], *arguments: str) -> Any:
    command = [sys.executable, "-P", str(path), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def eight(environment: dict[str, str]) -> dict[str, Any]:
    return script(HERE / "eight_devices.py", environment)


@pytest.mark.slow
def test_eight_devices_drop_exactly_what_one_device_says_they_drop(eight: dict[str, Any]) -> None:
    drops = [[result["dropped"] for result in eight[where]] for where in ("sharded", "on_one")]
    assert drops[0] == drops[1]
    assert all(layer > 0 for batch in drops[0] for layer in batch)


@pytest.mark.slow
def test_eight_devices_give_the_loss_and_gradient_of_one(eight: dict[str, Any]) -> None:
    """The order of sums differs: some units in the last place of float32."""
    for sharded, on_one in zip(eight["sharded"], eight["on_one"], strict=True):
        assert sharded["loss"] == pytest.approx(on_one["loss"], rel=1e-6)
    assert max(eight["gradient_off"].values()) < 1e-5, eight["gradient_off"]


@pytest.mark.slow
def test_experts_and_their_gradients_stay_on_their_device_and_tokens_travel(eight: dict[str, Any]) -> None:
    """Two of sixteen experts each; forth, addresses, back, and both ways again for the gradient, inside the loops over waves and layers."""
    assert eight["experts_of_a_device"] == [2] * 8
    assert eight["exchanges"] == 5


@pytest.mark.slow
def test_the_latent_width_halves_the_exchanged_bytes(environment: dict[str, str]) -> None:
    """Forth and back, forward and backward: four exchanges of factor · tokens · K rows in each of four layers, 7 of 8 parts to others."""
    bench = HERE.parents[1] / "benchmarks" / "trainer" / "exchange.py"
    full, latent = script(bench, environment, "--devices", "8", "--json")
    assert (full["width"], latent["width"]) == (64, 32)
    assert latent["tokens"] * 2 == full["tokens"]
    assert 0.5 < latent["bytes"] / full["bytes"] < 0.505
    rows = 8 * math.ceil(1.15 * 128 * 2 / 8)
    assert latent["tokens"] == 4 * 4 * rows * 32 * 4 * 7 // 8


def spread_card(run_dir: Path, tiny: dict[str, Any], **hardware: int) -> None:
    """A card whose experts are dropless, so that the number of devices changes nothing but the order of sums."""
    model = {**tiny["model"], "experts": 8, "capacity_factor": 8.0}
    plan = {
        **tiny["plan"],
        "token_budget": 128 * 8,
        "checkpoint": {"every_steps": 4, "keep": 3},
        "eval": {"every_steps": 4, "sequences": 6},
    }
    card = {**tiny, "model": model, "plan": plan, "hardware": {**tiny["hardware"], **hardware}}
    run_dir.mkdir(exist_ok=True)
    (run_dir / "run.yaml").write_text(yaml.safe_dump(card))


@pytest.mark.slow
def test_a_run_on_eight_devices_goes_on_from_its_checkpoint_on_two(
    tmp_path: Path, write_card: Callable[..., None], train: Any, telemetry: Callable[[Path], list[dict[str, Any]]]
) -> None:
    eight, two = tmp_path / "eight", tmp_path / "two"
    write_card(eight)
    tiny = yaml.safe_load((eight / "run.yaml").read_text())
    spread_card(eight, tiny, devices=8, waves=2)
    done = train(eight)
    assert done.returncode == 0, done.stderr
    spread_card(two, tiny, devices=2)
    middle = next(found.path for found in checkpoint.found(eight / "checkpoints") if found.step == 4)
    shutil.copytree(middle, two / "checkpoints" / middle.name)
    done = train(two)
    assert done.returncode == 0, done.stderr
    losses = [
        {record["step"]: record[signal] for record in telemetry(run) if signal in record}
        for run in (eight, two)
        for signal in ("train/loss", "eval/loss")
    ]
    assert [sorted(course) for course in losses] == [[*range(1, 9)], [4, 8], [5, 6, 7, 8], [8]]
    for whole, resumed in zip(losses[:2], losses[2:], strict=True):
        assert resumed == pytest.approx({step: whole[step] for step in resumed}, rel=1e-5)
