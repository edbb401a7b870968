"""How incidents, plans and the digest look in Slack: Block Kit within its limits. Pure.

Limits: https://docs.slack.dev/reference/block-kit/blocks (50 blocks a message, 3,000 characters a section, 150 a
header), https://docs.slack.dev/reference/views/modal-views (24 characters a title, 3,000 of private metadata) and
https://docs.slack.dev/reference/methods/chat.postMessage for the fallback text (4,000 advised).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import orjson

from runwatch.monitor.notify import DigestPayload, IncidentPayload, PlanPayload

Block = dict[str, Any]
BLOCKS, SECTION, HEADER, FALLBACK, REASON = 50, 3000, 150, 4000, 500
VERBS = {"approve": "Approve", "approve_twice": "Approve", "reject": "Reject"}
ASK_TWICE_ACTIONS = frozenset({"rewind", "stop"})
ASK_TWICE_PLANS = frozenset({"shorten_budget"})
_MARKS = {"critical": "\N{LARGE RED CIRCLE}", "warning": "\N{LARGE ORANGE CIRCLE}"}
_RESOLVED = "\N{WHITE HEAVY CHECK MARK}"
_WAITING = frozenset({"proposed"})


@dataclass(frozen=True)
class Order:
    """What a dialog is about: an execution, the button that was pressed, and the reason once it is known."""

    execution: str
    verb: str
    reason: str = ""


def incident(payload: Mapping[str, Any], mention: str = "") -> list[Block]:
    """The one message of an incident, in its current state."""
    told = cast("IncidentPayload", payload)
    resolved = told["state"] == "resolved"
    mark = _RESOLVED if resolved else _MARKS[told["severity"]]
    state = "resolved" if resolved else told["severity"]
    blocks = [header(f"{mark} {told['run']}: {told['check']} {state}"), section(f"{mention} {_bold(told['what'])}")]
    blocks.append(context([_since(told), escape(told.get("newest", "")), escape(told["certainty"])]))
    if not resolved:
        blocks += [section(f"*Plan:* {escape(told['plan'])}"), section(f"*Next:* `{escape(told['command'])}`")]
    return within([*blocks, *_links(told["links"]), context([escape(told["id"])])])


def plan(payload: Mapping[str, Any], *, buttons: bool, mention: str = "") -> list[Block]:
    """One plan execution: evidence, what would change, and what to press or run while it waits for approval."""
    told = cast("PlanPayload", payload)
    waiting = told["state"] in _WAITING
    asked = "needs approval" if waiting else told["state"].replace("_", " ")
    blocks = [
        header(f"{_MARKS[told['severity']]} {told['run']}: {told['plan']} {asked}"),
        section(f"{mention} {_bold(told['summary'])}"),
        section(f"*Evidence:* {escape(told['evidence'])}"),
        *sections("\n".join(f"• {escape(effect)}" for effect in told["effects"])),
        context([_decided(told)]),
    ]
    if waiting and buttons:
        blocks.append(_buttons(told))
    if waiting:
        blocks += sections("\n".join(f"{name}: `{escape(line)}`" for name, line in told["commands"].items()))
    return within([*blocks, *_links(told["links"]), context([escape(told["id"])])])


def digest(payload: Mapping[str, Any]) -> list[Block]:
    """The status of the run: tokens done, loss against the curve, MFU, speed, open incidents and plans."""
    told = cast("DigestPayload", payload)
    done = _percent(told["tokens"] / told["token_budget"] if told["token_budget"] else None)
    facts = {
        "Tokens": f"{quantity(told['tokens'])} of {quantity(told['token_budget'])} ({done}), step {told['step']:,}",
        "Loss": _against_curve(told["loss"], told["expected_loss"]),
        "Speed": f"{quantity(told['tokens_per_second'])} tokens/s, MFU {_percent(told['mfu'])}",
        "End": when(told["eta"]),
    }
    open_now = told["incidents"] + told["plans"]
    blocks: list[Block] = [
        header(f"{told['run']}: digest"),
        {"type": "section", "fields": [_mrkdwn(f"*{name}*\n{escape(fact)}", 2000) for name, fact in facts.items()]},
        *sections("\n".join(f"• {escape(line)}" for line in open_now) or "No open incidents, no open plans."),
    ]
    return within([*blocks, *_links(told["links"])])


def ask_reason(order: Order) -> Block:
    """The dialog behind a button: which plan, and why."""
    element = {"type": "plain_text_input", "action_id": "reason", "max_length": REASON, "multiline": True}
    asked = {"type": "input", "block_id": "reason", "label": _plain("Reason"), "element": element}
    hint = "Recorded in the audit log and shown in the channel, with your name."
    return _dialog("reason", order, [section(f"*{escape(order.execution)}*"), asked, context([hint])])


def ask_again(order: Order) -> Block:
    """The second question before a plan that cannot be undone."""
    question = f"*{escape(order.execution)}* cannot be undone once the trainer has applied it. Approve it?"
    return _dialog("confirm", order, [section(question), *sections(f"Reason: {escape(order.reason)}")])


def outcome(sentence: str) -> Block:
    """What came of a decision."""
    return {
        "type": "modal",
        "title": _plain("Decision"),
        "close": _plain("Close"),
        "blocks": [section(escape(sentence))],
    }


def asks_twice(payload: Mapping[str, Any]) -> bool:
    """Whether an approval of this plan must be confirmed: a rewind, a stop, a shorter budget."""
    told = cast("PlanPayload", payload)
    actions = {str(action.get("action")) for action in told["actions"]}
    return told["plan"] in ASK_TWICE_PLANS or bool(actions & ASK_TWICE_ACTIONS)


def header(text: str) -> Block:
    """A header block (plain text)."""
    return {"type": "header", "text": {"type": "plain_text", "text": cut(text, HEADER), "emoji": True}}


def section(text: str) -> Block:
    """One section of mrkdwn, cut to its limit; `text` is already escaped."""
    return {"type": "section", "text": _mrkdwn(text, SECTION)}


def sections(text: str) -> list[Block]:
    """As many sections as `text` needs, split at line ends; `text` is already escaped."""
    parts: list[str] = []
    for line in text.splitlines():
        short = cut(line, SECTION)
        if parts and len(parts[-1]) + 1 + len(short) <= SECTION:
            parts[-1] += f"\n{short}"
        else:
            parts.append(short)
    return [section(part) for part in parts if part.strip()]


def context(texts: Sequence[str]) -> Block:
    """Small print; `texts` are already escaped."""
    return {"type": "context", "elements": [_mrkdwn(text, SECTION) for text in texts if text.strip()][:10]}


def within(blocks: Iterable[Block]) -> list[Block]:
    """`blocks` without empty ones, at most as many as a message may have; a last one says how many are missing."""
    kept = [block for block in blocks if block.get("elements", True)]
    if len(kept) <= BLOCKS:
        return kept
    return [*kept[: BLOCKS - 1], context([f"{len(kept) - BLOCKS + 1} more parts not shown."])]


def escape(text: str) -> str:
    """`text` with Slack's three control characters made harmless, so that data cannot mention or link."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def cut(text: str, limit: int) -> str:
    """`text` within `limit` characters, never empty."""
    text = text.strip() or "-"
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def quantity(value: float | None) -> str:
    """1234567.0 as 1.23M."""
    if value is None:
        return "unknown"
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def when(time: float | None) -> str:
    """A time in the reader's own time zone."""
    return "unknown" if time is None else f"<!date^{int(time)}^{{date_short_pretty}} {{time}}|{int(time)}>"


def _since(told: IncidentPayload) -> str:
    tokens = "" if told["since_tokens"] is None else f" ({quantity(told['since_tokens'])} tokens)"
    since = f"since step {told['since_step']:,}{tokens}, {when(told['opened'])}"
    end = "" if told["resolved"] is None else f", resolved {when(told['resolved'])}"
    return f"{since}, newest step {told['step']:,}{end}"


def _decided(told: PlanPayload) -> str:
    by = "" if told["by"] is None else f", by {escape(told['by'])}"
    reason = "" if not told["reason"] else f": {escape(told['reason'])}"
    expires = f", expires {when(told['expires'])}" if told["expires"] and told["state"] in _WAITING else ""
    return f"node {told['node']}, mode {told['mode']}, step {told['step']:,}{expires}{by}{reason}"


def _buttons(told: PlanPayload) -> Block:
    verb = "approve_twice" if asks_twice(told) else "approve"
    elements = [_button("Approve…", verb, told["id"], "primary"), _button("Reject…", "reject", told["id"], "danger")]
    return {"type": "actions", "elements": elements}


def _dialog(name: str, order: Order, shown: list[Block]) -> Block:
    word = VERBS.get(order.verb, order.verb)
    return {
        "type": "modal",
        "callback_id": name,
        "title": _plain(f"{word} this plan?"),
        "submit": _plain("Yes, approve" if name == "confirm" else word),
        "close": _plain("Cancel"),
        "private_metadata": orjson.dumps(asdict(order)).decode(),
        "blocks": shown,
    }


def _plain(text: str) -> Block:
    return {"type": "plain_text", "text": text}


def _button(label: str, verb: str, execution_id: str, style: str) -> Block:
    return {"type": "button", "text": _plain(label), "action_id": verb, "value": execution_id, "style": style}


def _links(links: Mapping[str, str]) -> list[Block]:
    shown = [f"<{url}|{escape(label)}>" for label, url in links.items() if url]
    return [context([" · ".join(shown)])] if shown else []


def _against_curve(loss: float | None, expected: float | None) -> str:
    if loss is None:
        return "unknown"
    return f"{loss:.4f}" if expected is None else f"{loss:.4f} ({loss - expected:+.4f} against the curve)"


def _percent(ratio: float | None) -> str:
    return "unknown" if ratio is None else f"{100 * ratio:.1f} %"


def _bold(text: str) -> str:
    return f"*{escape(text)}*"


def _mrkdwn(text: str, limit: int) -> Block:
    return {"type": "mrkdwn", "text": cut(text, limit)}
