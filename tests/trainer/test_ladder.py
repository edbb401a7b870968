"""The fit of the ladder: a known surface is found again, the unknown is told, and a bad rung is refused by name."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from runwatch.trainer.ladder.course import DECAY_GRID
from runwatch.trainer.ladder.fit import fit, hold_out
from runwatch.trainer.ladder.rungs import LadderError, Rung, Schedule, read_rungs
from runwatch.trainer.ladder.surface import Surface

TRAINER = Path(__file__).parents[2] / "trainer"
CPU_RUNGS, CPU_CARD = TRAINER / "ladder" / "cpu.json", TRAINER / "cards" / "cpu.yaml"
TRUTH = Surface(1.5, 400.0, 0.4, 900.0, 0.45)
SHARP = replace(TRUTH, sharpness=4.0)
DESIGN = ((1e5, 4e5), (1e5, 3e6), (4e5, 1e6), (4e5, 6e6), (1.6e6, 2e6), (1.6e6, 1e7), (3e6, 4e6))
MAIN = Schedule(100_000_000, 200_000, 80_000_000)


def rung(surface: Surface, size: float, tokens: float, gain: float = 0.05, noise: float = 0.0, seed: int = 0) -> Rung:
    """A run of 60 stretches on the surface, whose decay gains `gain` nats along a line."""
    start, warmup = round(0.8 * tokens), round(0.02 * tokens)
    at = np.linspace(tokens / 60, tokens, 60)
    random = np.random.default_rng([seed, int(size), int(tokens)])
    through = np.clip((at - start) / (tokens - start), 0, 1)
    loss = surface.at(size, at) - gain * through + noise * (random.normal(size=60) + random.normal())
    final = float(surface.at(size, 0.975 * tokens) - 0.875 * gain)
    rows = np.stack([at, loss, np.full(60, 0.01), np.full(60, 10.0)], axis=1)
    return Rung(f"{size:g}-{tokens:g}", int(size), int(tokens), warmup, start, final, rows)


def rungs_of(surface: Surface, **more: float) -> list[Rung]:
    return [rung(surface, size, tokens, **more) for size, tokens in DESIGN]  # type: ignore[arg-type]


@pytest.mark.parametrize("truth", [TRUTH, SHARP], ids=["sum", "scarcer rules"])
def test_a_ladder_on_a_known_surface_gives_its_coefficients_back(truth: Surface) -> None:
    found = fit(rungs_of(truth)).surface
    assert found.irreducible == pytest.approx(truth.irreducible, abs=0.03)
    assert found.parameter_exponent == pytest.approx(truth.parameter_exponent, rel=0.05)
    assert found.token_exponent == pytest.approx(truth.token_exponent, rel=0.05)
    assert found.parameter_scale == pytest.approx(truth.parameter_scale, rel=0.3)
    assert found.token_scale == pytest.approx(truth.token_scale, rel=0.3)
    assert found.sharpness == pytest.approx(truth.sharpness, rel=0.1)


def test_the_gain_of_the_decay_is_found_and_ends_the_curve() -> None:
    fitted = fit(rungs_of(TRUTH))
    assert fitted.gain == pytest.approx(0.05 * DECAY_GRID, abs=0.003)
    end = fitted.curve(1e7, MAIN)["loss"][-1]
    assert end == pytest.approx(float(TRUTH.at(1e7, MAIN.token_budget)) - 0.05, abs=0.005)


def test_the_band_of_noisy_ladders_holds_the_truth_and_is_a_curve() -> None:
    """A band of 95 % misses now and then, and then a whole curve at once: what must be high is the mean over ladders."""
    shares: list[float] = []
    for seed in range(8):
        curve = fit(rungs_of(TRUTH, noise=0.01, seed=seed)).curve(1e7, MAIN)
        tokens, low, high = (np.array(curve[name]) for name in ("tokens", "low", "high"))
        truth = TRUTH.at(1e7, tokens) - np.where(tokens > 8e7, 0.05 * (tokens - 8e7) / 2e7, 0)
        shares.append(float(np.mean((low < truth) & (truth < high))))
        assert (np.diff(tokens) > 0).all()
        assert (low > 0).all()
        assert high[-1] - low[-1] < 0.15, "a band this wide says nothing"
    assert np.mean(shares) > 0.9


def test_the_largest_rung_is_predicted_from_the_others() -> None:
    held = hold_out(rungs_of(TRUTH, noise=0.004))
    assert held.rung == "1.6e+06-1e+07"
    assert abs(held.error) < 0.02
    assert held.inside >= 0.9


def test_the_rungs_of_the_cpu_card_predict_their_largest_one() -> None:
    held = hold_out(read_rungs(CPU_RUNGS))
    assert held.rung == "w56-2400"
    assert abs(held.error) < 0.02
    assert held.inside >= 0.9


def test_the_curve_in_the_cpu_card_predicted_a_clean_run_of_it() -> None:
    """`samples/cpu-clean-run.json` is the course (tokens, mean loss of a stretch) of a whole run, which no rung is."""
    run = json.loads((Path(__file__).parent / "samples" / "cpu-clean-run.json").read_text())
    curve = {name: np.array(row) for name, row in yaml.safe_load(CPU_CARD.read_text())["ladder"]["curve"].items()}
    tokens, loss = np.array([row for row in run["curve"] if row[0] > curve["tokens"][0]]).T
    low, high = (np.interp(tokens, curve["tokens"], curve[side]) for side in ("low", "high"))
    assert np.mean((loss > low) & (loss < high)) >= 0.9
    assert abs(np.interp(0.975 * curve["tokens"][-1], curve["tokens"], curve["loss"]) - run["final_loss"]) < 0.02


def in_one_order(rungs: list[Rung], seeds: tuple[int, ...] = (0,)) -> list[Rung]:
    """The rungs with what a data order adds: a wave over log tokens, the same for all sizes."""
    waved = [one.course + 0.05 * np.outer(np.sin(9 * np.log(one.course[:, 0])), [0, 1, 0, 0]) for one in rungs]
    return [
        replace(one, course=rows, seed=seeds[at % len(seeds)])
        for at, (one, rows) in enumerate(zip(rungs, waved, strict=True))
    ]


def test_what_a_data_order_adds_to_every_size_is_found_and_goes_into_the_curve() -> None:
    noisy = rungs_of(TRUTH, noise=0.003)
    alone, shared = fit(noisy), fit(in_one_order(noisy))
    tokens = np.geomspace(4e5, 4e6, 50)
    moved = shared.at(1e7, tokens, MAIN) - alone.at(1e7, tokens, MAIN)
    assert np.abs(moved - 0.05 * np.sin(9 * np.log(tokens))).max() < 0.02
    assert shared.misfit[0] < 0.02


@pytest.mark.parametrize(
    "rungs",
    [in_one_order(rungs_of(TRUTH), (0, 1)), [replace(one, seed=0) for one in rungs_of(TRUTH, noise=0.01)]],
    ids=["two seeds", "noise that no other size shares"],
)
def test_residuals_that_sizes_do_not_share_stay_out_of_the_curve(rungs: list[Rung]) -> None:
    assert not fit(rungs).shared.nats.any()


def test_a_shorter_run_of_the_held_out_size_and_seed_does_not_help_to_predict_it() -> None:
    rungs = [replace(one, seed=0) for one in rungs_of(TRUTH, noise=0.004)]
    told = [one for one in rungs if one.parameters != 1.6e6]
    assert hold_out(rungs) == hold_out([*told, next(one for one in rungs if one.name == "1.6e+06-1e+07")])


def test_the_formula_in_the_card_tells_what_another_budget_costs() -> None:
    fitted = fit(rungs_of(SHARP))
    formula = fitted.formula(1e7, MAIN)
    half = formula["token_scale"] * (5e7 ** -formula["token_exponent"] - 1e8 ** -formula["token_exponent"])
    assert half == pytest.approx(float(SHARP.at(1e7, 5e7) - SHARP.at(1e7, 1e8)), rel=0.15)


def test_what_the_rungs_do_not_determine_is_told() -> None:
    flat = [replace(one, parameters=size) for one, size in zip(rungs_of(TRUTH), (1, 1, 1, 2, 2, 2, 2), strict=True)]
    assert any("few" in remark for remark in fit(flat).remarks())
    endless = replace(TRUTH, irreducible=0.0, token_exponent=0.02)
    told = " ".join(fit(rungs_of(endless)).remarks())
    assert "token exponent lies at the edge" in told
    assert not fit(rungs_of(TRUTH)).remarks()


@pytest.mark.parametrize(("count", "size"), [(3, None), (0, None), (7, 100_000)])
def test_too_few_rungs_or_sizes_are_refused_with_what_is_needed(count: int, size: int | None) -> None:
    rungs = [one if size is None else replace(one, parameters=size) for one in rungs_of(TRUTH)[:count]]
    with pytest.raises(LadderError, match=r"4 rungs of 2 sizes are the least.*ladder train"):
        fit(rungs)


def as_entry(one: Rung) -> dict[str, Any]:
    names = ("name", "parameters", "tokens", "warmup_tokens", "decay_start_tokens", "final_loss")
    return {**{name: getattr(one, name) for name in names}, "curve": one.course.tolist()}


def _set(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda entry: entry.__setitem__(key, value)


def _set_loss(value: float) -> Callable[[dict[str, Any]], None]:
    return lambda entry: entry["curve"][30].__setitem__(1, value)


BAD = {
    "NaN in the curve": (_set_loss(float("nan")), "finite rows"),
    "negative loss": (_set_loss(-1.0), "losses must be above 0"),
    "NaN at the end": (_set("final_loss", float("nan")), "final_loss must be a number above 0"),
    "tokens that fall": (lambda entry: entry["curve"].reverse(), "tokens must rise"),
    "no curve": (lambda entry: entry.pop("curve"), "lacks 'curve'"),
    "no parameters": (_set("parameters", 0), "parameters must be above 0"),
    "endless tokens": (_set("tokens", float("inf")), "infinity"),
    "a decay after the end": (_set("decay_start_tokens", 10**9), "must follow"),
    "hardly any stable phase": (_set("warmup_tokens", 110_000), "3 are the least"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_rung_that_cannot_be_is_refused_by_number_with_a_remedy(name: str, tmp_path: Path) -> None:
    entries = [as_entry(one) for one in rungs_of(TRUTH)]
    change, sentence = BAD[name]
    change(entries[0])
    path = tmp_path / "rungs.json"
    path.write_text(json.dumps({"rungs": entries}))
    with pytest.raises(LadderError, match=rf"rungs\.json: rung 1.*{sentence}.*train"):
        read_rungs(path)


@pytest.mark.parametrize("text", [None, "", "{", "[]", '{"rungs": 3}', "null"])
def test_a_file_that_holds_no_rungs_is_refused(text: str | None, tmp_path: Path) -> None:
    path = tmp_path / "rungs.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(LadderError, match=r"rungs\.json"):
        read_rungs(path)


def test_rungs_come_back_from_their_file_and_the_fit_repeats(tmp_path: Path) -> None:
    path = tmp_path / "rungs.json"
    path.write_text(json.dumps({"rungs": [as_entry(one) for one in rungs_of(TRUTH)]}))
    first, second = (fit(read_rungs(path)).curve(1e7, MAIN) for _ in range(2))
    assert first == second
