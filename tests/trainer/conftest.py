"""One tiny card, and runs of it that several tests read."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]

TINY: dict[str, Any] = {
    "version": 1,
    "run": {"name": "tiny", "hypothesis": "", "owner": "", "links": {}},
    "seed": 3,
    "model": {
        "width": 16, "layers": 2, "heads": 2, "kv_heads": 1, "head_width": 8, "global_every": 2, "window": 8, "experts": 4,
        "experts_per_token": 2, "expert_width": 16, "shared_experts": 2, "shared_expert_width": 16, "latent_width": 8,
    },
    "hardware": {"devices": 1, "peak_flops_per_second": 1.0e11},
    "plan": {
        "token_budget": 5120,
        "context_length": 32,
        "sequences_per_step": 4,
        "learning_rate": {"peak": 0.01, "warmup_fraction": 0.1, "decay_fraction": 0.25, "final_fraction": 0.05},
        "mixture": {"stable": {"code": 0.5, "docs": 0.25, "prose": 0.25}, "decay": {"code": 0.25, "docs": 0.25, "prose": 0.5}},
        "checkpoint": {"every_steps": 10, "keep": 3},
        "eval": {"every_steps": 20, "sequences": 6},
    },
}  # fmt: skip
"""40 steps of 128 tokens."""

Train = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    cache = os.environ.get("JAX_COMPILATION_CACHE_DIR") or str(tmp_path_factory.mktemp("jax-cache"))
    return os.environ | {"JAX_COMPILATION_CACHE_DIR": cache, "JAX_PLATFORMS": "cpu"}


@pytest.fixture(scope="session")
def write_card() -> Callable[..., None]:
    def write(run_dir: Path, **plan: Any) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / "run.yaml").write_text(yaml.safe_dump({**TINY, "plan": {**TINY["plan"], **plan}}))

    return write


@pytest.fixture(scope="session")
def train(environment: dict[str, str]) -> Train:
    def run(run_dir: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-P", "-m", "runwatch.trainer.train", str(run_dir), "--wandb", "off", *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)

    return run


@pytest.fixture(scope="session")
def telemetry() -> Callable[[Path], list[dict[str, Any]]]:
    def read(run_dir: Path) -> list[dict[str, Any]]:
        paths = sorted((run_dir / "telemetry").glob("*.jsonl"))
        return [json.loads(line) for path in paths for line in path.read_text().splitlines()]

    return read


@pytest.fixture(scope="session")
def whole_run(tmp_path_factory: pytest.TempPathFactory, write_card: Callable[..., None], train: Train) -> Path:
    """An uninterrupted run of the tiny card."""
    run_dir = tmp_path_factory.mktemp("whole")
    write_card(run_dir)
    done = train(run_dir)
    assert done.returncode == 0, done.stderr
    return run_dir


@pytest.fixture(scope="session")
def contract() -> Path:
    """The folder of examples that trainer and monitor must both accept."""
    return ROOT / "tests" / "contract"
