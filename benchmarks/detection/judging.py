"""runwatch as a judge: the twelve checks under the settings that a run's card gives them."""

from collections.abc import Mapping, Sequence
from typing import Any

from runwatch.checks import Change, Settings, Signals, all_checks, judge
from runwatch.monitor.card import Card
from scoring import Levels


def settings_of(card: Mapping[str, Any]) -> tuple[dict[str, Settings], Sequence[Change]]:
    """What the daemon would hand to the checks of a run with this card."""
    return _settings(Card.model_validate(card))


def _settings(card: Card) -> tuple[dict[str, Settings], Sequence[Change]]:
    try:
        from runwatch.monitor.context import changes, check_settings  # noqa
    except ImportError:
        found = {name: check.settings() for name, check in all_checks().items()}
        return found, [Change(d.step, d.signals, d.reason) for d in card.declarations]
    return check_settings(card), changes(card)


def runwatch_levels(signals: Signals, card: Mapping[str, Any]) -> Levels:
    """The level of each row by check."""
    settings, changes = settings_of(card)
    return {
        name: judge(check, signals, settings[name], changes).level for name, check in all_checks().items()
    }
