"""The status document in the terminal: `runwatch status`, `runwatch status --watch` and the demo show the same picture."""

import math
import time
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from runwatch.monitor.show.status import CheckStatus, LossSeries, NodeStatus, PlanStatus, RunFacts, Status

COLOURS = {
    "ok": "green",
    "healthy": "green",
    "quiet": "green",
    "unknown": "bright_black",
    "outside_window": "bright_black",
    "warning": "yellow",
    "degraded": "yellow",
    "armed": "yellow",
    "blocked": "yellow",
    "critical": "bold red",
    "firing": "bold red",
}
BLOCKS = " ▁▂▃▄▅▆▇█"
WIDTH, HEIGHT = 72, 14
"""Of the loss plot, in characters."""
HALF_DAY = 43_200.0


def render(status: Status) -> RenderableType:
    """The whole picture: facts, loss against the registered curve, checks, nodes, plans."""
    parts: list[RenderableType] = [_facts(status), loss_plot(status["loss"], status["run"])]
    parts += [_checks(status["checks"]), _nodes(status["nodes"])]
    if status["plans"]:
        parts.append(_plans(status["plans"]))
    parts += [Text(f"! {condition['message']}", style="yellow") for condition in status["conditions"]]
    return Group(*parts)


def _facts(status: Status) -> Text:
    run = status["run"]
    line = Text.assemble(
        (run["name"], "bold"), "  ", (status["health"], COLOURS[status["health"]]), f"  step {run['step']:,}"
    )
    if run["tokens"] is not None and run["token_budget"]:
        line.append(f"  {run['tokens']:,.0f} of {run['token_budget']:,} tokens ({run['fraction'] or 0:.0%})")
        if run["declared_budget"] and run["declared_budget"] != run["token_budget"]:
            line.append(f", declared {run['declared_budget']:,}", style="yellow")
    if run["tokens_per_second"]:
        line.append(f"  {run['tokens_per_second']:,.0f} tokens/s")
    if run["eta"]:
        line.append(f"  ends {clock(run['eta'], time.time())}")
    return line.append(f"  attempt {run['attempt']}, {run['phase']}\n{status['sentence']}")


def clock(seconds: float, now: float) -> str:
    """A local time (both in Unix seconds), with its day when it is half a day or more away, as the status page has it."""
    form = "%H:%M" if abs(seconds - now) < HALF_DAY else "%Y-%m-%d %H:%M"
    return time.strftime(form, time.localtime(seconds))


def loss_plot(loss: LossSeries, run: RunFacts) -> RenderableType:
    """The training loss (●) on the registered curve (·) and its band (░), and on that of the plan in force (+) after a re-plan."""
    known_budget = run["declared_budget"] or run["token_budget"]
    budget = known_budget or max([t for t in loss["tokens"] if t is not None], default=1.0)
    seen = [(t, v) for t, v in zip(loss["tokens"], loss["loss"], strict=True) if t is not None and v is not None]
    settled = [v for t, v in seen if t > 0.02 * budget] or [v for _, v in seen]
    values = [*settled, *loss["curve_low"], *loss["curve_high"]]
    if not values:
        return Text("no loss yet", style="bright_black")
    low, high = min(values), max(values)
    grid = [[" "] * WIDTH for _ in range(HEIGHT)]

    marks = [*_band(loss, budget, (high - low) / HEIGHT), *_in_force(loss), *((t, v, "●") for t, v in seen)]
    for tokens, value, mark in marks:
        column = min(WIDTH - 1, int(tokens / budget * WIDTH))
        row = round((high - value) / ((high - low) or 1.0) * (HEIGHT - 1))
        if 0 <= row < HEIGHT and column >= 0:
            grid[row][column] = mark
    lines = [f"{high - (high - low) * n / (HEIGHT - 1):6.2f} {''.join(row)}" for n, row in enumerate(grid)]
    plot = Text("\n".join([_legend(loss), *lines, " " * 7 + _axis(budget, known=bool(known_budget))]))
    for mark, style in (("●", "cyan"), ("·", "yellow"), ("░", "bright_black"), (r"\+", "magenta")):
        plot.highlight_regex(mark, style)
    return plot


def _axis(budget: float, *, known: bool) -> str:
    if not known:
        return f"0{f'{budget:,.0f} tokens':>{WIDTH - 1}}"
    return f"{'0 %':<{WIDTH // 4}}{'25 %':<{WIDTH // 4}}{'50 %':<{WIDTH // 4}}{'75 %':<{WIDTH // 4 - 5}}100 %"


def _legend(loss: LossSeries) -> str:
    named = [
        ("loss (nats)   ● run", True),
        ("· registered curve   ░ its 95 % band", bool(loss["curve_tokens"])),
        ("+ plan in force", bool(loss["plan_tokens"])),
    ]
    return "   ".join(text for text, shown in named if shown)


def _band(loss: LossSeries, budget: float, row: float) -> list[tuple[float, float, str]]:
    """The registered curve on its band, which is filled in steps of a `row` of the plot."""
    found: list[tuple[float, float, str]] = []
    for tokens, expected, below, above in _columns(loss, budget):
        found += [(tokens, value, "░") for value in _between(below, above, row)]
        found.append((tokens, expected, "·"))
    return found


def _in_force(loss: LossSeries) -> list[tuple[float, float, str]]:
    """The part of the plan's curve that the registered one does not show: its decay."""
    at, curve = loss["plan_tokens"], loss["plan_curve"]
    if len(at) < 2:
        return []
    steps = [at[-2] + (at[-1] - at[-2]) * n / 20 for n in range(21)]
    return [(tokens, _interpolate(at, curve, tokens), "+") for tokens in steps]


def _columns(loss: LossSeries, budget: float) -> list[tuple[float, float, float, float]]:
    """The registered curve at each column of the plot: tokens, loss, low, high."""
    tokens = loss["curve_tokens"]
    if len(tokens) < 2:
        return []
    wanted = [(column + 0.5) / WIDTH * budget for column in range(WIDTH)]
    curves = (loss["curve"], loss["curve_low"], loss["curve_high"])
    inside = [at for at in wanted if tokens[0] <= at <= tokens[-1]]
    return [(at, *(_interpolate(tokens, curve, at) for curve in curves)) for at in inside]  # pyright: ignore[reportReturnType]


def _interpolate(tokens: Sequence[float], values: Sequence[float], at: float) -> float:
    right = next(n for n, value in enumerate(tokens) if value >= at)
    left = max(0, right - 1)
    span = tokens[right] - tokens[left]
    return values[left] + (values[right] - values[left]) * ((at - tokens[left]) / span if span else 0.0)


def _between(low: float, high: float, by: float) -> list[float]:
    return [low + n * by for n in range(int((high - low) / by) + 1)] if by > 0 else []


def _checks(checks: Sequence[CheckStatus]) -> Table:
    table = Table(title="checks", title_justify="left", box=None, padding=(0, 1))
    for name in ("check", "", "value", "limit", "last records"):
        table.add_column(name, no_wrap=True)
    for check in checks:
        mark = check["severity"] if check["alert"] == "firing" else check["level"]
        since = (
            f" since {check['since_step']:,}" if check["alert"] == "firing" and check["since_step"] is not None else ""
        )
        row = (check["name"], Text(mark + since, COLOURS[mark]), _number(check["value"]), _number(check["limit"]))
        table.add_row(*row, sparkline(check["sparkline"][-24:]))
    return table


def _nodes(nodes: Sequence[NodeStatus]) -> Table:
    table = Table(title="risk nodes", title_justify="left", box=None, padding=(0, 1))
    for name in ("node", "window", "mode", "", "plan"):
        table.add_column(name, no_wrap=True)
    for node in nodes:
        window = f"{node['window'][0]:.0%}-{node['window'][1]:.0%}"
        state = Text(f"{node['state'].replace('_', ' ')} {node['progress']:.0%}", COLOURS[node["state"]])
        table.add_row(node["name"], window, node["mode"], state, node["plan"])
    return table


def _plans(plans: Sequence[PlanStatus]) -> Panel:
    lines: list[str] = []
    for plan in plans[:3]:
        lines.append(f"{plan['id']}  {plan['plan']}  {plan['state']}  {plan['evidence']}")
        lines += [f"    {effect}" for effect in plan["effects"]]
    return Panel("\n".join(lines), title="plans", title_align="left")


def sparkline(values: Sequence[float | None]) -> str:
    """The values as eight heights; a gap where one is missing."""
    finite = [value for value in values if value is not None and math.isfinite(value)]
    if not finite:
        return ""
    low, span = min(finite), (max(finite) - min(finite)) or 1.0
    return "".join(
        " " if value is None or not math.isfinite(value) else BLOCKS[1 + round((value - low) / span * 7)]
        for value in values
    )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
