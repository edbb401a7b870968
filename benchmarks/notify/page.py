"""How long a page takes: from the telemetry record that makes an alert fire to the receiver behind a real Alertmanager.

    python -P benchmarks/notify/page.py [--rounds 10]

Each round is a run of its own, watched by a real `runwatch watch` with the shipped routes of `deploy/alertmanager/`: twelve records a
second, then one whose loss is not a number. Clock: from before that line is written until the request has arrived. Needs
prometheus-alertmanager.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "helpers"))

import http_collector as collectors  # noqa: E402 - on the path from here on
import processes  # noqa: E402
import scripted  # noqa: E402

HEALTHY_SECONDS = 4.0
PATIENCE = 60.0


@contextmanager
def alertmanager(folder: Path, receiver: str) -> Generator[str]:
    """A real Alertmanager with the shipped configuration, its receivers led to `receiver`; its address."""
    shipped = (ROOT / "deploy" / "alertmanager" / "alertmanager.yml").read_text()
    (folder / "alertmanager.yml").write_text(shipped.replace("http://localhost:9095", receiver))
    binary, url = shutil.which("prometheus-alertmanager"), "http://127.0.0.1:19093"
    if binary is None:
        sys.exit("prometheus-alertmanager is missing: run deploy/install-services")
    options = [f"--config.file={folder}/alertmanager.yml", f"--storage.path={folder}/data"]
    listen = ["--web.listen-address=127.0.0.1:19093", "--cluster.listen-address="]
    with (folder / "alertmanager.log").open("wb") as log:
        process = subprocess.Popen([binary, *options, *listen], stdout=log, stderr=log)
    try:
        processes.wait_for("Alertmanager is ready", lambda: ready(url))
        yield url
    finally:
        process.terminate()
        process.wait(20)


def ready(url: str) -> bool:
    """Whether it answers."""
    try:
        return httpx.get(f"{url}/-/ready").is_success
    except httpx.TransportError:
        return False


def page(folder: Path, number: int, url: str, collector: "collectors.Collector") -> float:
    """Seconds from the bad record to the page."""
    run_dir = folder / f"run-{number}"
    trainer = scripted.ScriptedTrainer(run_dir, fault=10**9)
    card = scripted.card() | {"run": {"name": f"run-{number}"}}
    (run_dir / "run.yaml").write_text(json.dumps(card))
    told = len(collector.requests)
    with processes.DaemonProcess(run_dir, f"daemon-{number}", notify=[{"kind": "alertmanager", "urls": [url]}]):
        with processes.training(trainer):
            threading.Event().wait(HEALTHY_SECONDS + 0.1 * number)  # at another moment of the tick each time
        trainer.clock, trainer.step = time.time(), trainer.step + 1
        line = json.dumps({**trainer.record(), "train/loss": "NaN"})
        began = time.monotonic()
        with (run_dir / "telemetry" / "a0001.jsonl").open("a") as file:
            file.write(line + "\n")
        pages = processes.wait_for(
            "the page",
            lambda: [one for one in collector.requests[told:] if one.path == "/page" and b"RunFinite" in one.body],
        )
    return min(one.time for one in pages) - began


def main() -> None:
    """Print the median and the longest of some rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    rounds = parser.parse_args().rounds
    folder = Path(tempfile.mkdtemp(prefix="page-"))
    with collectors.Collector() as collector, alertmanager(folder, collector.url) as url:
        took = []
        for number in range(rounds):
            took.append(page(folder, number, url, collector))
            print(f"round {number + 1} of {rounds}: {took[-1]:.2f} s", file=sys.stderr, flush=True)
    print("| from the record to the page, s | median | longest | goal |")
    print("| --- | --- | --- | --- |")
    print(f"| {rounds} runs | {np.median(took):.2f} | {max(took):.2f} | 2 |")


if __name__ == "__main__":
    main()
