"""What the logit z-loss is for: one card trained without it and with it, and what the checks say of both.

    python -P benchmarks/trainer/ablation.py [OUT_DIR]

Trains `trainer/cards/z-loss-ablation.yaml` twice (some minutes on two cores; runs that OUT_DIR holds are taken as they are), judges
both with `runwatch backtest`, and prints a Markdown table. Medians are over 32 steps.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

CARD = Path(__file__).parents[2] / "trainer" / "cards" / "z-loss-ablation.yaml"
WEIGHTS = (0.0, 0.001)
WINDOW = 32
WITNESSES = ("logit_growth", "grad_norm")


def train(run_dir: Path, weight: float) -> None:
    """One run at this z-loss weight, to its end."""
    run_dir.mkdir(parents=True)
    text = re.sub(r"(?<= z_loss_weight: )[\d.]+", str(weight), CARD.read_text(), count=1)
    (run_dir / "run.yaml").write_text(text)
    command = [sys.executable, "-P", "-m", "runwatch.trainer.train", str(run_dir), "--wandb", "off"]
    subprocess.run(command, check=True)


def course(run_dir: Path, signal: str) -> np.ndarray:
    """Medians of a signal over stretches of `WINDOW` steps."""
    lines = [line for path in sorted(run_dir.glob("telemetry/*.jsonl")) for line in path.read_text().splitlines()]
    values = [float(record[signal]) for record in map(json.loads, lines) if record["phase"] == "train"]
    return np.array([np.median(values[at : at + WINDOW]) for at in range(0, len(values) - WINDOW + 1, WINDOW)])


def said(run_dir: Path) -> dict[str, str]:
    """When each witness spoke first, and how badly."""
    command = [sys.executable, "-P", "-m", "runwatch.monitor.cli", "backtest", str(run_dir), "--json"]
    found: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, text=True, check=False).stdout)
    first = {}
    for incident in reversed(found["incidents"]):
        first[incident["check"]] = f"{incident['level']}, step {incident['first_step']}"
    return {name: first.get(name, "silent") for name in WITNESSES}


def row(run_dir: Path, weight: float) -> str:
    """One line of the table."""
    z, norm, params = (course(run_dir, name) for name in ("train/z_loss", "optim/grad_norm", "params/norm"))
    figures = f"{z.max():.1f} | {z[-1]:.1f} | {norm.min():.2f} | {norm[-1]:.2f} | {params[0]:.0f} | {params[-1]:.0f}"
    return f"| {weight:g} | {figures} | " + " | ".join(said(run_dir).values()) + " |"


def main() -> None:
    """Train what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out_dir", type=Path, nargs="?")
    out = parser.parse_args().out_dir or Path(tempfile.mkdtemp(prefix="ablation-"))
    columns = "mean log(Z)², highest | last | grad norm, lowest | last | parameter norm, first | last | "
    print(f"| z-loss weight | {columns}" + " | ".join(f"`{name}`" for name in WITNESSES) + " |")
    print("|---:" * 7 + "|---" * len(WITNESSES) + "|")
    for weight in WEIGHTS:
        run_dir = out / f"weight-{weight:g}"
        if not run_dir.exists():
            train(run_dir, weight)
        print(row(run_dir, weight), flush=True)


if __name__ == "__main__":
    main()
