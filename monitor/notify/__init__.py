"""What a notifier is, what it sends, and how it is set up in `runwatch.yaml`.

A notifier is one function, `send`, that sends one message through one medium and reports, when it fails, only whether a
retry makes sense. Retry, backoff, deadline and record exist once, in `monitor/notify/outbox.py`.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Protocol, TypedDict

from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator

from runwatch.monitor.store.incident import Severity

Kind = Literal[
    "incident_opened",
    "incident_updated",
    "incident_value",
    "incident_resolved",
    "plan_proposed",
    "plan_updated",
    "digest",
    "deadman",
    "directive",
]
"""`incident_value`: only the text of an incident has changed; for media that can edit a message. `directive`: for the
trainer and no medium for people (`monitor/act/delivery.py`)."""
KEEP_RESOLVED_SECONDS = 900.0
"""How long a resolution is re-sent to a notifier with `refresh_seconds` (Prometheus: 15 minutes)."""


class Series(TypedDict):
    """The signal behind an incident, thinned to a few hundred points, for its plot."""

    signal: str
    unit: str
    steps: list[float]
    values: list[float | None]
    limit: list[float | None]
    flagged: tuple[float, float]


class IncidentPayload(TypedDict):
    """One incident: what, worst value and limit, since when, how sure, what is armed, what to run next. JSON all through."""

    id: str
    run: str
    check: str
    severity: Severity  # the worst so far: it never goes back within one incident
    state: Literal["firing", "resolved"]
    change: str  # why this message: fired, escalated, eased, resolved, ...
    summary: str  # first line of the check's docstring
    what: str  # sentence with worst value and limit and their units; once resolved what resolved it, and that sentence
    value: float | None  # of the worst record
    limit: float | None
    newest: str  # sentence: the newest value; empty once resolved
    since_step: int
    since_tokens: float | None
    since_time: float
    step: int  # newest record judged
    opened: float  # Unix seconds
    resolved: float | None  # Unix seconds
    agreeing: list[str]  # other checks that are firing now
    certainty: str  # sentence: which checks agree, which could not be judged
    plan: str  # sentence: the armed plan, or that there is none
    command: str  # to run next
    links: dict[str, str]  # label to URL; `runbook` is always there
    series: Series | None


class PlanPayload(TypedDict):
    """One execution of a fallback plan."""

    id: str
    run: str
    node: str
    plan: str
    mode: Literal["observe", "confirm", "auto"]
    state: str
    severity: Severity
    summary: str  # sentence: what is proposed or what happened
    evidence: str
    actions: list[dict[str, Any]]  # as in the directive
    effects: list[str]  # a sentence for each action: from what to what
    step: int
    tokens: float | None
    proposed: float  # Unix seconds
    expires: float | None  # Unix seconds
    by: str | None
    reason: str | None
    commands: dict[str, str]  # approve, reject, preview
    links: dict[str, str]


class DigestPayload(TypedDict):
    """The status of the run, sent without mentions at a set interval."""

    run: str
    step: int
    tokens: float
    token_budget: float
    loss: float | None
    expected_loss: float | None  # of the registered curve, at these tokens
    mfu: float | None
    tokens_per_second: float | None
    eta: float | None  # Unix seconds
    incidents: list[str]  # a sentence for each open one
    plans: list[str]
    links: dict[str, str]


class DeadmanPayload(TypedDict):
    """The daemon can observe the run: sent only while that is so."""

    run: str
    observed: float  # Unix seconds, by the daemon's clock
    until: float  # the next one comes before this


@dataclass(frozen=True)
class Message:
    """One message.

    `key` is the idempotency key: the same event has the same key, however often it is sent. `subject` is the incident
    or execution that it is about; what a notifier remembers is kept per subject. `time` (Unix seconds) is the time of
    this sending, `attempt` counts sendings from 1. `text` is the whole alert as plain text.
    """

    key: str
    kind: Kind
    subject: str
    run: str
    time: float
    payload: Mapping[str, Any]
    text: str
    attempt: int = 1


@dataclass(frozen=True)
class Sent:
    """Sent. `remembered` replaces what the notifier had remembered of this subject."""

    remembered: dict[str, Any]


class SendError(Exception):
    """Not sent.

    `permanent`: a retry is pointless. `retry_after`: seconds that the receiver wants us to wait. `remembered`: what to
    remember even so, because part of the message went out.
    """

    def __init__(
        self,
        reason: str,
        *,
        permanent: bool = False,
        retry_after: float | None = None,
        remembered: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(reason)
        self.permanent = permanent
        self.retry_after = retry_after
        self.remembered = remembered


class Closable(Protocol):
    """Something that runs until it is closed."""

    def close(self) -> None:
        """Stop and release everything."""


Decide = Callable[[str, bool, str, str], str]
"""`decide(execution id, approved, by, reason)` writes a person's decision and returns the sentence to answer with."""


@dataclass(frozen=True)
class Notifier:
    """One medium.

    `kinds`: the messages it wants. `refresh_seconds`: the newest message of each firing incident, and for
    `KEEP_RESOLVED_SECONDS` of each resolved one, is sent again at this interval. `listen`: starts to take decisions.
    """

    name: str
    kinds: frozenset[Kind]
    send: Callable[[Message, dict[str, Any]], Sent]
    refresh_seconds: float | None = None
    listen: Callable[[Decide], Closable] | None = None


class NotifierConfig(BaseModel):
    """What every medium's settings have in common.

    Each field named in `SECRETS` is given as `NAME`, as `NAME_file` (a path) or as `NAME_env` (a variable); two at
    once is an error.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    SECRETS: ClassVar[tuple[str, ...]] = ()

    name: str = ""
    kinds: tuple[Kind, ...] | None = None
    timeout_seconds: float = Field(10.0, gt=0)

    @model_validator(mode="before")
    @classmethod
    def _read_secrets(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        given: dict[str, Any] = dict(data)
        for secret in cls.SECRETS:
            found = take_secret(given, secret)
            if found is not None:
                given[secret] = found
        return given


def take_secret(given: dict[str, Any], name: str) -> Any:
    """Take `NAME`, `NAME_file` or `NAME_env` out of `given`; None where none is set.

    Raises:
        ValueError: two are set, or the file or variable cannot be read.
    """
    sources = [key for key in (name, f"{name}_file", f"{name}_env") if given.get(key) is not None]
    if len(sources) > 1:
        raise ValueError(f"{' and '.join(sources)} are both set: keep one of them")
    value = given.pop(name, None)
    path, variable = given.pop(f"{name}_file", None), given.pop(f"{name}_env", None)
    if path is not None:
        return _from_file(f"{name}_file", Path(path))
    if variable is not None:
        if not os.environ.get(variable):
            raise ValueError(f"{name}_env: the environment variable {variable} is not set or empty")
        return os.environ[variable]
    return value


def _from_file(key: str, path: Path) -> str:
    try:
        secret = path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ValueError(f"{key}: cannot read {path}: {error.strerror}") from error
    if not secret:
        raise ValueError(f"{key}: {path} is empty")
    return secret


class SlackConfig(NotifierConfig):
    """One Slack channel. With `app_token` and `approvers`, plans are approved by buttons over Socket Mode."""

    SECRETS = ("bot_token", "app_token")

    kind: Literal["slack"]
    channel: str = Field(pattern=r"^[CG][A-Z0-9]+$", description="its ID, as at the end of its About page")
    bot_token: SecretStr
    app_token: SecretStr | None = None
    approvers: tuple[str, ...] = ()
    mentions: tuple[str, ...] = ()
    api_url: str = "https://slack.com/api/"

    @property
    def takes_decisions(self) -> bool:
        """Whether plans are approved in this channel."""
        return self.app_token is not None and bool(self.approvers)


class AlertmanagerConfig(NotifierConfig):
    """One Alertmanager, or all members of a cluster: each gets every alert, and one that answers is enough."""

    SECRETS = ("bearer_token",)

    kind: Literal["alertmanager"]
    urls: tuple[str, ...] = Field(min_length=1)
    bearer_token: SecretStr | None = None
    resend_seconds: float = Field(60.0, gt=0)
    labels: dict[str, str] = Field(default_factory=dict)


class WebhookConfig(NotifierConfig):
    """Any HTTP endpoint; with `secret`, bodies are signed."""

    SECRETS = ("secret",)

    kind: Literal["webhook"]
    url: str
    secret: SecretStr | None = None


class WandbConfig(NotifierConfig):
    """`run.alert` on the run that the trainer has open in W&B."""

    SECRETS = ("api_key",)

    kind: Literal["wandb"]
    project: str
    run_id: str
    entity: str | None = None
    api_key: SecretStr | None = None
    base_url: str | None = None


class DeadmanConfig(NotifierConfig):
    """A URL that expects a ping from the daemon and alerts when it stops."""

    SECRETS = ("url",)

    kind: Literal["deadman"]
    url: SecretStr


NotifyConfig = Annotated[
    SlackConfig | AlertmanagerConfig | WebhookConfig | WandbConfig | DeadmanConfig, Field(discriminator="kind")
]
_MODULES = {"wandb": "wandb_alert"}


def connect(config: NotifyConfig) -> Notifier:
    """The notifier for `config`; its module, and the medium's library, are imported only here."""
    module = import_module(f"{__name__}.{_MODULES.get(config.kind, config.kind)}")
    notifier: Notifier = module.connect(config)
    return notifier
