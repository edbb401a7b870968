"""A thread for one receiver, so that a receiver that hangs keeps nobody waiting: not the tick, not the other receivers."""

import logging
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)

PAUSE_SECONDS = 1.0
CLOSE_SECONDS = 2.0
"""What a message that is being sent may still take at the end; then it is left, and the next daemon sends it again."""


class Sender:
    """Calls `deliver(stopped)` every second and whenever it is woken, until closed.

    The thread is a daemon thread: one that hangs in a send does not keep the process from ending.
    """

    def __init__(self, name: str, deliver: Callable[[Callable[[], bool]], object], failed: Callable[[], None]) -> None:
        self._deliver, self._failed = deliver, failed
        self._wanted, self._stop = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def wake(self) -> None:
        """There is something to send now."""
        self._wanted.set()

    def close(self) -> None:
        """Send nothing more; what is on its way may end."""
        self._stop.set()
        self._wanted.set()

    def join(self) -> None:
        """Wait, for a moment, until it has ended."""
        self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        while not self._stop.is_set():
            self._wanted.clear()
            try:
                self._deliver(self._stop.is_set)
            except Exception:  # whatever one delivery meets, the next one must come
                log.exception("%s could not deliver; it tries again", self._thread.name)
                self._failed()
            self._wanted.wait(PAUSE_SECONDS)
