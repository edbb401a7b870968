"""What the daemon is put together from: its settings and its notifiers."""

from pathlib import Path

from runwatch.monitor.daemon.settings import DaemonConfig, load_config
from runwatch.monitor.notify import Notifier, connect


def settings(run_dir: Path, config_file: Path | None, listen: str | None, database: str | None) -> DaemonConfig:
    """The daemon's settings: the file's, then what the command line says.

    Raises:
        ConfigError: the file has mistakes.
        ValueError: what the command line says is wrong.
    """
    file = config_file or run_dir / "runwatch.yaml"
    config = load_config(file) if config_file or file.exists() else DaemonConfig()
    given = {"listen": listen, "database": database}
    return DaemonConfig.model_validate(
        {**dict(config), **{name: value for name, value in given.items() if value is not None}}
    )


def notifiers(config: DaemonConfig) -> dict[str, Notifier]:
    """Every configured notifier by name; two of a kind get numbers unless they are named."""
    found: dict[str, Notifier] = {}
    for one in config.notify:
        notifier = connect(one)
        name = one.name or notifier.name
        found[name if name not in found else f"{name}-{len(found) + 1}"] = notifier
    return found
