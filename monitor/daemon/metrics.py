"""The daemon's metrics, read from its state at each scrape; `docs/metrics.md` explains every name.

A custom collector: a run that is no longer watched vanishes, and nothing is kept twice.
"""

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version

from prometheus_client import ProcessCollector
from prometheus_client.core import (
    CollectorRegistry,
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import generate_latest

from runwatch.checks import Level, Phase
from runwatch.checks.ladder_deviation import LadderDeviationSettings
from runwatch.checks.signals import FAMILIES, VOCABULARY
from runwatch.monitor.card.rulebook import Rulebook
from runwatch.monitor.daemon.watched_run import Watch
from runwatch.monitor.engine.history import latest
from runwatch.rules import AlertState, Execution, NodeState, all_nodes

BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
MOST_SIGNALS = 200
"""Sources of a mixture are exported up to this many, so that a run stays below 2,000 series."""


def plan_times(executions: Iterable[Execution]) -> dict[tuple[str, str, str], float]:
    """When (Unix seconds) the newest execution of each node reached its states, by node, plan and state."""
    found: dict[tuple[str, str, str], float] = {}
    for one in {execution.node: execution for execution in executions}.values():
        marks = {
            one.state.value: one.ended,
            "proposed": one.proposed,
            "approved" if one.requested else one.state.value: one.decided,
            "requested": one.requested,
            "acknowledged": one.acknowledged,
        }
        found |= {(one.node, one.plan, state): mark.time for state, mark in marks.items() if mark is not None}
    return found


@dataclass
class Counts:
    """What the daemon counts of itself; written by its jobs, read by scrapes."""

    ticks: int = 0
    failures: int = 0
    ready: bool = False
    last_tick: float = 0.0
    seconds: float = 0.0
    durations: Counter[float] = field(default_factory=Counter[float])
    job_errors: Counter[str] = field(default_factory=Counter[str])
    job_missed: Counter[str] = field(default_factory=Counter[str])
    lock: threading.Lock = field(default_factory=threading.Lock)

    def ticked(self, seconds: float, now: float) -> None:
        """A tick ended well after `seconds`."""
        with self.lock:
            self.ticks += 1
            self.last_tick = now
            self.seconds += seconds
            place = bisect_left(BUCKETS, seconds)
            self.durations[BUCKETS[place] if place < len(BUCKETS) else float("inf")] += 1


class Collector:
    """Collects from one watch."""

    def __init__(self, watch: Watch, counts: Counts) -> None:
        self.watch = watch
        self.counts = counts
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def text(self) -> bytes:
        """The metrics in the Prometheus text format."""
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        """Every family."""
        info = GaugeMetricFamily("runwatch_info", "Version of the daemon.", labels=["version"])
        info.add_metric([version("runwatch")], 1)
        yield info
        yield from self._checks()
        yield from self._settings()
        yield from self._run()
        yield from self._signals()
        yield from self._plans()
        yield from self._daemon()
        yield self._durations()
        yield from self._jobs()
        yield from self._outbox()

    def _gauge(self, name: str, text: str, values: Mapping[tuple[str, ...], float], *labels: str) -> Metric:
        family = GaugeMetricFamily(f"runwatch_{name}", text, labels=["run", *labels])
        for key, value in values.items():
            family.add_metric([self.watch.run, *key], value)
        return family

    def _counter(self, name: str, text: str, values: Mapping[tuple[str, ...], float], *labels: str) -> Metric:
        family = CounterMetricFamily(f"runwatch_{name}", text, labels=["run", *labels])
        for key, value in values.items():
            family.add_metric([self.watch.run, *key], value)
        return family

    def _checks(self) -> Iterator[Metric]:
        tick = self.watch.last_tick
        alerts = tick.state.alerts if tick else {}
        known = {name: alert for name, alert in alerts.items() if alert.level is not Level.UNKNOWN}
        levels = {(name,): float(alert.level) for name, alert in alerts.items()}
        yield self._gauge("check_level", "-1 unknown, 0 ok, 1 warning, 2 critical.", levels, "check")
        values = {(name,): alert.value for name, alert in known.items()}
        yield self._gauge("check_value", "The newest value that the check judged.", values, "check")
        limits = {(name,): alert.limit for name, alert in known.items()}
        yield self._gauge("check_limit", "The limit that the value was compared with.", limits, "check")
        firing = {
            (name, word): float(alert.state is AlertState.FIRING and alert.severity is level)
            for name, alert in alerts.items()
            for word, level in (("warning", Level.WARN), ("critical", Level.CRITICAL))
        }
        yield self._gauge("alert_firing", "1 while the alert is firing at the severity.", firing, "check", "severity")
        firings = {(name,): float(alert.lives) for name, alert in alerts.items()}
        yield self._counter("alert_firings", "How often the alert has fired.", firings, "check")
        errors = {(name,): float(self.watch.check_errors[name]) for name in alerts}
        yield self._counter("check_errors", "Evaluations that raised an exception.", errors, "check")

    def _settings(self) -> Iterator[Metric]:
        book = self._book()
        settings = {
            (check, name): float(value)
            for check, one in book.checks.items()
            for name, value in one
            if isinstance(value, int | float)
        }
        yield self._gauge("check_setting", "A setting of a check, as in force.", settings, "check", "setting")
        windows = {name: all_nodes()[name].window(rules) for name, rules in book.nodes.items()}
        bounds = {
            (name, bound): min(fraction, 1.0)
            for name, window in windows.items()
            for bound, fraction in zip(("begin", "end"), window, strict=True)
        }
        text = "The fractions of the token budget between which the node may fire."
        yield self._gauge("node_window_ratio", text, bounds, "node", "bound")

    def _run(self) -> Iterator[Metric]:
        status = self.watch.status
        if status is None:
            return
        run = status["run"]
        phases = {(phase.name.lower(),): float(phase.name.lower() == run["phase"]) for phase in Phase}
        yield self._gauge("run_phase", "1 for the phase that the trainer is in.", phases, "phase")
        yield self._gauge("run_step", "Newest step.", {(): float(run["step"])})
        yield self._gauge("run_attempts", "Attempts seen.", {(): float(run["attempts"])})
        single = {
            "run_tokens": ("Tokens trained on so far.", run["tokens"]),
            "run_token_budget": ("Token budget in force.", run["token_budget"]),
            "run_tokens_per_second": (
                "Sustained speed of the newest attempt, evaluations and saves included.",
                run["tokens_per_second"],
            ),
            "run_end_timestamp_seconds": ("When the budget is reached at the sustained speed.", run["eta"]),
            "last_record_timestamp_seconds": ("Time of the newest record, by the trainer's clock.", run["time"]),
        }
        for name, (text, value) in single.items():
            yield self._gauge(name, text, {} if value is None else {(): value})
        expected = {(bound,): value for bound, value in self._expected(int(run["step"])).items()}
        yield self._gauge("run_expected_loss", "Pre-registered loss at these tokens.", expected, "bound")

    def _expected(self, step: int) -> dict[str, float]:
        """The registered loss where `ladder_deviation` judges by it: a directive can make another run of it."""
        settings = self._book().checks.get("ladder_deviation")
        curves = settings.curves if isinstance(settings, LadderDeviationSettings) else ()
        reached = [curve for curve in curves if curve.from_step <= step]
        return self.watch.expected_loss() if reached and reached[-1].tokens else {}

    def _book(self) -> Rulebook:
        return self.watch.last_tick.rulebook if self.watch.last_tick else Rulebook({})

    def _signals(self) -> Iterator[Metric]:
        newest = latest(self.watch.judge.context)
        canonical = [name for name in sorted(newest) if name in VOCABULARY or name.rpartition("/")[0] in FAMILIES]
        values = {(name,): newest[name] for name in canonical[:MOST_SIGNALS]}
        yield self._gauge("signal", "Newest value of a canonical signal.", values, "signal")

    def _plans(self) -> Iterator[Metric]:
        tick = self.watch.last_tick
        nodes, executed = (tick.nodes, tick.state.executions) if tick else ((), ())
        states = {(one.node, state.value): float(one.state is state) for one in nodes for state in NodeState}
        yield self._gauge("node_state", "1 for the state of the risk node.", states, "node", "state")
        progress = {(one.node,): one.progress for one in nodes}
        yield self._gauge("node_progress", "How far its condition is met, 0 to 1.", progress, "node")
        executions = Counter((one.node, one.state.value) for one in executed)
        counted = {key: float(count) for key, count in executions.items()}
        yield self._gauge("plan_executions", "Executions of its plan by state.", counted, "node", "state")
        reached = plan_times(executed)
        text = "When the newest execution of the node's plan reached the state."
        yield self._gauge("plan_state_timestamp_seconds", text, reached, "node", "plan", "state")
        enabled = self.watch.status["plans_enabled"] if self.watch.status else True
        yield self._gauge("plans_enabled", "0 after `runwatch plan disable`.", {(): float(enabled)})

    def _daemon(self) -> Iterator[Metric]:
        counts, reader = self.counts, self.watch.reader
        yield self._gauge("ready", "1 while the run can be observed and the state written.", {(): float(counts.ready)})
        yield self._counter("ticks", "Ticks finished.", {(): float(counts.ticks)})
        yield self._counter("tick_failures", "Ticks that failed; the next one retries the same.", {(): counts.failures})
        yield self._gauge("last_tick_timestamp_seconds", "When the newest tick ended.", {(): counts.last_tick})
        yield self._counter("telemetry_records", "Records read.", {(): float(reader.records)})
        yield self._counter("telemetry_malformed", "Lines that were skipped.", {(): float(reader.malformed)})
        audit = self.watch.status["audit"] if self.watch.status else []
        yield self._gauge("audit_rows", "Length of the audit log.", {(): float(audit[0]["seq"]) if audit else 0.0})

    def _durations(self) -> Metric:
        family = HistogramMetricFamily("runwatch_tick_duration_seconds", "How long a tick took.", labels=["run"])
        with self.counts.lock:
            below = 0
            buckets: list[tuple[str, float]] = []
            for bound in (*BUCKETS, float("inf")):
                below += self.counts.durations[bound]
                buckets.append(("+Inf" if bound == float("inf") else str(bound), float(below)))
            family.add_metric([self.watch.run], buckets, self.counts.seconds)
        return family

    def _jobs(self) -> Iterator[Metric]:
        for name, counted in (("job_errors", self.counts.job_errors), ("job_missed", self.counts.job_missed)):
            family = CounterMetricFamily(
                f"runwatch_{name}", "Scheduled jobs that failed or were missed.", labels=["job_id"]
            )
            for job, count in counted.items():
                family.add_metric([job], count)
            yield family

    def _outbox(self) -> Iterator[Metric]:
        standing = self.watch.outbox.standing()
        for name, field_name, text in (
            ("outbox_pending", "pending", "Messages waiting to be sent."),
            ("outbox_failing", "failing", "Messages that a receiver did not take, and that are sent again."),
            ("outbox_failed", "failed", "Messages that could not be sent and are not retried."),
            ("outbox_oldest_timestamp_seconds", "oldest", "When the oldest waiting message was written."),
        ):
            known = {(notifier,): value for notifier, one in standing.items() if (value := one[field_name]) is not None}
            yield self._gauge(name, text, known, "notifier")
