"""The life of an alert, told row by row.

A story has one letter a row: `o` ok, `w` warning, `c` critical, `u` unknown, `.` a row that only repeats the verdict,
`t` a tick that repeats it, `C` a tick at which it becomes critical, `|` (no row) a new attempt.
"""

import time
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runwatch.checks import Check, Column, Level, Phase, Settings, Signals, Verdicts
from runwatch.rules import Alert, AlertPolicy, AlertState, BadRecord, Transition, advance, inhibited, policy_of

LEVELS = {"o": Level.OK, "w": Level.WARN, "c": Level.CRITICAL, "C": Level.CRITICAL, "u": Level.UNKNOWN}
SHORT = AlertPolicy(keep_firing_records=3, flap_records=8, max_flaps=2)
PATIENT = AlertPolicy(for_records=3, keep_firing_records=3, flap_records=0)
CHECK = Check(
    name="toy",
    evaluate=lambda signals, _: Verdicts.unknown(len(signals)),
    settings=Settings,
    required=("train/loss",),
    optional=(),
    lookback=lambda _: 1,
    messages=("fine", "warned at {value:.0f}", "critical at {value:.0f}"),
)


def rows_of(story: str) -> tuple[Signals, Verdicts]:
    """The rows of a story: signals and verdicts. The value judged is the number of the row that was observed."""
    letters = [letter for letter in story if letter != "|"]
    bars = np.cumsum([letter == "|" for letter in story])
    attempt = np.array([bars[at] for at, letter in enumerate(story) if letter != "|"], np.int32)
    length = len(letters)
    fresh = np.array([letter not in ".t" for letter in letters], bool)
    shown = np.maximum.accumulate(np.where(fresh, np.arange(length), 0)) if length else np.zeros(0, int)
    level = np.array([LEVELS.get(letters[row], Level.UNKNOWN) for row in shown], np.int8)
    observed = np.array([letter in "owc" for letter in letters], bool)
    signals = Signals(
        attempt=attempt,
        step=np.arange(length),
        tokens=np.arange(length) * 10.0,
        time=np.arange(length) * 1.0,
        phase=np.full(length, Phase.TRAIN, np.int8),
        tick=np.array([letter in "tC" for letter in letters], bool),
        columns={"train/loss": Column(np.ones(length), observed)},
    )
    return signals, Verdicts(level, shown.astype(float), np.ones(length), np.maximum(level, 0).astype(np.int8))


def told(transitions: Iterable[Transition]) -> str:
    return " ".join(f"{t.reason}@{t.row}" for t in transitions)


@pytest.mark.parametrize(
    ("name", "story", "policy", "expected"),
    [
        ("a healthy run tells nothing", "uoooo.ot", SHORT, ""),
        ("a warning fires at once and resolves after three OK observations", "oowooo", SHORT, "fired@2 resolved@5"),
        ("a critical record fires critical, without a warning before", "ooc", SHORT, "fired@2"),
        ("a warning that grows escalates once", "owwcc", SHORT, "fired@1 escalated@3"),
        ("a critical alert eases after three calm records", "cwww", SHORT, "fired@0 eased@3"),
        ("an eased alert escalates again", "cwwwc", SHORT, "fired@0 eased@3 escalated@4"),
        ("flickering between warning and critical does not ease", "cwcwcwc", SHORT, "fired@0"),
        ("an alert that goes straight to OK resolves and does not ease", "cooo", SHORT, "fired@0 resolved@3"),
        ("warnings among the calm records keep it firing, eased", "cwowo", SHORT, "fired@0 eased@3"),
        ("unknown rows resolve nothing", "wuuuuuu", SHORT, "fired@0"),
        ("unknown rows do not break a run of OK ones", "wouuoo", SHORT, "fired@0 resolved@5"),
        ("rows that repeat the last verdict resolve nothing", "wo.....", SHORT, "fired@0"),
        ("ticks resolve nothing", "wottttttttt", SHORT, "fired@0"),
        ("a tick may fire", "oooC", SHORT, "fired@3"),
        ("a bad record starts the count of OK ones again", "woowoo", SHORT, "fired@0"),
        ("an alert that comes back soon has to stay OK for twice as long", "wooowoooooo", SHORT,
         "fired@0 resolved@3 fired@4 resolved@10"),
        ("an alert that comes back late does not", "wooooooooowooo", SHORT,
         "fired@0 resolved@3 fired@10 resolved@13"),
        ("waiting alerts fire at the third bad record", "owwww", PATIENT, "pending@1 fired@3"),
        ("waiting alerts are cancelled by one OK record", "owwo", PATIENT, "pending@1 cancelled@3"),
        ("repeated verdicts do not count towards firing", "ow...w.", PATIENT, "pending@1"),
        ("a waiting alert fires with the level of its last record", "wwc", PATIENT, "pending@0 fired@2"),
    ],
)  # fmt: skip
def test_an_alert_lives_as_told(name: str, story: str, policy: AlertPolicy, expected: str) -> None:
    signals, verdicts = rows_of(story)
    _, transitions = advance(Alert(check="toy"), CHECK, verdicts, signals, policy)
    assert told(transitions) == expected, name


def test_the_alert_carries_value_message_and_moments_of_its_life() -> None:
    signals, verdicts = rows_of("oowwco")
    alert, transitions = advance(Alert(check="toy"), CHECK, verdicts, signals, SHORT)
    assert (alert.state, alert.severity) == (AlertState.FIRING, Level.CRITICAL)
    assert alert.worst == BadRecord(level=Level.CRITICAL, value=4.0, limit=1.0, message="critical at 4")
    assert (alert.level, alert.value, alert.message, alert.lives) == (Level.OK, 5.0, "critical at 4", 1)
    assert alert.since.step == 2
    assert alert.critical_since.tokens == 40.0
    assert alert.last_bad.step == 4
    assert transitions[0].alert.message == "warned at 2"


WORST: dict[str, tuple[list[tuple[Level, float, float]], tuple[float, float]]] = {
    "the furthest beyond its limit": ([(Level.WARN, 3, 1), (Level.WARN, 5, 1), (Level.WARN, 4, 1)], (5, 1)),
    "the first of equals": ([(Level.WARN, 4, 2), (Level.WARN, 2, 1)], (4, 2)),
    "the highest level before the furthest value": ([(Level.WARN, 9, 1), (Level.CRITICAL, 2, 1)], (2, 1)),
    "under a lower limit the smallest": ([(Level.CRITICAL, 0.5, 1), (Level.CRITICAL, 0.2, 1)], (0.2, 1)),
    "not what is back inside the limit while the rule still holds": (
        [(Level.CRITICAL, 1.1, 1), (Level.CRITICAL, 0.0, 1)],
        (1.1, 1),
    ),
    "a share of the limit counts, whatever the unit": ([(Level.WARN, 900, 600), (Level.WARN, 3, 1)], (3, 1)),
    "a limit of zero": ([(Level.WARN, 2, 0), (Level.WARN, 7, 0)], (7, 0)),
    "what is not finite is further than any number": ([(Level.WARN, 3, 1), (Level.WARN, np.nan, 1)], (np.nan, 1)),
}


@pytest.mark.parametrize("case", WORST)
@pytest.mark.parametrize("block", [1, 2, 9])
def test_an_alert_keeps_its_worst_record(case: str, block: int) -> None:
    records, worst = WORST[case]
    signals, _ = rows_of("o" * len(records))
    level, value, limit = (np.array(column) for column in zip(*records, strict=True))
    verdicts = Verdicts(level.astype(np.int8), value.astype(float), limit.astype(float), np.ones(len(level), np.int8))
    alert = Alert(check="toy")
    for start in range(0, len(records), block):
        rows = slice(start, start + block)
        alert, _ = advance(alert, CHECK, verdicts.take(rows), signals.take(rows), SHORT)
    assert alert.worst is not None
    np.testing.assert_array_equal((alert.worst.value, alert.worst.limit), worst)
    assert alert.worst.level == level.max()


def test_the_worst_record_is_of_the_newest_life() -> None:
    signals, verdicts = rows_of("ooccooooooooooow")
    alert, transitions = advance(Alert(check="toy"), CHECK, verdicts, signals, SHORT)
    assert [transition.alert.worst.value for transition in transitions] == [2, 3, 15]
    assert alert.worst.level is Level.WARN


def test_an_alert_stored_by_a_release_before_has_the_newest_record_as_its_worst() -> None:
    stored = Alert(check="toy", state=AlertState.FIRING, value=4.0, limit=1.0, message="bad").model_dump(mode="json")
    assert Alert.model_validate(stored | {"worst": 0}).worst is None
    worst = Alert.model_validate(stored | {"worst": 2}).worst
    assert worst == BadRecord(level=Level.CRITICAL, value=4.0, limit=1.0, message="bad")


def test_critical_since_begins_again_in_a_new_attempt_and_an_old_one_is_not_critical_now() -> None:
    signals, verdicts = rows_of("occ|ccc")
    alert, _ = advance(Alert(check="toy"), CHECK, verdicts, signals, SHORT)
    assert alert.critical_since.step == 3
    assert alert.critical_now
    signals, verdicts = rows_of("occ|u")
    alert, _ = advance(Alert(check="toy"), CHECK, verdicts, signals, SHORT)
    assert alert.state is AlertState.FIRING
    assert not alert.critical_now


def test_a_check_without_required_signals_resolves_by_records_but_not_by_ticks() -> None:
    check = Check("toy", CHECK.evaluate, Settings, (), (), CHECK.lookback, CHECK.messages)
    signals, verdicts = rows_of("coot")
    assert told(advance(Alert(check="toy"), check, verdicts, signals, SHORT)[1]) == "fired@0"
    signals, verdicts = rows_of("coo.")
    assert told(advance(Alert(check="toy"), check, verdicts, signals, SHORT)[1]) == "fired@0 resolved@3"


def test_a_run_that_is_down_inhibits_every_other_alert() -> None:
    alerts = {name: Alert(check=name, state=AlertState.FIRING) for name in ("progress", "throughput", "finite")}
    assert inhibited(alerts) == frozenset()
    alerts["progress"] = alerts["progress"].model_copy(update={"severity": Level.CRITICAL})
    assert inhibited(alerts) == {"throughput", "finite"}
    assert inhibited({}) == frozenset()


def test_alerts_survive_being_stored_as_json() -> None:
    signals, verdicts = rows_of("ouwc")
    alert, _ = advance(Alert(check="toy"), CHECK, verdicts, signals, SHORT)
    assert Alert.model_validate_json(alert.model_dump_json()) == alert
    fresh = Alert.model_validate_json(Alert(check="toy").model_dump_json())
    assert np.isnan(fresh.value)


def test_evaluations_are_rare_so_their_alert_does_not_wait_for_twenty() -> None:
    assert policy_of("eval_regression").keep_firing_records < policy_of("loss_spike").keep_firing_records == 20


class Reference:
    """The same machine, one row at a time, in the plainest words."""

    def __init__(self, policy: AlertPolicy) -> None:
        self.policy, self.state, self.severity = policy, "inactive", 0
        self.ok = self.calm = self.bad = self.flaps = self.lives = 0
        self.told: list[str] = []

    def row(self, number: int, level: int, fresh: bool, tick: bool) -> None:
        """Count the row, then see what it changes."""
        quiet, judged = self.ok, fresh and not tick
        if level >= Level.WARN:
            self.ok, self.bad = 0, self.bad + fresh
        elif level == Level.OK and judged:
            self.ok, self.bad = self.ok + 1, 0
        if level == Level.CRITICAL:
            self.calm = 0
        elif level != Level.UNKNOWN and judged:
            self.calm += 1
        if self.state == "inactive":
            self._inactive(number, level, quiet)
        elif self.state == "pending":
            self._pending(number, level, judged)
        else:
            self._firing(number, level, judged)

    def _tell(self, number: int, reason: str) -> None:
        self.told.append(f"{reason}@{number}")

    def _inactive(self, number: int, level: int, quiet: int) -> None:
        if level < Level.WARN:
            return
        self.flaps = self.flaps + 1 if self.lives and quiet < self.policy.flap_records else 0
        if self.policy.for_records == 1:
            self._fire(number, level)
        else:
            self.state = "pending"
            self._tell(number, "pending")

    def _fire(self, number: int, level: int) -> None:
        self.state, self.severity, self.lives = "firing", level, self.lives + 1
        self._tell(number, "fired")

    def _pending(self, number: int, level: int, judged: bool) -> None:
        if level >= Level.WARN and self.bad >= self.policy.for_records:
            self._fire(number, level)
        elif level == Level.OK and judged:
            self.state = "inactive"
            self._tell(number, "cancelled")

    def _firing(self, number: int, level: int, judged: bool) -> None:
        keep = self.policy.keep_firing_records * 2 ** min(self.flaps, self.policy.max_flaps)
        if level == Level.OK and judged and self.ok >= keep:
            self.state = "inactive"
            self._tell(number, "resolved")
        elif self.severity == Level.WARN and level == Level.CRITICAL:
            self.severity = Level.CRITICAL
            self._tell(number, "escalated")
        elif self.severity == Level.CRITICAL and judged and level != Level.UNKNOWN and self.calm >= keep:
            self.severity = Level.WARN
            self._tell(number, "eased")


policies = st.builds(
    AlertPolicy,
    for_records=st.integers(1, 4),
    keep_firing_records=st.integers(1, 4),
    flap_records=st.integers(0, 10),
    max_flaps=st.integers(0, 3),
)
stories = st.text(st.sampled_from("ooowcuCt.|"), max_size=60)


@given(stories, policies)
def test_the_block_machine_is_the_row_by_row_machine(story: str, policy: AlertPolicy) -> None:
    signals, verdicts = rows_of(story)
    _, transitions = advance(Alert(check="toy"), CHECK, verdicts, signals, policy)
    reference = Reference(policy)
    before = (Level.UNKNOWN, 0.0)
    for row in range(len(signals)):
        level = verdicts.level[row]
        fresh = bool(signals.columns["train/loss"].present[row]) or (level, verdicts.value[row]) != before or row == 0
        reference.row(row, level, fresh, bool(signals.tick[row]))
        before = (level, verdicts.value[row])
    assert told(transitions) == " ".join(reference.told)


@given(stories, policies, st.lists(st.integers(0, 60), max_size=5))
def test_blocks_of_any_length_give_the_same_alert(story: str, policy: AlertPolicy, cuts: list[int]) -> None:
    signals, verdicts = rows_of(story)
    whole, transitions = advance(Alert(check="toy"), CHECK, verdicts, signals, policy)
    alert, reasons, start = Alert(check="toy"), [], 0
    for stop in sorted({*(cut for cut in cuts if cut <= len(signals)), len(signals)}):
        rows = slice(start, stop)
        stored = Alert.model_validate_json(alert.model_dump_json())
        alert, found = advance(stored, CHECK, verdicts.take(rows), signals.take(rows), policy)
        reasons += [f"{t.reason}@{t.row + start}" for t in found]
        start = stop
    assert " ".join(reasons) == told(transitions)
    assert alert.model_dump_json() == whole.model_dump_json()


def test_400000_records_with_hundreds_of_incidents_take_a_fraction_of_a_second() -> None:
    rng = np.random.default_rng(0)
    letters = np.full(400_000, "o")
    for start in rng.integers(0, len(letters) - 200, 300):
        letters[start : start + rng.integers(1, 200)] = rng.choice(["w", "c"])
    signals, verdicts = rows_of("".join(letters))
    start = time.process_time()
    _, transitions = advance(Alert(check="toy"), CHECK, verdicts, signals, AlertPolicy())
    assert len(transitions) > 400
    assert time.process_time() - start < 1, "a generous multiple of the 60 ms that it takes"
