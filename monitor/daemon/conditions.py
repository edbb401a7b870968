"""What keeps the daemon from doing all of its work; each is reported once when it begins and once when it ends."""

from runwatch.monitor.show.status import ConditionStatus


class Conditions:
    """The conditions that hold now, by kind."""

    def __init__(self) -> None:
        self._held: dict[str, ConditionStatus] = {}
        self._news: list[str] = []

    def put(self, kind: str, message: str | None, now: float) -> None:
        """Condition `kind` holds with this message, or (None) does not."""
        before = self._held.get(kind)
        if message is None:
            if before is not None:
                del self._held[kind]
                self._news.append(f"Resolved: {before['message']}")
            return
        if before is None:
            self._news.append(message)
        self._held[kind] = {"kind": kind, "message": message, "since": before["since"] if before else now}

    def news(self) -> list[str]:
        """What began or ended since the last call."""
        news, self._news = self._news, []
        return news

    def listed(self) -> list[ConditionStatus]:
        """The conditions that hold."""
        return list(self._held.values())
