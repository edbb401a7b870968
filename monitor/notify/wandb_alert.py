"""`run.alert` on the run that the trainer has open in W&B.

The alert is sent by a short-lived process: importing wandb costs 64 MB and its service 40 MB, which the daemon does not
keep, and a wandb that hangs cannot hold the outbox. It joins the run in W&B's shared mode as a writer that is not the
primary one, so the trainer's own run goes on undisturbed and is not marked as finished.
"""

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import orjson

from runwatch.monitor.notify import Kind, Message, Notifier, SendError, Sent, WandbConfig

KINDS: frozenset[Kind] = frozenset({"incident_opened", "incident_updated", "incident_resolved", "plan_proposed"})
LEVELS = {"critical": "ERROR", "warning": "WARN"}
START_SECONDS = 30.0
"""On top of the timeout of the call itself: import and start take two to four seconds on a free machine."""


def connect(config: WandbConfig) -> Notifier:
    """The notifier for one run.

    Raises:
        ValueError: if wandb (extra `wandb`) is not installed.
    """
    if find_spec("wandb") is None:
        raise ValueError("notify: kind wandb needs the extra: pip install 'runwatch[wandb]'")
    return Notifier(
        name=config.name or config.kind,
        kinds=KINDS if config.kinds is None else frozenset(config.kinds),
        send=Wandb(config).send,
    )


@dataclass(frozen=True)
class Wandb:
    """One run of one project."""

    config: WandbConfig

    def send(self, message: Message, remembered: dict[str, Any]) -> Sent:
        """Raise the alert; an update of the same severity is none, since W&B cannot edit an alert. Remembered: severity.

        Raises:
            SendError: if it did not get through in time.
        """
        told = {"severity": message.payload["severity"]}
        if message.kind == "incident_updated" and remembered == told:
            return Sent(remembered)
        command = [sys.executable, "-P", "-m", __name__]
        order = orjson.dumps(self._order(message))
        wait = START_SECONDS + self.config.timeout_seconds
        try:
            ran = subprocess.run(  # noqa: S603  our own interpreter and module; the message goes by standard input
                command, input=order, env=self._environment(), capture_output=True, timeout=wait, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise SendError(f"W&B did not take the alert within {wait:.0f} s") from error
        if ran.returncode:
            lines = ran.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
            raise SendError(f"W&B: {lines[-1]}")
        return Sent(told)

    def _order(self, message: Message) -> dict[str, Any]:
        payload = message.payload
        subject = payload.get("check") or payload["plan"]
        state = "resolved" if message.kind == "incident_resolved" else payload["severity"]
        return {
            "project": self.config.project,
            "entity": self.config.entity,
            "id": self.config.run_id,
            "title": f"{message.run}: {subject} {state}",
            "text": message.text,
            "level": LEVELS.get(state, "INFO"),
            "timeout": self.config.timeout_seconds,
        }

    def _environment(self) -> dict[str, str]:
        given = {
            "WANDB_API_KEY": None if self.config.api_key is None else self.config.api_key.get_secret_value(),
            "WANDB_BASE_URL": self.config.base_url,
        }
        return {**os.environ, **{name: value for name, value in given.items() if value is not None}}


def alert(order: dict[str, Any]) -> None:
    """Join the run, raise the alert, leave."""
    import wandb  # noqa: PLC0415  only in the short-lived process

    with tempfile.TemporaryDirectory() as folder:
        settings = wandb.Settings(
            mode="shared",
            x_primary=False,
            x_label="runwatch",
            x_update_finish_state=False,
            init_timeout=order["timeout"],
            console="off",
            silent=True,
            disable_git=True,
            save_code=False,
            x_disable_stats=True,
            x_disable_meta=True,
            root_dir=folder,
        )
        run = wandb.init(project=order["project"], entity=order["entity"], id=order["id"], settings=settings)
        run.alert(title=order["title"], text=order["text"], level=order["level"], wait_duration=0)
        run.finish()


if __name__ == "__main__":
    alert(orjson.loads(sys.stdin.buffer.read()))
