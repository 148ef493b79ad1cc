"""What calls of a graph do besides giving results, those that hold graphs of their own included."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fxwrap.torch_compat import HigherOrderOperator, OpOverload, storage_identity
from fxwrap.user_kernels import written_names
from fxwrap.wrapper_ir.operators import operator_facts

FUNCTIONALIZED = frozenset({"auto_functionalized", "auto_functionalized_v2"})
"""Higher-order operators that call an operator which writes its operands on copies of them."""

_ORDERED = frozenset({
    "with_effects", "run_and_save_rng_state", "run_with_rng_state", "graphsafe_run_with_rng_state", "print",
})  # fmt: skip
"""Higher-order operators that are there for what an operator does besides giving results."""


USER_KERNELS = frozenset({"triton_kernel_wrapper_functional", "triton_kernel_wrapper_mutation"})
"""Higher-order operators that launch a Triton kernel of the user's: on copies of what it writes, or as it is."""


def operator_label(operator: HigherOrderOperator) -> str:
    """Returns the name of a higher-order operator in `torch.ops.higher_order`."""
    return str(operator.name())  # type: ignore[no-untyped-call]


def has_effect(node: Node) -> bool:
    """Returns whether a node must run although nothing uses what it gives, and in its turn."""
    if isinstance(node.target, OpOverload):
        return not operator_facts(node.target).is_pure
    if not isinstance(node.target, HigherOrderOperator):
        return False
    name = operator_label(node.target)
    if name in _ORDERED:
        return True
    if name in FUNCTIONALIZED:
        return is_effectful(node)
    if name in USER_KERNELS:
        return name == "triton_kernel_wrapper_mutation"
    return any(has_effect(inner) for module in submodules(node) for inner in module.graph.nodes)


def is_effectful(node: Node) -> bool:
    """Returns whether a node has an effect besides what it writes: such nodes keep their order among each other."""
    if isinstance(node.target, OpOverload):
        return _is_effectful(node.target)
    if isinstance(node.target, HigherOrderOperator) and operator_label(node.target) in FUNCTIONALIZED:
        return isinstance(node.args[0], OpOverload) and _is_effectful(node.args[0])
    return has_effect(node) and not launches_kernel(node)


def launches_kernel(node: Node) -> bool:
    """Returns whether a node launches a Triton kernel of the user's."""
    return isinstance(node.target, HigherOrderOperator) and operator_label(node.target) in USER_KERNELS


def written_operands(node: Node, fakes: Mapping[Node, Any]) -> list[Node]:
    """Returns the operands that a call writes, not copies of them; `fakes` are the fake values of the graph's nodes."""
    given: dict[str, Any] = dict(node.kwargs)
    if isinstance(node.target, OpOverload):
        facts = operator_facts(node.target)
        given |= dict(zip(facts.argument_names, node.args, strict=False))
        names: Sequence[str] = facts.written
    elif launches_kernel(node) and "tensors_to_clone" not in given:
        call, given = given, given["kwargs"]
        known = {name: fakes[item] if isinstance(item, Node) else item for name, item in given.items()}
        names = written_names(call, known)
    else:
        return []
    found = [given.get(name) for name in names]
    flat = [part for item in found for part in (item if isinstance(item, tuple | list) else (item,))]
    return [item for item in flat if isinstance(item, Node)]


def _is_effectful(overload: OpOverload) -> bool:
    facts = operator_facts(overload)
    return facts.is_random or bool(facts.fixed_effects)


def is_token(node: Node) -> bool:
    """Returns whether a placeholder only orders effects: what is passed for it, which may be None, says nothing."""
    return any(
        isinstance(user.target, HigherOrderOperator)
        and operator_label(user.target) == "with_effects"
        and user.args[0] is node
        for user in node.users
    )


def submodules(node: Node) -> Iterator[GraphModule]:
    """Yields the graphs among a node's operands, those of `get_attr` nodes."""
    for operand in node.all_input_nodes:
        if operand.op == "get_attr":
            found = attribute_of(operand)
            if isinstance(found, GraphModule):
                yield found


def attribute_of(node: Node) -> Any:
    """Returns what a `get_attr` node stands for. Raises AttributeError where its module has no such attribute."""
    found: Any = node.graph.owning_module
    for part in str(node.target).split("."):
        found = getattr(found, part)
    return found


def shown_operands(node: Node) -> dict[int, Node]:
    """Returns which operand's memory a call of a shared subgraph shows in which result, by the result's position."""
    if not isinstance(node.target, HigherOrderOperator) or operator_label(node.target) != "invoke_subgraph":
        return {}
    module = next(submodules(node), None)
    if module is None:
        return {}
    placeholders = module.graph.find_nodes(op="placeholder")
    operands = list(node.args[2:])
    by_storage = {
        storage_identity(placeholder.meta["val"]): operand
        for placeholder, operand in zip(placeholders, operands, strict=False)
        if isinstance(placeholder.meta.get("val"), torch.Tensor) and isinstance(operand, Node)
    }
    (output,) = module.graph.find_nodes(op="output")
    results = [item.meta.get("val") if isinstance(item, Node) else None for item in output.args[0]]
    return {
        position: by_storage[storage_identity(fake)] for position, fake in enumerate(results)
        if isinstance(fake, torch.Tensor) and storage_identity(fake) in by_storage
    }  # fmt: skip
