"""What a drill has left in its run directory and at its receiver, as the links are judged by it."""

from pathlib import Path

import numpy as np

from runwatch.checks import Signals
from runwatch.checks.windows import SIGMAS_PER_MAD
from runwatch.monitor.drill.links import Found, Losses, Onset
from runwatch.monitor.read.run_directory import RunReader
from runwatch.monitor.store.incident import Incident
from runwatch.monitor.store.store import Store

LEVEL_RECORDS = 64
"""Losses before the onset whose median is the level to come back to."""
LOST_RECORDS = 20
"""So many records may be lost, or come late, when the trainer dies or its disk is full."""
RECOVER_RECORDS = 10
"""Newest losses whose median is held against it."""
ROOM_NATS = 0.1


def gather(run_dir: Path, store: Store, told: frozenset[str], attempt: str, onset_step: int) -> Found:
    """All that is there now; `onset_step` is the first step of the fault, in `attempt`, the first one of the drill."""
    reader = RunReader(run_dir)
    rows = reader.read(float("-inf"))
    if attempt not in reader.attempts:
        return Found()
    first = reader.attempts.index(attempt)
    place = _onset(rows, first, onset_step)
    if place is None:
        return Found()
    onset = Onset(first, int(rows.step[place]), float(rows.tokens[place]), float(rows.time[place]))
    with store.transaction() as tx:
        incidents, executions, alerts = tx.incidents(), tx.executions(), tx.load().alerts
    later = [one for one in incidents if _since(one, onset)]
    early = [one for one in incidents if one not in later and _still(one, onset)]
    return Found(
        onset=onset,
        incidents=later,
        early=early,
        executions=executions,
        requests=frozenset(path.stem for path in (run_dir / "control" / "requests").glob("*.json")),
        told=told,
        losses=_losses(rows, place),
        records=int(rows.trained[place + 1 :].sum()),
        critical=tuple(name for name, alert in alerts.items() if alert.critical_now),
    )


def _onset(rows: Signals, attempt: int, step: int) -> int | None:
    """The row of the last record before `step`; None until that step is near.

    A killed process takes its newest records with it, so it need not be the record right before.
    """
    near = (rows.step < step) & (rows.step >= step - LOST_RECORDS)
    before = np.flatnonzero(rows.trained & (rows.attempt == attempt) & near)
    return int(before[-1]) if len(before) else None


def _since(incident: Incident, onset: Onset) -> bool:
    """Whether it began after the onset; what the trainer could not write any more makes it seem a little older."""
    began = incident.since.attempt, incident.since.step
    opened = incident.opened >= onset.time and began >= (onset.attempt, onset.step - LOST_RECORDS)
    return opened or began >= (onset.attempt, onset.step)


def _still(incident: Incident, onset: Onset) -> bool:
    """Whether an incident from before the onset belongs to the drill: it began in it, or stood when the fault came."""
    return incident.since.attempt >= onset.attempt or incident.resolved is None or incident.resolved > onset.time


def _losses(rows: Signals, place: int) -> Losses:
    at = rows.observed("train/loss")
    loss = rows.values("train/loss")
    before, after = loss[at <= place][-LEVEL_RECORDS:], loss[at > place][-RECOVER_RECORDS:]
    if len(after) < RECOVER_RECORDS or not len(before):
        return Losses()
    level = float(np.median(before))
    noise = SIGMAS_PER_MAD * float(np.median(np.abs(before - level)))
    now = float(np.median(after)) if np.isfinite(after).all() else float("nan")
    return Losses(level, now, ROOM_NATS + 3 * noise / RECOVER_RECORDS**0.5)
