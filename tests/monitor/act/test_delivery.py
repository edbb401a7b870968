"""Directives to trainers that read no files, and receipts over HTTP: real servers, real commands, kills and hostile input."""

import hashlib
import hmac
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import scripted
from pydantic import SecretStr
from scripted import ScriptedTrainer

from runwatch.monitor.act.delivery import Delivery
from runwatch.monitor.act.run_once import CutOffError, StillRunsError, run_once
from runwatch.monitor.card.run_card import CardError, load_card
from runwatch.monitor.daemon.jobs import Daemon
from runwatch.monitor.daemon.settings import DaemonConfig
from runwatch.monitor.daemon.watched_run import Watch
from runwatch.monitor.daemon.web import WebServer
from runwatch.monitor.notify import Message, Notifier, Sent
from runwatch.monitor.notify.outbox import CLAIM_SECONDS, Outbox
from runwatch.monitor.store.store import Store, open_store, sqlite_url

ID = "early_divergence-0001"
SECRET = "between daemon and trainer"
TOKEN = "sixteen characters or more"


def wait_for(what: str, condition: Callable[[], Any], seconds: float = 180.0) -> Any:
    """The first true value of `condition`, within a generous time."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if found := condition():
            return found
        time.sleep(0.05)
    pytest.fail(f"never happened: {what}")


@dataclass
class Foreign:
    """A run whose trainer reads no files: its clock is the daemon's, and people's messages are kept."""

    trainer: ScriptedTrainer
    store: Store
    told: list[Message] = field(default_factory=list[Message])

    def __post_init__(self) -> None:
        self.trainer.obeys = False
        self.people = Notifier("people", frozenset({"plan_updated"}), self._hear)
        self.watch = self.opened()

    def _hear(self, message: Message, remembered: dict[str, Any]) -> Sent:
        self.told.append(message)
        return Sent(remembered)

    def opened(self) -> Watch:
        """A fresh daemon's watch, in the trainer's clock."""
        run_dir = self.trainer.run_dir
        people = Outbox(self.store, {"people": self.people}, lambda: self.trainer.clock)
        watch = Watch(run_dir, self.store, people, DaemonConfig(receipts_token=SecretStr(TOKEN)), "test")
        card = load_card(run_dir / "run.yaml")
        watch.delivery = Delivery(run_dir, self.store, people, lambda: card, dict, lambda: self.trainer.clock)
        watch.delivery._links = lambda: {"status": "http://here/"}  # noqa: SLF001
        return watch

    def until_requested(self) -> dict[str, Any]:
        """Train until the daemon has asked for the plan; the directive."""
        path = self.trainer.run_dir / "control" / "requests" / f"{ID}.json"
        for _ in range(30):
            self.watch.tick(self.trainer.train(20))
            if path.exists():
                return json.loads(path.read_text())
        pytest.fail("no plan was requested")

    def later(self, seconds: float) -> int:
        """Deliver what is due so many seconds on; how many went out."""
        self.trainer.clock += seconds
        return self.watch.delivery.deliver()

    def sentences(self, kind: str) -> list[str]:
        """What the audit log says of a kind."""
        with self.store.transaction() as tx:
            return [row.sentence for row in tx.audit_rows() if row.kind == kind]

    def state(self) -> str:
        """Where the execution stands."""
        with self.store.transaction() as tx:
            return tx.executions()[0].state.value


@pytest.fixture
def foreign(trainer: ScriptedTrainer) -> Iterator[Callable[..., Foreign]]:
    """Makes a run whose card says `execution`."""
    opened: list[Store] = []

    def make(**execution: Any) -> Foreign:
        (trainer.run_dir / "run.yaml").write_text(json.dumps(scripted.card() | {"execution": execution}))
        opened.append(open_store(sqlite_url(trainer.run_dir), "scripted"))
        return Foreign(trainer, opened[0])

    yield make
    for store in opened:
        store.close()


@pytest.fixture
def secret_file(tmp_path: Path) -> str:
    path = tmp_path / "secret"
    path.write_text(f"{SECRET}\n")
    return str(path)


@pytest.fixture
def webhook(foreign: Callable[..., Foreign], collector: Any, secret_file: str) -> Foreign:
    """A run whose directives go to `collector`."""
    return foreign(kind="webhook", url=f"{collector.url}/directives", secret_file=secret_file)


def receipt_for(trainer: ScriptedTrainer, directive: dict[str, Any]) -> dict[str, Any]:
    """Apply a directive of `shorten_budget`, and say so."""
    before = dict(trainer.plan)
    for action in directive["actions"]:
        match action["action"]:
            case "set_token_budget":
                trainer.plan |= {"token_budget": action["tokens"]}
            case "set_lr_decay":
                trainer.plan |= {
                    "decay_start_tokens": action["start_tokens"],
                    "final_fraction": action["final_fraction"],
                }
            case _:
                trainer.plan |= {"mixture": action["shares"]}
    trainer.cured = True
    answer = {"version": 1, "id": directive["id"], "status": "applied", "reason": None, **trainer.head()}
    return {**answer, "before": before, "after": dict(trainer.plan)}


# --- by webhook -----------------------------------------------------------------------------------------------------------


def test_the_webhook_carries_the_very_directive_signed_and_with_its_id_as_idempotency_key(
    webhook: Foreign, collector: Any
) -> None:
    directive = webhook.until_requested()
    assert webhook.later(1) == 1
    [request] = collector.requests
    assert json.loads(request.body) == directive
    assert request.headers["Idempotency-Key"] == directive["id"] == ID
    assert request.headers["X-Runwatch-Run"] == "scripted"
    at, _, seal = request.headers["X-Runwatch-Signature"].partition(",v1=")
    assert at == f"t={webhook.trainer.clock:.0f}"
    wanted = hmac.new(SECRET.encode(), f"{at[2:]}.".encode() + request.body, hashlib.sha256).hexdigest()
    assert hmac.compare_digest(seal, wanted)
    assert webhook.later(600) == 0
    assert webhook.sentences("delivery") == [f"{ID} was delivered to 127.0.0.1 (attempt 1)."]


def test_a_webhook_that_fails_for_a_while_is_tried_again_and_delivered_once(webhook: Foreign, collector: Any) -> None:
    webhook.until_requested()
    collector.answers = [(503, {}), (0, {}), (429, {"Retry-After": "30"})]
    went_out = [webhook.later(seconds) for seconds in (1, 3, 5, 9, 22, 60)]
    assert went_out == [0, 0, 0, 0, 1, 0]
    assert len(collector.requests) == 4
    assert {request.headers["Idempotency-Key"] for request in collector.requests} == {ID}
    assert len({request.body for request in collector.requests}) == 1
    said = webhook.sentences("delivery")
    assert [sentence.partition(":")[0] for sentence in said[:1]] == [f"{ID} could not be delivered yet"]
    assert said[1:] == [f"{ID} was delivered to 127.0.0.1 (attempt 4)."]
    assert not webhook.told


def test_a_webhook_that_refuses_calls_a_person_at_once(webhook: Foreign, collector: Any) -> None:
    webhook.until_requested()
    collector.answers = [(401, {})]
    assert webhook.later(1) == 0
    webhook.watch.outbox.deliver("people")
    [told] = [message for message in webhook.told if message.key.endswith("/undelivered")]
    assert told.payload["severity"] == "critical"
    assert "HTTP 401" in told.text
    assert "deliver it manually" in told.text
    assert webhook.later(3600) == 0
    assert len(collector.requests) == 1


def test_a_directive_that_has_expired_is_not_delivered_and_calls_a_person(webhook: Foreign, collector: Any) -> None:
    directive = webhook.until_requested()
    collector.answers = [(503, {})]
    webhook.later(1)
    webhook.later(directive["expires"] - webhook.trainer.clock + 1)
    assert len(collector.requests) == 1
    assert "it has expired" in webhook.sentences("delivery")[-1]
    webhook.watch.outbox.deliver("people")
    assert f"scripted/{ID}/undelivered" in {message.key for message in webhook.told}


def test_a_daemon_killed_between_sending_and_recording_sends_it_again_under_the_same_key(
    webhook: Foreign, collector: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    webhook.until_requested()

    class Killed(BaseException):
        """Nobody handles it."""

    def die(*_: Any) -> None:
        raise Killed

    monkeypatch.setattr(webhook.watch.delivery._outbox, "_record", die)  # noqa: SLF001
    with pytest.raises(Killed):
        webhook.later(1)
    webhook.watch = webhook.opened()
    assert webhook.later(1) == 0, "the claim of the dead daemon still holds"
    assert webhook.later(CLAIM_SECONDS) == 1
    assert [request.headers["Idempotency-Key"] for request in collector.requests] == [ID, ID]


def test_what_the_trainer_has_answered_is_not_sent_again(webhook: Foreign, collector: Any) -> None:
    directive = webhook.until_requested()
    answer = receipt_for(webhook.trainer, directive)
    (webhook.trainer.run_dir / "control" / "receipts" / f"{ID}.json").write_text(json.dumps(answer))
    webhook.later(1)
    assert not collector.requests


def test_files_stay_the_default_and_nothing_is_delivered(foreign: Callable[..., Foreign]) -> None:
    run = foreign(kind="files")
    run.until_requested()
    assert run.later(1) == 0
    assert run.sentences("delivery") == []


WRONG = {
    "a webhook without a secret": ({"kind": "webhook", "url": "https://a.example"}, "secret_file or secret_env"),
    "a secret in the card": ({"kind": "webhook", "url": "https://a.example", "secret": "x"}, "unknown key"),
    "no address": ({"kind": "webhook", "secret_env": "S"}, "execution.url is required"),
    "an address that is none": ({"kind": "webhook", "secret_env": "S", "url": "file:///etc/passwd"}, "pattern"),
    "a command without argv": ({"kind": "command"}, "argv"),
    "a command as one string": ({"kind": "command", "argv": "rm -rf /"}, "tuple"),
    "argv for files": ({"argv": ["true"]}, "argv"),
    "a command that takes longer than a claim": ({"kind": "command", "argv": ["a"], "timeout_seconds": 120}, "50"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_mistake_in_execution_is_told_with_its_key(case: str, tmp_path: Path) -> None:
    execution, told = WRONG[case]
    (tmp_path / "run.yaml").write_text(json.dumps(scripted.card() | {"execution": execution}))
    with pytest.raises(CardError, match=told) as error:
        load_card(tmp_path / "run.yaml")
    assert "execution" in str(error.value)


# --- by command -----------------------------------------------------------------------------------------------------------

LOG = "import sys, os; open('heard', 'a').write(os.environ['RUNWATCH_DIRECTIVE'] + ' ' + sys.stdin.read() + chr(10))"


def test_a_command_gets_the_very_directive_and_no_shell(foreign: Callable[..., Foreign]) -> None:
    run = foreign(
        kind="command",
        argv=[sys.executable, "-c", f"{LOG}; assert sys.argv[1] == '$HOME; touch pwned'", "$HOME; touch pwned"],
    )
    directive = run.until_requested()
    assert run.later(1) == 1
    [line] = (run.trainer.run_dir / "heard").read_text().splitlines()
    assert line.startswith(f"{ID} ")
    assert json.loads(line.partition(" ")[2]) == directive
    assert not (run.trainer.run_dir / "pwned").exists()
    assert run.later(600) == 0


FAILS = {
    "that is not there": (["no-such-program"], True, "cannot start no-such-program"),
    "that fails": ([sys.executable, "-c", "raise SystemExit('the queue is full')"], False, "the queue is full"),
    "that hangs": ([sys.executable, "-c", "import time; time.sleep(600)"], False, "killed after 0.5 s"),
    "that prints without end": (["yes"], False, "killed after 0.5 s"),
}


@pytest.mark.parametrize("case", FAILS)
def test_a_command_that_does_not_work_is_told(case: str, foreign: Callable[..., Foreign]) -> None:
    argv, never, told = FAILS[case]
    run = foreign(kind="command", argv=argv, timeout_seconds=0.5)
    run.until_requested()
    assert run.later(1) == 0
    [sentence] = run.sentences("delivery")
    assert told in sentence
    assert ("deliver it manually" in sentence) == never
    assert len(sentence) < 1000


def test_a_command_that_fails_first_is_run_again(foreign: Callable[..., Foreign]) -> None:
    fails_once = (
        "import os, sys; first = not os.path.exists('tried'); open('tried', 'a').write('x'); sys.exit(int(first))"
    )
    run = foreign(kind="command", argv=[sys.executable, "-c", fails_once])
    run.until_requested()
    assert [run.later(1), run.later(5), run.later(600)] == [0, 1, 0]
    assert (run.trainer.run_dir / "tried").read_text() == "xx"


SLOW = "import sys, time; open('began', 'a').write('x'); time.sleep(2); open('ended', 'a').write('x')"
START = """
import sys
from pathlib import Path
from runwatch.monitor.act.run_once import run_once
here = Path(sys.argv[1])
run_once(here / "state.json", [sys.executable, "-c", sys.argv[2]], b"{}", timeout=30, cwd=here, env={})
"""


def once(folder: Path, program: str = SLOW) -> Any:
    return run_once(folder / "state.json", [sys.executable, "-c", program], b"{}", timeout=30, cwd=folder, env={})


@pytest.mark.slow
def test_a_command_outlives_the_daemon_that_started_it_and_is_not_run_twice(tmp_path: Path) -> None:
    daemon = subprocess.Popen([sys.executable, "-P", "-c", START, str(tmp_path), SLOW])
    wait_for("the command begins", (tmp_path / "began").exists)
    daemon.kill()
    daemon.wait()
    if not (tmp_path / "ended").exists():
        with pytest.raises(StillRunsError):
            once(tmp_path)
    wait_for("the command ends", (tmp_path / "ended").exists)

    def ended() -> Any:
        try:
            return once(tmp_path)
        except StillRunsError:
            return None

    assert wait_for("its end is known", ended).code == 0
    assert ((tmp_path / "began").read_text(), (tmp_path / "ended").read_text()) == ("x", "x")


def test_a_command_that_was_cut_off_is_not_run_again(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text('{"state": "running", "argv": []}')
    with pytest.raises(CutOffError):
        once(tmp_path)
    assert not (tmp_path / "began").exists()


def test_what_a_command_leaves_running_lives_on_and_may_print(tmp_path: Path) -> None:
    child = "import time; time.sleep(1); print('x' * 10**6, flush=True); open('lives', 'w').close()"
    parent = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}])"
    assert once(tmp_path, parent).code == 0
    wait_for("the child lives on", (tmp_path / "lives").exists)


# --- receipts over HTTP ---------------------------------------------------------------------------------------------------


@pytest.fixture
def server(webhook: Foreign) -> Iterator[str]:
    """The daemon's real web server; its address."""
    web = WebServer(Daemon(webhook.watch, webhook.watch.config), "127.0.0.1:0")
    web.start()
    yield f"http://127.0.0.1:{web.port}"
    web.close()


def post(server: str, body: bytes, **headers: str) -> tuple[int, dict[str, Any]]:
    """Status and answer of a POST to /api/receipts."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(f"{server}/api/receipts", data=body, headers=named, method="POST")  # noqa: S310
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310 - our own server
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


BEARER = {"Authorization": f"Bearer {TOKEN}"}


def signed(body: bytes, token: str = TOKEN, ago: float = 0.0) -> dict[str, str]:
    at = int(time.time() - ago)
    seal = hmac.new(token.encode(), f"{at}.".encode() + body, hashlib.sha256).hexdigest()
    return {"X-Runwatch-Signature": f"t={at},v1={seal}"}


@pytest.mark.slow
@pytest.mark.parametrize("proof", ["bearer", "signature"])
def test_a_receipt_over_http_closes_the_loop(proof: str, webhook: Foreign, server: str, collector: Any) -> None:
    webhook.until_requested()
    webhook.later(1)
    heard = json.loads(collector.requests[0].body)
    body = json.dumps(receipt_for(webhook.trainer, heard)).encode()
    headers = BEARER if proof == "bearer" else signed(body)
    assert post(server, body, **headers)[0] == 201
    assert post(server, body, **headers)[0] == 200
    for _ in range(4):
        webhook.watch.tick(webhook.trainer.train(10))
    assert webhook.state() == "verified"
    assert webhook.sentences("receipt") == [f"The receipt of {ID} came over HTTP from 127.0.0.1: applied."]


@pytest.mark.slow
def test_hostile_receipts_are_refused_and_leave_nothing(webhook: Foreign, server: str) -> None:
    directive = webhook.until_requested()
    good = receipt_for(webhook.trainer, directive)
    body = json.dumps(good).encode()

    def like(**changed: Any) -> bytes:
        return json.dumps({**good, **changed}).encode()

    cases: list[tuple[str, bytes, dict[str, str], int, str]] = [
        ("no proof", body, {}, 401, "send"),
        ("a wrong token", body, {"Authorization": "Bearer wrong"}, 401, "token"),
        ("a token without its scheme", body, {"Authorization": TOKEN}, 401, "token"),
        ("another's signature", body, signed(body, "another secret of theirs"), 401, "signature"),
        ("a signature of another body", body, signed(b"{}"), 401, "signature"),
        ("an old signature", body, signed(body, ago=3600), 401, "signature"),
        ("a signature of no form", body, {"X-Runwatch-Signature": "t=,v1="}, 401, "signature"),
        ("a wrong token with a good signature", body, {"Authorization": "Bearer x", **signed(body)}, 401, "token"),
        ("too large", b" " * (1 << 20) + body, BEARER, 413, "bytes"),
        ("not JSON", b"{", BEARER, 422, "not JSON"),
        ("not UTF-8", b"\xff\xfe", BEARER, 422, "not JSON"),
        ("nested without end", b"[" * 100_000, BEARER, 422, "not JSON"),
        ("a list", b"[]", BEARER, 422, "receipt"),
        ("another status", like(status="maybe"), BEARER, 422, "status"),
        ("a key that is missing", json.dumps({"id": ID}).encode(), BEARER, 422, "status: Field required"),
        ("NaN", body.replace(b'"step": ', b'"step": NaN, "x": '), BEARER, 422, "not JSON"),
        ("an endless number", like(tokens=2**60), BEARER, 422, "2^53"),
        ("a step before the first", like(step=-1), BEARER, 422, "2^53"),
        ("a path as id", like(id="../../../etc/passwd"), BEARER, 404, "no directive"),
        ("an id with NUL", like(id="\0"), BEARER, 404, "no directive"),
        ("a directive that nobody wrote", like(id="early_divergence-0002"), BEARER, 404, "no directive"),
    ]
    before = sorted(path for path in webhook.trainer.run_dir.rglob("*"))
    for name, content, headers, code, word in cases:
        status, answer = post(server, content, **headers)
        assert (name, status) == (name, code)
        assert word in answer["error"], name
    assert sorted(path for path in webhook.trainer.run_dir.rglob("*")) == before
    assert post(server, body, **BEARER)[0] == 201
    assert post(server, like(step=1), **BEARER)[0] == 409
    assert json.loads((webhook.trainer.run_dir / "control" / "receipts" / f"{ID}.json").read_text()) == good


@pytest.mark.slow
def test_receipts_over_http_are_off_without_a_token(webhook: Foreign) -> None:
    web = WebServer(Daemon(webhook.watch, DaemonConfig()), "127.0.0.1:0")
    web.start()
    try:
        assert post(f"http://127.0.0.1:{web.port}", b"{}", **BEARER)[0] == 403
    finally:
        web.close()


# --- all of it, as processes ----------------------------------------------------------------------------------------------


@dataclass
class Processes:
    """A daemon that is killed and started again, beside a trainer that reads no files and trains in real time."""

    trainer: ScriptedTrainer
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """End the daemon with kill -9, if there is one, and start the next."""
        self.kill()
        command = [sys.executable, "-P", "-m", "runwatch.monitor.cli", "watch", str(self.trainer.run_dir)]
        self.process = subprocess.Popen([*command, "--listen", "127.0.0.1:0"], stderr=subprocess.DEVNULL)

    def kill(self) -> None:
        """End the daemon with kill -9."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def train_until(self, what: str, condition: Callable[[], Any]) -> None:
        """Train until `condition` holds."""

        def trained() -> Any:
            self.trainer.clock = time.time() - 3
            self.trainer.train(2)
            time.sleep(0.15)
            return condition()

        wait_for(what, trained)

    def status(self) -> dict[str, Any]:
        """The newest word of a daemon."""
        path = self.trainer.run_dir / ".runwatch" / "status.json"
        return json.loads(path.read_text()) if path.exists() else {"daemon": {"pid": None}, "plans": []}

    def ticked(self) -> bool:
        """Whether the daemon that runs now has ended a tick."""
        return self.process is not None and self.status()["daemon"]["pid"] == self.process.pid

    def verified(self) -> bool:
        """Whether the daemon has seen the plan's effect."""
        plans = self.status()["plans"]
        return bool(plans) and plans[0]["state"] == "verified"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["webhook", "command"])
def test_a_daemon_that_is_killed_again_and_again_delivers_and_the_trainer_obeys_once(
    kind: str, trainer: ScriptedTrainer, collector: Any, secret_file: str
) -> None:
    run_dir = trainer.run_dir
    by = {
        "webhook": {"url": collector.url, "secret_file": secret_file},
        "command": {"argv": [sys.executable, "-c", f"{LOG}; import time; time.sleep(1)"]},
    }
    (run_dir / "run.yaml").write_text(json.dumps(scripted.card() | {"execution": {"kind": kind, **by[kind]}}))
    collector.answers = [(503, {})]
    trainer.obeys, trainer.fault, trainer.clock = False, 60, time.time() - 300
    trainer.train(150)

    def heard() -> list[dict[str, Any]]:
        if kind == "webhook":
            return [json.loads(request.body) for request in collector.requests[1:]]
        path = run_dir / "heard"
        return [json.loads(line.partition(" ")[2]) for line in path.read_text().splitlines()] if path.exists() else []

    both = Processes(trainer)
    both.start()
    try:
        both.train_until("a tick", both.ticked)
        both.start()
        both.train_until("the directive is delivered", heard)
        both.start()
        answer = receipt_for(trainer, heard()[0])
        (run_dir / "control" / "receipts" / f"{ID}.json").write_text(json.dumps(answer))
        both.train_until("the plan is verified", both.verified)
    finally:
        both.kill()
    assert {document["id"] for document in heard()} == {ID}
    if kind == "command":
        assert len(heard()) == 1
