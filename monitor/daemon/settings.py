"""The daemon's own settings (`runwatch.yaml`): where to listen, where to keep state, whom to tell.

The run card says what was declared of the run; this file says how it is watched, and may differ from site to site.
"""

from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator, model_validator

from runwatch.monitor.notify import NotifyConfig, take_secret


class ConfigError(ValueError):
    """The file cannot be used; the text names file, key and remedy, one mistake a line."""


class DaemonConfig(BaseModel):
    """How a run is watched.

    `url` is where people reach the status page; `runbooks` a site that serves them instead. `approval_token` (or
    `approval_token_file`, `approval_token_env`) lets whoever has it decide on plans over HTTP, and `receipts_token` (likewise)
    lets a trainer send receipts over HTTP; without one that is off.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    listen: str = "127.0.0.1:9464"
    url: str | None = None
    runbooks: str | None = None
    database: str | None = None
    tick_seconds: float = Field(default=1.0, gt=0, le=60)
    digest_seconds: float = Field(default=86_400.0, gt=0)
    deadman_seconds: float = Field(default=60.0, gt=0)
    approval_token: SecretStr | None = Field(default=None, min_length=16)
    receipts_token: SecretStr | None = Field(default=None, min_length=16)
    notify: tuple[NotifyConfig, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _read_tokens(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        given: dict[str, Any] = dict(data)
        for name in ("approval_token", "receipts_token"):
            token = take_secret(given, name)
            given |= {} if token is None else {name: token}
        return given

    @field_validator("listen")
    @classmethod
    def _has_port(cls, listen: str) -> str:
        address(listen)
        return listen

    @property
    def page(self) -> str:
        """The status page, with a slash at its end."""
        return f"{(self.url or f'http://{self.listen}').rstrip('/')}/"


def address(listen: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT`; port 0 takes a free one.

    Raises:
        ValueError: it is not of that form.
    """
    host, _, port = listen.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{listen!r} is not HOST:PORT; write for instance 127.0.0.1:9464")
    return host.strip("[]"), int(port)


def load_config(path: Path) -> DaemonConfig:
    """Read and validate `runwatch.yaml`.

    Raises:
        ConfigError: it cannot be read or has mistakes; all of them are told.
    """
    try:
        values: Any = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        return DaemonConfig.model_validate(values)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not YAML: {error}") from error
    except ValidationError as error:
        raise ConfigError("\n".join(_told(path, detail) for detail in error.errors())) from error


def _told(path: Path, detail: Any) -> str:
    key = ".".join(map(str, detail["loc"])) or "the file"
    known = ", ".join(DaemonConfig.model_fields)
    remedy = f" (known keys: {known})" if detail["type"] == "extra_forbidden" and len(detail["loc"]) == 1 else ""
    return f"{path}: {key}: {detail['msg']}{remedy}"
