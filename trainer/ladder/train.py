"""Train the rungs of a scaling ladder: small runs of the same recipe, which pre-register the loss curve of the main run.

    python -m runwatch.trainer.ladder.train OUT_DIR --card run.yaml --rungs rungs.yaml --write rungs.json

A rungs file has a list `rungs`, each a name and what differs from the card (`model`, `plan`). Each rung is a whole run in
OUT_DIR/NAME, so an interrupted ladder goes on where it was. What `runwatch ladder fit` reads is written to `--write`.
"""

import argparse
import copy
import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from runwatch.trainer import train
from runwatch.trainer.config import read_card
from runwatch.trainer.model import count

STRETCH = 1.12
"""Each stretch of a course before the decay ends so many times later than the one before, counted from token 1: the same in all rungs."""
DECAY_STRETCHES = 10
FINAL_SHARE = 0.05
"""The final loss is the mean over the last 5 % of the records: one step's loss is noisy."""


def merged(card: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """The card with `changes` laid over it, key by key."""
    result = copy.deepcopy(card)
    for key, value in changes.items():
        result[key] = merged(result[key], value) if isinstance(value, dict) and key in result else value
    return result


def rung_card(card: dict[str, Any], rung: dict[str, Any]) -> dict[str, Any]:
    """The card of one rung: its own name and size, without ladder, faults and node settings of the main run."""
    kept = {key: value for key, value in card.items() if key not in {"ladder", "faults", "nodes", "checks"}}
    changes = {key: value for key, value in rung.items() if key != "name"}
    return merged(kept, {**changes, "run": {"name": str(rung["name"])}})


def stretches(decay_start: int, budget: int) -> np.ndarray:
    """Where the stretches of a course end, in tokens: equally wide in log tokens before the decay, equally wide within it.

    Rungs of one data order see the same sequences in the same stretch, so that their means compare without that noise.
    """
    stable = STRETCH ** np.arange(np.log(decay_start) / np.log(STRETCH))
    return np.unique(np.append(stable.astype(int), np.linspace(decay_start, budget, DECAY_STRETCHES + 1).astype(int)))


def thinned(tokens: np.ndarray, values: np.ndarray, ends: np.ndarray) -> list[list[float]]:
    """Means of `values` up to each of `ends`; rows [tokens, mean, standard deviation, count]."""
    places = np.searchsorted(tokens, ends, side="right")
    parts = [slice(a, b) for a, b in pairwise(places) if b > a]
    return [
        [float(np.mean(tokens[p])), float(np.mean(values[p])), float(np.std(values[p])), int(p.stop - p.start)]
        for p in parts
    ]


def run_records(run_dir: Path) -> list[dict[str, Any]]:
    """The records of a run by step, each step and phase once: where an attempt did a step again, the later one counts.

    A last line without its end is left out: an attempt was killed there, and the next one did the step again.
    """
    newest: dict[tuple[int, str], dict[str, Any]] = {}
    for path in sorted((run_dir / "telemetry").glob("*.jsonl")):
        *whole, _ = path.read_bytes().split(b"\n")
        for record in map(json.loads, whole):
            newest[record["step"], record["phase"]] = record
    return [newest[key] for key in sorted(newest)]


def summary(name: str, run_dir: Path) -> dict[str, Any]:
    """What the fit needs of a finished run: size, budget, final losses, and its course."""
    card = read_card(run_dir / "run.yaml")
    records = run_records(run_dir)
    steps = [record for record in records if record["phase"] == "train"]
    tokens = np.array([record["tokens"] for record in steps])

    decay_start = round(card.plan.token_budget * (1 - card.plan.learning_rate.decay_fraction))
    ends = stretches(decay_start, card.plan.token_budget)

    def course(signal: str) -> list[list[float]]:
        return [
            [round(value, 5) for value in row]
            for row in thinned(tokens, np.array([float(record[signal]) for record in steps]), ends)
        ]

    losses = np.array([float(record["train/loss"]) for record in steps])
    evals = [[record["tokens"], record["eval/loss"]] for record in records if "eval/loss" in record]
    return {
        "name": name,
        "parameters": count(card.model)[1],
        "tokens": card.plan.token_budget,
        "warmup_tokens": round(card.plan.token_budget * card.plan.learning_rate.warmup_fraction),
        "decay_start_tokens": decay_start,
        "seed": card.seed,
        "final_loss": float(np.mean(losses[-max(1, int(FINAL_SHARE * len(losses))) :])),
        "eval_loss": evals[-1][1] if evals else None,
        "curve": course("train/loss"),
        "eval_curve": evals,
        "grad_norm": course("optim/grad_norm"),
        "drop_rate": course("moe/drop_rate"),
    }


def climb(out_dir: Path, card: dict[str, Any], rungs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Train each rung to its end and summarise it.

    Raises:
        RuntimeError: a rung did not end.
    """
    summaries: list[dict[str, Any]] = []
    for number, rung in enumerate(rungs, 1):
        run_dir = out_dir / str(rung["name"])
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / "run.yaml").write_text(yaml.safe_dump(rung_card(card, rung), sort_keys=False))
        print(f"rung {number} of {len(rungs)}: {rung['name']}", file=sys.stderr, flush=True)
        if train.main([str(run_dir), "--wandb", "off"]) != 0:
            raise RuntimeError(f"rung {rung['name']} did not reach its budget; start the ladder again to go on")
        summaries.append(summary(str(rung["name"]), run_dir))
    return summaries


def main(argv: list[str] | None = None) -> int:
    """Train a ladder; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="runwatch ladder train")
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--card", type=Path, required=True)
    parser.add_argument("--rungs", type=Path, required=True)
    parser.add_argument("--write", type=Path, required=True)
    args = parser.parse_args(argv)
    rungs = yaml.safe_load(args.rungs.read_text())["rungs"]
    summaries = climb(args.out_dir, yaml.safe_load(args.card.read_text()), rungs)
    args.write.write_text(json.dumps({"rungs": summaries}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
