"""Effects of a graph's nodes besides their results, including those of nested graphs."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fxwrap.fx_passes.prepared_graph import NodeValues
from fxwrap.torch_compat import HigherOrderOperator, OpOverload, storage_identity
from fxwrap.user_kernels import mutated_argument_names
from fxwrap.wrapper_ir.operators import operator_schema

FUNCTIONALIZED = frozenset({"auto_functionalized", "auto_functionalized_v2"})
"""Higher-order operators that call a mutating operator on copies of its operands."""

_ORDERED = frozenset({
    "with_effects", "run_and_save_rng_state", "run_with_rng_state", "graphsafe_run_with_rng_state", "print",
    "call_torchbind",
})  # fmt: skip
"""Higher-order operators that exist for the effects of the operator they call."""

FLEX_OPERATORS = frozenset({"flex_attention", "flex_attention_backward"})
"""Higher-order operators that become kernels; the FX passes expand calls for which there is none."""

USER_KERNELS = frozenset({"triton_kernel_wrapper_functional", "triton_kernel_wrapper_mutation"})
"""Higher-order operators that launch a user-defined Triton kernel: on copies of mutated operands, or in place."""


def name_of(node: Node) -> str:
    """Returns the name of a call's target: one name for the function, the method and the operator.

    Empty for nodes that are no calls, whose names are those of other graphs' calls.
    """
    if not node.op.startswith("call_"):
        return ""
    target = node.target
    if isinstance(target, OpOverload):
        target = target.overloadpacket
    return (target if isinstance(target, str) else str(getattr(target, "__name__", ""))).strip("_")


def operator_label(operator: HigherOrderOperator) -> str:
    """Returns the name of a higher-order operator in `torch.ops.higher_order`."""
    return str(operator.name())  # type: ignore[no-untyped-call]


def calls_higher_order(node: Node, name: str) -> bool:
    """Whether a node calls the higher-order operator of a name."""
    return isinstance(node.target, HigherOrderOperator) and operator_label(node.target) == name


def has_effect(node: Node) -> bool:
    """Returns whether a node must run, in order, even if its results are unused."""
    if isinstance(node.target, OpOverload):
        return not operator_schema(node.target).is_pure
    if not isinstance(node.target, HigherOrderOperator):
        return False
    name = operator_label(node.target)
    if name in _ORDERED:
        return True
    if name in FUNCTIONALIZED:
        return has_ordered_effect(node)
    if name in USER_KERNELS:
        return name == "triton_kernel_wrapper_mutation"
    return any(has_effect(inner) for module in submodules(node) for inner in module.graph.nodes)


def is_movable(node: Node) -> bool:
    """Whether a call of an operator, or a result of one, is neither random nor has effects besides writes."""
    if node.op != "call_function" or node.target is operator.getitem:
        return True
    if not isinstance(node.target, OpOverload) or has_effect(node):
        return False
    return torch.Tag.nondeterministic_seeded not in node.target.tags


def has_ordered_effect(node: Node) -> bool:
    """Returns whether a node has an effect besides mutation: such nodes keep their relative order."""
    if isinstance(node.target, OpOverload):
        return _is_effectful(node.target)
    if isinstance(node.target, HigherOrderOperator) and operator_label(node.target) in FUNCTIONALIZED:
        return isinstance(node.args[0], OpOverload) and _is_effectful(node.args[0])
    return has_effect(node) and not launches_user_kernel(node)


def launches_user_kernel(node: Node) -> bool:
    """Returns whether a node launches a user-defined Triton kernel."""
    return isinstance(node.target, HigherOrderOperator) and operator_label(node.target) in USER_KERNELS


def mutated_operands(node: Node, fakes: NodeValues) -> list[Node]:
    """Returns the operands that a call mutates in place; `fakes` are the fake values of the graph's nodes."""
    arguments: dict[str, Any] = dict(node.kwargs)
    if isinstance(node.target, OpOverload):
        schema = operator_schema(node.target)
        if not schema.mutated_arguments:
            return []
        mutated = schema.written_arguments(node.args, tuple(node.kwargs.items()))
    elif launches_user_kernel(node) and "tensors_to_clone" not in arguments:
        call, arguments = arguments, arguments["kwargs"]
        values = {name: fakes[item] if isinstance(item, Node) else item for name, item in arguments.items()}
        mutated = tuple([arguments.get(name) for name in mutated_argument_names(call, values)])
    else:
        return []
    flat = [part for item in mutated for part in (item if isinstance(item, tuple | list) else (item,))]
    return [item for item in flat if isinstance(item, Node)]


def _is_effectful(overload: OpOverload) -> bool:
    schema = operator_schema(overload)
    return schema.is_random or bool(schema.fixed_effects)


def is_token(node: Node) -> bool:
    """Returns whether a placeholder is an effect token, whose value is unused and may be None."""
    return any(calls_higher_order(user, "with_effects") and user.args[0] is node for user in node.users)


def submodules(node: Node) -> Iterator[GraphModule]:
    """Yields the graphs among a node's operands, which are `get_attr` nodes."""
    for operand in node.all_input_nodes:
        if operand.op == "get_attr":
            attribute = attribute_of(operand)
            if isinstance(attribute, GraphModule):
                yield attribute


def attribute_of(node: Node) -> Any:
    """Returns the attribute that a `get_attr` node reads. Raises AttributeError if its module lacks it."""
    return attrgetter(str(node.target))(node.graph.owning_module)


def fake_of(node: Node) -> Any:
    """Returns the fake value of a node of a graph of operators or of Dynamo's graph; None if it has none."""
    return node.meta.get("val", node.meta.get("example_value"))


def storage_of(node: Node) -> int | None:
    """Returns the identity of the storage of a node's tensor (`storage_identity`); None for other nodes."""
    fake = fake_of(node)
    return storage_identity(fake) if isinstance(fake, torch.Tensor) else None


def aliased_operands(node: Node) -> dict[int, Node]:
    """Returns, for an `invoke_subgraph` call, the operand that each aliasing result aliases, by result position."""
    if not calls_higher_order(node, "invoke_subgraph"):
        return {}
    module = next(submodules(node), None)
    if module is None:
        return {}
    placeholders = module.graph.find_nodes(op="placeholder")
    by_storage = {
        storage_identity(placeholder.meta["val"]): operand
        for placeholder, operand in zip(placeholders, node.args[2:], strict=False)
        if isinstance(placeholder.meta.get("val"), torch.Tensor) and isinstance(operand, Node)
    }
    outputs: Any = module.graph.output_node().args[0]
    results = [item.meta.get("val") if isinstance(item, Node) else None for item in outputs]
    return {
        position: by_storage[storage_identity(fake)] for position, fake in enumerate(results)
        if isinstance(fake, torch.Tensor) and storage_identity(fake) in by_storage
    }  # fmt: skip


_aten = torch.ops.aten

EMPTY_OPERATORS = (
    _aten.empty.memory_format, _aten.empty_like.default, _aten.empty_strided.default,
    _aten.new_empty.default, _aten.new_empty_strided.default,
)  # fmt: skip
"""Operators with uninitialised results."""

_INDIRECT_WRITES = (
    "scatter.src", "scatter.value", "scatter.reduce", "scatter.value_reduce", "scatter_reduce.two",
    "scatter_add.default", "index_put.default", "index_put.hacked_twin", "_index_put_impl.default",
    "index_add.default", "index_copy.default", "index_fill.int_Scalar", "index_fill.int_Tensor",
    "index_reduce.default", "masked_scatter.default", "put.default",
)  # fmt: skip

IN_PLACE_VARIANTS: Mapping[str, str] = {
    **{f"aten.{name}": f"aten.{name.replace('.', '_.')}" for name in _INDIRECT_WRITES},
    "aten._unsafe_index_put.default": "aten.index_put_.default",
    "aten._unsafe_index_put.hacked_twin": "aten.index_put_.hacked_twin",
}
"""Operators that write at indirect indices of a copy of their first argument, with their in-place variants."""


def expand_to_rank(option: int | Sequence[int], rank: int) -> list[int]:
    """Returns an option of a convolution or pooling for each of `rank` dimensions; one number applies to all."""
    values = [*option] if isinstance(option, Sequence) else [option]
    return values * rank if len(values) == 1 else values
