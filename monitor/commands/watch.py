"""`runwatch watch`: puts the daemon together (settings, database, notifiers, web server) and runs it."""

import logging
import sys
import time
from pathlib import Path

import click

from runwatch.monitor.commands.options import EXITS, UNAVAILABLE, USAGE, Failure, run_dir_argument
from runwatch.monitor.commands.store import open_run
from runwatch.monitor.daemon.jobs import Daemon
from runwatch.monitor.daemon.service import notifiers, settings
from runwatch.monitor.daemon.settings import ConfigError, DaemonConfig
from runwatch.monitor.daemon.watched_run import Watch
from runwatch.monitor.daemon.web import WebServer
from runwatch.monitor.notify.outbox import Outbox
from runwatch.monitor.store.lease import this_process

log = logging.getLogger("runwatch")


@click.command()
@run_dir_argument
@click.option("--listen", metavar="HOST:PORT", help="Where to serve metrics and the status page [127.0.0.1:9464].")
@click.option("--config", "config_file", type=click.Path(path_type=Path), help="Settings [RUN_DIR/runwatch.yaml].")
@click.option("--database", metavar="URL", help="SQLAlchemy URL [RUN_DIR/.runwatch/state.db].")
@click.option("--once", is_flag=True, help="Run one tick, then exit with 0, 1 or 2 by the run's health.")
@click.option("--verbose", is_flag=True, help="Log every tick.")
def watch(
    run_dir: Path, listen: str | None, config_file: Path | None, database: str | None, once: bool, verbose: bool
) -> None:
    """Watch the run in RUN_DIR until SIGTERM, or for one tick."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("runwatch").setLevel(logging.DEBUG if verbose else logging.INFO)
    for name in ("apscheduler", "httpx", "httpcore"):  # httpx logs whole addresses, and those of webhooks are secrets
        logging.getLogger(name).setLevel(logging.WARNING)
    config = _settings(run_dir, config_file, listen, database)
    store = open_run(run_dir, config.database)
    daemon = Daemon(Watch(run_dir, store, Outbox(store, notifiers(config)), config, this_process()), config)
    try:
        sys.exit(_once(daemon) if once else _until_told(daemon, config))
    finally:
        store.close()


def _once(daemon: Daemon) -> int:
    if not daemon.tick():
        raise Failure(f"the tick failed; see the log above ({daemon.watch.run_dir})", UNAVAILABLE)
    with daemon.watch.store.transaction() as tx:
        tx.release_lease(daemon.watch.holder)
    return health(daemon)


def health(daemon: Daemon) -> int:
    """The exit code for the health of the run."""
    return EXITS[daemon.watch.status["health"]] if daemon.watch.status else EXITS["degraded"]


def _until_told(daemon: Daemon, config: DaemonConfig) -> int:
    try:
        server = WebServer(daemon, config.listen)
    except OSError as error:
        raise Failure(
            f"cannot listen on {config.listen}: {error.strerror}; try --listen 127.0.0.1:0", UNAVAILABLE
        ) from error
    with daemon.watch.store.transaction() as tx:
        tx.audit("daemon", {"sentence": f"The daemon started ({daemon.watch.holder.partition('/')[0]})."}, time.time())
    server.start()
    log.info("watching %s as %s; status page on port %d", daemon.watch.run_dir, daemon.watch.run, server.port)
    try:
        daemon.run()
    finally:
        server.close()
    log.info("stopped")
    return 0


def _settings(run_dir: Path, config_file: Path | None, listen: str | None, database: str | None) -> DaemonConfig:
    if not run_dir.is_dir():
        raise Failure(f"{run_dir} is not a directory; give the run's directory (docs/run-directory.md)", USAGE)
    try:
        return settings(run_dir, config_file, listen, database)
    except (ConfigError, ValueError) as error:
        raise Failure(str(error)) from error
