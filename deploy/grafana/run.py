"""The dashboard of one run: loss against its band, checks, nodes and plans, and every signal with its limits."""

from typing import Any

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.models.dashboard import VariableHide
from panels import (
    BLUE,
    GREEN,
    GREY,
    LEVELS,
    NATS,
    NODE_STATES,
    ORANGE,
    RED,
    SOURCE,
    TOKENS_PER_SECOND,
    Cell,
    Query,
    bars,
    board,
    dashed,
    finite,
    graph,
    limit,
    number,
    rows,
    setting,
    signal,
    timeline,
    variable,
)

RUN = '{run="$run"}'
MARGIN = f"on (run) group_left () {setting('ladder_deviation', 'margin_nats')}"
BAND: dict[str, Any] = {
    "color": {"mode": "fixed", "fixedColor": BLUE},
    "custom.lineWidth": 0,
    "custom.fillOpacity": 15,
}


def expected(bound: str) -> str:
    """PromQL of the registered loss (`loss`) or an end of its band (`low`, `high`)."""
    return f'runwatch_run_expected_loss{{run="$run", bound="{bound}"}}'


def run() -> dashboard.Dashboard:
    """The whole dashboard."""
    made = board(
        "runwatch-run", "runwatch: run", "One run: its loss against the registered band, checks, nodes, plans."
    )
    made.with_variable(variable("run", "Run", "label_values(runwatch_run_step, run)"))
    checks = variable("check", "Check", 'label_values(runwatch_check_level{run="$run"}, check)', several=True)
    made.with_variable(checks.hide(VariableHide.HIDE_VARIABLE))
    for one in (plans(), alarms(), attempts()):
        made.annotation(one)
    for title, add in SECTIONS.items():
        if title:
            made.with_row(dashboard.Row(title))
        for panel in add():
            made.with_panel(panel)
    made.with_row(every_check())
    return made


def _marks(name: str, expr: str, colour: str, *, shown: bool = True) -> dashboard.AnnotationQuery:
    return dashboard.AnnotationQuery().name(name).datasource(SOURCE).enable(enable=shown).icon_color(colour).expr(expr)


def plans() -> dashboard.AnnotationQuery:
    """What became of a plan, where it happened: the value is the time (`MARKS` says so)."""
    return _marks("Plans", f"runwatch_plan_state_timestamp_seconds{RUN} * 1000", "purple")


def alarms() -> dashboard.AnnotationQuery:
    """Stretches in which a check is in critical alarm; switched on by hand, since they colour every graph."""
    firing = 'runwatch_alert_firing{run="$run", severity="critical"} == 1'
    return _marks("Critical alarms", firing, RED, shown=False)


def attempts() -> dashboard.AnnotationQuery:
    """Where the trainer was started again."""
    return _marks(
        "Restarts", f"changes(runwatch_run_attempts{RUN}[$__rate_interval]) > 0 and runwatch_run_attempts > 1", GREY
    )


MARKS: dict[str, dict[str, Any]] = {
    "Plans": {"titleFormat": "{{plan}} {{state}}", "textFormat": "by the node {{node}}", "useValueForTime": True},
    "Critical alarms": {"titleFormat": "{{check}} is critical", "textFormat": "", "useValueForTime": False},
    "Restarts": {"titleFormat": "A new attempt", "textFormat": "", "useValueForTime": False},
}
"""What Grafana's Prometheus plugin reads of an annotation; the SDK has no fields for it."""


def standing() -> list[Any]:
    """How the run stands, in eight numbers."""
    speed = Query(f"runwatch_run_tokens_per_second{RUN}")
    return [
        number(
            "Health",
            "The worst alert that fires.",
            "none",
            Query(f"run:runwatch_alert_severity:max{RUN}"),
            words=LEVELS,
        ),
        number(
            "Phase", "What the trainer does.", "none", Query(f"runwatch_run_phase{RUN} == 1", "{{phase}}"), named=True
        ),
        number("Step", "Newest step.", "locale", Query(f"runwatch_run_step{RUN}")),
        number(
            "Budget done",
            "Tokens over the budget in force.",
            "percentunit",
            Query(f"run:runwatch_budget_done:ratio{RUN}"),
        ),
        number(
            "Off its curve",
            "Loss less the registered loss.",
            NATS,
            Query(finite(f"run:runwatch_loss_deviation:nats{RUN}")),
        ),
        number("Tokens/s", "Sustained: restarts and pauses count.", TOKENS_PER_SECOND, speed),
        number(
            "Ends",
            "At the sustained speed.",
            "dateTimeFromNow",
            Query(f"1000 * runwatch_run_end_timestamp_seconds{RUN}"),
        ),
        number(
            "Newest record",
            "Its age, by the trainer's clock.",
            "s",
            Query(f"time() - runwatch_last_record_timestamp_seconds{RUN}"),
            (None, GREEN),
            (60, ORANGE),
            (1800, RED),
        ),
    ]


def loss() -> list[Any]:
    """The loss and its band, and how far off it is."""
    over, under = f"{expected('high')} + {MARGIN}", f"{expected('low')} - {MARGIN}"
    curve = f"on (run) group_left () {expected('loss')}"
    return [
        graph(
            "Loss against the registered band",
            "Beyond the dashed lines (the 95 % band widened by `margin_nats` of `ladder_deviation`) it is off beyond doubt.",
            "none",
            Query(signal("train/loss"), "loss", {"color": {"mode": "fixed", "fixedColor": "yellow"}}),
            Query(signal("eval/loss"), "held-out loss", {"color": {"mode": "fixed", "fixedColor": "purple"}}),
            Query(
                expected("loss"), "registered", {"color": {"mode": "fixed", "fixedColor": BLUE}, "custom.lineWidth": 1}
            ),
            Query(expected("low"), "band, low end", BAND | {"custom.fillOpacity": 0}),
            Query(expected("high"), "band, high end", BAND | {"custom.fillBelowTo": "band, low end"}),
            Query(over, "beyond doubt above", dashed(RED)),
            Query(under, "beyond doubt below", dashed(ORANGE)),
            size=(14, 10),
        ),
        graph(
            "Loss off its curve (nats)",
            "The residual that `ladder_deviation` judges. A lasting shift of `min_shift_nats` is found inside the band too.",
            "none",
            Query(finite(f"run:runwatch_loss_deviation:nats{RUN}"), "off by"),
            Query(f"{over} - {curve}", "beyond doubt above", dashed(RED)),
            Query(f"{under} - {curve}", "beyond doubt below", dashed(ORANGE)),
            limit("ladder_deviation", "min_shift_nats", "smallest lasting shift", BLUE),
            size=(10, 10),
        ),
    ]


def judged() -> list[Any]:
    """Checks and nodes along time."""
    levels, states = (
        Query(f"runwatch_check_level{RUN}", "{{check}}"),
        Query(f"run:runwatch_node_state:code{RUN}", "{{node}}"),
    )
    near = Query(f"runwatch_node_progress{RUN}", "{{node}}")
    reached = f"1000 * runwatch_plan_state_timestamp_seconds{RUN}"
    named = {"plan": "Plan", "node": "Node"}
    return [
        timeline("Twelve checks", "The verdict of each check on the newest record.", levels, LEVELS, (24, 10)),
        timeline(
            "Risk nodes",
            "Armed: its condition is partly met. Blocked: it holds, but no plan may run.",
            states,
            NODE_STATES,
            (12, 7),
        ),
        bars("Nodes' conditions", "How far each is met; at 1 the node fires.", "percentunit", near, (12, 7)),
        graph(
            "Token budget",
            "What is done of the budget in force, and where the window of a node ends before the run does.",
            "percentunit",
            Query(f"run:runwatch_budget_done:ratio{RUN}", "done"),
            Query('runwatch_node_window_ratio{run="$run", bound="end"} < 1', "{{node}} until"),
            size=(12, 8),
            most=1,
        ),
        rows(
            "Plans",
            "When the newest execution of each reached its states.",
            "state",
            [Cell(reached, "At", "dateTimeAsIso")],
            (12, 8),
            named,
        ),
    ]


def optimizer() -> list[Any]:
    """Gradients, logits, learning rate."""
    return [
        graph(
            "Gradient norm",
            "Before clipping. The ceiling counts after the warm-up; growth and outliers are judged against the run itself.",
            "none",
            Query(signal("optim/grad_norm"), "gradient norm"),
            limit("grad_norm", "ceiling", "ceiling", RED),
            logarithmic=True,
        ),
        graph(
            "z-loss",
            "Mean of log(Z)^2 before its weight; `logit_growth` judges its level and its growth.",
            "none",
            Query(signal("train/z_loss"), "z-loss"),
            limit("logit_growth", "ceiling", "ceiling", RED),
            logarithmic=True,
        ),
        graph(
            "Learning rate",
            "Of the main parameter group.",
            "sci",
            Query(signal("optim/learning_rate"), "learning rate"),
        ),
    ]


def experts() -> list[Any]:
    """Dropped tokens and the load of the experts, worst layer."""
    shares = 'runwatch_signal{run="$run", signal=~"data/mixture/.*"}'
    return [
        graph(
            "Drop rate",
            "Share of token-expert assignments over capacity. The check judges a mean over `window_records`.",
            "percentunit",
            Query(signal("moe/drop_rate"), "dropped"),
            limit("token_drop", "warn_rate", "warns"),
            limit("token_drop", "critical_rate", "critical", RED),
        ),
        graph(
            "Expert load: violation",
            "Worst layer of (max - mean) / mean tokens per expert.",
            "none",
            Query(signal("moe/load_max_vio"), "violation"),
            limit("expert_balance", "violation_limit", "warns"),
            limit("expert_balance", "violation_limit", "critical", RED, factor=2),
        ),
        graph(
            "Expert load: entropy",
            "Worst layer of the load's entropy over ln E: 1 is even. A floor only where the run card sets one.",
            "percentunit",
            Query(signal("moe/load_entropy"), "entropy"),
            limit("expert_balance", "entropy_floor", "floor"),
        ),
        graph(
            "Dead experts",
            "Experts without a token, all layers.",
            "none",
            Query(signal("moe/dead_experts"), "dead"),
            limit("expert_balance", "dead_critical", "critical", RED),
        ),
        graph(
            "Router bias",
            "Largest magnitude of a balance bias.",
            "none",
            Query(signal("moe/router_bias_max"), "bias"),
            limit("expert_balance", "router_bias_limit", "limit"),
        ),
        graph(
            "Data mixture",
            "Share of the step's tokens by source.",
            "percentunit",
            Query(f'label_replace({shares}, "source", "$1", "signal", "data/mixture/(.*)")', "{{source}}"),
            stacked=True,
            most=1,
        ),
    ]


def speed() -> list[Any]:
    """How fast it trains and when it ends."""
    newest = f"runwatch_last_record_timestamp_seconds{RUN}"
    return [
        graph(
            "MFU",
            "Model FLOP/s over the devices' peak. A floor only where the run card sets one.",
            "percentunit",
            Query(signal("throughput/mfu"), "MFU"),
            limit("throughput", "mfu_floor", "floor"),
        ),
        graph(
            "Tokens per second",
            "Of each step, and sustained: over the newest attempt, evaluations and checkpoints included.",
            TOKENS_PER_SECOND,
            Query(signal("throughput/tokens_per_second"), "step"),
            Query(f"runwatch_run_tokens_per_second{RUN}", "sustained"),
            limit("throughput", "tokens_per_second_floor", "floor"),
        ),
        graph(
            "Time to the end",
            "What is left of the budget at the sustained speed, and at that of the last five minutes.",
            "s",
            Query(f"clamp_min(runwatch_run_end_timestamp_seconds{RUN} - {newest}, 1)", "sustained"),
            Query(f"clamp_min(run:runwatch_remaining_seconds:estimate{RUN}, 1)", "last five minutes"),
            logarithmic=True,
        ),
    ]


SECTIONS = {
    "": standing,
    "Loss": loss,
    "Checks, nodes and plans": judged,
    "Optimizer": optimizer,
    "Experts and data": experts,
    "Speed": speed,
}


def every_check() -> dashboard.Row:
    """Folded: what each check judges, and its limit at that record."""
    chosen = '{run="$run", check="$check"}'
    panel = graph(
        "$check",
        "The value that the check judges and the limit that it is held against, in its own unit (`runwatch explain CHECK`).",
        "none",
        Query(finite(f"runwatch_check_value{chosen}"), "value"),
        Query(finite(f"runwatch_check_limit{chosen}"), "limit", dashed(RED)),
        size=(6, 6),
    )
    return dashboard.Row("Every check's value and limit").collapsed(collapsed=True).with_panel(panel.repeat("check"))
