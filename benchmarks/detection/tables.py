"""The benchmark's figures as Markdown."""

from collections.abc import Sequence
from pathlib import Path

from injections import KINDS, Kind
from scoring import Outcome
from synthetic import Tally, percentile

DAY = 4800
"""Records of a day at 18 s a step."""


def synthetic(tallies: Sequence[Tally], seeds: str, runs: int) -> str:
    """Overall and per kind."""
    ours = tallies[0]
    head = f"Seeds: {seeds}; {runs} runs of each of {len(KINDS)} kinds; {ours.clean.records:,} clean records, "
    head += f"and {ours.restarts.records:,} more with a restart every 700."
    return "\n\n".join([head, _overall(tallies), _by_kind(tallies), _false_alarms(ours)])


def _overall(tallies: Sequence[Tally]) -> str:
    rows = [
        "| judge | recall in time | recall ever | precision | kinds < 0.8 | median delay | p95 delay "
        "| alarms per 10,000 clean | critical per 144,000 | per day | after 1,000 restarts |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for tally in tallies:
        found = tally.outcomes
        delays = [one.delay for one in found if one.delay is not None and _kind(one).unit == "records"]
        clean = tally.clean
        poor = sum(_recall([one for one in found if one.kind == kind.name]) < 0.8 for kind in KINDS)
        rows.append(
            f"| {tally.name} | {_recall(found):.3f} | {sum(o.delay is not None for o in found) / len(found):.3f} "
            f"| {_precision(found):.3f} | {poor} | {percentile(delays, 50):.0f} | {percentile(delays, 95):.0f} "
            f"| {clean.rate():.2f} | {clean.critical_rate() * 14.4:.2f} | {clean.rate() * DAY / 1e4:.2f} "
            f"| {len(tally.after_restart)} |"
        )
    return "\n".join(rows)


def _by_kind(tallies: Sequence[Tally]) -> str:
    names = " | ".join(tally.name for tally in tallies)
    rows = [
        f"| incident | check | horizon | delay: median | p95 | {names} |",
        "|---|---|---|---|---|" + "---|" * len(tallies),
    ]
    for kind in KINDS:
        ours = [one for one in tallies[0].outcomes if one.kind == kind.name]
        delays = [one.delay for one in ours if one.delay is not None]
        recalls = [_recall([one for one in tally.outcomes if one.kind == kind.name]) for tally in tallies]
        unit = "" if kind.unit == "records" else " s"
        rows.append(
            f"| {kind.name} | {', '.join(kind.checks)} | {kind.horizon:.0f}{unit} | {percentile(delays, 50):.0f}{unit} "
            f"| {percentile(delays, 95):.0f}{unit} | " + " | ".join(f"{recall:.2f}" for recall in recalls) + " |"
        )
    return "\n".join(rows)


def _false_alarms(tally: Tally) -> str:
    rules = sorted({*tally.clean.warnings, *tally.clean.criticals, *tally.restarts.warnings, *tally.restarts.criticals})
    rows = ["| check | warnings, clean | critical, clean | warnings, restarts | critical, restarts |", "|---|---|---|---|---|"]
    for rule in rules:
        counts = (tally.clean.warnings, tally.clean.criticals, tally.restarts.warnings, tally.restarts.criticals)
        rows.append(f"| {rule} | " + " | ".join(str(count.get(rule, 0)) for count in counts) + " |")
    return "\n".join(rows) if rules else "No alarm on a clean record."


def _kind(one: Outcome) -> Kind:
    return next(kind for kind in KINDS if kind.name == one.kind)


def _recall(found: Sequence[Outcome]) -> float:
    return sum(one.in_time for one in found) / len(found) if found else float("nan")


def _precision(found: Sequence[Outcome]) -> float:
    true, false = sum(one.true for one in found), sum(one.false for one in found)
    return true / (true + false) if true + false else float("nan")


def put(path: Path, name: str, text: str) -> None:
    """Replace what stands between the markers `<!-- name:begin -->` and `<!-- name:end -->`."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    old = path.read_text()
    path.write_text(old[: old.index(begin) + len(begin)] + f"\n{text}\n" + old[old.index(end) :])
