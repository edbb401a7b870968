"""`runwatch drill`: inject faults into a throwaway run and check every step from the fault to the recovery."""

import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import click
from rich.console import Console

from runwatch.monitor.card.run_card import CardError
from runwatch.monitor.commands.options import DATA, FAILED, USAGE, Failure
from runwatch.monitor.drill.links import Drill, Found
from runwatch.monitor.drill.matrix import Drilled, document, page, sentences, table
from runwatch.monitor.drill.receiver import Receiver
from runwatch.monitor.drill.replay import prepared, replay_drill
from runwatch.monitor.drill.table import DRILLS
from runwatch.monitor.drill.training import NOTES, TrainingError, train_drill, warm_up

AT_ONCE = 2
BROKEN = 1
PIPED_WIDTH = 200
SAY_SECONDS = 10.0
"""A drill reports its progress no more often than this."""

Say = Callable[[str], None]
Play = Callable[[Drill, Say], Found]


@click.command("drill")
@click.argument("names", nargs=-1, required=True, metavar="FAULT...|all")
@click.option("--no-train", is_flag=True, help="Replay telemetry in the shape of --card; train nothing.")
@click.option("--card", type=click.Path(path_type=Path), help="The run card to replay (with --no-train).")
@click.option("--step-seconds", type=click.FloatRange(min=0, min_open=True), help="Step time of that run.")
@click.option("--run-dir", type=click.Path(path_type=Path), help="Keep the run directories here (a new directory).")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the matrix as JSON.")
@click.option("--html", "html_file", type=click.Path(path_type=Path), help="Write the matrix as a page.")
def command(
    names: tuple[str, ...],
    no_train: bool,
    card: Path | None,
    step_seconds: float | None,
    run_dir: Path | None,
    json_file: Path | None,
    html_file: Path | None,
) -> None:
    """Inject faults into a short training (or a replay of your card) and check alert, node, plan, directive, receipt and recovery.

    Exits with 0 when every expected step was seen, and with 1 naming those that were not.
    """
    if no_train != (card is not None):
        raise click.UsageError("--no-train and --card go together: a drill that trains has a card of its own")
    chosen = _chosen(names)
    if run_dir is not None and run_dir.exists():
        raise Failure(f"{run_dir} already exists: name a new directory", USAGE)
    console, began = Console(width=None if sys.stdout.isatty() else PIPED_WIDTH), time.monotonic()
    with ExitStack() as stack:
        folder = run_dir or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="runwatch-drill-")))
        receiver = stack.enter_context(Receiver())
        notes, play = _player(folder, receiver, card, step_seconds, Progress(console))
        for note in notes:
            console.print(f"  {note}", style="dim")
        drilled = run_all(chosen, play, Progress(console))
    seconds = time.monotonic() - began
    if json_file is not None:
        json_file.write_text(json.dumps(document(drilled, notes, seconds), indent=2) + "\n", encoding="utf-8")
    if html_file is not None:
        html_file.write_text(page(drilled, notes, seconds), encoding="utf-8")
    sys.exit(tell(drilled, seconds, console))


def tell(drilled: Sequence[Drilled], seconds: float, console: Console) -> int:
    """Print the matrix and each missing step; the exit code."""
    console.print(table(drilled))
    broken = sentences(drilled)
    for sentence in broken:
        console.print(sentence, style="bold red", markup=False)
    verdict = f"{len(broken)} missing" if broken else "every expected step was seen"
    console.print(f"{len(drilled)} drills in {seconds:.0f} s: {verdict}.")
    return BROKEN if broken else 0


def _chosen(names: Sequence[str]) -> list[Drill]:
    wanted = list(DRILLS) if "all" in names else list(dict.fromkeys(names))
    if unknown := [name for name in wanted if name not in DRILLS]:
        raise click.UsageError(f"unknown drill {', '.join(unknown)}; choose from all, {', '.join(DRILLS)}")
    return [DRILLS[name] for name in wanted]


class Progress:
    """Progress: a line when something begins or ends, and now and then in between."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._said: dict[str, float] = {}

    def say(self, name: str, text: str) -> None:
        """Progress of one drill."""
        now = time.monotonic()
        if now - self._said.get(name, float("-inf")) >= SAY_SECONDS:
            self._said[name] = now
            self._console.print(f"  {name}: {text}", style="dim", markup=False)


def _player(
    folder: Path, receiver: Receiver, card: Path | None, step_seconds: float | None, progress: Progress
) -> tuple[tuple[str, ...], Play]:
    """What differs from a real run, in sentences, and how to run one drill."""
    try:
        if card is not None:
            replayed = prepared(card, step_seconds)
            return replayed.changes, lambda drill, say: replay_drill(
                drill, replayed, folder / drill.name, receiver, say
            )
        trained = warm_up(folder / "warm-up", lambda text: progress.say("warm-up", text))
        return NOTES, lambda drill, say: train_drill(drill, trained, folder / drill.name, receiver, say)
    except CardError as error:
        raise Failure(str(error), DATA) from error
    except (TrainingError, FileNotFoundError) as error:
        raise Failure(str(error), FAILED) from error


def run_all(drills: Sequence[Drill], play: Play, progress: Progress) -> list[Drilled]:
    """Every drill, `AT_ONCE` at a time, in the order of the table; one that cannot be run does not end the others."""

    def one(drill: Drill) -> Drilled:
        began = time.monotonic()
        found, error = Found(), ""
        try:
            found = play(drill, lambda text: progress.say(drill.name, text))
        except TrainingError as failed:
            error = str(failed)
        done = Drilled(drill, found, time.monotonic() - began, error)
        progress.say(f"{drill.name} done", f"{done.seconds:.0f} s, {'passed' if done.held else 'FAILED'}")
        return done

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(one, drills))
