"""One look at a run, from what is known as it begins to what it has decided."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from runwatch.checks import Signals
from runwatch.monitor.card.rulebook import Rulebook
from runwatch.monitor.engine.evaluate import Judged
from runwatch.monitor.notify import Message
from runwatch.monitor.store.store import RunState
from runwatch.rules import Event, NodeVerdict, Receipt, Transition, World


@dataclass(frozen=True)
class Tick:
    """One tick.

    `rows` are those at hand and end with the unjudged `block`, of which `judged` has the verdicts; `records` counts the
    train records of the run up to the last of them. `state` is what is stored of the run: as the tick before left it
    and, after `conclude`, as it is to be stored. The fields from `transitions` on are what `conclude` adds.
    """

    run: str
    directory: str
    now: float
    rows: Signals
    block: Signals
    judged: Judged
    attempts: Sequence[str]
    records: int
    rulebook: Rulebook
    receipts: Mapping[str, Receipt]
    state: RunState
    taken: frozenset[str] = frozenset()
    """Names of the files in `control/`."""
    links: Mapping[str, str] = field(default_factory=dict[str, str])
    """Where people read on, by label; `status` is the status page."""
    transitions: tuple[Transition, ...] = ()
    world: World | None = None
    nodes: tuple[NodeVerdict, ...] = ()
    events: tuple[Event, ...] = ()
    messages: tuple[Message, ...] = ()
