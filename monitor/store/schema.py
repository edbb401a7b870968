"""The tables of the daemon's database. Every row belongs to a run; what only rules understand is JSON in `body`."""

from typing import Any

import sqlalchemy as sql


class Words(sql.types.TypeDecorator[str]):
    """Free text, from people and from answers of servers: without NUL, which PostgreSQL does not store."""

    impl = sql.Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Any) -> str | None:  # noqa: ARG002  SQLAlchemy's signature
        """Replace every NUL."""
        return None if value is None else value.replace("\0", "\N{REPLACEMENT CHARACTER}")


TABLES = sql.MetaData()


def _run() -> sql.Column[str]:
    return sql.Column("run", sql.String, primary_key=True)


def _body() -> sql.Column[str]:
    return sql.Column("body", sql.Text, nullable=False)


VERSION = sql.Table(
    "schema_version",
    TABLES,
    sql.Column("version", sql.Integer, nullable=False),
    sql.Column("readable_by", sql.Integer, nullable=False),
)
"""One row: the version of these tables, and the oldest version whose release can still work on them (`migrations.py`)."""
CURSOR = sql.Table("cursor", TABLES, _run(), _body())
ALERTS = sql.Table("alerts", TABLES, _run(), sql.Column("check", sql.String, primary_key=True), _body())
INCIDENTS = sql.Table(
    "incidents",
    TABLES,
    _run(),
    sql.Column("id", sql.String, primary_key=True),
    sql.Column("open", sql.Boolean, nullable=False),
    sql.Column("opened", sql.Float, nullable=False),
    _body(),
)
EXECUTIONS = sql.Table(
    "executions",
    TABLES,
    _run(),
    sql.Column("id", sql.String, primary_key=True),
    sql.Column("ordinal", sql.Integer, nullable=False),
    sql.Column("state", sql.String, nullable=False),
    _body(),
)
DECISIONS = sql.Table(
    "decisions",
    TABLES,
    _run(),
    sql.Column("execution", sql.String, primary_key=True),
    sql.Column("approved", sql.Boolean, nullable=False),
    sql.Column("by", Words, nullable=False),
    sql.Column("reason", Words, nullable=False),
    sql.Column("time", sql.Float, nullable=False),
)
DECLARATIONS = sql.Table(
    "declarations",
    TABLES,
    sql.Column("id", sql.Integer, primary_key=True),
    sql.Column("run", sql.String, nullable=False),
    _body(),
)
SETTINGS = sql.Table(
    "settings",
    TABLES,
    _run(),
    sql.Column("name", sql.String, primary_key=True),
    sql.Column("value", sql.String, nullable=False),
)
AUDIT = sql.Table(
    "audit",
    TABLES,
    _run(),
    sql.Column("seq", sql.Integer, primary_key=True),
    sql.Column("time", sql.Float, nullable=False),
    sql.Column("kind", sql.String, nullable=False),
    sql.Column("payload", sql.Text, nullable=False),
    sql.Column("previous", sql.String, nullable=False),
    sql.Column("hash", sql.String, nullable=False),
)
OUTBOX = sql.Table(
    "outbox",
    TABLES,
    sql.Column("id", sql.Integer, primary_key=True),
    sql.Column("run", sql.String, nullable=False),
    sql.Column("notifier", sql.String, nullable=False),
    sql.Column("key", sql.String, nullable=False),
    sql.Column("kind", sql.String, nullable=False),
    sql.Column("subject", sql.String, nullable=False),
    sql.Column("created", sql.Float, nullable=False),
    sql.Column("deadline", sql.Float, nullable=False),
    sql.Column("due", sql.Float, nullable=False),
    sql.Column("attempts", sql.Integer, nullable=False),
    sql.Column("state", sql.String, nullable=False),  # pending, refused (waits too), sent, failed
    sql.Column("sent", sql.Float),
    sql.Column("error", Words),
    sql.Column("payload", sql.Text, nullable=False),
    sql.Column("text", Words, nullable=False),
    sql.UniqueConstraint("run", "notifier", "key"),
    sql.Index("outbox_waiting", "run", "notifier", "state", "due"),
)
REMEMBERED = sql.Table(
    "remembered",
    TABLES,
    _run(),
    sql.Column("notifier", sql.String, primary_key=True),
    sql.Column("subject", sql.String, primary_key=True),
    _body(),
)
LEASE = sql.Table(
    "lease",
    TABLES,
    _run(),
    sql.Column("holder", sql.String, nullable=False),
    sql.Column("expires", sql.Float, nullable=False),
)
