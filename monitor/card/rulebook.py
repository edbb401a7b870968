"""What a run is judged by: the run card in force, and what directives and people have changed since."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runwatch.checks import Change, Settings, all_checks
from runwatch.monitor.card.context import applied, changes, check_settings, node_settings
from runwatch.monitor.card.run_card import Card, CardError, Declaration, load_card
from runwatch.rules import Execution, PlannedRun, PlanRules, Receipt


@dataclass(frozen=True)
class Rulebook:
    """Settings of every check and node, and the planned changes. Without a card no plan can be made."""

    checks: Mapping[str, Settings]
    nodes: Mapping[str, PlanRules] = field(default_factory=dict[str, PlanRules])
    changes: tuple[Change, ...] = ()
    planned: PlannedRun | None = None
    card: Card | None = None


def rulebook(card: Card | None, executions: Sequence[Execution], declared: Sequence[Mapping[str, Any]]) -> Rulebook:
    """The rulebook of a card, the executions so far and the changes declared so far."""
    declarations = [Declaration.model_validate(one) for one in declared]
    if card is None:
        moved = tuple(Change(one.step, one.signals, one.reason) for one in declarations)
        return Rulebook({name: check.settings() for name, check in all_checks().items()}, changes=moved)
    directives = applied(executions)
    return Rulebook(
        check_settings(card, directives, declarations),
        node_settings(card),
        changes(card, directives, declarations),
        card.planned(),
        card,
    )


def answered(executions: Sequence[Execution], receipts: Mapping[str, Receipt]) -> list[Execution]:
    """The executions with the receipts that have come for them: the records that follow are under the new plan."""
    return [
        one.model_copy(update={"receipt": receipts[one.id]}) if one.receipt is None and one.id in receipts else one
        for one in executions
    ]


class CardFile:
    """`run.yaml` as it is now: read again when it changes, kept as it was while the new one has mistakes."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / "run.yaml"
        self.card: Card | None = None
        self.problem: str | None = None
        self.hash = ""
        self.text = ""
        self._stamp: tuple[int, int] | None = None

    def refresh(self) -> None:
        """Look whether the file has changed."""
        try:
            facts = self.path.stat()
        except FileNotFoundError:
            self.problem = (
                None if self.card else f"{self.path} is missing: checks use defaults, no plan can be proposed"
            )
            return
        stamp = (facts.st_mtime_ns, facts.st_size)
        if stamp != self._stamp:
            self._stamp = stamp
            self._load()

    def _load(self) -> None:
        try:
            card = load_card(self.path)
        except CardError as error:
            kept = "the previous card stays in force" if self.card else "no plan can be proposed"
            self.problem = f"{error}\n{kept}"
            return
        self.problem = None
        self.card = card
        self.text = self.path.read_text(encoding="utf-8")
        self.hash = f"sha256:{hashlib.sha256(self.text.encode()).hexdigest()}"


def run_name(run_dir: Path) -> str:
    """The name in the run card, or one made of the directory's name."""
    try:
        return load_card(run_dir / "run.yaml").run.name
    except CardError:
        return re.sub(r"[^a-z0-9-]+", "-", run_dir.resolve().name.lower()).strip("-")[:63] or "run"
