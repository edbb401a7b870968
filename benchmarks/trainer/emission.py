"""What one step's metrics cost the training loop: our writer beside wandb.log and prometheus_client alone.

    python -P benchmarks/trainer/emission.py [--steps 2000] [--without-wandb]

The step between two emissions is a sleep, as a device's step is to the host: the writer's thread works meanwhile. Prints one row
for each way with the microseconds that the calling thread waited at p50, p99 and at most, and the share of the CPU card's step.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from prometheus_client import CollectorRegistry, Gauge

from runwatch.trainer.telemetry import Telemetry

METRICS = {f"group/metric_{n}": 1.0 / (n + 3) for n in range(30)}
"""As many as a train record of the CPU card has."""
STEP_SECONDS = 0.05
"""A step of the CPU card, for the share."""
PAUSE = 0.002


def costs(emit: Callable[[int], object], steps: int) -> np.ndarray:
    """Microseconds that each of `steps` calls kept its caller; shape (steps,)."""
    spent = np.empty(steps)
    for step in range(steps):
        began = time.perf_counter_ns()
        emit(step)
        spent[step] = (time.perf_counter_ns() - began) / 1000
        time.sleep(PAUSE)
    return spent


def row(name: str, spent: np.ndarray) -> None:
    """Print one way's costs."""
    p50, p99 = np.percentile(spent, [50, 99])
    print(f"{name:24} {p50:9.1f} {p99:9.1f} {spent.max():9.1f} {p50 / 1e6 / STEP_SECONDS:9.3%}", flush=True)


def telemetry(folder: Path, steps: int) -> None:
    """The writer on a disk that works, and on one that refuses."""
    writer = Telemetry(folder / "telemetry", "a0001")
    row("telemetry", costs(lambda step: writer.emit(step, step, "train", METRICS), steps))
    writer.close()
    (folder / "dead").write_text("a file where the folder should be")
    writer = Telemetry(folder / "dead", "a0001", queue_records=100)
    row("telemetry, dead disk", costs(lambda step: writer.emit(step, step, "train", METRICS), steps))
    print(f"  dropped and counted: {writer.dropped} of {steps}")


def prometheus(steps: int) -> None:
    """Thirty labelled gauges set one by one."""
    gauge = Gauge("metric", "a metric", ["name"], registry=CollectorRegistry())
    children = {name: gauge.labels(name) for name in METRICS}
    row("prometheus_client", costs(lambda _: [children[name].set(value) for name, value in METRICS.items()], steps))


def wandb_offline(folder: Path, steps: int) -> None:
    """wandb.log on the caller's thread."""
    import wandb  # noqa: PLC0415 - it takes over a second to import and may be missing

    run = wandb.init(project="bench", dir=folder, mode="offline", settings=wandb.Settings(silent=True))
    row("wandb.log offline", costs(lambda step: run.log(METRICS, step=step), steps))
    run.finish()


def main() -> None:
    """Run all ways and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--without-wandb", action="store_true")
    args = parser.parse_args()
    print(f"{'30 metrics, microseconds':24} {'p50':>9} {'p99':>9} {'max':>9} {'of a step':>9}")
    with tempfile.TemporaryDirectory() as folder:
        telemetry(Path(folder), args.steps)
        prometheus(args.steps)
        if not args.without_wandb:
            wandb_offline(Path(folder), args.steps)


if __name__ == "__main__":
    main()
