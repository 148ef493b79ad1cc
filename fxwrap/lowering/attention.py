"""Attention before torch has chosen how it is computed: what its mask says, and how that lies in memory.

Torch chooses while the operator is traced, by the operands alone. A mask takes time that no mask, or `is_causal`, does
not, yet models build masks that say just this: one that is traced cannot look at its mask and leave it out. And no
kernel reads a mask whose last dimension has another stride than 1: such attention is taken apart into products of
float32 and a softmax. So masks that depend on nothing are looked at here, and others are laid out anew.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate
from torch.nn import functional

from fxwrap.options import Options
from fxwrap.torch_compat import (
    HigherOrderOperator,
    OpOverload,
    copy_dynamo_node,
    dynamo_module,
    storage_identity,
    without_fake_mode,
)
from fxwrap.wrapper_ir.operators import operator_facts

_aten = torch.ops.aten

_ATTENTION = frozenset({functional.scaled_dot_product_attention, _aten.scaled_dot_product_attention.default})
_PARAMETERS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")

_BUILDERS = frozenset({
    "add", "alias", "and", "arange", "bitwise_and", "bitwise_not", "bitwise_or", "bitwise_xor", "bool", "clone",
    "contiguous", "cumsum", "detach", "diff", "eq", "expand", "expand_as", "flip", "floordiv", "full", "full_like",
    "ge", "getitem", "gt", "index", "int", "inv", "invert", "le", "lift_fresh_copy", "logical_and", "logical_not",
    "logical_or", "logical_xor", "long", "lt", "masked_fill", "mod", "mul", "ne", "neg", "new_full", "new_ones",
    "new_zeros", "not", "ones", "ones_like", "or", "permute", "repeat", "reshape", "rsub", "select", "slice", "squeeze",
    "sub", "to", "to_copy", "transpose", "tril", "triu", "unsqueeze", "view", "where", "xor", "zeros", "zeros_like",
})  # fmt: skip
"""Names of what makes masks."""
_MOST_BYTES = 1 << 27
"""How large a tensor is computed while compiling: a mask of 8192 rows and columns takes half of that."""

_WRITING = frozenset({
    operator.setitem, operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv, operator.imod,
    operator.ipow, operator.iand, operator.ior, operator.ixor, operator.ilshift, operator.irshift, operator.imatmul,
})  # fmt: skip
_WRITING_METHODS = frozenset([f"__{function.__name__}__" for function in _WRITING])

_PASSES_ON = frozenset({
    "getitem", "transpose", "permute", "swapaxes", "movedim", "squeeze", "unsqueeze", "select", "slice", "reshape",
    "flatten", "clone",
})  # fmt: skip
"""Names of what takes a tensor however it lies, and gives one that lies by that."""
_HIDES = frozenset({"contiguous", "linear", "matmul", "mm", "addmm", "bmm"})
"""Names of what takes a tensor however it lies, and gives what does not show how that was."""

EVERYTHING, CAUSAL, RELAID = "everything", "causal", "relaid"
_SAID = {
    EVERYTHING: "lets everything through, and goes",
    CAUSAL: "is a lower triangle, and becomes is_causal",
    RELAID: "lies as no kernel reads it, and is copied",
}

log = logging.getLogger("fxwrap.compile")


def with_plain_attention(graph_module: GraphModule, options: Options) -> GraphModule:
    """Returns a graph of Dynamo's in which attention has masks that torch's kernels take, or none where none is needed.

    A mask of bools that lets everything through goes, one that is a lower triangle becomes `is_causal`, and one that
    lies as no kernel reads it is copied. Attention with dropout, or whose result has to lie as it does, stays as it is.
    The graph itself is not changed; it is given back where there is nothing to do.
    """
    found = masks_to_change(graph_module.graph, options)
    if not found:
        return graph_module
    graph, made = Graph(), dict[Node, Node]()
    for node in graph_module.graph.nodes:
        made[node] = copy_dynamo_node(graph, node, made)
    change_masks({made[node]: becomes for node, becomes in found.items()}, options)
    return dynamo_module(graph_module, graph)


def masks_to_change(graph: Graph, options: Options) -> dict[Node, str]:
    """Returns the calls of attention whose masks are to be changed, and what these become."""
    called = {node: mask for node in graph.nodes if (mask := _mask_of(node)) is not None and _may_lie_anywhere(node)}
    if not called or not options.fuse or "aten.scaled_dot_product_attention.default" in options.keep:
        return {}
    constants = _constants(graph)
    becomes = {mask: _becomes(mask, constants) for mask in dict.fromkeys(called.values())}
    found = {node: what for node, mask in called.items() if (what := becomes[mask]) is not None}
    return {node: what for node, what in found.items() if what != RELAID or _is_readable(called[node], node)}


def _is_readable(mask: Node, node: Node) -> bool:
    """Whether a mask has a dtype that kernels read: with float32 beside half precision an H200 gave other numbers."""
    return _fake(mask).dtype in (torch.bool, _fake(_arguments(node)["query"]).dtype)


def change_masks(found: Mapping[Node, str], options: Options) -> None:
    """Changes calls of attention as `masks_to_change` says."""
    specs = options.device_specs()
    relaid: dict[Any, _Relaid] = {}
    for node, becomes in found.items():
        arguments = _arguments(node)
        mask = arguments["attn_mask"]
        log.debug("%s: the mask %s %s", node.name, mask.name, _SAID[becomes])
        if becomes == RELAID:
            key = mask, _fake(node).dtype, _fake(arguments["query"]).dtype
            if key not in relaid:
                spec = specs.get(_fake(node).device.type)
                is_exact = spec is not None and spec.zeros_blind_rows
                relaid[key] = _Relaid(mask, node, arguments["query"], is_exact)
            arguments["attn_mask"] = relaid[key].mask
            relaid[key].fill_blind_rows(node)
        else:
            arguments |= {"attn_mask": None, "is_causal": becomes == CAUSAL}
        node.args = tuple([arguments.pop(name) for name in _PARAMETERS[:3]])
        node.kwargs = arguments


def _arguments(node: Node) -> dict[str, Any]:
    """Returns what attention is called with, by the names of its parameters."""
    return dict(zip(_PARAMETERS, node.args)) | node.kwargs


def _mask_of(node: Node) -> Node | None:
    if node.target not in _ATTENTION:
        return None
    arguments = _arguments(node)
    mask = arguments.get("attn_mask")
    # kernels draw other random numbers than the formula does
    is_plain = arguments.get("is_causal", False) is False and arguments.get("dropout_p", 0.0) == 0
    return mask if isinstance(mask, Node) and is_plain else None


def _may_lie_anywhere(node: Node) -> bool:
    """Whether nothing can tell how a tensor lies in memory that is the same for every layout of it."""
    for user in node.users:
        name = _name(user)
        if user.op == "output" or not (name in _HIDES or (name in _PASSES_ON and _may_lie_anywhere(user))):
            return False
    return True


def _repeated(mask: torch.Tensor) -> list[int]:
    """Returns the dimensions along which a mask is the same matrices again."""
    return [dimension for dimension, stride in enumerate(mask.stride()[:-2]) if type(stride) is int and stride == 0]


def _fake(node: Node) -> Any:
    return node.meta.get("example_value", node.meta.get("val"))


def _name(node: Node) -> str:
    """Returns what a node calls, by one name for the function, the method and the operator."""
    target = node.target
    if isinstance(target, OpOverload):
        target = target.overloadpacket
    return (target if isinstance(target, str) else str(getattr(target, "__name__", ""))).strip("_")


# --- masks that depend on nothing -------------------------------------------------------------------------------------


def _becomes(mask: Node, constants: frozenset[Node]) -> str | None:
    fake = _fake(mask)
    if not isinstance(fake, torch.Tensor) or fake.ndim < 2:
        return None
    if mask in constants and fake.dtype is torch.bool and fake.numel() > 0:
        value = _computed(mask)
        if value is not None and bool(value.all()):
            return EVERYTHING
        if value is not None and _is_triangle(value):
            return CAUSAL
    stride, size = fake.stride(-1), fake.shape[-1]
    # a symbol is not asked: that would install a guard
    is_spread = type(stride) is int and stride != 1 and not (type(size) is int and size == 1)
    return RELAID if is_spread else None


def _is_triangle(value: torch.Tensor) -> bool:
    rows, columns = value.shape[-2:]
    return rows == columns and bool((value == torch.ones(rows, columns, dtype=torch.bool).tril()).all())


def _constants(graph: Graph) -> frozenset[Node]:
    """Returns the tensors of a graph that depend on nothing that it is given; none where something may write one."""
    found: set[Node] = set()
    storages: set[int | None] = set()
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        operands = node.all_input_nodes
        if _may_write(node):
            if any(_storage(operand) in storages for operand in operands):
                return frozenset()
        elif found.issuperset(operands) and _name(node) in _BUILDERS and _can_be_known(_fake(node)):
            found.add(node)
            storages.add(_storage(node))
    return frozenset(found)


def _storage(node: Node) -> int | None:
    fake = _fake(node)
    return storage_identity(fake) if isinstance(fake, torch.Tensor) else None


def _can_be_known(fake: Any) -> bool:
    """Whether a value is a tensor that is the same on every device, and not too large to be computed."""
    if not isinstance(fake, torch.Tensor) or fake.dtype.is_floating_point or fake.dtype.is_complex:
        return False
    return all(type(size) is int for size in fake.shape) and fake.untyped_storage().nbytes() <= _MOST_BYTES


def _may_write(node: Node) -> bool:
    """Whether a call may write its operands, by its name, schema or parameters."""
    target = node.target
    if isinstance(target, OpOverload):
        return bool(operator_facts(target).written)
    if isinstance(target, str):
        named = target in _WRITING_METHODS if target.endswith("__") else target.endswith("_")
        return node.op == "call_module" or named
    if getattr(target, "__module__", "") == operator.add.__module__:
        return target in _WRITING
    parameters = getattr(getattr(target, "__code__", None), "co_varnames", ())
    name = getattr(target, "__name__", "_")
    return (
        isinstance(target, HigherOrderOperator) or name.endswith("_") or "out" in node.kwargs or "inplace" in parameters
    )


def _computed(mask: Node) -> torch.Tensor | None:
    """Returns what a node that depends on nothing gives, on the CPU, repeated matrices once; None where that fails."""
    needed, pending = {mask}, [mask]
    while pending:
        new = [operand for operand in pending.pop().all_input_nodes if operand not in needed]
        needed.update(new)
        pending.extend(new)
    values: dict[Node, torch.Tensor] = {}
    cpu = torch.device("cpu")

    def given(argument: Any) -> Any:
        if isinstance(argument, Node):
            return values[argument]
        return cpu if isinstance(argument, torch.device | str) else argument

    with without_fake_mode(), torch.no_grad(), cpu, suppress(RuntimeError):  # integers divide by 0 on GPUs
        for node in mask.graph.nodes:
            if node in needed:
                found: Any = map_aggregate((node.args, node.kwargs), given)
                arguments, keywords = found
                keywords = {name: item for name, item in keywords.items() if name != "pin_memory"}
                call = getattr(torch.Tensor, node.target) if isinstance(node.target, str) else node.target
                values[node] = call(*arguments, **keywords)
    value = values.get(mask)
    if value is None:
        return None
    for dimension in _repeated(value):
        value = value.narrow(dimension, 0, 1)
    return value


# --- masks that no kernel reads ---------------------------------------------------------------------------------------


class _Relaid:
    """A mask whose last dimension has stride 1, made before attention with it; repeated matrices stay repeated.

    The formula gives zeros for rows that see nothing. A device's kernels need not: where a mask of bools lets nothing
    through, an H200 gave other numbers (torch 2.11). Unless they are exact, a mask adds the lowest number of the dtype,
    so that nothing is NaN in a backward either, and such rows are filled afterwards.
    """

    def __init__(self, mask: Node, node: Node, query: Node, is_exact: bool) -> None:
        graph, fake = mask.graph, _fake(mask)
        repeated = _repeated(fake)
        self._sees: Node | None = None  # of each row, whether it sees a column
        with graph.inserting_before(node):
            made = mask
            for dimension in repeated:
                made = graph.call_function(_aten.slice.Tensor, (made, dimension, 0, 1))
            keywords: dict[str, Any] = {"memory_format": torch.contiguous_format}
            made = graph.call_function(_aten.clone.default, (made,), keywords)
            if not is_exact:
                lowest = torch.finfo(_fake(node).dtype).min
                if fake.dtype is torch.bool:
                    self._sees = graph.call_function(_aten.any.dim, (made, -1, True))
                    keywords = {"dtype": _fake(query).dtype}
                    made = graph.call_function(_aten.where.Scalar, (made, 0.0, lowest))
                    made = graph.call_function(_aten._to_copy.default, (made,), keywords)
                else:
                    is_seen = graph.call_function(_aten.ne.Scalar, (made, -torch.inf))
                    self._sees = graph.call_function(_aten.any.dim, (is_seen, -1, True))
                    made = graph.call_function(_aten.clamp_min.default, (made, lowest))
            self.mask = graph.call_function(_aten.expand_as.default, (made, mask)) if repeated else made

    def fill_blind_rows(self, node: Node) -> None:
        """Has attention give zeros for rows that see nothing, where its kernel may not."""
        if self._sees is None:
            return
        with node.graph.inserting_after(node):
            made = node.graph.call_function(_aten.where.ScalarOther, (self._sees, node, 0.0))
        node.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)
