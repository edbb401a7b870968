"""Runs in real time under real daemons and exporters: what Prometheus scrapes in tests and in the pictures of the dashboards."""

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from scripted import ScriptedTrainer, card

FLOORS = {
    "throughput": {"tokens_per_second_floor": 2000.0, "mfu_floor": 0.2},
    "expert_balance": {"entropy_floor": 0.9, "router_bias_limit": 4.0},
}
"""Optional limits, so that every line of the dashboards has its series."""


@dataclass
class LiveTrainer(ScriptedTrainer):
    """A scripted trainer that carries every signal and keeps real time. `shifts` are added to signals from `fault` on."""

    shifts: Mapping[str, float] = field(default_factory=dict[str, float])
    attempt: str = "a0001"
    steps_per_second: int = 12

    def head(self) -> dict[str, Any]:
        """As the scripted trainer's, of the attempt that runs."""
        return super().head() | {"attempt": self.attempt}

    def record(self) -> dict[str, Any]:
        """All signals, healthy but for the loss and the shifts."""
        noise = np.random.default_rng(self.step + 7).standard_normal(8)
        found = super().record() | {
            "train/z_loss": 12 + 0.3 * noise[0],
            "optim/learning_rate": 0.01 * min(1.0, self.step / 60),
            "optim/skipped_step": 0,
            "params/norm": 80 + self.step / 100,
            "moe/drop_rate": abs(0.03 + 0.004 * noise[1]),
            "moe/load_max_vio": 0.35 + 0.04 * noise[2],
            "moe/load_entropy": min(1.0, 0.97 + 0.004 * noise[3]),
            "moe/dead_experts": 0,
            "moe/router_bias_max": 0.4 + self.step / 2000,
            "throughput/mfu": 0.36 + 0.008 * noise[4],
            "throughput/tokens_per_second": 1024 * self.steps_per_second * (1 + 0.03 * noise[5]),
            "throughput/step_time": 1 / self.steps_per_second,
        }
        if self.step % 20 == 0:
            found["eval/loss"] = found["train/loss"] + 0.02
        for name, shift in self.shifts.items() if self.step >= self.fault else ():
            found[name] += shift
        return found

    def restart(self) -> None:
        """Go on as the next attempt."""
        self.attempt = f"a{int(self.attempt[1:]) + 1:04d}"

    def advance(self, steps: int) -> None:
        """Do so many steps, the last of them now."""
        lines: list[str] = []
        for left in range(steps - 1, -1, -1):
            if self.obeys:
                self.obey()
            self.step += 1
            self.clock = time.time() - left / self.steps_per_second
            lines.append(json.dumps(self.record()))
            if self.step % 100 == 0:
                lines.append(json.dumps({**self.head(), "phase": "checkpoint", "checkpoint/step": self.step}))
        with (self.run_dir / "telemetry" / f"{self.attempt}.jsonl").open("a") as file:
            file.writelines(f"{line}\n" for line in lines)


def prepared(root: Path, name: str, nodes: Mapping[str, Any] | None = None, **trainer: Any) -> LiveTrainer:
    """A live trainer with its card, all optional limits set; `nodes` as the card has them, `trainer` its fields."""
    made = LiveTrainer(root / name, **trainer)
    declared = card(dict(nodes) if nodes else None)
    declared["run"]["name"] = name
    (made.run_dir / "run.yaml").write_text(json.dumps({**declared, "checks": FLOORS}))
    return made


@contextmanager
def running(trainers: Sequence[LiveTrainer]) -> Generator[None]:
    """The trainers train until the block ends."""
    stop = threading.Event()

    def train() -> None:
        began = time.monotonic()
        while not stop.wait(0.25):
            for trainer in trainers:
                due = int((time.monotonic() - began) * trainer.steps_per_second) - trainer.step
                if due:
                    trainer.advance(due)

    thread = threading.Thread(target=train)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def free_port() -> int:
    """A port of loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def process(log: Path, module: str, *arguments: str) -> Generator[subprocess.Popen[bytes]]:
    """One of our own modules as a process, ended when the block ends."""
    with log.open("ab") as file:
        started = subprocess.Popen([sys.executable, "-P", "-m", module, *arguments], stdout=file, stderr=file)
    try:
        yield started
    finally:
        started.terminate()
        started.wait(60)


def scrape(root: Path, ports: Sequence[tuple[int, int]]) -> Path:
    """Write a configuration that scrapes daemons and exporters each second, with all rules; where it is."""
    given = Path(__file__).parents[2] / "deploy" / "prometheus"
    config = yaml.safe_load((given / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["alerting"] = {}
    config["rule_files"] = [str(given / name) for name in config["rule_files"]]
    for which, job in enumerate(config["scrape_configs"]):
        job["static_configs"][0]["targets"] = [f"127.0.0.1:{pair[which]}" for pair in ports]
    path = root / "prometheus.yml"
    path.write_text(yaml.safe_dump(config))
    return path


@contextmanager
def watched(run_dirs: Mapping[Path, tuple[int, int]]) -> Generator[None]:
    """Each run directory with its daemon and its exporter, at the two given ports."""
    with ExitStack() as stack:
        for run_dir, (daemon, exporter) in run_dirs.items():
            listen = ("--listen", f"127.0.0.1:{daemon}")
            stack.enter_context(process(run_dir / "daemon.log", "runwatch.monitor.cli", "watch", str(run_dir), *listen))
            listen = ("--listen", f"127.0.0.1:{exporter}")
            stack.enter_context(process(run_dir / "exporter.log", "runwatch.trainer.exporter", str(run_dir), *listen))
        yield
