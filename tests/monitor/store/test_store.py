"""The database: transactions, the lease, the append-only audit chain and its mirror, a damaged file."""

import json
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError

from runwatch.monitor.store.audit import GENESIS, AuditRow, append, broken, chained, mirrored, read_mirror
from runwatch.monitor.store.store import Store, StoreError, Transaction, open_store, sqlite_url

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


def rows_of(payloads: list[dict[str, object]]) -> list[AuditRow]:
    rows: list[AuditRow] = []
    for seq, payload in enumerate(payloads, 1):
        rows.append(chained(seq, 1.79e9 + seq / 3, "test", payload, rows[-1].hash if rows else GENESIS))
    return rows


@given(st.lists(st.dictionaries(st.text(), JSON, max_size=3), max_size=4))
def test_a_chain_is_whole_and_its_mirror_reads_back_the_same(payloads: list[dict[str, object]]) -> None:
    rows = rows_of(payloads)
    assert broken(rows) is None
    assert [AuditRow.of_line(row.line()) for row in rows] == rows


TAMPERED: dict[str, Callable[[list[AuditRow]], list[AuditRow]]] = {
    "row 2 (test) was changed": lambda rows: [rows[0], replace(rows[1], payload='{"by":"eve"}'), rows[2]],
    "row 2 (test) was changed: its hash": lambda rows: [rows[0], replace(rows[1], time=0.0), rows[2]],
    "row 2 is missing": lambda rows: [rows[0], rows[2]],
    "row 1 is missing": lambda rows: rows[1:],
    "row 3 does not follow row 2": lambda rows: [
        rows[0],
        chained(2, rows[1].time, "test", {"by": "eve"}, rows[0].hash),
        rows[2],
    ],
}


@pytest.mark.parametrize("told", TAMPERED)
def test_whoever_tampers_with_the_chain_is_found(told: str) -> None:
    rows = rows_of([{"n": n} for n in range(3)])
    assert told in str(broken(TAMPERED[told](rows)))


def test_a_torn_mirror_is_cut_to_whole_lines_and_goes_on(tmp_path: Path) -> None:
    rows, path = rows_of([{"n": n} for n in range(3)]), tmp_path / "audit.jsonl"
    assert mirrored(path) == 0
    append(path, rows[:2])
    with path.open("a") as file:
        file.write(rows[2].line()[:20])
    assert read_mirror(path) == rows[:2]
    assert mirrored(path) == 2
    append(path, rows[2:])
    assert read_mirror(path) == rows


def test_the_database_itself_refuses_to_change_or_delete_an_audit_row(store: Store) -> None:
    with store.transaction() as tx:
        tx.audit("test", {"sentence": "first"})
    for statement in ("UPDATE audit SET kind = 'other'", "DELETE FROM audit"):
        with pytest.raises(IntegrityError, match="append-only"), store.transaction() as tx:
            tx.connection.execute(text(statement))


def test_a_transaction_that_fails_leaves_nothing(store: Store) -> None:
    def fail(tx: Transaction) -> None:
        tx.put_setting("name", "value")
        tx.audit("test", {})
        raise KeyError

    with pytest.raises(KeyError), store.transaction() as tx:
        fail(tx)
    with store.transaction() as tx:
        assert tx.setting("name", "none") == "none"
        assert tx.audit_rows() == []


def test_the_lease_is_one_daemons_until_it_expires_or_is_given_back(store: Store) -> None:
    with store.transaction() as tx:
        assert tx.take_lease("a", 100.0, 30.0)
        assert tx.take_lease("a", 120.0, 30.0)
        assert not tx.take_lease("b", 149.0, 30.0)
        assert tx.take_lease("b", 151.0, 30.0)
        assert not tx.take_lease("a", 152.0, 30.0)
        tx.release_lease("b")
        assert tx.take_lease("a", 153.0, 30.0)


def test_a_run_keeps_its_rows_when_its_card_is_renamed(tmp_path: Path) -> None:
    first = open_store(sqlite_url(tmp_path), "before")
    with first.transaction() as tx:
        tx.audit("test", {})
    first.close()
    second = open_store(sqlite_url(tmp_path), "after")
    assert second.run == "before"
    second.close()


def test_two_runs_share_a_database_without_seeing_each_other(tmp_path: Path) -> None:
    stores = [open_store(f"sqlite:///{tmp_path / 'fleet.db'}", name) for name in ("one", "two")]
    for store in stores:
        with store.transaction() as tx:
            tx.put_setting("plans_enabled", store.run)
            tx.audit("test", {"run": store.run})
    for store in stores:
        with store.transaction() as tx:
            assert tx.setting("plans_enabled", "") == store.run
            assert [json.loads(row.payload)["run"] for row in tx.audit_rows()] == [store.run]
        store.close()


@pytest.mark.parametrize("damage", ["text", "page"])
def test_a_damaged_database_is_told_with_its_remedy(damage: str, tmp_path: Path) -> None:
    path = tmp_path / ".runwatch" / "state.db"
    path.parent.mkdir()
    if damage == "text":
        path.write_text("this is no database, but it is longer than a header of a hundred bytes would be" * 3)
    else:
        with sqlite3.connect(path) as connection:
            connection.execute("CREATE TABLE filler (x)")
            connection.executemany("INSERT INTO filler VALUES (?)", [("x" * 500,)] * 200)
        connection.close()
        with path.open("r+b") as file:
            file.seek(4096 * 3)
            file.write(b"\xff" * 4096)
    with pytest.raises(StoreError, match=r"state\.db is damaged .*move it aside"):
        open_store(sqlite_url(tmp_path), "run")


def test_a_directory_that_cannot_be_made_is_told_with_its_remedy(tmp_path: Path) -> None:
    (tmp_path / ".runwatch").write_text("in the way")
    with pytest.raises(StoreError, match="make the run directory writable"):
        open_store(sqlite_url(tmp_path), "run")
