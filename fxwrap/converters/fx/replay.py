"""Submodules of emitted graphs that are captured and replayed; to torch's tools they are ordinary submodules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fxwrap.lines import CallFunction
from fxwrap.lines.operands import block_device, communicating_groups
from fxwrap.runtime.graph_capture.replay import GraphedFunction, GraphManager
from fxwrap.torch_compat import mark_impure
from fxwrap.wrapper_ir import Block

_META_KEY = "fxwrap_replay"


@dataclass(frozen=True)
class ReplaySpec:
    """How calls of a submodule are captured: see `control.call`.

    `operand_count` is the number of inputs before the symbols; `fixed` and `written` are indices of inputs; `groups`
    are the names of the process groups whose collectives it contains.
    """

    max_captures: int
    device: str
    operand_count: int
    fixed: tuple[int, ...]
    written: tuple[int, ...]
    groups: tuple[str, ...] = ()

    @classmethod
    def of(cls, line: CallFunction, functions: Mapping[str, Block]) -> ReplaySpec:
        """Returns the specification of a line that calls one of these functions."""
        block = functions[line.function]
        groups = communicating_groups(block, functions)
        fixed, written = line.operand_positions(line.static_operands), line.operand_positions(line.writes)
        return cls(line.max_captures, str(block_device(block)), len(line.operands), fixed, written, groups)


def mark_replayed(module: GraphModule, spec: ReplaySpec) -> None:
    """Marks a submodule as replayed, and as impure, so that torch's dead-code elimination keeps its calls."""
    module.meta[_META_KEY] = spec
    mark_impure(module)


def replay_spec(module: object) -> ReplaySpec | None:
    """Returns the specification of a replayed submodule, None for anything else."""
    spec = module.meta.get(_META_KEY) if isinstance(module, GraphModule) else None
    return spec if isinstance(spec, ReplaySpec) else None


def replayed_submodule(owner: object, node: Node) -> GraphModule | None:
    """Returns the replayed submodule that a node of a module's graph calls, None for any other node."""
    module: GraphModule | None = module_attribute(owner, node.target) if node.op == "call_module" else None
    return None if replay_spec(module) is None else module


def graphed_call(node: Node, graph_managers: dict[str, GraphManager]) -> tuple[GraphedFunction, list[object]] | None:
    """Returns the function that a node which calls a replayed submodule runs, with its arguments; else None.

    `graph_managers` has the manager of each device; missing ones are added.
    """
    module = replayed_submodule(node.graph.owning_module, node)
    spec = replay_spec(module)
    if module is None or spec is None or node.kwargs or len(node.args) < spec.operand_count:
        return None
    manager = graph_managers.setdefault(spec.device, GraphManager(spec.device))
    run = partial(_run, module)
    settings = (spec.max_captures, spec.fixed, spec.written, spec.groups)
    function = GraphedFunction(run, manager, str(node.target), *settings)
    return function, [list(node.args[: spec.operand_count]), *node.args[spec.operand_count :]]


def _run(
    module: Callable[..., tuple[torch.Tensor, ...]], arguments: list[object], *symbols: object
) -> tuple[torch.Tensor, ...]:
    outputs = module(*arguments, *symbols)
    arguments.clear()
    return outputs


def module_attribute(module: object, target: object) -> Any:
    """Returns the attribute of a module with a dotted name, None if there is none."""
    for part in str(target).split("."):
        module = getattr(module, part, None)
    return module
