"""Decisions over HTTP reach the store only with the daemon's token, once, and take effect with the next tick."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import scripted

from runwatch.monitor.daemon.jobs import Daemon
from runwatch.monitor.daemon.settings import ConfigError, DaemonConfig, load_config
from runwatch.monitor.daemon.watched_run import Watch
from runwatch.monitor.daemon.web import WebServer
from runwatch.rules import ExecutionState

TOKEN = "a-token-of-good-length"
PLAN = "early_divergence-0001"
BODY = {"approved": True, "by": "ana", "reason": "the data is broken"}


@pytest.fixture
def proposed(tmp_path: Path, open_watch: Any) -> Watch:
    """A run whose loss has left its curve, with `shorten_budget` waiting for a person."""
    run = scripted.ScriptedTrainer(tmp_path / "run")
    run.obeys = False
    (run.run_dir / "run.yaml").write_text(json.dumps(scripted.card({"early_divergence": {"mode": "confirm"}})))
    watch: Watch = open_watch(run.run_dir)
    for _ in range(20):
        watch.tick(run.train(10))
    assert state(watch) is ExecutionState.PROPOSED
    return watch


def state(watch: Watch) -> ExecutionState | None:
    with watch.store.transaction() as tx:
        return next((one.state for one in tx.executions() if one.id == PLAN), None)


@pytest.fixture
def serve() -> Iterator[Callable[..., str]]:
    """Serves a watch and gives its address; the servers end with the test."""
    servers: list[WebServer] = []

    def serve_one(watch: Watch, token: str | None = TOKEN) -> str:
        servers.append(WebServer(Daemon(watch, DaemonConfig.model_validate({"approval_token": token})), "127.0.0.1:0"))
        servers[-1].start()
        return f"http://127.0.0.1:{servers[-1].port}"

    yield serve_one
    for server in servers:
        server.close()


def post(url: str, body: Any = BODY, token: str | bytes | None = TOKEN, plan: str = PLAN) -> tuple[int, str]:
    raw = token.encode() if isinstance(token, str) else token
    headers = {} if raw is None else {b"Authorization": b"Bearer " + raw}
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = httpx.post(f"{url}/api/plans/{plan}/decision", content=content, headers=headers, timeout=30)
    return answer.status_code, answer.text


def test_an_approval_with_the_token_is_stored_once(proposed: Watch, serve: Callable[..., str]) -> None:
    url = serve(proposed)
    code, said = post(url)
    assert (code, "approved by ana" in said) == (200, True)
    assert post(url)[0] == 409


@pytest.mark.parametrize(
    ("asked", "code", "says"),
    [
        ({"token": None}, 401, "token"),
        ({"token": "another-token-of-length"}, 401, "token"),
        ({"token": "a-tokën-of-good-length".encode()}, 401, "token"),
        ({"plan": "early_divergence-0099"}, 409, "no plan execution"),
        ({"body": b"not json"}, 422, "approved"),
        ({"body": {**BODY, "by": ""}}, 422, "approved"),
        ({"body": {**BODY, "reason": "x" * 20_000}}, 422, "approved"),
        ({"body": {**BODY, "more": 1}}, 422, "approved"),
    ],
)
def test_a_request_that_is_not_right_changes_nothing(
    proposed: Watch, serve: Callable[..., str], asked: dict[str, Any], code: int, says: str
) -> None:
    found, said = post(serve(proposed), **asked)
    assert (found, says in said) == (code, True)
    with proposed.store.transaction() as tx:
        assert not [row for row in tx.audit_rows() if row.kind == "decision"]


def test_without_a_token_in_the_settings_decisions_are_off(proposed: Watch, serve: Callable[..., str]) -> None:
    assert post(serve(proposed, token=None), token=None)[0] == 403


def test_a_token_is_read_from_a_file_and_two_places_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    (tmp_path / "one.yaml").write_text(f"approval_token_file: {tmp_path / 'token'}\n")
    token = load_config(tmp_path / "one.yaml").approval_token
    assert token is not None
    assert token.get_secret_value() == TOKEN
    (tmp_path / "two.yaml").write_text(f"approval_token: {TOKEN}\napproval_token_file: {tmp_path / 'token'}\n")
    with pytest.raises(ConfigError, match="both set"):
        load_config(tmp_path / "two.yaml")
