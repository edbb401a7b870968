"""A database of the release before goes on, one of a later release is read or refused with a sentence, and a bad row is set aside."""

import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import sqlalchemy as sql
from scripted import ScriptedTrainer

from runwatch.monitor.daemon.settings import DaemonConfig
from runwatch.monitor.daemon.watched_run import Watch
from runwatch.monitor.notify import Message, Notifier, Sent
from runwatch.monitor.notify.outbox import Outbox
from runwatch.monitor.store.migrations import NEWEST, version
from runwatch.monitor.store.schema import ALERTS, EXECUTIONS, INCIDENTS, VERSION
from runwatch.monitor.store.store import Store, StoreError, open_store, read_store, sqlite_url

SAMPLE = Path(__file__).parent / "samples" / "release-0.1.0.tar.gz"
"""A scripted run as release 0.1.0 left it at step 190: `ladder_deviation` fires, its plan is requested and not acknowledged,
and the only receiver had answered every message with 401."""
LAST_STEP = 190
OpenWatch = Callable[..., Watch]


@pytest.fixture
def before(tmp_path: Path) -> Path:
    """The run directory of the release before."""
    with tarfile.open(SAMPLE) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / "release-0.1.0"


def going_on(run_dir: Path) -> ScriptedTrainer:
    """The trainer of that run, which obeys from now on."""
    trainer = ScriptedTrainer(run_dir, step=LAST_STEP)
    trainer.clock += LAST_STEP
    return trainer


def test_an_incident_and_a_plan_of_the_release_before_go_on_to_their_end(before: Path) -> None:
    heard: list[Message] = []
    listener = Notifier("medium", frozenset({"incident_opened", "incident_updated", "incident_resolved", "plan_updated"}),
                        lambda message, remembered: heard.append(message) or Sent(remembered))  # fmt: skip
    trainer = going_on(before)
    store = open_store(sqlite_url(before), "x")
    watch = Watch(before, store, Outbox(store, {"medium": listener}, lambda: trainer.clock), DaemonConfig(), "test")
    for _ in range(60):
        trainer.train(10)
        watch.tick(trainer.clock)
    with watch.store.transaction() as tx:
        [execution] = tx.executions()
        incidents = {one.id: one.state for one in tx.incidents()}
        assert not tx.unreadable
    assert (execution.id, execution.state) == ("early_divergence-0001", "verified")
    assert incidents["ladder_deviation-0001"] == "resolved"
    watch.outbox.deliver("medium")
    assert "ladder_deviation-0001" in {message.subject for message in heard}, "what 0.1.0 gave up is sent after all"
    store.close()


def test_a_database_of_the_release_before_is_read_without_a_change(before: Path) -> None:
    file = before / ".runwatch" / "state.db"
    content = file.read_bytes()
    store = read_store(sqlite_url(before), "x")
    with store.transaction() as tx:
        assert (store.run, tx.watched, len(tx.executions())) == ("scripted", True, 1)
    store.close()
    assert file.read_bytes() == content
    assert sorted(path.name for path in file.parent.iterdir()) == ["audit.jsonl", "state.db"]


def test_it_becomes_the_newest_version_once(before: Path) -> None:
    for _ in range(2):
        store = open_store(sqlite_url(before), "x")
        with store.engine.begin() as connection:
            assert version(connection) == (NEWEST, 1)
        store.close()


def test_a_new_database_has_the_newest_version(store: Store) -> None:
    with store.engine.begin() as connection:
        assert version(connection) == (NEWEST, 1)


def _of_release(store: Store, number: int, readable_by: int) -> None:
    with store.engine.begin() as connection:
        connection.execute(sql.update(VERSION).values(version=number, readable_by=readable_by))


def test_a_database_of_a_later_release_that_allows_it_is_used_and_keeps_its_version(store: Store) -> None:
    url = store.engine.url.render_as_string(hide_password=False)
    _of_release(store, NEWEST + 1, NEWEST)
    again = open_store(url, "scripted")
    with again.engine.begin() as connection:
        assert version(connection) == (NEWEST + 1, NEWEST)
    again.close()


@pytest.mark.parametrize("opening", [open_store, read_store])
def test_one_that_does_not_is_refused_with_both_versions(store: Store, opening: Callable[[str, str], Store]) -> None:
    url = store.engine.url.render_as_string(hide_password=False)
    _of_release(store, NEWEST + 9, NEWEST + 8)
    with pytest.raises(StoreError, match=f"version {NEWEST + 9} and needs a release that knows version {NEWEST + 8}"):
        opening(url, "scripted")


def test_what_a_later_release_added_to_stored_records_is_left_out(before: Path) -> None:
    store = open_store(sqlite_url(before), "x")
    with store.engine.begin() as connection:
        for table in (ALERTS, EXECUTIONS, INCIDENTS):
            added = sql.literal('{"of_tomorrow": 1, ') + sql.func.substr(table.c.body, 2)
            connection.execute(sql.update(table).values(body=added))
    with store.transaction() as tx:
        state = tx.load()
        assert (len(state.alerts), len(state.executions), len(tx.incidents())) == (12, 1, 2)
    store.close()


@pytest.mark.parametrize("table", [ALERTS, INCIDENTS], ids=lambda table: table.name)
def test_a_row_that_cannot_be_read_is_set_aside_named_and_the_rest_goes_on(
    before: Path, open_watch: OpenWatch, table: sql.Table
) -> None:
    store = open_store(sqlite_url(before), "x")
    with store.engine.begin() as connection:
        connection.execute(sql.update(table).values(body='{"check": []'))
    store.close()
    watch = open_watch(before)
    trainer = going_on(before)
    trainer.train(5)
    watch.tick(trainer.clock)
    [condition] = [one for one in watch.conditions.listed() if one["kind"] == "stored rows"]
    assert table.name in condition["message"]
    trainer.train(5)
    watch.tick(trainer.clock)
    assert watch.judge.context.step[-1] == LAST_STEP + 10


def test_a_plan_that_cannot_be_read_is_taken_up_again_from_its_directive(before: Path, open_watch: OpenWatch) -> None:
    store = open_store(sqlite_url(before), "x")
    with store.engine.begin() as connection:
        connection.execute(sql.update(EXECUTIONS).values(body="[]"))
    store.close()
    watch = open_watch(before)
    watch.tick(going_on(before).clock)
    with watch.store.transaction() as tx:
        assert [(one.id, one.state) for one in tx.executions()] == [("early_divergence-0001", "requested")]
