"""A ping to a URL while the daemon can observe its run; the service behind it alerts when the pings stop.

Any service with ping URLs will do (healthchecks, a cron monitor). The daemon sends a `deadman` message only while it can
observe its run, and never keeps one for later: an old ping would claim a health that was not observed.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from runwatch.monitor.notify import DeadmanConfig, Kind, Message, Notifier, SendError, Sent
from runwatch.monitor.notify.post import post

KINDS: frozenset[Kind] = frozenset({"deadman"})
OLDEST_SECONDS = 30.0


def connect(config: DeadmanConfig) -> Notifier:
    """The notifier for one ping URL."""
    return Notifier(name=config.name or config.kind, kinds=KINDS, send=Deadman(config).send)


@dataclass(frozen=True)
class Deadman:
    """One ping URL."""

    config: DeadmanConfig
    clock: Callable[[], float] = time.time

    def send(self, message: Message, remembered: dict[str, Any]) -> Sent:
        """Ping.

        Raises:
            SendError: permanent for a message that has waited: only the next one is current.
        """
        age = self.clock() - message.payload["observed"]
        if age > OLDEST_SECONDS:
            raise SendError(f"the ping is {age:.0f} s old and no longer current", permanent=True)
        content = message.text.encode()
        post(self.config.url.get_secret_value(), content, timeout=self.config.timeout_seconds)
        return Sent(remembered)
