"""The training loop of one process of a run, from top to bottom: resume, steps, evaluations, checkpoints, directives."""

import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from runwatch.trainer import checkpoint, control
from runwatch.trainer.config import Card, differing
from runwatch.trainer.data import DataOrder, fingerprint
from runwatch.trainer.model import count
from runwatch.trainer.optim import Rates, closed_form
from runwatch.trainer.parallel import buffers, layout_of
from runwatch.trainer.plan import PlanState, lr_fraction
from runwatch.trainer.step import Knobs, State, initial_state, make_evaluation, make_step, unpack
from runwatch.trainer.telemetry import Telemetry, next_attempt
from runwatch.trainer.wandb_log import Mode, WandbLog

LAYER_DETAIL_EVERY = 20
"""Steps between two records with per-layer lists."""
PAUSE_SECONDS = 0.2
INTERRUPTED = 75
"""Exit code after a checkpoint on SIGTERM or SIGINT (EX_TEMPFAIL: start again)."""


def declared_plan(card: Card) -> PlanState:
    """The plan of the card before any directive."""
    plan, rate = card.plan, card.plan.learning_rate
    return PlanState(
        token_budget=plan.token_budget,
        decay_start_tokens=round(plan.token_budget * (1 - rate.decay_fraction)),
        final_fraction=rate.final_fraction,
        mixtures=((0, plan.mixture.stable),),
        lr_scale=1.0,
        z_loss_weight=card.model.z_loss_weight,
        capacity_factor=card.model.capacity_factor,
        balance_rate=card.model.balance_rate,
        context_length=plan.context_length,
    )


def flops_per_token(card: Card) -> float:
    """Model FLOP of a trained token: 6 per active parameter and 12 · width of attention per token seen (Chowdhery et al. 2022, PaLM, B)."""
    model, length = card.model, card.plan.context_length
    local = min(model.window, length / 2)
    layers_global = model.layers // model.global_every
    seen = local * (model.layers - layers_global) + length / 2 * layers_global
    return 6.0 * count(model)[1] + 12.0 * model.heads * model.head_width * seen


class OtherRunError(RuntimeError):
    """RUN_DIR holds checkpoints and none of them can be gone on from; starting over would lose them."""


@dataclasses.dataclass(frozen=True)
class Batch:
    """What one step trains on: tokens (sequences, length + 1), loss weights (sequences, length), each sequence's source."""

    tokens: NDArray[np.uint8]
    weights: NDArray[np.float32]
    sources: list[str]


@dataclasses.dataclass
class Loop:
    """All that changes while a run trains."""

    plan: PlanState
    state: State
    step: int = 0
    tokens: int = 0
    position: int = 0
    stopping: bool = False


class Trainer:
    """One process of a run: resumes, trains to the budget, obeys directives."""

    def __init__(self, card: Card, run_dir: Path, wandb: Mode | None = None) -> None:
        self.card, self.run_dir = card, run_dir
        folder = run_dir / "telemetry"
        self.telemetry = Telemetry(folder, next_attempt(folder), clock=self.clock)
        config = {**dataclasses.asdict(card.model), **dataclasses.asdict(card.plan), "card_hash": card.hash}
        self.wandb = WandbLog(run_dir / "wandb", run_dir.name, config, wandb) if wandb else None
        self.control = control.Control(run_dir)
        self.rates = self._rates()
        sources = tuple(sorted(set(card.plan.mixture.stable) | set(card.plan.mixture.decay or {})))
        self.order = DataOrder(sources, card.seed, card.plan.context_length)
        self.layout = layout_of(card)
        self.evaluate = make_evaluation(card.model, self.layout)
        self.programs: dict[
            tuple[int, ...], Any
        ] = {}  # by buffers of the experts and context length, which fix all shapes
        self.interrupted = False
        self.answers: list[dict[str, Any]] = []  # every receipt of the run, kept in each checkpoint
        state = self.layout.place(initial_state(card.model, self.rates, card.seed))
        self.loop = Loop(declared_plan(card), state)

    def _rates(self) -> Rates:
        plan = self.card.plan
        rates = closed_form(plan.token_budget, plan.tokens_per_step, self.card.model.width)
        rates = rates._replace(lm_head=plan.lm_head_optimizer)
        peak = plan.learning_rate.peak
        return rates if peak is None else rates._replace(muonh=peak, adam=rates.adam * peak / rates.muonh)

    def clock(self) -> float:
        """Unix seconds."""
        return time.time()

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.run_dir / "checkpoints"

    def run(self) -> int:
        """Train until the budget, a stop or a signal; returns the exit code."""
        self.emit("init")
        self.resume()
        self.program(self.loop.plan)
        while self.loop.tokens < self.loop.plan.token_budget and not self.loop.stopping and not self.interrupted:
            self.directives()
            if self.loop.plan.paused:
                self.pause()
            elif not self.loop.stopping and self.loop.tokens < self.loop.plan.token_budget:
                self.train_step()
                self.after_step()
        self.save()
        if not self.interrupted:
            self.emit("finished")
        self.close()
        return INTERRUPTED if self.interrupted else 0

    def emit(self, phase: str, metrics: dict[str, Any] | None = None) -> None:
        """One telemetry record at the loop's place."""
        self.telemetry.emit(self.loop.step, self.loop.tokens, phase, metrics)

    def close(self) -> None:
        """Write out what is still queued."""
        self.telemetry.close()
        if self.wandb:
            self.wandb.close()

    # --- one step ---------------------------------------------------------------------------------------------------------------

    def train_step(self) -> None:
        """Draw a batch, take a step, read one packed vector, emit one record."""
        loop, per_step = self.loop, self.card.plan.tokens_per_step
        self.enter_decay()
        program, began = self.program(loop.plan), time.monotonic()
        batch = self.draw()
        knobs = self.knobs(loop.tokens + per_step)
        scalars, layers = unpack(self.execute(program, knobs, batch), self.card.model.layers)
        loop.step, loop.tokens = loop.step + 1, loop.tokens + per_step
        loop.position += len(batch.sources)
        self.report(scalars, layers, batch, knobs, time.monotonic() - began)

    def draw(self) -> Batch:
        """The next sequences of the data order."""
        loop, length = self.loop, self.loop.plan.context_length
        sequences = self.card.plan.tokens_per_step // length
        tokens, sources = self.order.batch(loop.plan, loop.position, sequences)
        return Batch(tokens, np.ones((sequences, length), np.float32), sources)

    def knobs(self, tokens: int) -> Knobs:
        """The traced scalars of the step that ends at `tokens`."""
        plan = self.loop.plan
        warmup = round(self.card.plan.token_budget * self.card.plan.learning_rate.warmup_fraction)
        return Knobs(self.rates.muonh * lr_fraction(plan, tokens, warmup), plan.z_loss_weight, plan.balance_rate)

    def execute(self, program: Any, knobs: Knobs, batch: Batch) -> NDArray[np.float32]:
        """Take the step on the device; all scalars come back as one vector."""
        self.loop.state, packed = program(self.loop.state, knobs, batch.tokens, batch.weights)
        return np.asarray(packed)

    def program(self, plan: PlanState) -> Any:
        """The compiled step for the shapes of `plan`: compiled in phase `compile` when they are new, else taken from those that are there.

        Everything else that a directive changes is an argument of the program.
        """
        per_step, length = self.card.plan.tokens_per_step, plan.context_length
        shapes = (*buffers(plan.capacity_factor, per_step, self.card.model, self.layout), length)
        if shapes not in self.programs:
            self.emit("compile")
            step = make_step(self.card.model, self.rates, plan.capacity_factor, self.layout)
            rows = per_step // length
            tokens, weights = np.zeros((rows, length + 1), np.uint8), np.ones((rows, length), np.float32)
            self.programs[shapes] = step.lower(self.loop.state, Knobs(0.0, 0.0, 0.0), tokens, weights).compile()
        return self.programs[shapes]

    def enter_decay(self) -> None:
        """Move the mixture to its decay shares where the plan's decay begins, unless a directive set the mixture."""
        loop, shares = self.loop, self.card.plan.mixture.decay
        due = loop.tokens >= loop.plan.decay_start_tokens and not loop.plan.decayed
        if due:
            plan = dataclasses.replace(loop.plan, decayed=True)
            loop.plan = (
                plan.with_mixture(shares, loop.position, pinned=False) if shares and not plan.mixture_pinned else plan
            )

    def report(
        self,
        scalars: dict[str, float],
        layers: dict[str, Any],
        batch: Batch,
        knobs: Knobs,
        seconds: float,
    ) -> None:
        """Emit the record of the step just taken."""
        loop, plan, hardware = self.loop, self.loop.plan, self.card.hardware
        speed = self.card.plan.tokens_per_step / seconds
        record: dict[str, Any] = {
            **scalars,
            "optim/learning_rate": knobs.learning_rate,
            "throughput/step_time": seconds,
            "throughput/tokens_per_second": speed,
            "throughput/mfu": speed * flops_per_token(self.card) / (hardware.devices * hardware.peak_flops_per_second),
            "data/sample_fingerprint": fingerprint(batch.tokens),
            "data/position": loop.position,
            "plan/token_budget": plan.token_budget,
            "plan/decay_start_tokens": plan.decay_start_tokens,
            "plan/lr_scale": plan.lr_scale,
            "plan/z_loss_weight": knobs.z_loss_weight,
            "plan/capacity_factor": plan.capacity_factor,
            "plan/balance_rate": knobs.balance_rate,
            "plan/context_length": plan.context_length,
            **{f"data/mixture/{name}": batch.sources.count(name) / len(batch.sources) for name in self.order.sources},
        }
        if loop.step % LAYER_DETAIL_EVERY == 0:
            record |= layers
        self.emit("train", record)
        if self.wandb:
            self.wandb.log(loop.step, record)
        if loop.step % 50 == 0 or loop.step == 1:
            share = loop.tokens / plan.token_budget
            loss = scalars["train/loss"]
            print(f"step {loop.step} {share:.0%} loss {loss:.3f} {speed:.0f} tokens/s", file=sys.stderr, flush=True)

    # --- between steps ----------------------------------------------------------------------------------------------------------

    def after_step(self) -> None:
        """Evaluate and save where the plan's cadence says so."""
        loop, plan = self.loop, self.card.plan
        if loop.step % plan.eval.every_steps == 0:
            self.evaluation()
        if loop.step % plan.checkpoint.every_steps == 0 and loop.tokens < loop.plan.token_budget:
            self.save()

    def evaluation(self) -> None:
        """Measure the held-out loss, in phase `eval`."""
        self.emit("eval")
        metrics = {"eval/loss": self.held_out_loss()}
        self.emit("eval", metrics)
        if self.wandb:
            self.wandb.log(self.loop.step, metrics)

    def held_out_loss(self) -> float:
        """Nats per token over sequences that are never trained on."""
        tokens = self.order.held_out(self.card.plan.context_length, self.card.plan.eval.sequences)
        return float(self.evaluate(self.loop.state.params, self.loop.state.router_bias, tokens))

    def save(self) -> None:
        """Write a checkpoint, in phase `checkpoint`; one that fails is told and training goes on.

        It holds the receipts of the directives whose plan it holds: after a kill the next attempt writes out those that are missing.
        """
        self.emit("checkpoint")
        try:
            path = self.write_checkpoint()
        except checkpoint.CheckpointError as error:
            print(f"checkpoint failed: {error}", file=sys.stderr, flush=True)
            return
        if checkpoint.is_complete(path):
            self.emit("checkpoint", {"checkpoint/step": self.loop.step})
            checkpoint.prune(self.checkpoints, self.card.plan.checkpoint.keep)

    def write_checkpoint(self) -> Path:
        """The checkpoint of this step boundary.

        Raises:
            CheckpointError: a value is not finite, or the disk refused.
        """
        loop = self.loop
        meta = {
            "tokens": loop.tokens,
            "position": loop.position,
            "plan": loop.plan.to_json(),
            "card": self.card.hash,
            "identity": self.card.identity,
            "data": self.order.digest,
            "receipts": self.answers,
        }
        arrays = [np.asarray(leaf) for leaf in jax.tree.leaves(loop.state)]
        return checkpoint.save(self.checkpoints, self.telemetry.attempt, loop.step, arrays, meta)

    def pause(self) -> None:
        """Hold at the step boundary; a record now and then shows that the trainer lives."""
        self.emit("paused")
        for _ in range(25):
            time.sleep(PAUSE_SECONDS)
            self.directives()
            if not self.loop.plan.paused or self.loop.stopping or self.interrupted:
                return

    # --- resume and directives --------------------------------------------------------------------------------------------------

    def resume(self) -> None:
        """Go on from the newest complete checkpoint, if there is one, under the plan that receipts speak of.

        Raises:
            OtherRunError: there are checkpoints, and none is whole and of this card: to start over would lose them.
        """
        problems: list[str] = []
        for candidate in reversed(checkpoint.found(self.checkpoints)):
            try:
                self.answers = list(candidate.meta["receipts"])
                self.restore(candidate)
            except (checkpoint.CheckpointError, KeyError, TypeError, ValueError) as error:
                problems.append(f"{candidate.path.name}: {error}")
                print(f"skipping checkpoint {problems[-1]}", file=sys.stderr, flush=True)
                continue
            for answer in self.answers:
                if not self.control.answered(answer["id"]):
                    self.control.answer(answer["id"], answer)
            break
        else:
            if problems:
                remedy = "put the card back as it was, or begin a new run in another directory"
                raise OtherRunError(f"{self.checkpoints} holds no checkpoint of this run: {problems[0]}; {remedy}")
        self.catch_up()

    def catch_up(self) -> None:
        """Carry out again what receipts say was applied and the checkpoint does not hold: its own was torn, or the disk was full."""
        missing = [answer for answer in self.control.applied() if answer["id"] not in self.loop.plan.directives]
        for answer in missing:
            name = answer["id"]
            try:
                outcome = control.apply(self.loop.plan, self.control.again(name), self.boundary(), self.clock())
                self.carry_out(outcome, self.target(outcome))
            except (control.RejectedError, checkpoint.CheckpointError) as error:
                print(f"directive {name} cannot be carried out again: {error}", file=sys.stderr, flush=True)
                continue
            self.answers.append(answer)
            print(f"directive {name} carried out again at step {self.loop.step}", file=sys.stderr, flush=True)
        if missing:
            self.save()

    def restore(self, candidate: checkpoint.Found) -> None:
        """Take parameters, optimizer, plan and place from a checkpoint.

        Raises:
            CheckpointError: it is torn, or of another card or other text.
        """
        meta, loop = candidate.meta, self.loop
        other = differing(meta, self.card)
        if other is None and meta["data"] != self.order.digest:
            other = "the text of its sources is not what it was"
        if other is not None:
            raise checkpoint.CheckpointError(f"it is of another run: {other}")
        arrays = checkpoint.load(candidate.path)
        loop.step = candidate.step
        self.emit("restore")
        state = jax.tree.unflatten(jax.tree.structure(loop.state), jax.device_put(arrays))
        loop.state = self.layout.place(state)
        loop.tokens, loop.position = int(meta["tokens"]), int(meta["position"])
        loop.plan = PlanState.from_json(meta["plan"])

    def directives(self) -> None:
        """Read what came to control/requests and answer each."""
        for name, directive in self.control.poll():
            if isinstance(directive, str):
                self.reject(name, directive)
            elif name in self.loop.plan.directives:
                continue  # applied in an earlier attempt, which answers when it resumes
            else:
                self.obey(name, directive)

    def boundary(self) -> control.Boundary:
        """This step boundary, as a directive sees it."""
        loop = self.loop
        steps = tuple(one.step for one in checkpoint.found(self.checkpoints))
        per_step, attempt = self.card.plan.tokens_per_step, self.telemetry.attempt
        return control.Boundary(
            attempt, loop.step, loop.tokens, loop.position, per_step, tuple(self.order.sources), steps
        )

    def reject(self, name: str, reason: str) -> None:
        """Answer a directive that is not carried out."""
        self.control.answer(name, control.receipt(name, self.boundary(), self.loop.plan, self.loop.plan, reason))

    def obey(self, name: str, directive: dict[str, Any]) -> None:
        """Apply all of a directive or nothing, save the new plan, then write the receipt."""
        loop, at = self.loop, self.boundary()
        before = len(self.programs)
        try:
            outcome = control.apply(loop.plan, directive, at, self.clock())
            target = self.target(outcome)
            self.program(outcome.plan)
        except (control.RejectedError, checkpoint.CheckpointError, jax.errors.JaxRuntimeError) as error:
            self.reject(name, str(error))
            return
        answer = control.receipt(name, at, loop.plan, outcome.plan, None, len(self.programs) - before)
        self.carry_out(outcome, target)
        loop.stopping = outcome.stop
        self.answers.append(answer)
        self.save()
        self.control.answer(name, answer)
        print(f"directive {name} applied at step {at.step}", file=sys.stderr, flush=True)

    def carry_out(self, outcome: control.Outcome, target: checkpoint.Found | None) -> None:
        """Take on the plan of an outcome, from the checkpoint that it goes back to, if to any."""
        if target and outcome.rewind:
            self.rewind(target, outcome.rewind[1], outcome.plan)
        else:
            self.loop.plan = outcome.plan

    def target(self, outcome: control.Outcome) -> checkpoint.Found | None:
        """The checkpoint that a rewind goes to, found complete.

        Raises:
            CheckpointError: it is torn.
        """
        if outcome.rewind is None:
            return None
        named = [one for one in checkpoint.found(self.checkpoints) if one.step == outcome.rewind[0]]
        if not checkpoint.is_complete(named[-1].path):
            raise checkpoint.CheckpointError(f"checkpoint {named[-1].path.name} is torn")
        return named[-1]

    def rewind(self, target: checkpoint.Found, skip_steps: int, plan: PlanState) -> None:
        """Restore a checkpoint under the new plan as a new attempt, and leave out the next batches of the data order."""
        loop, shares, changed = self.loop, plan.mixture, plan.mixture != self.loop.plan.mixture
        self.telemetry.attempt = f"a{int(self.telemetry.attempt[1:]) + 1:04d}"
        self.restore(target)
        loop.position += skip_steps * self.card.plan.sequences_per_step
        loop.plan = dataclasses.replace(plan, mixtures=loop.plan.mixtures, decayed=loop.plan.decayed)
        if changed:
            loop.plan = loop.plan.with_mixture(shares, loop.position, pinned=True)
