"""The dashboard of many runs: which of them needs a person, and how they compare."""

from typing import Any

from grafana_foundation_sdk.builders import dashboard
from panels import (
    GREEN,
    LEVELS,
    ORANGE,
    RED,
    TOKENS_PER_SECOND,
    Cell,
    Query,
    board,
    dashed,
    finite,
    graph,
    number,
    properties,
    rows,
    timeline,
    variable,
)

RUNS = '{run=~"$run"}'
TO_RUN = {"title": "Open this run", "url": "/d/runwatch-run?var-run=${__data.fields.Run}&${__url_time_range}"}


def fleet() -> dashboard.Dashboard:
    """The whole dashboard."""
    made = board("runwatch-fleet", "runwatch: fleet", "All runs at once: which needs a person, and how they compare.")
    made.with_variable(variable("run", "Run", "label_values(runwatch_run_step, run)", several=True))
    for panel in (*counts(), *overview(), *compared()):
        made.with_panel(panel)
    return made


def _count(title: str, text: str, expr: str, *colours: tuple[float | None, str]) -> Any:
    return number(title, text, "none", Query(f"{expr} or vector(0)"), *colours).span(4)


def counts() -> list[Any]:
    """How many runs there are, and how many of them need a person."""
    severity, bad, odd = (
        f"run:runwatch_alert_severity:max{RUNS}",
        ((None, GREEN), (1, RED)),
        ((None, GREEN), (1, ORANGE)),
    )
    waits = 'sum(runwatch_plan_executions{run=~"$run", state="proposed"})'
    return [
        _count("Runs", "Runs that a daemon watches.", f"count(runwatch_run_step{RUNS})"),
        _count("Critical", "Runs with a critical alert.", f"count({severity} == 2)", *bad),
        _count("Warned", "Runs with a warning and nothing worse.", f"count({severity} == 1)", *odd),
        _count("Plans that wait", "Proposed plans that a person must decide on.", waits, *odd),
        _count("Daemons gone", "Scrapes of a daemon that fail.", 'count(up{job="runwatch"} == 0)', *bad),
        _count("Blind", "Daemons that cannot observe their run.", f"count(runwatch_ready{RUNS} == 0)", *bad),
    ]


def overview() -> list[Any]:
    """A row for each run, and how its health went."""
    to_run = {"links": [TO_RUN]}
    cells = [
        Cell(f"run:runwatch_alert_severity:max{RUNS}", "Health", words=LEVELS),
        Cell(f"runwatch_run_phase{RUNS} == 1", ""),
        Cell(f"runwatch_run_step{RUNS}", "Step", "locale"),
        Cell(f"run:runwatch_budget_done:ratio{RUNS}", "Budget done", "percentunit"),
        Cell(f"run:runwatch_loss_deviation:nats{RUNS}", "Off its curve (nats)", look={"decimals": 3}),
        Cell(f"runwatch_run_tokens_per_second{RUNS}", "Tokens/s", TOKENS_PER_SECOND),
        Cell('runwatch_signal{run=~"$run", signal="throughput/mfu"}', "MFU", "percentunit"),
        Cell(f"1000 * runwatch_run_end_timestamp_seconds{RUNS}", "Ends", "dateTimeFromNow"),
        Cell(f"time() - runwatch_last_record_timestamp_seconds{RUNS}", "Newest record", "s"),
    ]
    table = rows(
        "Runs", "Newest values; the name leads to the run's dashboard.", "run", cells, (24, 9), {"phase": "Phase"}
    )
    health = Query(f"run:runwatch_alert_severity:max{RUNS}", "{{run}}")
    return [
        table.override_by_name("Run", properties(to_run)),
        timeline("Health", "The worst alert that fires.", health, LEVELS, (24, 7)),
    ]


def compared() -> list[Any]:
    """The same signal of all runs."""

    def each(name: str) -> Query:
        return Query(finite(f'runwatch_signal{{run=~"$run", signal="{name}"}}'), "{{run}}")

    margin = 'max(runwatch_check_setting{run=~"$run", check="ladder_deviation", setting="margin_nats"})'
    warns = 'min(runwatch_check_setting{run=~"$run", check="token_drop", setting="warn_rate"})'
    off = Query(finite(f"run:runwatch_loss_deviation:nats{RUNS}"), "{{run}}")
    done = Query(f"run:runwatch_budget_done:ratio{RUNS}", "{{run}}")
    return [
        graph("Loss", "Training loss, nats.", "none", each("train/loss")),
        graph(
            "Loss off its curve (nats)",
            "Less the registered loss at the same tokens.",
            "none",
            off,
            Query(margin, "margin", dashed(RED)),
        ),
        graph("Budget done", "Of the budget in force.", "percentunit", done, most=1),
        graph(
            "Tokens per second",
            "Sustained.",
            TOKENS_PER_SECOND,
            Query(f"runwatch_run_tokens_per_second{RUNS}", "{{run}}"),
        ),
        graph("MFU", "Model FLOP/s over the devices' peak.", "percentunit", each("throughput/mfu")),
        graph(
            "Drop rate",
            "Dropped token-expert assignments.",
            "percentunit",
            each("moe/drop_rate"),
            Query(warns, "warns", dashed(ORANGE)),
        ),
    ]
