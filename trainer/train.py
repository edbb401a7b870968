"""Train the run card's model.

    python -m runwatch.trainer.train RUN_DIR [--card CARD] [--fault kind@step:key=value]... [--wandb offline]

RUN_DIR gets the card, telemetry, receipts and checkpoints; a run that is there already goes on from its newest complete
checkpoint. Exit codes: 0 the token budget is reached or a `stop` directive came, 64 the card or a fault cannot be read, or none of the
checkpoints in RUN_DIR belongs to the card, 75 interrupted after a checkpoint (start again).
"""

import argparse
import importlib.util
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import jax

from runwatch.trainer.config import Card, CardError, FaultError, read_card
from runwatch.trainer.data import SourceError
from runwatch.trainer.faulty import FaultyTrainer, read_faults
from runwatch.trainer.loop import OtherRunError, Trainer

if TYPE_CHECKING:
    from runwatch.trainer.wandb_log import Mode

USAGE = 64


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="runwatch train", description="Train the run card's model.")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--card", type=Path, help="the run card; copied to RUN_DIR/run.yaml when that is missing")
    parser.add_argument("--fault", action="append", default=[], metavar="KIND@STEP:KEY=VALUE,…", help="inject a fault")
    parser.add_argument("--wandb", choices=("off", "offline", "online"), help="offline when wandb is installed")
    return parser.parse_args(argv)


def prepare(args: argparse.Namespace) -> Card:
    """The card in RUN_DIR, copied there if it is not there yet."""
    run_dir, own = args.run_dir, args.run_dir / "run.yaml"
    run_dir.mkdir(parents=True, exist_ok=True)
    if args.card and not own.exists():
        shutil.copyfile(args.card, own)
    return read_card(own)


def trainer_of(args: argparse.Namespace) -> Trainer:
    """The trainer that was asked for: the plain one, or with `faults` one that injects them."""
    card = prepare(args)
    wandb = args.wandb or ("offline" if importlib.util.find_spec("wandb") else "off")
    mode: Mode | None = None if wandb == "off" else wandb
    texts = (*card.faults, *args.fault)
    if not texts:
        return Trainer(card, args.run_dir, mode)
    return FaultyTrainer(card, args.run_dir, mode, read_faults(texts, card.plan))


def main(argv: list[str] | None = None) -> int:
    """Train; see the module's docstring."""
    args = _arguments(argv)
    cache = os.environ.get("JAX_COMPILATION_CACHE_DIR", str(Path.home() / ".cache" / "runwatch" / "jax"))
    jax.config.update("jax_compilation_cache_dir", cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    try:
        trainer = trainer_of(args)
    except (CardError, SourceError, FaultError, OSError) as error:
        print(error, file=sys.stderr)
        return USAGE

    def interrupt(*_: object) -> None:
        trainer.interrupted = True

    signal.signal(signal.SIGTERM, interrupt)
    signal.signal(signal.SIGINT, interrupt)
    try:
        return trainer.run()
    except OtherRunError as error:
        trainer.close()
        print(error, file=sys.stderr)
        return USAGE


if __name__ == "__main__":
    sys.exit(main())
