"""One HTTP request, and what its failure means: shared by all media that are an HTTP endpoint."""

import ssl
from collections.abc import Mapping
from functools import cache
from http import HTTPStatus

import httpx

from runwatch.monitor.notify import SendError

WORTH_ANOTHER_TRY = frozenset({HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_EARLY, HTTPStatus.TOO_MANY_REQUESTS})


def post(url: str, body: bytes, *, timeout: float, headers: Mapping[str, str] | None = None) -> None:
    """POST `body` and wait at most `timeout` seconds for each part of the answer. Redirects are not followed.

    Raises:
        SendError: permanent where the endpoint refuses (4xx), with its Retry-After where it asks to wait.
    """
    try:
        answer = httpx.post(url, content=body, headers=dict(headers or {}), timeout=timeout, verify=_tls())
    except httpx.InvalidURL as error:
        raise SendError(f"not a URL: {error}", permanent=True) from error
    except httpx.HTTPError as error:
        raise SendError(f"{_place(url)}: {type(error).__name__}: {error}") from error
    if answer.is_success:
        return
    wait = answer.headers.get("Retry-After", "")
    raise SendError(
        f"{_place(url)}: HTTP {answer.status_code}: {answer.text[:200]}",
        permanent=answer.status_code < HTTPStatus.INTERNAL_SERVER_ERROR and answer.status_code not in WORTH_ANOTHER_TRY,
        retry_after=float(wait) if wait.isdecimal() else None,
    )


def _place(url: str) -> str:
    """Scheme and host only: paths of webhooks and pings are secrets."""
    parsed = httpx.URL(url)
    return f"{parsed.scheme}://{parsed.host}"


@cache
def _tls() -> ssl.SSLContext:
    """Reading the certificates takes 50 ms: once is enough."""
    return ssl.create_default_context()
