"""The main job in a few minutes: train the CPU card with the daemon beside it, break it, and watch the plan be carried out.

The trainer and the daemon are the real ones, each a process of its own. The fault is real too: from step 190 on the bytes of every `code`
sequence are shuffled, as if a shard were corrupt. The loss leaves the registered curve, `early_divergence` fires inside the first quarter
of the token budget, the trainer carries out `shorten_budget`, and the daemon sees it in the telemetry.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live

from runwatch.monitor.report.run_page import ReportError, report
from runwatch.monitor.show.status import Status, read_status
from runwatch.monitor.show.terminal import render

FAULT = "label_shuffle@190:source=code"
CARD = "cards/cpu.yaml"
PATIENCE_SECONDS = 900
"""The demo gives up after this long; it takes a quarter of it on two cores."""


def demo(run_dir: Path, listen: str, console: Console) -> int:
    """Run it all below `run_dir`; 0 when the plan was carried out, verified, and the run ended at the shorter budget."""
    run_dir.mkdir(parents=True, exist_ok=False)
    with as_file(files("runwatch.trainer") / CARD) as card:
        (run_dir / "run.yaml").write_text(card.read_text())
    console.print(f"Training in {run_dir}; from step 190 on the code in the data is corrupted ({FAULT}).")
    console.print(f"Status page while it runs: http://{listen}/")
    with _process(run_dir, "daemon", ["runwatch.monitor.cli", "watch", str(run_dir), "--listen", listen]) as daemon:
        trainer_command = ["runwatch.trainer.train", str(run_dir), "--fault", FAULT]
        with _process(run_dir, "trainer", trainer_command) as trainer:
            _show(run_dir, trainer, daemon, console)
    return _tell(run_dir, console)


@contextmanager
def _process(run_dir: Path, name: str, command: list[str]) -> Generator[subprocess.Popen[bytes]]:
    """A process of ours with its output in RUN_DIR/NAME.log, ended when the block ends."""
    with (run_dir / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(  # noqa: S603 - our own modules
            [sys.executable, "-P", "-m", *command], stdout=log, stderr=log, env=os.environ | {"PYTHONUNBUFFERED": "1"}
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


def _show(run_dir: Path, trainer: subprocess.Popen[bytes], daemon: subprocess.Popen[bytes], console: Console) -> None:
    """The live picture until the run has ended and the daemon has seen it."""
    until = time.monotonic() + PATIENCE_SECONDS
    told: set[str] = set()
    with Live(console=console, refresh_per_second=2, transient=False) as live:
        while time.monotonic() < until and daemon.poll() is None:
            status = read_status(run_dir)
            if status and console.is_terminal:
                live.update(render(status))
            elif status:
                _tell_news(status, told, console)
            if trainer.poll() is not None and (
                not status or status["run"]["phase"] == "finished" or trainer.returncode
            ):
                return
            time.sleep(0.5)


def _tell_news(status: Status, told: set[str], console: Console) -> None:
    """Where the output is no terminal: a line for each audit row, and one for every 50 steps."""
    for row in reversed(status["audit"]):
        if (key := f"audit {row['seq']}") not in told:
            told.add(key)
            console.print(f"  {row['sentence']}")
    run = status["run"]
    if (key := f"step {run['step'] // 50}") not in told:
        told.add(key)
        loss = run["latest"].get("train/loss")
        console.print(
            f"step {run['step']}, {run['fraction'] or 0:.0%} of the budget, loss {loss if loss is None else round(loss, 3)}"
        )


def _tell(run_dir: Path, console: Console) -> int:
    """What happened, where to read on, and whether the plan was carried out and verified."""
    status = read_status(run_dir)
    plan = next((one for one in status["plans"] if one["node"] == "early_divergence"), None) if status else None
    receipt = _receipt(run_dir, plan["id"]) if plan else None
    if status is None or plan is None or receipt is None:
        console.print(f"[red]The plan was not carried out; read {run_dir}/daemon.log and {run_dir}/trainer.log.[/red]")
        return 1
    before, after = receipt["before"], receipt["after"]
    console.print(f"\n[bold]{plan['id']}[/bold]: {plan['plan']}, {plan['state']}. {plan['evidence']}")
    console.print(f"  token budget {before['token_budget']:,} -> {after['token_budget']:,}")
    console.print(f"  decay starts at {before['decay_start_tokens']:,} -> {after['decay_start_tokens']:,} tokens")
    console.print(f"  mixture {before['mixture']} -> {after['mixture']}")
    run, checkpoints = status["run"], sorted(path.name for path in (run_dir / "checkpoints").glob("a*"))
    console.print(
        f"The run ended at step {run['step']:,} with {run['tokens']:,.0f} tokens; newest checkpoint {checkpoints[-1:]}."
    )
    ended = run["phase"] == "finished" and run["tokens"] is not None and run["tokens"] >= after["token_budget"]
    _tell_places(run_dir, console)
    return 0 if ended and plan["state"] == "verified" and checkpoints else 1


def _receipt(run_dir: Path, name: str) -> dict[str, Any] | None:
    path = run_dir / "control" / "receipts" / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def _tell_places(run_dir: Path, console: Console) -> None:
    page = run_dir / ".runwatch" / "report.html"
    try:
        report(run_dir, page, page.with_suffix(".md"))
        console.print(f"Report       {page}")
    except ReportError as error:
        console.print(f"Report       not written: {error}")
    console.print(f"Audit log    {run_dir / '.runwatch' / 'audit.jsonl'}")
    console.print(f"Receipts     {run_dir / 'control' / 'receipts'}")
    console.print(f"Status page  runwatch watch {run_dir}   (then http://127.0.0.1:9464/)")
