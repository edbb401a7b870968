"""A declared change re-bases the checks; the same change undeclared fires; the report shows both. Also with the real trainer."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import scripted
from click.testing import CliRunner
from scripted import ScriptedTrainer

from runwatch.monitor.card.context import check_settings
from runwatch.monitor.card.run_card import load_card
from runwatch.monitor.commands.declare import CHANGES, command
from runwatch.monitor.commands.report import report
from runwatch.monitor.daemon.watched_run import Watch
from runwatch.monitor.store.store import open_store, sqlite_url

SWAP = 120
TOUCHED = {"plan_conformance", "ladder_deviation", "loss_spike"}
"""Checks that a swap of the mixture makes fire."""


def fired(run_dir: Path) -> set[str]:
    """The checks that have fired."""
    store = open_store(sqlite_url(run_dir), "scripted")
    with store.transaction() as tx:
        found = {one.check for one in tx.incidents()}
    store.close()
    return found


def declare(run_dir: Path, *arguments: str) -> str:
    """What `runwatch declare` says."""
    result = CliRunner().invoke(command, [str(run_dir), "--by", "ada", "--reason", "stage two", *arguments])
    return result.output


def swap_mixture(trainer: ScriptedTrainer, watch: Watch) -> None:
    """Train up to the swap, swap, and train on: other shares, and a loss that is half a nat higher from there on."""
    trainer.fault, trainer.obeys = SWAP, False
    watch.tick(trainer.train(SWAP - 1))
    trainer.plan |= {"mixture": {"code": 1.0, "prose": 0.0}}
    for _ in range(15):
        watch.tick(trainer.train(10))


def test_a_declared_swap_of_the_mixture_fires_nothing(trainer: ScriptedTrainer, open_watch: Any) -> None:
    said = declare(trainer.run_dir, "--step", str(SWAP), "--change", "mixture")
    assert said.startswith("ada declared that data/mixture, train/loss will change at step 120: stage two\n")
    assert "Checks that reset there: " in said
    assert all(name in said.splitlines()[1] for name in TOUCHED)
    swap_mixture(trainer, open_watch(trainer.run_dir))
    assert fired(trainer.run_dir) == set()


def test_the_same_swap_undeclared_fires(trainer: ScriptedTrainer, open_watch: Any) -> None:
    swap_mixture(trainer, open_watch(trainer.run_dir))
    assert fired(trainer.run_dir) >= {"plan_conformance", "ladder_deviation"}


def test_a_declaration_of_something_else_lets_it_fire(trainer: ScriptedTrainer, open_watch: Any) -> None:
    declare(trainer.run_dir, "--step", str(SWAP), "--change", "transport")
    swap_mixture(trainer, open_watch(trainer.run_dir))
    assert fired(trainer.run_dir) >= {"plan_conformance", "ladder_deviation"}


def test_what_was_not_declared_is_judged_by_the_plan_and_the_curve_as_before(trainer: ScriptedTrainer) -> None:
    path = trainer.run_dir / "run.yaml"
    for change, judged in {
        "mixture": (False, True, False),
        "learning-rate": (True, False, True),
        "transport": (True, True, True),
    }.items():
        declaration = {"step": SWAP, "signals": list(CHANGES[change]), "reason": "planned"}
        path.write_text(json.dumps(scripted.card() | {"declarations": [declaration]}))
        settings: Any = check_settings(load_card(path))
        plan, curve = settings["plan_conformance"].plans[-1], settings["ladder_deviation"].curves[-1]
        assert (plan.from_step, settings["plan_conformance"].plans[0].mixture) == (SWAP, {"code": 0.5, "prose": 0.5})
        assert (plan.mixture is not None, plan.peak is not None, bool(curve.tokens)) == judged


def test_a_change_that_is_declared_after_the_fact_is_called_so(trainer: ScriptedTrainer, open_watch: Any) -> None:
    open_watch(trainer.run_dir).tick(trainer.train(200))
    assert "had changed at step 120 (after the fact: the run is at step 200)" in declare(
        trainer.run_dir, "--step", "120", "--change", "mixture"
    )
    pytest.importorskip("matplotlib", reason="needs the extra plots")
    report(trainer.run_dir, None, trainer.run_dir / "report.md")
    assert "after the fact" in (trainer.run_dir / "report.md").read_text()


WRONG = {
    "nothing that moves": (["--step", "1"], "say what it affects"),
    "no signal of this name": (["--step", "1", "--signal", "train/los"], "did you mean train/loss"),
    "no change of this name": (["--step", "1", "--change", "weather"], "transport"),
    "a step before the first": (["--step", "-1", "--change", "mixture"], "x>=0"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_declaration_says_what_is_right(case: str, trainer: ScriptedTrainer) -> None:
    arguments, told = WRONG[case]
    assert told in declare(trainer.run_dir, *arguments)
    assert not (trainer.run_dir / ".runwatch" / "state.db").exists()


# --- with the real trainer ------------------------------------------------------------------------------------------------

CARD: dict[str, Any] = {
    "version": 1,
    "run": {"name": "scripted", "hypothesis": "A declared swap of the mixture fires nothing."},
    "model": {
        "width": 16, "layers": 2, "heads": 2, "kv_heads": 1, "head_width": 8, "global_every": 2, "window": 8, "experts": 4,
        "experts_per_token": 2, "expert_width": 16, "shared_experts": 2, "shared_expert_width": 16, "latent_width": 8,
    },
    "plan": {
        "token_budget": 128 * 4000,
        "context_length": 32,
        "sequences_per_step": 4,
        "learning_rate": {"peak": 0.01, "warmup_fraction": 0.005},
        "mixture": {"stable": {"code": 0.5, "prose": 0.5}},
        "checkpoint": {"every_steps": 1000},
        "eval": {"every_steps": 4000, "sequences": 4},
    },
}  # fmt: skip
TRUSTED = {"plan_conformance", "loss_spike", "grad_norm"}
"""What must stay quiet: a busy machine may make `throughput` speak, and the noise of four sequences a step `ladder_deviation`."""


def wait_for(what: str, condition: Callable[[], Any]) -> Any:
    until = time.monotonic() + 180
    while time.monotonic() < until:
        if found := condition():
            return found
        time.sleep(0.1)
    pytest.fail(f"never happened: {what}")


@contextmanager
def process(run_dir: Path, name: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    cache = os.environ.get("JAX_COMPILATION_CACHE_DIR") or str(run_dir.parent / "jax-cache")
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": cache, "JAX_PLATFORMS": "cpu"}
    with (run_dir / f"{name}.log").open("wb") as log:
        child = subprocess.Popen([sys.executable, "-P", "-m", *arguments], stdout=log, stderr=log, env=environment)
    try:
        yield child
    finally:
        child.terminate()
        try:
            child.wait(60)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def by_hand(run_dir: Path, name: str, *actions: dict[str, Any]) -> dict[str, Any]:
    """Write a directive with an editor, as it were, and wait for the trainer's receipt."""
    folder = run_dir / "control"
    directive = {
        "version": 1, "id": name, "node": "by-hand", "plan": "by-hand", "attempt": "a0001", "created": time.time(),
        "expires": time.time() + 600, "evidence": "stage two", "preconditions": {}, "actions": list(actions),
    }  # fmt: skip
    (folder / "requests").mkdir(parents=True, exist_ok=True)
    temporary = folder / "requests" / f".{name}.tmp"
    temporary.write_text(json.dumps(directive))
    temporary.rename(folder / "requests" / f"{name}.json")
    answer = folder / "receipts" / f"{name}.json"
    wait_for(f"the receipt of {name}", answer.exists)
    receipt: dict[str, Any] = json.loads(answer.read_text())
    assert receipt["status"] == "applied", receipt
    return receipt


def step(run_dir: Path) -> int:
    path = run_dir / ".runwatch" / "status.json"
    return json.loads(path.read_text())["run"]["step"] if path.exists() else 0


@pytest.mark.slow
def test_a_real_run_whose_mixture_is_swapped_by_hand_fires_unless_it_was_declared(tmp_path: Path) -> None:
    pytest.importorskip("jax", reason="needs the extra trainer")
    run_dir = tmp_path / "declared"
    run_dir.mkdir()
    (run_dir / "run.yaml").write_text(json.dumps(CARD))
    watching = ("runwatch.monitor.cli", "watch", str(run_dir), "--listen", "127.0.0.1:0")
    training = ("runwatch.trainer.train", str(run_dir), "--wandb", "off")
    with process(run_dir, "daemon", *watching), process(run_dir, "trainer", *training) as trainer:
        wait_for("the run has a past", lambda: step(run_dir) > 150)
        at = by_hand(run_dir, "hold", {"action": "pause"})["step"]
        assert "Checks that reset" in declare(run_dir, "--step", str(at + 1), "--change", "mixture")
        shares = {"action": "set_data_mixture", "shares": {"code": 1.0, "prose": 0.0}}
        by_hand(run_dir, "swap", shares, {"action": "resume"})
        wait_for("the swap has been judged", lambda: step(run_dir) > at + 200)
        by_hand(run_dir, "end", {"action": "stop"})
        trainer.wait(120)
        wait_for(
            "the daemon has seen the end", lambda: "finished" in (run_dir / ".runwatch" / "status.json").read_text()
        )
    assert not fired(run_dir) & TRUSTED
    undeclared = shutil.copytree(run_dir, tmp_path / "undeclared", ignore=shutil.ignore_patterns(".runwatch"))
    once = subprocess.run(
        [sys.executable, "-P", "-m", "runwatch.monitor.cli", "watch", str(undeclared), "--once"], check=False
    )
    assert once.returncode == 2
    assert "plan_conformance" in fired(undeclared)
    for folder in (run_dir, undeclared):
        report(folder, None, folder / "report.md")
    assert "stage two" in (run_dir / "report.md").read_text()
    assert "No planned change was declared" in (undeclared / "report.md").read_text()
