"""Alerts, risk nodes and plans: pure functions from verdicts and one frozen world to what should be done.

`all_nodes()` finds the nodes: every module of this folder that defines `NODE` is one.
"""

import importlib
import pkgutil
from functools import cache

from runwatch.rules.alert import (
    Alert,
    AlertPolicy,
    AlertState,
    BadRecord,
    Moment,
    Reason,
    Transition,
    advance,
    inhibited,
    policy_of,
)
from runwatch.rules.carry_out import advance_execution
from runwatch.rules.deciding import Decided, decide
from runwatch.rules.execution import (
    Decision,
    Event,
    Execution,
    ExecutionState,
    Forecast,
    Mark,
    Prediction,
    from_control,
)
from runwatch.rules.node import Node, NodeState, NodeVerdict, Proposal, Refusal, evaluate, preview
from runwatch.rules.plan import Action, Directive, PlanRules, PlanState, Preconditions, Receipt
from runwatch.rules.world import Checkpoint, Curve, Formula, PlannedRun, Throughput, World

__all__ = [
    "Action",
    "Alert",
    "AlertPolicy",
    "AlertState",
    "BadRecord",
    "Checkpoint",
    "Curve",
    "Decided",
    "Decision",
    "Directive",
    "Event",
    "Execution",
    "ExecutionState",
    "Forecast",
    "Formula",
    "Mark",
    "Moment",
    "Node",
    "NodeState",
    "NodeVerdict",
    "PlanRules",
    "PlanState",
    "PlannedRun",
    "Preconditions",
    "Prediction",
    "Proposal",
    "Reason",
    "Receipt",
    "Refusal",
    "Throughput",
    "Transition",
    "World",
    "advance",
    "advance_execution",
    "all_nodes",
    "decide",
    "evaluate",
    "from_control",
    "inhibited",
    "policy_of",
    "preview",
]


@cache
def all_nodes() -> dict[str, Node]:
    """Every risk node by name, in alphabetical order."""
    modules = (importlib.import_module(f"{__name__}.{found.name}") for found in pkgutil.iter_modules(__path__))
    nodes = [node for module in modules if isinstance(node := getattr(module, "NODE", None), Node)]
    return {node.name: node for node in sorted(nodes, key=lambda node: node.name)}
