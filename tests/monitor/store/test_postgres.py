"""The daemon's state on a real PostgreSQL: one writer a run, one acting daemon, and what happens when either side goes."""

import json
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from http_collector import Collector
from postgres import PostgresServer
from processes import DaemonProcess, training, wait_for
from scripted import ScriptedTrainer
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError

from runwatch.monitor.notify import Message, Notifier, Sent
from runwatch.monitor.notify.outbox import Outbox
from runwatch.monitor.store.audit import broken
from runwatch.monitor.store.store import Store, StoreError, open_store
from runwatch.rules import Decision

pytestmark = pytest.mark.slow
OpenStore = Callable[..., Store]


@pytest.fixture
def opened(request: pytest.FixtureRequest) -> OpenStore:
    """Opens stores; what it opened is closed after the test."""

    def open_one(url: str, run: str = "scripted") -> Store:
        store = open_store(url, run)
        request.addfinalizer(store.close)
        return store

    return open_one


def test_many_daemons_may_open_an_empty_database_at_once(postgres: PostgresServer, opened: OpenStore) -> None:
    url = postgres.database()
    with ThreadPoolExecutor(8) as pool:
        stores = list(pool.map(lambda number: opened(url, f"run-{number}"), range(8)))
    for store in stores:
        with store.transaction() as tx:
            tx.audit("test", {"run": store.run})
        with store.transaction() as tx:
            assert [json.loads(row.payload)["run"] for row in tx.audit_rows()] == [store.run]


def test_writers_of_one_run_take_turns_so_that_its_audit_chain_is_whole(
    postgres: PostgresServer, opened: OpenStore
) -> None:
    url = postgres.database()
    stores = [opened(url) for _ in range(4)]

    def write(store: Store) -> None:
        for number in range(20):
            with store.transaction() as tx:
                tx.audit("test", {"number": number})

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, stores))
    with stores[0].transaction() as tx:
        rows = tx.audit_rows()
    assert (len(rows), broken(rows)) == (80, None)


def test_of_many_who_decide_at_once_one_is_heard(postgres: PostgresServer, opened: OpenStore) -> None:
    url = postgres.database()

    def decide(number: int) -> bool:
        with opened(url).transaction() as tx:
            return tx.decide("plan-0001", Decision(approved=True, by=f"{number}\0", reason="why\0not", time=1.0))

    with ThreadPoolExecutor(6) as pool:
        assert sorted(pool.map(decide, range(6))) == [False] * 5 + [True]


def test_a_message_goes_out_once_though_two_daemons_deliver(postgres: PostgresServer, opened: OpenStore) -> None:
    url, heard = postgres.database(), Counter[str]()

    def send(message: Message, _: dict[str, Any]) -> Sent:
        heard[message.key] += 1
        return Sent({})

    notifier = Notifier("pager", frozenset({"incident_opened"}), send)
    boxes = [Outbox(opened(url), {"pager": notifier}) for _ in range(2)]
    with boxes[0].store.transaction() as tx:
        for number in range(30):
            key = f"k{number}"
            boxes[0].put(tx, Message(key, "incident_opened", key, "scripted", time.time(), {}, key))
    with ThreadPoolExecutor(2) as pool:
        assert sum(pool.map(lambda box: box.deliver("pager"), boxes)) == 30
    assert set(heard.values()) == {1}


def test_who_stands_still_inside_a_transaction_loses_its_turn(postgres: PostgresServer, opened: OpenStore) -> None:
    url = postgres.database("&options=-c%20idle_in_transaction_session_timeout%3D1s")
    frozen, other = opened(url), opened(url)
    stands, thawed = threading.Event(), threading.Event()

    def freeze() -> None:
        with frozen.transaction() as tx:
            tx.put_setting("name", "of the frozen one")
            stands.set()
            thawed.wait()

    with ThreadPoolExecutor(1) as pool:
        freezing = pool.submit(freeze)
        stands.wait()
        with other.transaction() as tx:
            assert tx.setting("name", "none") == "none"
            tx.put_setting("name", "of the other")
        thawed.set()
        with pytest.raises(DBAPIError):
            freezing.result()


def test_the_lease_is_judged_by_the_servers_clock(postgres: PostgresServer, opened: OpenStore) -> None:
    store = opened(postgres.database())
    with store.transaction() as tx:
        assert tx.take_lease("fast clock", tx.clock(1e12), 30.0)
    with store.transaction() as tx:
        assert not tx.take_lease("slow clock", tx.clock(0.0), 30.0)
        assert tx.take_lease("later", tx.clock(0.0) + 31, 30.0)


def test_a_server_that_was_started_again_is_used_again(opened: OpenStore, postgres: PostgresServer) -> None:
    store = opened(postgres.database())
    postgres.stop()
    with pytest.raises(OperationalError), store.transaction():
        pass
    postgres.start()
    with store.transaction() as tx:
        tx.audit("test", {})
    with pytest.raises(IntegrityError, match="append-only"), store.transaction() as tx:
        tx.connection.exec_driver_sql("TRUNCATE audit")


WRONG = {
    "nowhere": ("postgresql://nobody@127.0.0.1:9/none", "cannot use the database postgresql.*refused"),
    "no such database": ("postgresql://runwatch@/none?host={folder}", 'database "none" does not exist'),
    "a password that stays secret": ("postgresql://u:sesame@127.0.0.1:9/none", r"u:\*\*\*@"),
    "no URL": ("somewhere", "write postgresql://USER@HOST/NAME"),
    "an unknown driver": ("oracle+nothing://x", "URL cannot be used"),
    "a driver that is not installed": ("mysql+pymysql://x/y", "No module named 'pymysql'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_database_that_cannot_be_used_is_told_with_its_place(case: str, postgres: PostgresServer) -> None:
    url, says = WRONG[case]
    with pytest.raises(StoreError, match=says):
        open_store(url.format(folder=postgres.folder), "run")


def test_a_standby_takes_over_from_a_daemon_killed_in_the_middle_of_a_plan(
    trainer: ScriptedTrainer, postgres: PostgresServer, opened: OpenStore, collector: Collector
) -> None:
    url = postgres.database()
    settings = {"database": url, "notify": [{"kind": "webhook", "url": f"{collector.url}/hook"}]}
    store = opened(url)

    def states() -> list[str]:
        with store.transaction() as tx:
            return [one.state.value for one in tx.executions()]

    with training(trainer, fault=60), DaemonProcess(trainer.run_dir, "first", **settings) as first:
        wait_for("the first acts", lambda: first.readiness() == 200)
        with DaemonProcess(trainer.run_dir, "second", **settings) as second:
            wait_for("the second stands by", lambda: second.holds("another daemon holds the lease"))
            wait_for("a plan", states)
            first.end(signal.SIGKILL)
            wait_for("the second acts", lambda: not second.holds("another daemon holds the lease"))
            wait_for("the plan is verified", lambda: states() == ["verified"])
            wait_for("the last word is told", lambda: "verified" in _told(collector))
    with store.transaction() as tx:
        assert broken(tx.audit_rows()) is None
    requests = [path.name for path in (trainer.run_dir / "control" / "requests").iterdir()]
    assert requests == ["early_divergence-0001.json"]
    # At least once, under one key: who was killed between sending and recording has told one message a second time.
    keys = Counter(request.headers["Idempotency-Key"] for request in collector.requests)
    assert max(keys.values()) <= 2
    assert sum(count - 1 for count in keys.values()) <= 1


def _told(collector: Collector) -> list[str]:
    return [json.loads(request.body)["payload"].get("state", "") for request in list(collector.requests)]
