"""The health checks: pure functions from a run's signals to verdicts.

`all_checks()` finds them: every module of this folder that defines `CHECK` is a check.
"""

import importlib
import pkgutil
from functools import cache

from runwatch.checks.check import Change, Check, Level, Settings, Verdicts, judge
from runwatch.checks.signals import Column, Phase, Signals

__all__ = ["Change", "Check", "Column", "Level", "Phase", "Settings", "Signals", "Verdicts", "all_checks", "judge"]


@cache
def all_checks() -> dict[str, Check]:
    """Every check by name, in alphabetical order."""
    modules = (importlib.import_module(f"{__name__}.{found.name}") for found in pkgutil.iter_modules(__path__))
    checks = [check for module in modules if isinstance(check := getattr(module, "CHECK", None), Check)]
    return {check.name: check for check in sorted(checks, key=lambda check: check.name)}
