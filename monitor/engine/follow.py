"""A source that is still being written, judged as it grows by the live path."""

from collections.abc import Iterator, Mapping, Sequence

from runwatch.checks import Change, Level, Phase, Settings, Signals, all_checks
from runwatch.monitor.engine.evaluate import LiveJudge
from runwatch.monitor.engine.incidents import followed, resolution
from runwatch.monitor.read.run_directory import RunReader
from runwatch.monitor.read.sources import Source
from runwatch.rules import Alert, Reason

CHANGES = {Reason.FIRED: "is firing", Reason.ESCALATED: "is critical", Reason.RESOLVED: "is resolved"}


class Following:
    """Reads what is new, judges it, and tells what changed."""

    def __init__(self, source: Source, settings: Mapping[str, Settings], changes: Sequence[Change]) -> None:
        self.worst = Level.OK
        self.finished = False
        self._source = source
        self._settings = settings
        self._changes = changes
        self._rows: list[Signals] = []
        self._judge: LiveJudge | None = None
        self._alerts: dict[str, Alert] = {}

    def poll(self, now: float) -> Iterator[str]:
        """What is to be said of the rows that have come by `now` (Unix seconds)."""
        block = self._source.read(end=False, now=now)
        if not len(block):
            return
        judge = self._judge = self._judge or LiveJudge(all_checks(), block.take(slice(0, 0)), self._history)
        judged = judge.judge(block, self._settings, self._changes)
        self._alerts, _, transitions = followed(self._alerts, {}, judged.verdicts, block, now)
        for one in transitions:
            alert = one.alert
            self.worst = max(self.worst, alert.worst.level if alert.worst else Level.OK)
            if one.reason in CHANGES:
                said = resolution(alert) if one.reason is Reason.RESOLVED else alert.message
                yield f"step {block.step[one.row]}: {alert.check} {CHANGES[one.reason]}. {said}"
        judge.accept(block, self._settings, self._changes)
        self._rows.append(block)
        self.finished = bool(block.phase[-1] == Phase.FINISHED)

    def _history(self) -> Signals:
        if isinstance(self._source.reader, RunReader):
            return self._source.reader.history()
        return Signals.concatenate(self._rows)
