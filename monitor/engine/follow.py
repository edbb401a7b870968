"""A source that is still being written, judged as it grows by the live path."""

from collections.abc import Iterator, Mapping, Sequence

from runwatch.checks import Change, Level, Phase, Settings, Signals, all_checks
from runwatch.monitor.engine.backtest import INCIDENT
from runwatch.monitor.engine.evaluate import LiveJudge
from runwatch.monitor.read.run_directory import RunReader
from runwatch.monitor.read.sources import Source
from runwatch.rules.alert import Alert, Reason, advance

TOLD = {Reason.FIRED: "opened", Reason.ESCALATED: "is critical", Reason.RESOLVED: "is over"}


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
        self._alerts = {name: Alert(check=name) for name in all_checks()}

    def poll(self, now: float) -> Iterator[str]:
        """What is to be said of the rows that have come by `now` (Unix seconds)."""
        block = self._source.read(end=False, now=now)
        if not len(block):
            return
        judge = self._judge = self._judge or LiveJudge(all_checks(), block.take(slice(0, 0)), self._history)
        judged = judge.judge(block, self._settings, self._changes)
        for name, verdicts in judged.verdicts.items():
            check = all_checks()[name]
            self._alerts[name], transitions = advance(self._alerts[name], check, verdicts, block, INCIDENT)
            for one in transitions:
                self.worst = max(self.worst, one.alert.worst)
                if one.reason in TOLD:
                    yield f"step {block.step[one.row]}: {name} {TOLD[one.reason]}. {one.alert.message}"
        judge.accept(block, self._settings, self._changes)
        self._rows.append(block)
        self.finished = bool(block.phase[-1] == Phase.FINISHED)

    def _history(self) -> Signals:
        if isinstance(self._source.reader, RunReader):
            return self._source.reader.history()
        return Signals.concatenate(self._rows)
