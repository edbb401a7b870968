"""Fits the public OLMo ladder with the form that `runwatch ladder` fits, and predicts the held-out losses of OLMo 2 7B.

    python -P benchmarks/ladder/olmo.py [--recordings DIR] [--dry]

Twenty rungs (190M to 3B parameters, 1 to 10 times 20 tokens a parameter) and the 7B run above them, five corpora each, from
allenai/OLMo-ladder (Bhagia et al. 2024, arXiv 2412.04403). Cosine schedules: a rung is a point at its end, not a course; what a
run loses on the way to its end is the mean course of the longest rungs, over the share of the schedule.
"""

import argparse
import csv
import gzip
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from runwatch.trainer.ladder.rungs import Floats
from runwatch.trainer.ladder.surface import Points, Surface, fit_surface, grid_fit, improved

ROOT = Path(__file__).parents[2]
RECORDINGS = ROOT.parent / "shared" / "recordings"
CORPORA = ("c4", "pile", "wiki", "stack", "reddit")
PARAMETERS = {"190M": 190354176, "370M": 371262464, "760M": 758220288, "1B": 1279395840, "3B": 3169537280}
"""Without embeddings, as allenai/OLMo-ladder counts them; the 7B below too."""
TARGET_PARAMETERS = 6887575552
TARGET_BUDGET = 5e12
"""Tokens for which the 7B's cosine was laid out; it was cut at 3.9T (OLMo 2, arXiv 2501.00656, section 2)."""
SHARES = np.linspace(0.05, 1.0, 39)
"""Of the schedule; before 5 % the short rungs still warm up."""
LONGEST = 10
BOOTSTRAPS = 200
BETWEEN_RUNGS = 5
"""Coefficients of the surface: so many degrees of freedom are gone."""


@dataclass(frozen=True)
class Rung:
    """Multiple of 20 tokens a parameter, parameters, and rows of tokens (P,) and losses (P,) of one corpus."""

    multiple: int
    parameters: int
    tokens: Floats
    loss: Floats


@dataclass(frozen=True)
class Prediction:
    """The 7B's evaluations of one corpus from 5 % of its schedule on: tokens, measured, predicted, band; all (P,)."""

    corpus: str
    surface: Surface
    tokens: Floats
    measured: Floats
    predicted: Floats
    low: Floats
    high: Floats
    end_summed: float

    @property
    def error(self) -> Floats:
        """Predicted less measured, in nats."""
        return self.predicted - self.measured

    @property
    def end(self) -> float:
        """The error over the last five evaluations."""
        return float(self.error[-5:].mean())

    @property
    def inside(self) -> float:
        """Share of the evaluations inside the band."""
        return float(np.mean((self.low <= self.measured) & (self.measured <= self.high)))


def rungs_of(recordings: Path, corpus: str) -> list[Rung]:
    with gzip.open(recordings / "olmo-ladder-rungs.csv.gz", "rt", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    found: list[Rung] = []
    for name in dict.fromkeys(row["run"] for row in rows):
        size, multiple = name.split("-")[:2]
        mine = [(float(row["tokens"]), float(row[f"eval_loss_{corpus}"])) for row in rows if row["run"] == name]
        tokens, loss = np.array(mine).T
        found.append(Rung(int(multiple.removesuffix("xC")), PARAMETERS[size], tokens, loss))
    return found


def target_of(recordings: Path, corpus: str) -> tuple[Floats, Floats]:
    """Tokens and losses of the 7B from 5 % of its schedule on."""
    with (recordings / "olmo2-7b-evals.csv").open(encoding="utf-8") as file:
        rows = [(float(row["tokens"]), float(row[f"eval_loss_{corpus}"])) for row in csv.DictReader(file)]
    tokens, loss = np.array([row for row in rows if row[0] >= SHARES[0] * TARGET_BUDGET]).T
    return tokens, loss


def ends(rungs: Sequence[Rung]) -> Points:
    sizes, tokens, losses = np.array([(rung.parameters, rung.tokens[-1], rung.loss[-1]) for rung in rungs]).T
    return Points(sizes, tokens, losses, np.ones(len(rungs)))


def approach(rungs: Sequence[Rung], surface: Surface) -> Floats:
    """How far these rungs lie above the surface at each share of their schedule, less the same at its end; (S,)."""
    above: list[Floats] = []
    for rung in rungs:
        over = rung.loss - surface.at(rung.parameters, rung.tokens)
        above.append(np.interp(SHARES, rung.tokens / rung.tokens[-1], over - over[-1]))
    return np.mean(above, axis=0)


def course(surface: Surface, longest: Sequence[Rung], tokens: Floats) -> Floats:
    """Expected losses of the 7B at `tokens`."""
    return surface.at(TARGET_PARAMETERS, tokens) + np.interp(tokens / TARGET_BUDGET, SHARES, approach(longest, surface))


def predict(recordings: Path, corpus: str) -> Prediction:
    """Fit the twenty rungs and predict the 7B; `end_summed` is the error at the end of the plain sum (p = 1)."""
    rungs = rungs_of(recordings, corpus)
    longest = [rung for rung in rungs if rung.multiple == LONGEST]
    tokens, measured = target_of(recordings, corpus)
    points = ends(rungs)
    surface, summed = fit_surface(points), improved(points, grid_fit(points), sharp=False)
    predicted = course(surface, longest, tokens)
    below, above = band(points, surface, longest, tokens)
    end_summed = float((course(summed, longest, tokens) - measured)[-5:].mean())
    return Prediction(corpus, surface, tokens, measured, predicted, predicted - below, predicted + above, end_summed)


def band(points: Points, surface: Surface, longest: Sequence[Rung], tokens: Floats) -> tuple[Floats, Floats]:
    """How far the 95 % band reaches below and above: resampled residuals, resampled courses, and the misfit of a rung."""
    count = len(points.loss)
    residual = points.loss - surface.at(points.size, points.tokens)
    residual *= np.sqrt(count / (count - BETWEEN_RUNGS))
    random = np.random.default_rng(0)
    samples: list[Floats] = []
    for _ in range(BOOTSTRAPS):
        drawn = random.choice(residual - residual.mean(), count)
        again = replace(points, loss=surface.at(points.size, points.tokens) + drawn)
        used = [longest[number] for number in random.integers(0, len(longest), len(longest))]
        samples.append(course(improved(again, surface, sharp=surface.sharpness > 1), used, tokens))
    low, high = np.percentile(samples - np.median(samples, axis=0), (2.5, 97.5), axis=0)
    spread = 1.96 * float(residual.std())
    return np.hypot(low, spread), np.hypot(high, spread)


def table(found: Sequence[Prediction]) -> str:
    """Markdown."""
    stops = (0.5e12, 1e12, 2e12, 3e12)
    head = [
        "corpus",
        "measured",
        "error at 3.9T",
        *(f"at {stop / 1e12:g}T" for stop in stops),
        "mean of all",
        "in the band",
    ]
    lines = [f"| {' | '.join([*head, 'p = 1 at 3.9T'])} |", f"| --- |{' ---: |' * len(head)}"]
    for one in found:
        errors = [float(one.error[np.argmin(np.abs(one.tokens - stop))]) for stop in stops]
        cells = [
            one.corpus,
            f"{one.measured[-5:].mean():.3f}",
            f"**{one.end:+.3f}**",
            *(f"{error:+.3f}" for error in errors),
        ]
        cells += [f"{np.abs(one.error).mean():.3f}", f"{one.inside:.0%}", f"{one.end_summed:+.3f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def picture(recordings: Path, found: Sequence[Prediction]) -> Figure:
    """Loss over tokens: ends of the rungs with the fit, the 7B's course with prediction and band, one panel a corpus."""
    figure = Figure(figsize=(14, 4), layout="constrained")
    panels = figure.subplots(1, len(found))
    for axes, one in zip(panels, found, strict=True):
        rungs = rungs_of(recordings, one.corpus)
        sizes = sorted({rung.parameters for rung in rungs})
        for size, colour in zip(sizes, mpl.colormaps["viridis"](np.linspace(0.1, 0.85, len(sizes))), strict=True):
            mine = [(rung.tokens[-1], rung.loss[-1]) for rung in rungs if rung.parameters == size]
            tokens, losses = np.array(mine).T
            axes.plot(tokens, losses, "o", color=colour, markersize=4, label=f"{size / 1e9:.2g}B rungs")
            axes.plot(tokens, one.surface.at(size, tokens), color=colour, linewidth=1)
        axes.fill_between(one.tokens, one.low, one.high, color="#0d47a1", alpha=0.15, linewidth=0)
        axes.plot(one.tokens, one.predicted, color="#0d47a1", linewidth=1.6, label="7B predicted, 95 %")
        axes.plot(one.tokens, one.measured, color="#c62828", linewidth=1.2, label="7B measured")
        axes.set(xscale="log", xlabel="tokens", title=one.corpus)
    panels[0].set_ylabel("held-out loss (nats)")
    panels[0].legend(frameon=False, fontsize=8)
    return figure


def publish(results: Path, text: str) -> None:
    """Put `text` between the markers."""
    begin, end = "<!-- ladder -->", "<!-- /ladder -->"
    old = results.read_text(encoding="utf-8")
    before, _, rest = old.partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise SystemExit(f"{results} has no {begin} and {end}")
    results.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recordings", type=Path, default=RECORDINGS)
    parser.add_argument("--dry", action="store_true", help="leave RESULTS.md and the picture alone")
    args = parser.parse_args()
    found = [predict(args.recordings, corpus) for corpus in CORPORA]
    print(table(found))
    for one in found:
        print(one.corpus, one.surface)
    if not args.dry:
        publish(ROOT / "benchmarks" / "RESULTS.md", table(found))
        picture(args.recordings, found).savefig(ROOT / "docs" / "images" / "ladder-olmo.png", dpi=110)


if __name__ == "__main__":
    main()
