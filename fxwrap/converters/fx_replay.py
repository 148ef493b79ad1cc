"""Submodules of emitted graphs whose work is recorded and replayed: ordinary calls of modules, to everybody else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.fx import GraphModule, Node

from fxwrap.converters.fx_attributes import attribute_of
from fxwrap.lines import CallFunction
from fxwrap.lines.blocks import device_of
from fxwrap.runtime.replay import Memory, Replayed
from fxwrap.wrapper_ir import Block

_KEY = "fxwrap_replay"


@dataclass(frozen=True)
class ReplayFacts:
    """What a submodule's `meta` says of its calls: what `control.call` does, and how many inputs come before symbols.

    `fixed` and `written` are positions of inputs.
    """

    recordings: int
    device: str
    count: int
    fixed: tuple[int, ...]
    written: tuple[int, ...]

    @classmethod
    def of(cls, line: CallFunction, block: Block) -> ReplayFacts:
        """Returns the facts of a line that calls a function."""
        places = line.places(line.fixed), line.places(line.writes)
        return cls(line.replay, str(device_of(block)), len(line.operands), *places)


def mark_replayed(module: GraphModule, facts: ReplayFacts) -> None:
    """Says of a submodule that its calls are replayed; torch's dead-code elimination then leaves them alone."""
    module.meta[_KEY] = facts
    module._is_impure = True  # type: ignore[assignment]


def replay_facts(module: Any) -> ReplayFacts | None:
    """Returns what a submodule says of its calls; None for any other."""
    found = module.meta.get(_KEY) if isinstance(module, GraphModule) else None
    return found if isinstance(found, ReplayFacts) else None


def replayed_submodule(owner: Any, node: Node) -> GraphModule | None:
    """Returns the submodule that a node of a module's graph calls, if its work is replayed."""
    found = attribute_of(owner, node.target) if node.op == "call_module" else None
    return None if replay_facts(found) is None else found


def replayed_call(node: Node, memories: dict[str, Memory]) -> tuple[Replayed, list[Any]] | None:
    """Returns what a node that calls a submodule calls directly, and with which arguments; None for any other node.

    `memories` are those of the graph's devices; it is filled.
    """
    module = replayed_submodule(node.graph.owning_module, node)
    facts = replay_facts(module)
    if module is None or facts is None or node.kwargs or len(node.args) < facts.count:
        return None
    memory = memories.setdefault(facts.device, Memory(facts.device))
    found = Replayed(partial(_run, module), memory, str(node.target), facts.recordings, facts.fixed, facts.written)
    return found, [list(node.args[: facts.count]), *node.args[facts.count :]]


def _run(module: Callable[..., Any], arguments: list[Any], *numbers: Any) -> Any:
    given = module(*arguments, *numbers)
    arguments.clear()
    return given
