"""A directive to a trainer that reads no files: by webhook or by command, as the run card's `execution` says.

The file in `control/requests/` is written whatever the card says. What is to be delivered is stored with the tick that
requested it and goes through the outbox: tried again with backoff until the directive expires, also by the daemon that comes
after one that was killed. The directive's id is the idempotency key. That one was delivered, or could not be, is in the audit log; a
person is paged as soon as another attempt is pointless.
"""

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import httpx
import orjson

from runwatch.monitor.act.run_once import NOT_STARTED, CutOffError, StillRunsError, run_once
from runwatch.monitor.card.run_card import Card
from runwatch.monitor.card.run_card import Execution as Way
from runwatch.monitor.engine.messages import plan_payload
from runwatch.monitor.notify import Message, Notifier, SendError, Sent, take_secret
from runwatch.monitor.notify.outbox import Outbox
from runwatch.monitor.notify.post import post
from runwatch.monitor.notify.webhook import signature
from runwatch.monitor.store.store import Store, Transaction
from runwatch.rules import Execution, ExecutionState

log = logging.getLogger(__name__)

NAME = "trainer"
RESTART_SECONDS = 50.0
"""What a restart command may take; shorter than the outbox's claim on a message."""


class Delivery:
    """What is on its way to the trainer of one run. `people` is the outbox that pages a person."""

    def __init__(
        self,
        run_dir: Path,
        store: Store,
        people: Outbox,
        card: Callable[[], Card | None],
        links: Callable[[], Mapping[str, str]],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._run_dir, self._store, self._people, self._card, self._links = run_dir, store, people, card, links
        notifier = Notifier(NAME, frozenset({"directive"}), self._send)
        self._outbox = Outbox(store, {NAME: notifier}, clock)

    def put(self, tx: Transaction, executions: Iterable[Execution], now: float) -> None:
        """Keep, once, what waits for the trainer and does not reach it as a file."""
        for one in executions:
            if one.state is ExecutionState.REQUESTED and one.requested and (one.command or self._way.kind != "files"):
                body = {
                    "expires": one.requested.time + one.ack_seconds,
                    "directive": one.directive.document() if one.actions else None,
                    "command": list(one.command),
                }
                self._outbox.put(tx, Message(one.id, "directive", one.id, tx.run, now, body, one.evidence))

    def deliver(self, stopped: Callable[[], bool] = lambda: False) -> int:
        """Deliver what is due, until `stopped`; how many directives went out."""
        return self._outbox.deliver(NAME, stopped)

    @property
    def _way(self) -> Way:
        card = self._card()
        return card.execution if card else Way()

    def _send(self, message: Message, remembered: dict[str, Any]) -> Sent:
        try:
            how = self._handed_over(message)
        except SendError as error:
            self._tell(message, error)
            raise
        if how:
            self._audit(message, f"{message.key} was delivered {how} (attempt {message.attempt}).")
        return Sent(remembered)

    def _handed_over(self, message: Message) -> str:
        """Hand the directive over, and say how; nothing where the trainer has answered already.

        Raises:
            SendError: it did not reach the trainer.
        """
        body, way = message.payload, self._way
        if (self._run_dir / "control" / "receipts" / f"{message.key}.json").exists():
            return ""
        if message.time > body["expires"]:
            raise SendError("it has expired", permanent=True)
        if body["command"]:
            return self._by_command(message, body["command"], RESTART_SECONDS)
        if way.kind == "webhook" and way.url is not None:
            return self._by_webhook(message, way, way.url)
        if way.kind == "command":
            return self._by_command(message, way.argv, way.timeout_seconds)
        return "as a file: the run card was changed"

    def _by_webhook(self, message: Message, way: Way, url: str) -> str:
        content = orjson.dumps(message.payload["directive"])
        try:
            secret = str(take_secret({"secret_file": way.secret_file, "secret_env": way.secret_env}, "secret"))
        except ValueError as error:
            raise SendError(f"execution.{error}") from error
        headers = {
            "Content-Type": "application/json",
            "Idempotency-Key": message.key,
            "X-Runwatch-Run": message.run,
            "X-Runwatch-Signature": signature(secret, content, int(message.time)),
        }
        post(url, content, headers=headers, timeout=way.timeout_seconds)
        return f"to {httpx.URL(url).host}"

    def _by_command(self, message: Message, argv: Iterable[str], timeout: float) -> str:
        argv = list(argv)
        state = self._run_dir / ".runwatch" / "deliveries" / f"{message.key}.json"
        env = {"RUNWATCH_DIRECTIVE": message.key, "RUNWATCH_RUN_DIR": os.fspath(self._run_dir.resolve())}
        given = orjson.dumps(message.payload["directive"])
        try:
            ended = run_once(state, argv, given, timeout=timeout, cwd=self._run_dir, env=env)
        except StillRunsError as error:
            raise SendError(f"{argv[0]} is still running") from error
        except CutOffError as error:
            raise SendError(f"{argv[0]} was cut off; check what it has done", permanent=True) from error
        if ended.code:
            never = ended.code == NOT_STARTED
            raise SendError(f"{argv[0]} exited with {ended.code}: {ended.output}", permanent=never)
        return f"by {argv[0]}"

    def _tell(self, message: Message, error: SendError) -> None:
        """Record the first failure and the last one; the last one pages a person."""
        if error.permanent:
            sentence = f"{message.key} could not be delivered: {error}. "
            sentence += "No further attempts will be made; deliver it manually."
            self._audit(message, sentence, call=True)
        elif message.attempt == 1:
            self._audit(message, f"{message.key} could not be delivered yet: {error}. Further attempts follow.")

    def _audit(self, message: Message, sentence: str, *, call: bool = False) -> None:
        log.log(logging.WARNING if call else logging.INFO, "%s", sentence)
        with self._store.transaction() as tx:
            tx.audit("delivery", {"sentence": sentence, "execution": message.key}, message.time)
            found = [one for one in tx.executions() if one.id == message.key]
            if call and found:
                body = plan_payload(tx.run, str(self._run_dir), self._links(), found[0])
                told = {**body, "severity": "critical", "summary": sentence}
                key = f"{tx.run}/{message.key}/undelivered"
                text = f"{tx.run}: {sentence}\nEvidence: {body['evidence']}"
                self._people.put(tx, Message(key, "plan_updated", message.key, tx.run, message.time, told, text))
