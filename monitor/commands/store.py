"""The store of a run, as commands open it."""

from pathlib import Path

from runwatch.monitor.card.rulebook import run_name
from runwatch.monitor.commands.options import Failure
from runwatch.monitor.store.store import Store, StoreError, open_store, sqlite_url


def open_run(run_dir: Path, database: str | None) -> Store:
    """The store of a run.

    Raises:
        Failure: the database cannot be used.
    """
    try:
        return open_store(database or sqlite_url(run_dir), run_name(run_dir))
    except StoreError as error:
        raise Failure(str(error)) from error
