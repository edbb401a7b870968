"""`POST /api/receipts`: what a trainer did with a directive, from a trainer that cannot write into the run directory.

Whoever sends it proves that it knows the daemon's `receipts_token`: as a bearer token, or, over plain HTTP, by signing the body as
webhooks are signed (`X-Runwatch-Signature: t=<Unix seconds>,v1=<HMAC-SHA256 over "<t>.<body>">`). A receipt that is accepted becomes the
file in `control/receipts/` that it would have been; the same one sent again is answered the same way.
"""

import hmac
import math
import re
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
from pydantic import SecretStr, ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from runwatch.monitor.act.directives import RECEIPT_BYTES, write_json
from runwatch.monitor.notify.webhook import signature
from runwatch.rules import Receipt

if TYPE_CHECKING:
    from runwatch.monitor.daemon.watched_run import Watch

FRESH_SECONDS = 300.0
"""How old, or how far ahead, the time of a signature may be."""
MOST = 2**53
"""No step and no number of tokens is larger: above it JSON numbers lose their last digits."""


class RefusedError(Exception):
    """A receipt that is not taken, with its HTTP status."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class ReceiptDesk:
    """Takes the receipts of one run; off while there is no token."""

    def __init__(self, watch: "Watch", token: SecretStr | None) -> None:
        self._watch, self._token = watch, token
        self._one_at_a_time = threading.Lock()

    async def receive(self, request: Request) -> Response:
        """Answer one request: 201 stored, 200 known already, 4xx with the reason."""
        try:
            content = await self._proven(request)
            status, sentence = await run_in_threadpool(
                self._take, content, request.client.host if request.client else "?"
            )
        except RefusedError as error:
            return JSONResponse({"error": str(error)}, status_code=error.status)
        return JSONResponse({"sentence": sentence}, status_code=status)

    async def _proven(self, request: Request) -> bytes:
        """The body, once it is known who sends it.

        Raises:
            RefusedError: receipts over HTTP are off, the body is too large, or the proof does not hold.
        """
        if self._token is None:
            raise RefusedError(403, "receipts over HTTP are disabled: set receipts_token in runwatch.yaml")
        token, bearer = self._token.get_secret_value(), request.headers.get("authorization")
        if bearer is not None and not hmac.compare_digest(bearer.encode(), f"Bearer {token}".encode()):
            raise RefusedError(401, "the token is not the daemon's")
        signed = request.headers.get("x-runwatch-signature", "")
        if bearer is None and not signed:
            raise RefusedError(401, "send `Authorization: Bearer TOKEN` or X-Runwatch-Signature")
        content = await _body(request)
        if bearer is None and not _signature_holds(signed, token, content, time.time()):
            raise RefusedError(401, "the signature does not hold, or its time is not now")
        return content

    def _take(self, content: bytes, sender: str) -> tuple[int, str]:
        """Store a receipt, once; HTTP status and the sentence that confirms it.

        Raises:
            RefusedError: it is malformed, or fits no directive of this run.
        """
        document, receipt = _checked(content)
        path = self._watch.run_dir / "control" / "receipts" / f"{receipt.id}.json"
        with self._one_at_a_time, self._watch.store.transaction() as tx:
            asked = [one for one in tx.executions() if one.id == receipt.id and one.requested is not None]
            if not asked:
                raise RefusedError(404, f"there is no directive {receipt.id!r} of this run")
            if path.exists():
                return _again(path, receipt)
            sentence = f"The receipt of {receipt.id} came over HTTP from {sender}: {receipt.status}."
            tx.audit("receipt", {"sentence": sentence, "execution": receipt.id}, time.time())
            write_json(path, document)
        return 201, sentence


async def _body(request: Request) -> bytes:
    content = bytearray()
    try:
        async for chunk in request.stream():
            content += chunk
            if len(content) > RECEIPT_BYTES:
                raise RefusedError(413, f"a receipt has at most {RECEIPT_BYTES:,} bytes")
    except ClientDisconnect as error:
        raise RefusedError(400, "the body ended early") from error
    return bytes(content)


def _signature_holds(given: str, token: str, content: bytes, now: float) -> bool:
    at = re.match(r"t=(\d{1,12}),", given, re.ASCII)
    if at is None or abs(now - int(at[1])) > FRESH_SECONDS:
        return False
    return hmac.compare_digest(given.encode(), signature(token, content, int(at[1])).encode())


def _checked(content: bytes) -> tuple[dict[str, Any], Receipt]:
    """The receipt as it came and as it is understood.

    Raises:
        RefusedError: it is none; the text names the key.
    """
    try:
        document = orjson.loads(content)
        receipt = Receipt.model_validate(document)
    except orjson.JSONDecodeError as error:
        raise RefusedError(422, f"not JSON: {error}") from error
    except ValidationError as error:
        told = [f"{'.'.join(map(str, one['loc'])) or 'receipt'}: {one['msg']}" for one in error.errors()[:5]]
        raise RefusedError(422, "; ".join(told)) from error
    if not (math.isfinite(receipt.time) and 0 <= receipt.step <= MOST and 0 <= receipt.tokens <= MOST):
        raise RefusedError(422, "time must be finite, step and tokens must lie between 0 and 2^53")
    return document, receipt


def _again(path: Path, receipt: Receipt) -> tuple[int, str]:
    try:
        known = Receipt.model_validate_json(path.read_bytes())
    except ValidationError:
        known = None
    if known != receipt:
        raise RefusedError(409, f"{receipt.id} has another receipt already; the first one counts")
    return 200, f"The receipt of {receipt.id} is known."
