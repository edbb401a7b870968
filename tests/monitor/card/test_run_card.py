"""The run card: good ones load, and each mistake is told with file, line, key and remedy."""

import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runwatch.checks import all_checks
from runwatch.monitor.card.context import Applied, applied, changes, check_settings, node_settings
from runwatch.monitor.card.run_card import Card, CardError, Declaration, load_card, remarks
from runwatch.rules import Execution, Receipt
from runwatch.rules.plan import Action, Rewind, ScaleLr, SetDataMixture, SetLrDecay, SetTokenBudget

ROOT = Path(__file__).parents[3]
CARDS = ROOT / "tests/contract/cards"
BAD = sorted((CARDS / "bad").glob("*.yaml"))
GOOD = [*sorted((CARDS / "good").glob("*.yaml")), *sorted((ROOT / "trainer/cards").glob("*.yaml"))]


def example() -> str:
    """The card in the documentation of the contract."""
    document = (ROOT / "docs/run-directory.md").read_text()
    return document.split("```yaml\n")[1].split("```")[0]


@pytest.fixture
def card(tmp_path: Path) -> Card:
    (tmp_path / "run.yaml").write_text(example())
    return load_card(tmp_path / "run.yaml")


@pytest.mark.parametrize("path", GOOD, ids=lambda path: path.name)
def test_good_cards_load(path: Path) -> None:
    card = load_card(path)
    assert card.planned().plan_state().token_budget == card.plan.token_budget
    assert set(check_settings(card)) == set(all_checks())
    assert set(node_settings(card)) == {"early_divergence", "instability", "routing_collapse", "throughput_shortfall"}


@pytest.mark.parametrize("path", BAD, ids=lambda path: path.stem)
def test_a_bad_card_tells_every_mistake_with_its_line(path: Path) -> None:
    """A bad card begins with the mistakes expected, one a line: `#! line: key and sentence`."""
    lines = path.read_text().splitlines()
    expected = [line.removeprefix("#! ") for line in lines if line.startswith("#! ")]
    with pytest.raises(CardError) as raised:
        load_card(path)
    told = [str(mistake).removeprefix(f"{path}:").strip() for mistake in raised.value.mistakes]
    assert sorted(told) == sorted(line.removeprefix("0: ") for line in expected)


def test_the_documented_example_is_a_card(card: Card) -> None:
    assert card.run.name == "cpu-demo"
    assert card.hardware.peak_flops_per_second == 5e10
    assert node_settings(card)["early_divergence"].mode == "auto"
    assert remarks(card) == ()


def test_a_card_that_is_not_there_or_not_text_is_told_as_such(tmp_path: Path) -> None:
    with pytest.raises(CardError, match=r"nowhere\.yaml: cannot be read: No such file"):
        load_card(tmp_path / "nowhere.yaml")
    (tmp_path / "run.yaml").write_bytes(b"version: 1\nrun: {name: \xff\xfe}\n")
    with pytest.raises(CardError, match=r"run\.yaml:2: is not UTF-8"):
        load_card(tmp_path / "run.yaml")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("deep", "[" * 5_000, "nested more than"),
        ("bomb", "a: &a [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
            f"{new}: &{new} [{','.join([f'*{old}'] * 10)}]\n" for old, new in zip("abcdefg", "bcdefgh", strict=True)
        ), "expands to more than"),
        ("loop", "a: &a [*a]\n", "expands to more than"),
        ("huge", "# " + "x" * (1 << 20), "has 1,048,578 bytes"),
    ],
)  # fmt: skip
def test_a_hostile_card_costs_no_more_than_a_moment(name: str, text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(text)
    start = time.process_time()
    with pytest.raises(CardError, match=message):
        load_card(tmp_path / "run.yaml")
    assert time.process_time() - start < 5, name


@given(st.text(max_size=200) | st.from_regex(r"(version|run|plan|checks): [\[{&*!a-z0-9: ,\n-]{0,60}"))
def test_any_text_is_a_card_or_a_card_error(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(CardError):
        load_card(path)


def test_what_is_allowed_and_perhaps_not_meant_is_remarked(tmp_path: Path) -> None:
    text = example().replace("token_budget: 3072000", "token_budget: 3072500")
    (tmp_path / "run.yaml").write_text(text)
    found = "\n".join(remarks(load_card(tmp_path / "run.yaml")))
    assert "will end at 3,073,024 tokens" in found
    assert "the last stretch is shorter" in found
    assert "ladder.curve ends before" in found


def directive(card: Card, step: int, *actions: Action, time: float = 0.0) -> Applied:
    """A directive applied at `step`; its receipt shows the budget, decay and shares of its actions."""
    before = card.planned().plan_state()
    update = {}
    for action in actions:
        if isinstance(action, SetTokenBudget):
            update["token_budget"] = action.tokens
        if isinstance(action, SetLrDecay):
            update["decay_start_tokens"] = action.start_tokens
        if isinstance(action, SetDataMixture):
            update["mixture"] = action.shares
        if isinstance(action, ScaleLr):
            update["lr_scale"] = action.factor
    receipt = Receipt(
        id=f"x-{step:04d}",
        status="applied",
        attempt="a0001",
        step=step,
        tokens=step * 1024,
        time=time,
        before=before,
        after=before.model_copy(update=update),
    )
    return Applied(receipt, actions)


SHORTEN = (
    SetTokenBudget(tokens=1_536_000),
    SetLrDecay(start_tokens=1_228_800, final_fraction=0.05),
    SetDataMixture(shares={"code": 0.2, "docs": 0.3, "prose": 0.5}),
)


def test_checks_are_told_of_curve_plan_and_limits(card: Card) -> None:
    settings = check_settings(card)
    assert settings["ladder_deviation"].curves[0].tokens == (0, 3_072_000)
    assert settings["checkpoint"].interval_steps == 100
    assert settings["expert_balance"].router_bias_limit == 4.0
    assert settings["loss_spike"].min_jump_nats == 0.05
    plan, swapped = settings["plan_conformance"].plans
    assert (swapped.from_step, swapped.mixture, swapped.peak) == (2000, None, 0.01)
    assert settings["ladder_deviation"].curves[1].from_step == 2000
    assert (plan.peak, plan.warmup_tokens, plan.decay_start_tokens) == (0.01, 61_440, 2_457_600)


def test_a_directive_changes_what_checks_hold_the_run_against(card: Card) -> None:
    settings = check_settings(card, [directive(card, 400, *SHORTEN)])
    declared, replanned, _ = settings["plan_conformance"].plans
    assert (declared.from_step, replanned.from_step) == (0, 401)
    assert (replanned.token_budget, replanned.decay_start_tokens) == (1_536_000, 1_228_800)
    assert replanned.mixture == {"code": 0.2, "docs": 0.3, "prose": 0.5}
    assert replanned.decay_mixture is None
    registered, nothing = settings["ladder_deviation"].curves
    assert (registered.from_step, nothing.from_step, nothing.tokens) == (0, 401, ())


def test_an_earlier_decay_alone_ends_the_curve_where_it_begins(card: Card) -> None:
    settings = check_settings(card, [directive(card, 400, *SHORTEN[:2])])
    assert settings["ladder_deviation"].curves[1].from_step == 1_201


def test_a_rewind_carries_the_plan_back_to_its_checkpoint(card: Card) -> None:
    done = [
        directive(card, 400, *SHORTEN),
        directive(card, 450, Rewind(checkpoint_step=300, skip_steps=160), ScaleLr(factor=0.5), time=1.0),
    ]
    plans = check_settings(card, done)["plan_conformance"].plans
    assert [(plan.from_step, plan.from_time) for plan in plans] == [(0, None), (401, None), (301, 1.0), (2000, 1.0)]
    assert plans[2].lr_scale == 0.5
    assert plans[2].mixture == {"code": 0.2, "docs": 0.3, "prose": 0.5}


def test_planned_changes_are_those_of_the_card_of_declarations_and_of_directives(card: Card) -> None:
    declared = [Declaration(step=100, signals=("throughput",), reason="another transport")]
    found = changes(card, [directive(card, 400, *SHORTEN)], declared)
    assert [change.step for change in found] == [100, 401, 2000]  # the last: a declaration of the card
    assert found[1].signals == (
        "data/mixture",
        "optim/learning_rate",
        "plan/decay_start_tokens",
        "plan/token_budget",
        "train/loss",
    )
    assert found[0].touches(["throughput/mfu"])
    assert not found[0].touches(["train/loss"])


LATER = (SetLrDecay(start_tokens=2_560_000, final_fraction=0.05),)
BACK = (Rewind(checkpoint_step=2_300, skip_steps=160),)
DECAYS: dict[str, tuple[list[tuple[int, tuple[Action, ...]]], int | None]] = {
    "as planned": ([], 2_401),
    "an earlier decay": ([(400, SHORTEN[:2])], 1_201),
    "an earlier decay that should have begun by now": ([(1_500, SHORTEN[:2])], 1_501),
    "a later decay": ([(400, LATER)], 2_501),
    "a later decay when it had begun": ([(2_450, LATER)], 2_401),
    "a mixture that was set before": ([(400, SHORTEN)], None),
    "a mixture that was set after it": ([(2_450, SHORTEN)], 2_401),
    "a rewind to before it": ([(2_450, BACK)], 2_401),
}


@pytest.mark.parametrize("case", DECAYS)
def test_checks_judge_anew_where_the_decay_brings_its_own_mixture(case: str, card: Card) -> None:
    done, step = DECAYS[case]
    found = changes(card, [directive(card, at, *actions, time=float(at)) for at, actions in done])
    assert [change.step for change in found if "decay" in change.reason] == ([] if step is None else [step])


def test_a_decay_on_the_same_mixture_changes_nothing(card: Card) -> None:
    mixture = card.plan.mixture.model_copy(update={"decay": card.plan.mixture.stable})
    plan = card.plan.model_copy(update={"mixture": mixture})
    assert not [one for one in changes(card.model_copy(update={"plan": plan})) if "decay" in one.reason]


def test_only_applied_executions_are_directives() -> None:
    assert applied(list[Execution]()) == ()
