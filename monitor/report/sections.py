"""The sections of a run's public page, in the order in which a stranger reads them: what was claimed, what came of it.

Every section is made of what a recorded run holds; the same text goes to the HTML page and to the Markdown version.
"""

import difflib
import json
import math
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from itertools import pairwise
from typing import Any

import numpy as np

from runwatch.checks import Level, Phase, all_checks
from runwatch.monitor.report.page import Block, Items, Links, Picture, Section, Table, Text, Tone, Verbatim
from runwatch.monitor.report.recorded_run import Approach, RecordedRun, approaches
from runwatch.monitor.show.build_status import curve_at
from runwatch.monitor.store.incident import Incident
from runwatch.rules import Decision, Execution, ExecutionState, NodeVerdict, PlanState, Receipt, all_nodes
from runwatch.rules.plan import SetContextLength, SetDataMixture, SetLrDecay, SetTokenBudget

TREND_RECORDS = 64
DIFF_LINES = 200

OUTCOMES: Mapping[ExecutionState, tuple[Tone, str]] = {
    ExecutionState.OBSERVED: ("quiet", "Only noted: the node is in mode observe."),
    ExecutionState.PROPOSED: ("warning", "Waits for a person's decision."),
    ExecutionState.APPROVED: ("warning", "Approved; the directive is about to be written."),
    ExecutionState.REQUESTED: ("warning", "Requested; the trainer has not answered yet."),
    ExecutionState.ACKNOWLEDGED: ("warning", "The trainer applied it; its effect has not been verified in telemetry."),
    ExecutionState.VERIFIED: ("good", "Verified: the effect was seen in telemetry."),
    ExecutionState.REFUSED: ("quiet", "A person turned it down; nothing was changed."),
    ExecutionState.REJECTED: ("critical", "The trainer rejected it; nothing was changed."),
    ExecutionState.EXPIRED: ("critical", "It expired before anybody decided; nothing was changed."),
    ExecutionState.UNACKNOWLEDGED: ("critical", "The trainer did not answer in time."),
    ExecutionState.UNVERIFIED: ("critical", "Applied, but its effect was not seen in telemetry in time."),
    ExecutionState.SUPERSEDED: ("quiet", "Withdrawn: something else went first."),
    ExecutionState.UNPLANNED: ("critical", "No plan could be made; a person was called."),
}


def sections(recorded: RecordedRun, pictures: Mapping[str, str]) -> list[Section]:
    """The whole page; `pictures` are SVGs by name: `course`, `levels`."""
    return [
        Section("The run", _run(recorded)),
        Section("Registered and real loss", _course(recorded, pictures.get("course", ""))),
        Section("What fired", _fired(recorded, pictures.get("levels", ""))),
        *_decisions(recorded),
        Section("Not fired", _not_fired(recorded)),
        Section("Declared and amended", _amendments(recorded)),
        Section("The ladder", _ladder(recorded)),
        Section("Audit log", _audit(recorded)),
        Section("How this page was made", _making(recorded)),
    ]


def when(seconds: float) -> str:
    """A time in UTC."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds)) if math.isfinite(seconds) else "unknown"


def _number(value: float | None) -> str:
    return "" if value is None or math.isnan(value) else f"{value:,.4g}"


def _tokens(value: float | None) -> str:
    return "" if value is None or not math.isfinite(value) else f"{value:,.0f}"


def standing(recorded: RecordedRun) -> str:
    """How far the run is and how it stands, in one or two sentences."""
    signals, world = recorded.signals, recorded.world
    real = np.flatnonzero(~signals.tick)
    if not len(real):
        return "No telemetry yet."
    last = int(real[-1])
    phase = Phase(int(signals.phase[last]))
    going = "Finished" if phase is Phase.FINISHED else f"In flight, in phase {phase.name.lower()},"
    share = f", {signals.tokens[last] / world.plan.token_budget:.1%} of the budget in force" if world else ""
    tokens = f" ({_tokens(float(signals.tokens[last]))} tokens{share})" if math.isfinite(signals.tokens[last]) else ""
    firing = [one.check for one in recorded.incidents if one.state == "firing"]
    alerts = f"Firing: {', '.join(sorted(firing))}." if firing else "No check is firing."
    return f"{going} at step {int(signals.step[last]):,}{tokens}, {when(float(signals.time[last]))}. {alerts}"


def _run(recorded: RecordedRun) -> list[Block]:
    card = recorded.card
    if card is None:
        return [Text(standing(recorded)), Text(f"No run card: {recorded.card_problem or 'none was found'}.", "warning")]
    plan = card.plan
    facts = [
        ("Owner", card.run.owner or "not named"),
        ("Declared budget", f"{plan.token_budget:,} tokens, {plan.tokens_per_step:,} a step"),
        ("Model", _model(recorded)),
        ("Attempts", f"{len(recorded.loaded.attempts):,}"),
        ("Incidents", _counted(recorded.incidents)),
        ("Plans", _plans_counted(recorded.executions)),
    ]
    links = [(name, url) for name, url in card.run.links.items() if url]
    return [
        Text(card.run.hypothesis or "No hypothesis was written down."),
        Text(standing(recorded)),
        Table(("Fact", "Value"), facts),
        *([Links(links)] if links else []),
    ]


def _model(recorded: RecordedRun) -> str:
    if recorded.card is None:
        return ""
    model = recorded.card.model
    return (
        f"{model.layers} layers of width {model.width}, {model.experts} experts ({model.experts_per_token} per token, "
        f"{model.shared_experts} shared), context {recorded.card.plan.context_length:,}"
    )


def _counted(incidents: Sequence[Incident]) -> str:
    critical = sum(one.severity == "critical" for one in incidents)
    return f"{len(incidents)}, {critical} of them critical" if incidents else "none"


def _plans_counted(executions: Sequence[Execution]) -> str:
    verified = sum(one.state is ExecutionState.VERIFIED for one in executions)
    return f"{len(executions)}, {verified} of them carried out and verified" if executions else "none"


def _course(recorded: RecordedRun, picture: str) -> list[Block]:
    card = recorded.card
    ladder = card.ladder if card else None
    blocks: list[Block] = []
    if ladder is None:
        blocks.append(Text("No loss curve was registered before launch.", "quiet"))
    else:
        late = _registered_late(recorded, ladder.registered.timestamp())
        text = f"The curve and its 95 % band were registered on {ladder.registered:%Y-%m-%d %H:%M %Z}"
        blocks.append(Text(f"{text}, {late or 'before launch'}.", "warning" if late else ""))
        blocks.append(Text(f"Hash of rungs and curve: {ladder.hash}", "quiet"))
    comparison, tone = _comparison(recorded)
    blocks.append(Text(comparison, tone))
    blocks += [Text(moved)] if (moved := _moved(recorded)) else []
    alt = "Loss of the run over tokens, on the registered curve. Shaded: incidents; dashed: carried-out plans."
    return [*blocks, Picture(picture, alt, _sparkline(recorded))]


def _registered_late(recorded: RecordedRun, registered: float) -> str:
    """How long after the first record the curve was registered; empty when it was before."""
    times = recorded.signals.time[np.isfinite(recorded.signals.time)]
    if not len(times) or registered <= times[0]:
        return ""
    return f"{(registered - times[0]) / 3600:,.1f} hours after the run had begun: it is no pre-registration"


def _comparison(recorded: RecordedRun) -> tuple[str, Tone]:
    """The newest level of the loss against the registered curve."""
    signals = recorded.signals
    rows, loss = signals.observed("train/loss"), signals.values("train/loss")
    if not len(rows):
        return "No loss has been reported.", "warning"
    level, tokens = float(np.median(loss[-TREND_RECORDS:])), float(signals.tokens[rows[-1]])
    said = f"Newest level (median of {min(TREND_RECORDS, len(rows))} records): {level:.4f} nats"
    ladder = recorded.card.ladder if recorded.card else None
    curve = curve_at(ladder.curve, tokens) if ladder and math.isfinite(tokens) else {}
    if not curve:
        return f"{said}.", ""
    off = level - curve["loss"]
    where = "above" if level > curve["high"] else "below" if level < curve["low"] else "inside"
    tone: Tone = "good" if where == "inside" else "warning"
    band = f"registered: {curve['loss']:.4f}, band {curve['low']:.4f} to {curve['high']:.4f}"
    return (
        f"{said}; {band}: {where} the band, {abs(off):.4f} {'above' if off > 0 else 'below'} the curve.",
        tone,
    )


def _moved(recorded: RecordedRun) -> str:
    """From which step on the registered curve is another run's."""
    kinds = SetTokenBudget | SetLrDecay | SetDataMixture | SetContextLength
    for execution in recorded.executions:
        applied = execution.receipt is not None and execution.receipt.status == "applied"
        if execution.receipt and applied and any(isinstance(action, kinds) for action in execution.actions):
            return f"{execution.id} changed the plan at step {execution.receipt.step:,}: the curve was registered without it."
    return ""


def _sparkline(recorded: RecordedRun) -> str:
    """The course of the loss in one line of text, from its first value to its last."""
    loss = recorded.signals.values("train/loss")
    loss = loss[np.isfinite(loss)]
    if len(loss) < 2:
        return ""
    levels = np.array([np.median(part) for part in np.array_split(loss, min(48, len(loss)))])
    through = (levels - levels.min()) / (np.ptp(levels) or 1.0)
    bars = "".join("▁▂▃▄▅▆▇█"[round(float(value) * 7)] for value in through)
    return f"{levels[0]:.3f} {bars} {levels[-1]:.3f}"


def _fired(recorded: RecordedRun, picture: str) -> list[Block]:
    alt = "Level of each check along the run: green is OK, yellow a warning, red critical, grey not judged."
    blocks: list[Block] = [Picture(picture, alt)] if picture else []
    if not recorded.incidents:
        return [Text("No check has fired.", "good"), *blocks]
    head = ("Incident", "Severity", "State", "Steps", "Tokens", "Value", "Limit", "Since", "What")
    rows = [_incident(one) for one in recorded.incidents]
    return [*blocks, Table(head, rows, frozenset({3, 4, 5, 6}))]


def _incident(one: Incident) -> tuple[str, ...]:
    first, last = one.since.step, one.last.step
    return (
        one.id,
        one.severity,
        one.state,
        f"{first:,}" if first == last else f"{first:,} to {last:,}",
        _tokens(one.since.tokens),
        "NaN" if math.isnan(one.value) else _number(one.value),
        _number(one.limit),
        when(one.since.time),
        one.what,
    )


def _decisions(recorded: RecordedRun) -> list[Section]:
    if not recorded.executions:
        return [Section("What was decided", [Text("No plan was proposed or carried out.")])]
    parts = [Section("What was decided", [Text(f"Plans: {_plans_counted(recorded.executions)}.")])]
    return parts + [Section(f"{one.id}: {one.plan}", _execution(recorded, one), level=3) for one in recorded.executions]


def _execution(recorded: RecordedRun, one: Execution) -> list[Block]:
    tone, outcome = OUTCOMES[one.state]
    decision = recorded.remembered.state.decisions.get(one.id)
    told = one.reason and one.reason != one.evidence and one.state is not ExecutionState.VERIFIED
    why = f" {one.reason}" if told else ""
    blocks: list[Block] = [
        Text(f"{outcome}{why}", tone),
        Text(f"Evidence: {one.evidence}"),
        Items(one.effects or [_action(action.model_dump()) for action in one.actions]),
    ]
    if one.forecast:
        old, new = one.forecast.old, one.forecast.new
        rows = [
            (name, f"{p.loss:.4f}", f"{p.low:.4f} to {p.high:.4f}") for name, p in (("in force", old), ("new", new))
        ]
        blocks.append(
            Table(("Plan", "Predicted final loss of a healthy run (nats)", "95 % interval"), rows, frozenset({1, 2}))
        )
    blocks.append(Items(_history(recorded, one, decision)))
    if one.receipt is not None:
        blocks += _receipt(one.receipt)
    return blocks


def _action(fields: Mapping[str, Any]) -> str:
    rest = ", ".join(f"{key} {_shown(value)}" for key, value in fields.items() if key != "action")
    return f"{fields['action']}: {rest}" if rest else str(fields["action"])


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {share:.3g}" for name, share in sorted(value.items()))
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else f"{value}"


def _history(recorded: RecordedRun, one: Execution, decision: Decision | None) -> list[str]:
    """What happened to an execution, from the audit log where there is one."""
    told = [f"{when(row.time)}: {row.sentence}" for row in recorded.remembered.audit if _concerns(row.payload, one.id)]
    if told:
        return told
    marks = {
        "proposed": one.proposed,
        "decided": one.decided,
        "requested": one.requested,
        "acknowledged": one.acknowledged,
        "ended": one.ended,
    }
    found = [f"{when(mark.time)}: {name} at step {mark.step:,}" for name, mark in marks.items() if mark is not None]
    return [*found, f"{when(decision.time)}: {decision.by}: {decision.reason}"] if decision else found


def _concerns(payload: str, execution: str) -> bool:
    said = json.loads(payload).get("execution")
    return said == execution or (isinstance(said, dict) and said.get("id") == execution)


def _receipt(receipt: Receipt) -> list[Block]:
    rows = [
        (name.replace("_", " "), _shown(before), _shown(after))
        for name in PlanState.model_fields
        if (before := getattr(receipt.before, name)) != (after := getattr(receipt.after, name))
    ]
    at = f"at step {receipt.step:,} ({receipt.tokens:,} tokens), attempt {receipt.attempt}, {when(receipt.time)}"
    said = Text(f"The trainer's receipt: {receipt.status} {at}.{f' {receipt.reason}' if receipt.reason else ''}")
    return [said, Table(("Plan", "Before", "After"), rows, frozenset({1, 2}))] if rows else [said]


def _not_fired(recorded: RecordedRun) -> list[Block]:
    blocks: list[Block] = []
    fired = {one.node for one in recorded.executions}
    quiet = [verdict for verdict in recorded.nodes if verdict.node not in fired]
    if quiet:
        near = approaches(recorded)
        head = ("Risk node", "Plan", "State", "Why", "Nearest it came", "At step", "What it said then")
        blocks.append(Table(head, [_quiet(verdict, near.get(verdict.node)) for verdict in quiet], frozenset({4, 5})))
    elif recorded.nodes:
        blocks.append(Text("Every risk node has fired."))
    else:
        blocks.append(
            Text(
                f"Risk nodes were not walked: {recorded.card_problem or 'there is no telemetry with tokens'}.",
                "warning",
            )
        )
    alarmed = {one.check for one in recorded.incidents}
    unknown = [name for name, found in recorded.verdicts.items() if (found.level == Level.UNKNOWN).all()]
    silent = [name for name in all_checks() if name not in alarmed and name not in unknown]
    blocks.append(Text(f"Checks that judged the run and never fired: {', '.join(silent) or 'none'}."))
    if unknown:
        blocks.append(
            Text(f"Checks that could not judge, since their signals or settings are missing: {', '.join(unknown)}.")
        )
    return blocks


def _quiet(verdict: NodeVerdict, near: Approach | None) -> tuple[str, ...]:
    progress, step, why = (f"{near.progress:.0%}", f"{near.step:,}", near.reason) if near else ("", "", "")
    never = near is None or near.progress <= 0
    return (
        verdict.node,
        all_nodes()[verdict.node].plan,
        verdict.state.value.replace("_", " "),
        verdict.reason,
        "0%" if never else progress,
        "" if never else step,
        "" if never else why,
    )


def _amendments(recorded: RecordedRun) -> list[Block]:
    blocks: list[Block] = []
    declared = recorded.card.declarations if recorded.card else ()
    rows = [(f"{one.step:,}", ", ".join(one.signals), one.reason, "run card") for one in declared]
    rows += [
        (f"{one['step']:,}", ", ".join(one["signals"]), str(one["reason"]), "runwatch declare")
        for one in recorded.remembered.state.declarations
    ]
    if rows:
        blocks.append(Table(("From step", "Signals", "Reason", "Declared in"), rows, frozenset({0})))
    else:
        blocks.append(Text("No planned change was declared."))
    events = [
        row
        for row in recorded.remembered.audit
        if row.kind not in {"daemon", "plan", "decision", "incident", "condition"}
    ]
    if events:
        blocks.append(Items([f"{when(row.time)}: {row.sentence}" for row in events]))
    blocks += _card_changes([json.loads(row.payload) for row in events if row.kind == "card"])
    return blocks


def _card_changes(cards: Sequence[Mapping[str, Any]]) -> list[Block]:
    """What each amendment changed in the card's text."""
    texts = [str(card.get("text", "")) for card in cards]
    found: list[Block] = []
    for number, (before, after) in enumerate(pairwise(texts), start=1):
        lines = list(difflib.unified_diff(before.splitlines(), after.splitlines(), "before", "after", lineterm="", n=1))
        found.append(Verbatim(f"Amendment {number} of the run card", "\n".join(lines[:DIFF_LINES])))
    return found


def _ladder(recorded: RecordedRun) -> list[Block]:
    ladder = recorded.card.ladder if recorded.card else None
    if ladder is None:
        return [Text("No ladder was registered (`runwatch ladder register`).", "quiet")]
    rows = [(one.name, f"{one.parameters:,}", f"{one.tokens:,}", f"{one.loss:.4f}") for one in ladder.rungs]
    head = ("Rung", "Parameters", "Tokens", "Final loss (nats)")
    blocks: list[Block] = (
        [Table(head, rows, frozenset({1, 2, 3}))] if rows else [Text("The card names no rungs.", "quiet")]
    )
    if ladder.formula:
        f = ladder.formula
        terms = f"{f.parameter_scale:g} / N^{f.parameter_exponent:g} + {f.token_scale:g} / D^{f.token_exponent:g}"
        blocks.append(
            Text(f"Fitted final loss: L(N, D) = {f.irreducible:g} + {terms} nats for N parameters and D tokens.")
        )
    return blocks


def _audit(recorded: RecordedRun) -> list[Block]:
    remembered = recorded.remembered
    if not remembered.watched:
        return [
            Text(
                "There is no audit log: no daemon has watched this run. All of this page is judged afterwards.",
                "warning",
            )
        ]
    if remembered.chain is not None:
        first: Block = Text(f"The audit log is broken: {remembered.chain}.", "critical")
    elif not remembered.audit:
        first = Text("The audit log is empty.", "quiet")
    else:
        head = remembered.audit[-1].hash
        first = Text(f"Verified: {len(remembered.audit):,} rows are whole and in order; head {head}.", "good")
    rows = [(f"{row.seq}", when(row.time), row.kind, row.sentence) for row in remembered.audit]
    table = Table(("Row", "Time", "Kind", "What"), rows, frozenset({0}), folded="All rows of the audit log")
    return [first, *([table] if rows else [])]


def _making(recorded: RecordedRun) -> list[Block]:
    source = (
        "Incidents and plans are those that the daemon stored."
        if recorded.remembered.watched
        else "Incidents are those of a backtest: every check was judged over the telemetry with the card's settings."
    )
    attempts = len(recorded.loaded.attempts)
    records = f"{recorded.loaded.records:,} records of {attempts} attempt{'s' * (attempts != 1)}"
    made = f"Made by runwatch {version('runwatch')} from {records}. {source}"
    return [Text(made, "quiet"), *(Text(warning, "warning") for warning in recorded.loaded.warnings)]
