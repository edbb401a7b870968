"""What was planned of a run, as functions of its tokens: the registered loss and the learning rate.

One of each for checks, plans, pictures and drills. The reference trainer, which shares no code, is held to the same numbers by
`tests/contract/schedules/`.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]


class LossCurve(Protocol):
    """A registered loss in nats over tokens, with its 95 % band; tokens rise, and all four have one length."""

    @property
    def tokens(self) -> Sequence[float]:
        """Where it is known."""
        ...

    @property
    def loss(self) -> Sequence[float]:
        """The expected loss."""
        ...

    @property
    def low(self) -> Sequence[float]:
        """The lower end of the band."""
        ...

    @property
    def high(self) -> Sequence[float]:
        """The upper end of the band."""
        ...


def along(tokens: Sequence[float], loss: Sequence[float], at: ArrayLike) -> Floats:
    """A loss at further tokens `at`: straight lines in log loss over log tokens, NaN outside (docs/run-directory.md)."""
    known = np.log(np.maximum(tokens, 1.0))
    wanted = np.log(np.maximum(np.asarray(at, np.float64), 1.0))
    return np.exp(np.interp(wanted, known, np.log(loss), left=np.nan, right=np.nan))


def registered_loss(curve: LossCurve, at: ArrayLike) -> Floats:
    """Expected loss, low and high end of its band at tokens `at`: shape (3, *at.shape), NaN outside the curve."""
    return np.stack([along(curve.tokens, side, at) for side in (curve.loss, curve.low, curve.high)])


def learning_rate_share(
    at: ArrayLike, *, warmup_tokens: float, decay_start_tokens: float, token_budget: float, final_fraction: float
) -> Floats:
    """The share (0 to 1) of the peak learning rate for the step that ends at tokens `at`: warmup, stable, decay.

    Linear from 0 over the warmup, 1, then linear from `decay_start_tokens` down to `final_fraction` at the budget's end (WSD: Hu et
    al. 2024, arXiv 2404.06395). A decay without length drops at its start.
    """
    tokens = np.asarray(at, np.float64)
    warm = np.clip(tokens / warmup_tokens, 0, 1) if warmup_tokens > 0 else np.ones_like(tokens)
    span = token_budget - decay_start_tokens
    through = (
        np.clip((tokens - decay_start_tokens) / span, 0, 1) if span > 0 else (tokens > decay_start_tokens).astype(float)
    )
    return np.minimum(warm, 1 - (1 - final_fraction) * through)
