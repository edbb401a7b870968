"""The fit of a scaling ladder, as the trainer's side makes it: a process in, a fit file out (`docs/ladder.md`)."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

COMMAND = (sys.executable, "-P", "-m", "runwatch.trainer.ladder.fit")
OPTIONS: Sequence[str] = ()
FIT_SECONDS = 600.0


class LadderError(ValueError):
    """Rungs that cannot be fitted, or a card that may not be changed; the message says what to do."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class FittedRung(_Part):
    """A rung: losses in nats; courses have rows [tokens, loss] from three warm-ups on; `trends` are means by signal."""

    name: str
    parameters: int
    tokens: int
    loss: float
    fitted: float
    course: list[tuple[float, float]]
    fitted_course: list[tuple[float, float]]
    trends: dict[str, float]


class HeldOut(_Part):
    """The largest rung, predicted from others; `error` is measured less predicted, `inside` the share inside the band."""

    rung: str
    predicted: float
    measured: float
    inside: float
    error: float


class Prediction(_Part):
    """What the fit says of the run that it was asked about: `formula` and `curve` as the card holds them."""

    formula: dict[str, float]
    curve: dict[str, list[float]]


class LadderFit(_Part):
    """A fit file. `misfit` is the scatter in nats before the decay and within it, `shared` that of the common data order."""

    version: int
    surface: dict[str, float]
    intervals: dict[str, tuple[float, float]]
    decay_gain: list[float]
    misfit: tuple[float, float]
    shared: float
    rungs: tuple[FittedRung, ...]
    warnings: tuple[str, ...]
    held_out: HeldOut | None
    prediction: Prediction | None


def fit_rungs(rungs: Path, *arguments: str) -> LadderFit:
    """Fit the rungs of a file, in a process of the trainer's side; seconds of work.

    Raises:
        LadderError: they cannot be read or fitted.
    """
    try:
        done = subprocess.run(  # noqa: S603 - our own interpreter and module
            [*COMMAND, str(rungs), *OPTIONS, *arguments], capture_output=True, timeout=FIT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise LadderError(f"{rungs}: the fit has not ended within {FIT_SECONDS:.0f} s") from error
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or [f"the fit ended with {done.returncode}"]
        raise LadderError(lines[-1])
    try:
        return LadderFit.model_validate_json(done.stdout)
    except ValidationError as error:
        raise LadderError(f"{rungs}: the fit gives no usable curve: {error.errors()[0]['msg']}") from error


def prediction_of(fitted: LadderFit) -> dict[str, Any]:
    """Formula and curve of the run that the fit was asked about.

    Raises:
        LadderError: it was asked about none.
    """
    if fitted.prediction is None:
        raise LadderError("the fit was not asked about a run")
    return fitted.prediction.model_dump()
