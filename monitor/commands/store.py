"""The store of a run, as commands open it."""

from collections.abc import Callable
from pathlib import Path

from runwatch.monitor.card.rulebook import run_name
from runwatch.monitor.commands.options import UNAVAILABLE, USAGE, Failure
from runwatch.monitor.store.store import Store, StoreError, open_store, read_store, sqlite_url


def open_run(run_dir: Path, database: str | None) -> Store:
    """The store of a run, to write down what a person decided; it is created where there is none.

    Raises:
        Failure: there is no such run, or the database cannot be used.
    """
    return _opened(open_store, run_dir, database)


def read_run(run_dir: Path, database: str | None) -> Store:
    """The store of a run, to read: nothing is created or changed, and no write access is needed.

    Raises:
        Failure: there is no such run, no daemon has watched it, or the database cannot be read.
    """
    return _opened(read_store, run_dir, database)


def _opened(how: Callable[[str, str], Store], run_dir: Path, database: str | None) -> Store:
    if not run_dir.is_dir():
        raise Failure(f"{run_dir} is not a directory", USAGE)
    try:
        return how(database or sqlite_url(run_dir), run_name(run_dir))
    except StoreError as error:
        raise Failure(str(error), UNAVAILABLE) from error
