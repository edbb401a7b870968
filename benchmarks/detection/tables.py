"""The benchmark's figures as Markdown."""

from collections.abc import Sequence
from pathlib import Path

from injections import KINDS, Kind
from recordings import Recording, Row
from scoring import Outcome
from speed import Figure
from synthetic import Tally, percentile

DAY = 4800
"""Records of a day at 18 s a step."""
NOISE_RULES = ("loss_spike", "ladder_deviation", "grad_norm")
"""Checks of noisy signals: their alarms after a restart are chance, unless they exceed the base rate."""


def synthetic(tallies: Sequence[Tally], seeds: str, runs: int, cuts: int) -> str:
    """Against the goals, overall, per kind, and where false alarms come from."""
    ours = tallies[0]
    head = (
        f"Seeds: {seeds}. {runs} runs of each of {len(KINDS)} kinds of incident; {ours.clean.records:,} clean records "
        f"({ours.clean.records / DAY:.0f} run-days at 18 s a step), and {ours.restarts.records:,} more with {cuts:,} "
        "restarts. Delays are in train records. Alarms of both levels count as false on clean records."
    )
    requeued = (
        f"A restart that is silent for 1 to 10 minutes is a job that is down, and is told: of {ours.requeues} such "
        f"restarts {ours.requeues_warned} warned and {ours.requeues_paged} turned critical."
    )
    parts = [head, _goals(ours), _overall(tallies, cuts), _by_kind(tallies), _false_alarms(ours), requeued]
    return "\n\n".join(parts)


def _goals(ours: Tally) -> str:
    """The figures that were set as goals before anything was measured."""
    by_kind = {kind.name: [one for one in ours.outcomes if one.kind == kind.name] for kind in KINDS}
    poor = [f"{name} {_recall(found):.2f}" for name, found in by_kind.items() if _recall(found) < 0.8]
    nan = [one.delay for name in ("NaN loss, one step", "NaN loss, lasting") for one in by_kind[name]]
    shift, small = by_kind["loss up by 0.1 nats, lasting"], by_kind["loss up by 0.03 nats, lasting"]
    all_clean = ours.clean.records + ours.restarts.records
    criticals = sum(ours.clean.criticals.values()) + sum(ours.restarts.criticals.values())
    warnings = sum(ours.clean.warnings.values()) + sum(ours.restarts.warnings.values())
    return _table(
        ("goal", "figure", "met"),
        [
            _goal("recall, in time ≥ 0.95", _recall(ours.outcomes), _recall(ours.outcomes) >= 0.95),
            _goal("precision ≥ 0.95", _precision(ours.outcomes), _precision(ours.outcomes) >= 0.95),
            ("no kind under 0.8", "; ".join(poor) or "none", _tick(not poor)),
            ("NaN at the same record", f"{sum(delay == 0 for delay in nan)} of {len(nan)}", _tick(set(nan) == {0.0})),
            _goal("+0.1 nats at sigma ≤ 0.02 within 10 records: ≥ 0.99", _recall(shift), _recall(shift) >= 0.99),
            _goal("+0.03 nats against the registered curve within 100", _recall(small), _recall(small) >= 0.95),
            _goal(
                "critical per 144,000 clean records ≤ 1",
                criticals / all_clean * 144_000,
                criticals / all_clean * 144_000 <= 1,
            ),
            _goal("warnings per run-day ≤ 1", warnings / all_clean * DAY, warnings / all_clean * DAY <= 1),
            (f"alarms caused by {ours.cuts:,} restarts: 0", _restart_figure(ours), _tick(_none_induced(ours))),
        ],
    )


def _goal(what: str, value: float, met: bool) -> tuple[str, str, str]:
    return what, f"{value:.3f}", _tick(met)


def _tick(met: bool) -> str:
    return "yes" if met else "**no**"


def _induced(ours: Tally) -> list[str]:
    """Alarms within 100 records of a restart by rules other than those of the loss's and gradient's noise."""
    return [told for told in ours.after_restart if told.split()[0] not in NOISE_RULES]


def _restart_figure(ours: Tally) -> str:
    noise = len(ours.after_restart) - len(_induced(ours))
    return f"{len(_induced(ours))}; in the 100 records after one {noise} of noise, by chance {_by_chance(ours):.0f}"


def _by_chance(ours: Tally) -> float:
    """Noise alarms expected in the 100 records after each restart, from their rate in all of these runs."""
    base = sum(ours.restarts.warnings.values()) + sum(ours.restarts.criticals.values())
    return base * 100 * ours.cuts / max(ours.restarts.records, 1)


def _none_induced(ours: Tally) -> bool:
    """No alarm of a quiet check, and no more of noise than chance (three standard deviations) explains."""
    chance = _by_chance(ours)
    return not _induced(ours) and len(ours.after_restart) <= chance + 3 * chance**0.5


def recordings(rows: Sequence[Row], files: Sequence[Recording]) -> str:
    """Rows met, and unexplained alarms per file."""
    met = sum(row.met for row in rows)
    quiet = sum(one.within for one in files)
    head = f"{met} of {len(rows)} rows of `incidents.csv` met; {quiet} of {len(files)} recordings within their budget "
    head += "(no critical alarm outside incidents, one warning per 4,800 records)."
    wanted = [
        (row.file.split(".csv")[0], row.check, f"{row.first} to {row.last}", row.expected, row.said, _tick(row.met))
        for row in rows
    ]
    budget = [
        (one.file.split(".csv")[0], f"{one.records:,}", str(one.warnings), str(one.criticals), _tick(one.within))
        for one in files
    ]
    return "\n\n".join(
        [
            head,
            _table(("recording", "check", "steps", "expected", "said", "met"), wanted),
            _table(("recording", "records", "unexplained warnings", "critical", "within budget"), budget),
        ]
    )


def speed(figures: Sequence[Figure]) -> str:
    """Rates, times and sizes."""
    rows = [
        (one.what, f"{one.value:,.0f}" if one.value >= 100 else f"{one.value:.1f}", one.unit, one.goal)
        for one in figures
    ]
    return _table(("what", "figure", "unit", "goal"), rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _overall(tallies: Sequence[Tally], cuts: int) -> str:
    head = ("judge", "recall in time", "recall ever", "precision", "kinds < 0.8", "median delay", "p95 delay")
    head += ("false alarms per 10,000", "critical per 144,000", "false alarms a day", f"after {cuts:,} restarts")
    rows: list[tuple[str, ...]] = []
    for tally in tallies:
        found = tally.outcomes
        delays = [one.delay for one in found if one.delay is not None and _kind(one).unit == "records"]
        clean = tally.clean
        poor = sum(_recall([one for one in found if one.kind == kind.name]) < 0.8 for kind in KINDS)
        rows.append(
            (
                tally.name,
                f"{_recall(found):.3f}",
                f"{sum(one.delay is not None for one in found) / len(found):.3f}",
                f"{_precision(found):.3f}",
                f"{poor} of {len(KINDS)}",
                f"{percentile(delays, 50):.0f}",
                f"{percentile(delays, 95):.0f}",
                f"{clean.rate():.2f}",
                f"{clean.critical_rate() * 14.4:.2f}",
                f"{clean.rate() * DAY / 1e4:.2f}",
                str(len(tally.after_restart)),
            )
        )
    return _table(head, rows)


def _by_kind(tallies: Sequence[Tally]) -> str:
    head = ("incident", "check", "horizon", "median delay", "p95", *(tally.name for tally in tallies))
    rows: list[tuple[str, ...]] = []
    for kind in KINDS:
        ours = [one for one in tallies[0].outcomes if one.kind == kind.name]
        delays = [one.delay for one in ours if one.delay is not None]
        recalls = [_recall([one for one in tally.outcomes if one.kind == kind.name]) for tally in tallies]
        unit = "" if kind.unit == "records" else " s"
        times = (kind.horizon, percentile(delays, 50), percentile(delays, 95))
        shown = [f"{value:.0f}{unit}" for value in times]
        rows.append((kind.name, ", ".join(kind.checks), *shown, *(f"{recall:.2f}" for recall in recalls)))
    return _table(head, rows)


def _false_alarms(tally: Tally) -> str:
    counts = (tally.clean.warnings, tally.clean.criticals, tally.restarts.warnings, tally.restarts.criticals)
    rules = sorted({rule for count in counts for rule in count})
    if not rules:
        return "No alarm on a clean record."
    head = ("false alarms of", "warnings, clean", "critical, clean", "warnings, restarts", "critical, restarts")
    return _table(head, [(rule, *(str(count.get(rule, 0)) for count in counts)) for rule in rules])


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
