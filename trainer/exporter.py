"""The trainer's own metrics for Prometheus: `python -m runwatch.trainer.exporter RUN_DIR --listen HOST:PORT`.

A process of its own on the trainer's host, which reads the end of the newest telemetry segments at each scrape. The training
process is never scraped: an HTTP server inside it would take the interpreter lock from the step, up to 35 ms for wide metrics.
It needs no daemon, so it is a second pair of eyes: it shows the run while the daemon is gone, and that a daemon lags behind.
"""

import argparse
import math
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import yaml
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily, Metric

TAIL_BYTES = 256 << 10
"""So much of each segment is read: some 400 records, four evaluations of the demo's run."""
MOST_SIGNALS = 200
HEAD = ("step", "tokens", "time")


def newest(folder: Path) -> dict[str, Any]:
    """The newest value of everything that the last records of the two newest segments say; empty without one."""
    segments = sorted(folder.glob("*.jsonl"), key=lambda path: (path.stat().st_mtime, path.name))
    found: dict[str, Any] = {}
    for segment in segments[-2:]:
        for line in _tail(segment):
            try:
                record = orjson.loads(line)
            except orjson.JSONDecodeError:
                continue  # the daemon counts and reports such lines
            if isinstance(record, dict):
                found |= record
    return found


def _tail(segment: Path) -> list[bytes]:
    """The last whole lines."""
    with segment.open("rb") as file:
        start = max(0, file.seek(0, 2) - TAIL_BYTES)
        file.seek(start)
        lines = file.read(TAIL_BYTES).split(b"\n")
    return lines[1 if start else 0 : -1]


def _number(value: Any) -> float | None:
    """A number, or one of the strings that stand for numbers which JSON cannot write."""
    if isinstance(value, int | float):
        return float(value)
    return float(value) if value in ("NaN", "Infinity", "-Infinity") else None


class Exporter:
    """Collects from the telemetry of one run directory."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.run = _run_name(run_dir)

    def collect(self) -> Iterator[Metric]:
        """Every family; those of which the telemetry says nothing are empty."""
        record = newest(self.run_dir / "telemetry")
        numbers = {name: number for name, value in record.items() if (number := _number(value)) is not None}
        signals = GaugeMetricFamily("runwatch_trainer_signal", "Newest value of a signal.", labels=["run", "signal"])
        for name in sorted(numbers.keys() - set(HEAD))[:MOST_SIGNALS]:
            signals.add_metric([self.run, name], numbers[name])
        yield signals
        phase = GaugeMetricFamily("runwatch_trainer_phase", "1 for the phase it is in.", labels=["run", "phase"])
        if isinstance(record.get("phase"), str):
            phase.add_metric([self.run, record["phase"]], 1)
        yield phase
        yield self._single("step", "Newest step.", numbers.get("step"))
        yield self._single("tokens", "Tokens trained on so far.", numbers.get("tokens"))
        yield self._single("last_record_timestamp_seconds", "Time of the newest record.", numbers.get("time"))

    def _single(self, name: str, text: str, value: float | None) -> Metric:
        family = GaugeMetricFamily(f"runwatch_trainer_{name}", text, labels=["run"])
        if value is not None and math.isfinite(value):
            family.add_metric([self.run], value)
        return family


def _run_name(run_dir: Path) -> str:
    """The name in the run card, as the daemon has it; the directory's where there is none."""
    try:
        return str(yaml.safe_load((run_dir / "run.yaml").read_text(encoding="utf-8"))["run"]["name"])
    except (OSError, yaml.YAMLError, KeyError, TypeError):
        return run_dir.resolve().name


def main(argv: list[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(prog="runwatch.trainer.exporter", description="Serve a run's newest telemetry.")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--listen", default="127.0.0.1:9465", metavar="HOST:PORT")
    args = parser.parse_args(argv)
    host, _, port = args.listen.rpartition(":")
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Exporter(args.run_dir))
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    server, thread = start_http_server(int(port), host, registry)
    print(f"{args.run_dir}: http://{host}:{server.server_port}/metrics", flush=True)
    stop.wait()
    server.shutdown()
    server.server_close()
    thread.join()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
