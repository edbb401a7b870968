"""The daemon: APScheduler jobs around the tick, the process's signals, and a liveness thread on the monotonic clock.

The scheduler runs on the wall clock and stands still for as long as a clock was set back; the liveness thread sees
that no tick has ended for too long and asks for one.
"""

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

from apscheduler.events import EVENT_JOB_ERROR, EVENT_JOB_MAX_INSTANCES, EVENT_JOB_MISSED, JobEvent
from apscheduler.executors.pool import ThreadPoolExecutor
from apscheduler.schedulers.background import BackgroundScheduler
from sqlalchemy.exc import SQLAlchemyError

from runwatch.monitor.act.approvals import DecisionError, decide
from runwatch.monitor.daemon.metrics import Counts
from runwatch.monitor.daemon.settings import DaemonConfig
from runwatch.monitor.daemon.watched_run import Watch
from runwatch.monitor.notify import Closable, Message, Notifier
from runwatch.monitor.notify.sender import Sender
from runwatch.monitor.show.digest import digest
from runwatch.monitor.store.store import Store

log = logging.getLogger(__name__)

STALE_SECONDS = 30.0
"""Without a finished tick for this long the daemon is not healthy (`/healthz`, the service manager's watchdog), and
without a good one it can not observe the run (`/readyz`, the dead-man signal)."""
LONGEST_TICK_SECONDS = 600.0
"""A tick that reads a whole run anew takes its time; one that takes longer than this is stuck."""
DEADMAN_MISSES = 3
"""Dead-man signals that may be missed before the Watchdog alert ends."""
STALLED_TICKS = 5
"""Ticks overdue before the liveness thread asks for one."""


class Daemon:
    """The jobs of one watched run. `clock` gives Unix seconds, `monotonic` seconds that only grow."""

    def __init__(
        self,
        watch: Watch,
        config: DaemonConfig,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.watch, self.config, self.counts = watch, config, Counts()
        self._clock, self._monotonic = clock, monotonic
        self._finished = self._observed = monotonic()
        self._busy = threading.Lock()
        self._stop = threading.Event()
        seats = {"default": ThreadPoolExecutor(2), "tick": ThreadPoolExecutor(1)}
        self._scheduler = BackgroundScheduler(timezone=UTC, executors=seats)
        self._senders: list[Sender] = []
        self._listening: list[Closable] = []

    @property
    def age(self) -> float:
        """Seconds since a tick last ended, well or not."""
        return self._monotonic() - self._finished

    @property
    def healthy(self) -> bool:
        """Whether the loop turns."""
        return self.age < self._stale_seconds or (self._busy.locked() and self.age < LONGEST_TICK_SECONDS)

    @property
    def ready(self) -> bool:
        """Whether the run can be observed, judged and paged about, and the state be written, as of the last tick."""
        observed = self.counts.ready and self._monotonic() - self._observed < self._stale_seconds
        return observed and not self.watch.unwell

    @property
    def _stale_seconds(self) -> float:
        return max(STALE_SECONDS, 3 * self.config.tick_seconds)

    def tick(self) -> bool:
        """One tick; whether it went well. A failed one is done again by the next."""
        with self._busy:
            began = self._monotonic()
            try:
                sentence = self.watch.tick(self._clock())
            except Exception as error:  # whatever happens, the next tick must come
                log.exception("the tick failed; the next one does the same again")
                self.counts.failures += 1
                self.counts.ready = False
                self.watch.conditions.put("tick", f"the last tick failed: {error}", self._clock())
                return False
            finally:
                self._finished = self._monotonic()
            self.watch.conditions.put("tick", None, self._clock())
            self._observed = self._finished
            self.counts.ready = True
            self.counts.ticked(self._finished - began, self._clock())
            if self.watch.last_tick is not None and self.watch.last_tick.messages:
                self._send_now()
            log.debug("tick: %s", sentence)
            return True

    def run(self) -> None:
        """Watch until SIGTERM or SIGINT, then end the tick that runs and stop."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._stop.set())
        self.start()
        notify_service_manager("READY=1")
        self._stop.wait()
        self.close()

    def start(self) -> None:
        """Start the jobs, what listens for decisions, and the liveness thread."""
        self._scheduler.add_listener(self._count, EVENT_JOB_ERROR | EVENT_JOB_MAX_INSTANCES | EVENT_JOB_MISSED)
        self._every(self.config.tick_seconds, "tick", self.tick, "tick")
        for name, notifier in self.watch.outbox.notifiers.items():
            self._add_sender(f"outbox:{name}", partial(self.send, name))
            self._listen(notifier)
        self._add_sender("delivery", self.direct)
        self._every(3600.0, "prune", self.watch.outbox.prune)
        self._every(min(60.0, self.config.digest_seconds), "digest", self.digest)
        self._every(self.config.deadman_seconds, "deadman", self.deadman)
        self._scheduler.start()
        threading.Thread(target=self._keep_alive, name="liveness", daemon=True).start()

    def close(self) -> None:
        """End what runs and let another daemon act."""
        self._stop.set()
        notify_service_manager("STOPPING=1")
        for one in (*self._senders, *self._listening):
            one.close()
        self._scheduler.shutdown(wait=True)
        for sender in self._senders:
            sender.join()
        try:
            with self.watch.store.transaction() as tx:
                tx.release_lease(self.watch.holder)
        except SQLAlchemyError as error:
            log.warning("the lease could not be given back; it expires by itself: %s", error)

    def _send_now(self) -> None:
        """What a tick has to send goes out at once and not at the sender's next turn: a second matters to a page."""
        for sender in self._senders:
            sender.wake()

    def _add_sender(self, name: str, deliver: Callable[[Callable[[], bool]], object]) -> None:
        """A seat of its own for what may hang."""
        self._senders.append(Sender(name, deliver, partial(self._count_error, name)))
        self._senders[-1].start()

    def send(self, name: str, stopped: Callable[[], bool] = lambda: False) -> None:
        """Send what is due to one receiver, while this daemon holds the lease."""
        if self.watch.acting:
            self.watch.outbox.deliver(name, lambda: stopped() or not self.watch.acting)

    def direct(self, stopped: Callable[[], bool] = lambda: False) -> None:
        """Deliver what is due to the trainer, while this daemon holds the lease."""
        if self.watch.acting:
            self.watch.delivery.deliver(lambda: stopped() or not self.watch.acting)

    def _every(self, seconds: float, name: str, job: Callable[[], Any], seat: str = "default") -> None:
        self._scheduler.add_job(
            job,
            "interval",
            seconds=seconds,
            id=name,
            executor=seat,
            next_run_time=datetime.now(UTC),
            coalesce=True,
            misfire_grace_time=None,
            max_instances=1,
        )

    def _listen(self, notifier: Notifier) -> None:
        if notifier.listen is not None:
            self._listening.append(notifier.listen(partial(_decide, self.watch.store)))

    def _count(self, event: JobEvent) -> None:
        if event.code == EVENT_JOB_ERROR:
            self._count_error(event.job_id)
            return
        with self.counts.lock:
            self.counts.job_missed[event.job_id] += 1

    def _count_error(self, name: str) -> None:
        with self.counts.lock:
            self.counts.job_errors[name] += 1

    def digest(self) -> None:
        """Put the digest of this interval into the outbox; the same interval has one."""
        status, now = self.watch.status, self._clock()
        if not self.watch.acting or status is None or not status["run"]["attempts"]:
            return
        expected = self.watch.expected_loss().get("loss")
        message = digest(status, expected, self.watch.links, now, int(now // self.config.digest_seconds))
        with self.watch.store.transaction() as tx:
            self.watch.outbox.put(tx, message)

    def deadman(self) -> None:
        """Say that the run can be observed, while that is so."""
        status, now = self.watch.status, self._clock()
        if not (self.ready and self.watch.acting) or status is None or status["run"]["time"] is None:
            return
        run = self.watch.run
        body = {"run": run, "observed": now, "until": now + DEADMAN_MISSES * self.config.deadman_seconds}
        key = f"{run}/deadman/{int(now // self.config.deadman_seconds)}"
        with self.watch.store.transaction() as tx:
            self.watch.outbox.put(tx, Message(key, "deadman", "deadman", run, now, body, f"{run} is observed."))

    def _keep_alive(self) -> None:
        while not self._stop.wait(1.0):
            if self.healthy:
                notify_service_manager("WATCHDOG=1")
            if self.age > STALLED_TICKS * self.config.tick_seconds and not self._busy.locked():
                log.warning("no tick for %.0f s (was the clock set back?); starting one now", self.age)
                self.postpone(0.0)

    def postpone(self, seconds: float) -> None:
        """Let every job start `seconds` from now, and then at its interval again; 0 starts all of them at once."""
        for job in self._scheduler.get_jobs():
            job.modify(next_run_time=datetime.now(UTC) + timedelta(seconds=seconds))


def _decide(store: Store, execution: str, approved: bool, by: str, reason: str) -> str:
    try:
        return decide(store, execution, approved=approved, by=by, reason=reason)
    except DecisionError as error:
        return str(error)
    except SQLAlchemyError as error:
        log.warning("a decision on %s could not be stored: %s", execution, error)
        return f"The decision was not stored: the daemon's database cannot be used ({error}). Try again."


def notify_service_manager(state: str) -> None:
    """Notify systemd, where it wants to be (sd_notify)."""
    path = os.environ.get("NOTIFY_SOCKET")
    if not path:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        try:
            channel.sendto(state.encode(), f"\0{path[1:]}" if path.startswith("@") else path)
        except OSError as error:
            log.warning("cannot tell the service manager: %s", error)
