"""runwatch as a judge: the twelve checks under the settings that a run's card gives them."""

from collections.abc import Mapping, Sequence
from typing import Any

from scoring import Levels

from runwatch.checks import Change, Settings, Signals, all_checks, judge
from runwatch.monitor.card.context import changes, check_settings
from runwatch.monitor.card.run_card import Card


def settings_of(card: Mapping[str, Any]) -> tuple[dict[str, Settings], Sequence[Change]]:
    """What the daemon would hand to the checks of a run with this card."""
    card_model = Card.model_validate(card)
    return check_settings(card_model), changes(card_model)


def runwatch_levels(signals: Signals, card: Mapping[str, Any]) -> Levels:
    """The level of each row by check."""
    settings, changes = settings_of(card)
    return {name: judge(check, signals, settings[name], changes).level for name, check in all_checks().items()}
