"""The faults of a drill without training: what each does to the telemetry, in the words of the trainer's own faults."""

from collections.abc import Callable, Mapping

from runwatch.monitor.drill.scripted_trainer import Harm, Record, SyntheticTrainer

RESTARTS = 4


def _put(**changes: Callable[[float, int], float]) -> Harm:
    """Change signals (`train__loss`) from their healthy value and the steps since the onset."""

    def harm(trainer: SyntheticTrainer, record: Record, since: int) -> Record:
        del trainer
        changed = {name.replace("__", "/"): change for name, change in changes.items()}
        return record | {name: change(record[name], since) for name, change in changed.items()}

    return harm


def _for(steps: int, harm: Harm) -> Harm:
    """The same for so many steps only."""
    return lambda trainer, record, since: harm(trainer, record, since) if since < steps else record


def _slower(factor: Callable[[int], float]) -> Harm:
    def harm(trainer: SyntheticTrainer, record: Record, since: int) -> Record:
        del trainer
        by = factor(since)
        slower = {"throughput/step_time": record["throughput/step_time"] * by}
        return (
            record | slower | {name: record[name] / by for name in ("throughput/tokens_per_second", "throughput/mfu")}
        )

    return harm


def _silent(trainer: SyntheticTrainer, record: Record, since: int) -> None:
    """Nothing is written any more; the step before has been."""
    del record, since
    trainer.step -= 1


def _disk(trainer: SyntheticTrainer, record: Record, since: int) -> Record | None:
    """A hundred records are lost, then the writer says so."""
    if since < 100:
        trainer.clock += record["throughput/step_time"]
        return None
    return record | {"telemetry/dropped_records": 100}


def _restarts(trainer: SyntheticTrainer, record: Record, since: int) -> Record | None:
    """Three steps after each restore the process dies, before that step is told of."""
    if since < 3 or trainer.attempt > RESTARTS:
        return record
    trainer.restart(trainer.checkpoint_before(trainer.onset))
    trainer.onset = trainer.step + 1
    return None


def _moved(steps: int) -> Harm:
    """The data order jumps once by so many steps."""

    def harm(trainer: SyntheticTrainer, record: Record, since: int) -> Record:
        if since == 0:
            trainer.position += steps * trainer.planned.sequences_per_step
        return trainer.at_position(record)

    return harm


def _longer(trainer: SyntheticTrainer, record: Record, since: int) -> Record:
    """Sequences of four times the length: a step holds a quarter as many."""
    del since
    trainer.position -= trainer.planned.sequences_per_step * 3 // 4
    return trainer.at_position(record)


def _clock(trainer: SyntheticTrainer, record: Record, since: int) -> Record:
    """The trainer's clock goes back by an hour, once."""
    del since
    trainer.behind = 3600.0
    return record


NAN = float("nan")
HARMS: Mapping[str, Harm] = {
    "nan_batch": _put(train__loss=lambda *_: NAN, optim__grad_norm=lambda *_: NAN),
    "corrupt_tokens": _for(80, _put(train__loss=lambda loss, _: loss + 2.0, optim__grad_norm=lambda norm, _: 3 * norm)),
    "lr_spike": _for(
        60,
        _put(
            optim__learning_rate=lambda rate, _: 30 * rate,
            train__loss=lambda loss, since: loss + min(1.5, 0.5 * since),
            optim__grad_norm=lambda norm, since: norm * min(30.0, 2.0 * (since + 1)),
        ),
    ),
    "label_shuffle": _put(train__loss=lambda loss, _: loss + 0.5),
    "router_collapse": _put(
        moe__load_max_vio=lambda vio, since: vio * min(12.0, 1 + since),
        moe__load_entropy=lambda entropy, since: entropy - min(0.3, 0.02 * since),
        moe__drop_rate=lambda rate, since: rate + min(0.25, 0.02 * since),
    ),
    "bias_runaway": _put(moe__router_bias_max=lambda bias, since: bias * 1.03 ** min(since, 150)),
    "context_jump": _longer,
    "slow_step": _slower(lambda _: 2.5),
    "straggler": _slower(lambda since: 2.5 if since % 6 == 0 else 1.0),
    "hang": _silent,
    "kill": _silent,
    "restart_loop": _restarts,
    "full_disk": _disk,
    "data_replay": _moved(-20),
    "data_skip": _moved(20),
    "telemetry_stop": _silent,
    "clock_jump": _clock,
}
"""By the name of the drill; those of checkpoints are not among them (`SAVES`)."""

SAVES: Mapping[str, Callable[[int], Callable[[int], float | None]]] = {
    "stale_checkpoint": lambda onset: lambda step: float(step) if step < onset else None,
    "corrupt_checkpoint": lambda onset: lambda step: float(step) if step < onset else None,
}
"""What checkpoints say of themselves, by the step of the onset."""
SILENT = frozenset({"hang", "kill", "telemetry_stop"})
"""After these the clock goes on without records."""
