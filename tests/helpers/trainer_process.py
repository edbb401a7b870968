"""The real trainer as a process of its own."""

import os
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def training(run_dir: Path, cache: str, *faults: str) -> Generator[subprocess.Popen[bytes]]:
    """The trainer on `run_dir` with these faults, its output in RUN_DIR/trainer.log; ended with the block."""
    command = [sys.executable, "-P", "-m", "runwatch.trainer.train", str(run_dir), "--wandb", "off"]
    command += [word for fault in faults for word in ("--fault", fault)]
    env = os.environ | {"JAX_COMPILATION_CACHE_DIR": cache, "JAX_PLATFORMS": "cpu"}
    with (run_dir / "trainer.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=env)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
