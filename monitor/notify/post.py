"""One HTTP request, and what its failure means: shared by all media that are an HTTP endpoint."""

import asyncio
import ssl
from collections.abc import Mapping
from functools import cache
from http import HTTPStatus

import httpx

from runwatch.monitor.notify import SendError

WORTH_ANOTHER_TRY = frozenset({HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_EARLY, HTTPStatus.TOO_MANY_REQUESTS})
ANSWER_BYTES = 4096
"""Of an answer no more is read: the first line of an error is enough, and an endless one fills no memory."""


def post(url: str, body: bytes, *, timeout: float, headers: Mapping[str, str] | None = None) -> None:
    """POST `body`; the whole of it, from name look-up to the last byte, may take `timeout` seconds. No redirects.

    Raises:
        SendError: permanent where the endpoint refuses (4xx), with its Retry-After where it asks to wait.
    """
    try:
        status, wait, text = asyncio.run(asyncio.wait_for(_post(url, body, dict(headers or {}), timeout), timeout))
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise SendError(f"not a URL: {error}", permanent=True) from error
    except TimeoutError as error:
        raise SendError(f"{_place(url)}: no whole answer within {timeout:g} s") from error
    except httpx.HTTPError as error:
        raise SendError(f"{_place(url)}: {type(error).__name__}: {error}") from error
    if HTTPStatus.OK <= status < HTTPStatus.MULTIPLE_CHOICES:
        return
    raise SendError(
        f"{_place(url)}: HTTP {status}: {text[:200]}",
        permanent=status < HTTPStatus.INTERNAL_SERVER_ERROR and status not in WORTH_ANOTHER_TRY,
        retry_after=float(wait) if wait.isdecimal() else None,
    )


async def _post(url: str, body: bytes, headers: Mapping[str, str], seconds: float) -> tuple[int, str, str]:
    """Status, Retry-After and the beginning of the answer. The caller's clock ends it: httpx's is for each read."""
    async with (
        httpx.AsyncClient(verify=_tls(), timeout=seconds) as client,
        client.stream("POST", url, content=body, headers=headers) as answer,
    ):
        text = b""
        async for chunk in answer.aiter_raw():
            text += chunk
            if len(text) >= ANSWER_BYTES:
                break
        return answer.status_code, answer.headers.get("Retry-After", ""), text.decode(errors="replace")


def _place(url: str) -> str:
    """Scheme and host only: paths of webhooks and pings are secrets."""
    parsed = httpx.URL(url)
    return f"{parsed.scheme}://{parsed.host}"


@cache
def _tls() -> ssl.SSLContext:
    """Reading the certificates takes 50 ms: once is enough."""
    return ssl.create_default_context()
