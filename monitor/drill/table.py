"""The drills, and what each owes: written down before any of them is run."""

from collections.abc import Mapping

from runwatch.monitor.drill.links import Drill

ROUTING = ("token_drop", "expert_balance")
LOSS = ("loss_spike", "ladder_deviation")

_ALL = (
    Drill("clean", "No fault: nothing may fire.", quiet=250),
    Drill(
        "nan_batch",
        "A batch whose loss is NaN.",
        ("nan_batch@{step}",),
        ("finite",),
        node="instability",
        recovers=True,
        steps=1,
        slowed=True,
    ),
    Drill(
        "corrupt_tokens",
        "Twenty steps of random bytes in place of text.",
        ("corrupt_tokens@{step}:steps=20",),
        LOSS,
        steps=5,
    ),
    Drill(
        "lr_spike",
        "The learning rate is a thousand times too high for sixty steps.",
        ("lr_spike@{step}:factor=1000,steps=60",),
        ("plan_conformance", "loss_spike", "grad_norm"),
        node="instability",
        recovers=True,
        steps=5,
    ),
    Drill(
        "label_shuffle",
        "The bytes of every code and docs sequence are shuffled from here on, as if shards were corrupt.",
        ("label_shuffle@{step}:source=code", "label_shuffle@{step}:source=docs"),
        LOSS,
        node="early_divergence",
        steps=20,
    ),
    Drill(
        "router_collapse",
        "Every router is set to zero at one step.",
        ("router_collapse@{step}",),
        (*ROUTING, *LOSS),
        node="routing_collapse",
        steps=40,
    ),
    Drill(
        "bias_runaway",
        "The router bias moves a hundred times too fast for 150 steps.",
        ("bias_runaway@{step}:rate=1.0,steps=150",),
        ROUTING,
        node="routing_collapse",
        recovers=True,
        steps=40,
    ),
    Drill(
        "context_jump",
        "The context is four times as long from here on, and nobody declared it.",
        ("context_jump@{step}:factor=4",),
        ("plan_conformance",),
        steps=3,
    ),
    Drill(
        "slow_step",
        "Every step takes 0.45 s longer: the deadline will be missed.",
        ("slow_step@{step}:seconds=0.45",),
        ("throughput",),
        node="throughput_shortfall",
        steps=60,
        offset=1,
    ),
    Drill(
        "straggler",
        "Every third step waits half a second for a slow rank.",
        ("straggler@{step}:seconds=0.5,every=3",),
        ("throughput",),
        steps=128,
    ),
    Drill("hang", "A step never ends.", ("hang@{step}:seconds=3600",), ("progress",), steps=1, quiet=0),
    Drill(
        "kill",
        "The process is killed and not restarted.",
        ("restart_loop@{step}:after=0,times=2",),
        ("progress",),
        steps=1,
        quiet=0,
    ),
    Drill(
        "restart_loop",
        "The process dies again and again three steps after its restore.",
        ("restart_loop@{step}:after=3,times=4",),
        ("progress",),
        restarts=True,
        quiet=20,
    ),
    Drill(
        "full_disk",
        "No file may grow for 200 steps.",
        ("full_disk@{step}:steps=200",),
        ("progress", "checkpoint"),
        steps=250,
    ),
    Drill(
        "data_replay",
        "The data order jumps back by twenty steps.",
        ("data_replay@{step}:back=20",),
        ("plan_conformance",),
        steps=3,
    ),
    Drill(
        "data_skip",
        "The data order jumps ahead by twenty steps.",
        ("data_skip@{step}:ahead=20",),
        ("plan_conformance",),
        steps=3,
    ),
    Drill(
        "stale_checkpoint",
        "Checkpoints are silently left out.",
        ("stale_checkpoint@{step}",),
        ("checkpoint",),
        steps=130,
    ),
    Drill(
        "corrupt_checkpoint",
        "Every checkpoint is torn on disk.",
        ("corrupt_checkpoint@{step}",),
        ("checkpoint",),
        steps=130,
    ),
    Drill(
        "telemetry_stop",
        "The trainer trains on and writes nothing.",
        ("telemetry_stop@{step}",),
        ("progress",),
        steps=1,
        quiet=0,
    ),
    Drill(
        "clock_jump",
        "The trainer's clock jumps back by an hour: to the daemon its steps are an hour old.",
        ("clock_jump@{step}:seconds=-3600",),
        ("progress",),
        steps=20,
    ),
)

DRILLS: Mapping[str, Drill] = {drill.name: drill for drill in _ALL}
"""By name, in the order of the matrix."""
