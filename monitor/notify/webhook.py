"""Any HTTP endpoint: the whole message as JSON, signed, with an idempotency key.

Headers: `Idempotency-Key` is the same in every attempt at one message, so that the receiver can drop what it has seen.
`X-Runwatch-Signature` is `t=<Unix seconds>,v1=<hex>`, the HMAC-SHA256 over `<t>.<body>` with the shared secret: the
receiver compares in constant time and refuses old times.
"""

import hashlib
import hmac
from dataclasses import dataclass
from typing import Any, get_args

import orjson

from runwatch.monitor.notify import Kind, Message, Notifier, Sent, WebhookConfig
from runwatch.monitor.notify.post import post

VERSION = 1
KINDS: frozenset[Kind] = frozenset(get_args(Kind)) - {"deadman", "incident_value", "directive"}


def connect(config: WebhookConfig) -> Notifier:
    """The notifier for one endpoint."""
    return Notifier(
        name=config.name or config.kind,
        kinds=KINDS if config.kinds is None else frozenset(config.kinds),
        send=Webhook(config).send,
    )


@dataclass(frozen=True)
class Webhook:
    """One endpoint."""

    config: WebhookConfig

    def send(self, message: Message, remembered: dict[str, Any]) -> Sent:
        """Post `message`.

        Raises:
            SendError: if the endpoint did not take it.
        """
        content = body(message)
        headers = {"Content-Type": "application/json", "Idempotency-Key": message.key}
        if self.config.secret is not None:
            secret = self.config.secret.get_secret_value()
            headers["X-Runwatch-Signature"] = signature(secret, content, int(message.time))
        post(self.config.url, content, headers=headers, timeout=self.config.timeout_seconds)
        return Sent(remembered)


def body(message: Message) -> bytes:
    """The JSON of `message`. A non-finite number is null, as JSON has none; the text says what it was."""
    return orjson.dumps(
        {
            "version": VERSION,
            "key": message.key,
            "kind": message.kind,
            "subject": message.subject,
            "run": message.run,
            "time": message.time,
            "text": message.text,
            "payload": message.payload,
        },
        option=orjson.OPT_SERIALIZE_NUMPY,
    )


def signature(secret: str, content: bytes, time: int) -> str:
    """The value of `X-Runwatch-Signature`."""
    digest = hmac.new(secret.encode(), f"{time}.".encode() + content, hashlib.sha256).hexdigest()
    return f"t={time},v1={digest}"
