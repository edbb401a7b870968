"""The dashboard of the daemon itself: is it there, does it see, is it on time, do its messages get through?"""

import re
from pathlib import Path
from typing import Any

import yaml
from grafana_foundation_sdk.builders import dashboard
from panels import GREEN, GREY, ORANGE, RED, YES, Cell, Query, board, dashed, finite, graph, number, rows, variable

RUNS = '{run=~"$run"}'
JOB = '{job="runwatch"}'
RATE = "[$__rate_interval]"
RULES = Path(__file__).parents[1] / "prometheus" / "runwatch_alerts.yml"


def daemon() -> dashboard.Dashboard:
    """The whole dashboard."""
    made = board("runwatch-daemon", "runwatch: daemon", "The daemons themselves: there, seeing, on time, heard.")
    made.with_variable(variable("run", "Run", "label_values(runwatch_ready, run)", several=True))
    for title, add in {"": standing, "Ticks": ticks, "Messages": messages, "Process": process}.items():
        if title:
            made.with_row(dashboard.Row(title))
        for panel in add():
            made.with_panel(panel)
    return made


def threshold(alert: str) -> float:
    """The number that an alert of `deploy/prometheus/runwatch_alerts.yml` compares with."""
    groups = yaml.safe_load(RULES.read_text())["groups"]
    expr = next(rule["expr"] for group in groups for rule in group["rules"] if rule["alert"] == alert)
    return float(re.findall(r"> (\d+)", expr)[0])


def _line(alert: str) -> Query:
    return Query(f"vector({threshold(alert):g})", f"{alert} after", dashed(RED))


def standing() -> list[Any]:
    """How the daemons stand, in eight numbers; the worst of those chosen."""
    late, stuck = threshold("RunwatchTickLate"), threshold("RunwatchOutboxStuck")
    tick = Query(f"max(time() - runwatch_last_tick_timestamp_seconds{RUNS})")
    none_is_good = ((None, GREEN), (1, ORANGE))
    return [
        number("There", "Whether every daemon answers.", "none", Query(f"min(up{JOB})"), words=YES),
        number("Sees", "Whether every run can be observed.", "none", Query(f"min(runwatch_ready{RUNS})"), words=YES),
        number(
            "Newest tick",
            "Its age; one is due every second.",
            "s",
            tick,
            (None, GREEN),
            (late / 3, ORANGE),
            (late, RED),
        ),
        number(
            "Messages waiting",
            "In all outboxes.",
            "none",
            Query(f"sum(runwatch_outbox_pending{RUNS}) or vector(0)"),
            (None, GREEN),
            (10, ORANGE),
        ),
        number(
            "Oldest message",
            "How long it has waited.",
            "s",
            Query(f"max(run:runwatch_outbox_age_seconds:max{RUNS}) or vector(0)"),
            (None, GREEN),
            (stuck, RED),
        ),
        number(
            "Given up",
            "Messages that no retry got through.",
            "none",
            Query(f"sum(runwatch_outbox_failed{RUNS}) or vector(0)"),
            *none_is_good,
        ),
        number("Audit rows", "Length of the hash-chained log.", "locale", Query(f"max(runwatch_audit_rows{RUNS})")),
        number(
            "Version", "Of the daemon.", "none", Query("group by (version) (runwatch_info)", "{{version}}"), named=True
        ),
    ]


def ticks() -> list[Any]:
    """The loop: how long, how late, how often it failed."""
    quantile = "histogram_quantile({0}, sum by (run, le) (rate(runwatch_tick_duration_seconds_bucket{1}{2})))"
    return [
        graph(
            "Duration of a tick",
            "Reading, judging, storing, acting. The histogram's buckets bound it from above.",
            "s",
            Query(finite(quantile.format(0.5, RUNS, RATE)), "{{run}} p50"),
            Query(finite(f"run:runwatch_tick_duration_seconds:p99_5m{RUNS}"), "{{run}} p99 of 5 min"),
        ),
        graph(
            "Age of the newest tick",
            "It grows when the loop hangs.",
            "s",
            Query(f"time() - runwatch_last_tick_timestamp_seconds{RUNS}", "{{run}}"),
            _line("RunwatchTickLate"),
        ),
        graph(
            "Ticks and failures",
            "Ticks each second; a failed one is done again by the next.",
            "ops",
            Query(f"rate(runwatch_ticks_total{RUNS}{RATE})", "{{run}} finished"),
            Query(
                f"rate(runwatch_tick_failures_total{RUNS}{RATE})",
                "{{run}} failed",
                {"color": {"mode": "fixed", "fixedColor": RED}},
            ),
        ),
        graph(
            "Telemetry",
            "Records read each second, and lines that were skipped.",
            "ops",
            Query(f"rate(runwatch_telemetry_records_total{RUNS}{RATE})", "{{run}} records"),
            Query(f"rate(runwatch_telemetry_malformed_total{RUNS}{RATE})", "{{run}} malformed"),
        ),
        graph(
            "Age of the newest record",
            "By the trainer's clock; the run's own check `progress` pages long before the line.",
            "s",
            Query(f"time() - runwatch_last_record_timestamp_seconds{RUNS}", "{{run}}"),
            _line("RunwatchRunSilent"),
        ),
        graph(
            "Checks that raise",
            "Evaluations that failed; the alert stays as it was.",
            "none",
            Query(f"sum by (run) (increase(runwatch_check_errors_total{RUNS}{RATE}))", "{{run}}"),
        ),
    ]


def messages() -> list[Any]:
    """The outbox, medium by medium, and what Prometheus says of the daemons."""
    return [
        graph(
            "Messages waiting",
            "By medium.",
            "none",
            Query(f"runwatch_outbox_pending{RUNS}", "{{run}} {{notifier}}"),
            size=(7, 8),
        ),
        graph(
            "Age of the oldest message",
            "Absent while none waits.",
            "s",
            Query(f"time() - runwatch_outbox_oldest_timestamp_seconds{RUNS}", "{{run}} {{notifier}}"),
            _line("RunwatchOutboxStuck"),
            size=(7, 8),
        ),
        rows(
            "Alerts about the daemons",
            "Those of the Prometheus rules that are pending or fire.",
            "alertname",
            [Cell('ALERTS{alertname=~"Runwatch.*"}', "")],
            (10, 8),
            {"severity": "Severity", "alertstate": "State", "instance": "Instance"},
        ),
    ]


def process() -> list[Any]:
    """What a daemon takes of its host."""
    ours = f"and on (instance) runwatch_ready{RUNS}"
    return [
        graph("Memory", "Resident.", "bytes", Query(f"process_resident_memory_bytes{JOB} {ours}", "{{instance}}")),
        graph(
            "CPU",
            "Share of one core.",
            "percentunit",
            Query(f"rate(process_cpu_seconds_total{JOB}{RATE}) {ours}", "{{instance}}"),
        ),
        graph(
            "Scrapes",
            "Series that a scrape brings; a daemon stays below the line.",
            "none",
            Query(f"scrape_samples_scraped{JOB}", "{{instance}}"),
            Query("vector(2000)", "most for one run", dashed(GREY)),
        ),
    ]
