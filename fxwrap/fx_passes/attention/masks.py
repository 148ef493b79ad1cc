"""Simplification of attention masks, before torch selects an attention kernel.

Torch selects the kernel while it traces, by the operands' metadata. Attention with a mask is slower than without one or
with `is_causal`, yet models build masks that are all true or causal. No kernel reads a mask whose last dimension is not
contiguous: torch decomposes such attention into float32 matmuls and a softmax. So this pass evaluates constant masks,
and makes others contiguous.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Hashable, Iterable, Mapping
from contextlib import suppress
from typing import Any, Literal, TypeAlias

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate
from torch.nn import functional

from fxwrap.fx_passes.attention.mask_bounds import uniform_value
from fxwrap.fx_passes.effects import fake_of, name_of, storage_of
from fxwrap.options import Options
from fxwrap.torch_compat import (
    HigherOrderOperator,
    OpOverload,
    copy_dynamo_graph,
    copy_dynamo_module,
    without_dispatch_modes,
)
from fxwrap.wrapper_ir.operators import operator_schema

_aten = torch.ops.aten

_ATTENTION = frozenset({functional.scaled_dot_product_attention, _aten.scaled_dot_product_attention.default})
_PARAMETERS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")

_MASK_OPERATORS = frozenset({
    "add", "alias", "and", "arange", "bitwise_and", "bitwise_not", "bitwise_or", "bitwise_xor", "bool", "cat", "clone",
    "contiguous", "cumsum", "detach", "diff", "eq", "expand", "expand_as", "flip", "floordiv", "full", "full_like",
    "ge", "getitem", "gt", "index", "int", "inv", "invert", "le", "lift_fresh_copy", "logical_and", "logical_not",
    "logical_or", "logical_xor", "long", "lt", "masked_fill", "mod", "mul", "ne", "neg", "new_full", "new_ones",
    "new_zeros", "not", "ones", "ones_like", "or", "permute", "repeat", "reshape", "rsub", "select", "slice", "squeeze",
    "sub", "to", "to_copy", "transpose", "tril", "triu", "unsqueeze", "view", "where", "xor", "zeros", "zeros_like",
})  # fmt: skip
"""Names of operators that masks are built from."""
_MAX_FOLDED_BYTES = 1 << 27
"""The largest tensor that is computed at compile time: twice a mask of 8192 rows and columns."""

_IN_PLACE_FUNCTIONS = frozenset({
    operator.setitem, operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv, operator.imod,
    operator.ipow, operator.iand, operator.ior, operator.ixor, operator.ilshift, operator.irshift, operator.imatmul,
})  # fmt: skip
_IN_PLACE_METHODS = frozenset([f"__{function.__name__}__" for function in _IN_PLACE_FUNCTIONS])

LAYOUT_PROPAGATING = frozenset({
    "getitem", "transpose", "permute", "swapaxes", "movedim", "squeeze", "unsqueeze", "select", "slice", "reshape",
    "flatten", "clone",
})  # fmt: skip
"""Names of operators that accept any layout, and whose result's layout depends on it."""
_LAYOUT_HIDING = frozenset({"contiguous", "linear", "matmul", "mm", "addmm", "bmm"})
"""Names of operators that accept any layout, and whose result's layout does not depend on it."""

MaskRewrite: TypeAlias = Literal["all_true", "causal", "contiguous"]
"""A rewrite of a mask: removed since it is all true, replaced by `is_causal`, or made contiguous."""

_LOG_MESSAGES: Mapping[MaskRewrite, str] = {
    "all_true": "masks nothing and is removed",
    "causal": "is a lower triangle and becomes is_causal",
    "contiguous": "has a layout that no kernel reads and is copied",
}

log = logging.getLogger("fxwrap.compile")


def simplify_attention_masks(graph_module: GraphModule, options: Options) -> GraphModule:
    """Returns a Dynamo graph whose attention masks suit torch's kernels.

    Boolean masks that are all true are removed, lower triangles become `is_causal`, and masks that are not contiguous
    are copied. Attention with dropout, or with an observable layout of its result, is not changed. Returns the graph
    itself if there is nothing to rewrite.
    """
    rewrites = find_mask_rewrites(graph_module.graph, options)
    if not rewrites:
        return graph_module
    graph, node_map = copy_dynamo_graph(graph_module.graph)
    rewrite_masks({node_map[node]: rewrite for node, rewrite in rewrites.items()}, options)
    return copy_dynamo_module(graph_module, graph)


def find_mask_rewrites(graph: Graph, options: Options) -> dict[Node, MaskRewrite]:
    """Returns the attention calls whose masks are rewritten."""
    mask_of = {
        node: mask for node in graph.nodes if (mask := _mask_of(node)) is not None and has_unobservable_layout(node)
    }
    if not mask_of or not options.fuse or "aten.scaled_dot_product_attention.default" in options.preserve_ops:
        return {}
    rewrite_of = classify_masks(graph, mask_of.values())
    return {
        node: rewrite for node, mask in mask_of.items()
        if (rewrite := rewrite_of[mask]) is not None
        and (rewrite != "contiguous" or _has_supported_dtype(mask, node))
    }  # fmt: skip


def classify_masks(graph: Graph, masks: Iterable[Node]) -> dict[Node, MaskRewrite | None]:
    """Returns the rewrite of each mask of a graph, which may still be traced; None for those that stay."""
    written = _written_storages(graph)
    constants = _constant_nodes(graph, written)
    return {mask: _classify_mask(mask, constants, written) for mask in dict.fromkeys(masks)}


def _has_supported_dtype(mask: Node, node: Node) -> bool:
    """Whether kernels read the mask's dtype: float32 masks with half-precision operands gave wrong results on H200."""
    return fake_of(mask).dtype in (torch.bool, fake_of(attention_arguments(node)["query"]).dtype)


def rewrite_masks(rewrites: Mapping[Node, MaskRewrite], options: Options) -> None:
    """Applies the result of `find_mask_rewrites` to its graph, in place."""
    specs = options.device_specs()
    contiguous_masks: dict[Hashable, _ContiguousMask] = {}
    for node, rewrite in rewrites.items():
        arguments = attention_arguments(node)
        mask = arguments["attn_mask"]
        log.debug("%s: the mask %s %s", node.name, mask.name, _LOG_MESSAGES[rewrite])
        if rewrite == "contiguous":
            key = mask, fake_of(node).dtype, fake_of(arguments["query"]).dtype
            if key not in contiguous_masks:
                spec = specs.get(fake_of(node).device.type)
                is_exact = spec is not None and spec.attention.zeroes_fully_masked_rows
                contiguous_masks[key] = _ContiguousMask(mask, node, arguments["query"], is_exact)
            arguments["attn_mask"] = contiguous_masks[key].mask
            contiguous_masks[key].zero_fully_masked_rows(node)
        else:
            arguments |= {"attn_mask": None, "is_causal": rewrite == "causal"}
        set_attention_arguments(node, arguments)


def attention_arguments(node: Node) -> dict[str, Any]:
    """Returns the arguments of an attention call by parameter name."""
    return arguments_by_name(node.args, node.kwargs)


def arguments_by_name(positional: Iterable[Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of `scaled_dot_product_attention` by parameter name."""
    return dict(zip(_PARAMETERS, positional)) | dict(named)


def set_attention_arguments(node: Node, arguments: Mapping[str, Any]) -> None:
    """Replaces the arguments of an attention call, by parameter name."""
    node.args = tuple([arguments[name] for name in _PARAMETERS[:3]])
    node.kwargs = {name: item for name, item in arguments.items() if name not in _PARAMETERS[:3]}


def is_attention(node: Node) -> bool:
    """Whether a node calls `scaled_dot_product_attention`."""
    return node.target in _ATTENTION


def _mask_of(node: Node) -> Node | None:
    if not is_attention(node):
        return None
    arguments = attention_arguments(node)
    mask = arguments.get("attn_mask")
    return mask if isinstance(mask, Node) and has_plain_mask(arguments) else None


def has_plain_mask(arguments: Mapping[str, Any]) -> bool:
    """Whether an attention call has neither `is_causal`, nor dropout, whose random numbers kernels draw differently."""
    return arguments.get("is_causal", False) is False and arguments.get("dropout_p", 0.0) == 0


def has_unobservable_layout(node: Node, propagating: frozenset[str] = LAYOUT_PROPAGATING) -> bool:
    """Whether no result depends on the layout of a tensor; `propagating` are names of operators that accept any."""
    return all(
        user.op != "output"
        and (
            (name := name_of(user)) in _LAYOUT_HIDING
            or (name in propagating and has_unobservable_layout(user, propagating))
        )
        for user in node.users
    )


def _broadcast_dims(mask: torch.Tensor) -> list[int]:
    """Returns the batch dimensions along which a mask is broadcast."""
    return [dimension for dimension, stride in enumerate(mask.stride()[:-2]) if type(stride) is int and stride == 0]


# --- constant masks ---------------------------------------------------------------------------------------------------


def _written_storages(graph: Graph) -> frozenset[int | None]:
    """Returns the storages that calls may write."""
    calls = [node for node in graph.nodes if node.op not in ("placeholder", "get_attr", "output") and may_mutate(node)]
    return frozenset(storage_of(operand) for node in calls for operand in node.all_input_nodes)


def _classify_mask(mask: Node, constants: frozenset[Node], written: frozenset[int | None]) -> MaskRewrite | None:
    fake = fake_of(mask)
    if not isinstance(fake, torch.Tensor) or fake.ndim < 2:
        return None
    uniform = uniform_value(mask, fake_of, lambda node: storage_of(node) in written)
    if uniform is not None and uniform == (1 if fake.dtype is torch.bool else 0):
        return "all_true"
    if mask in constants and fake.dtype is torch.bool and fake.numel() > 0:
        with without_dispatch_modes():
            value = _fold_constant(mask)
            if value is not None and bool(value.all()):
                return "all_true"
            if value is not None and _is_lower_triangular(value):
                return "causal"
    stride, size = fake.stride(-1), fake.shape[-1]
    # A comparison of symbols would install a guard.
    is_strided = type(stride) is int and stride != 1 and not (type(size) is int and size == 1)
    return "contiguous" if is_strided else None


def _is_lower_triangular(value: torch.Tensor) -> bool:
    rows, columns = value.shape[-2:]
    return rows == columns and bool((value == torch.ones(rows, columns, dtype=torch.bool).tril()).all())


def _constant_nodes(graph: Graph, written: frozenset[int | None]) -> frozenset[Node]:
    """Returns the tensors that depend neither on the graph's inputs nor on memory of `written` storages."""
    constants: set[Node] = set()
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr", "output") or may_mutate(node) or storage_of(node) in written:
            continue
        is_constant = constants.issuperset(node.all_input_nodes) and name_of(node) in _MASK_OPERATORS
        if is_constant and _is_foldable(fake_of(node)):
            constants.add(node)
    return frozenset(constants)


def _is_foldable(fake: object) -> bool:
    """Whether a value is a tensor of integers or booleans, small enough to compute at compile time."""
    if not isinstance(fake, torch.Tensor) or fake.dtype.is_floating_point or fake.dtype.is_complex:
        return False
    return all(type(size) is int for size in fake.shape) and fake.untyped_storage().nbytes() <= _MAX_FOLDED_BYTES


def may_mutate(node: Node) -> bool:
    """Whether a call may mutate its operands, by its name, schema or parameters."""
    target = node.target
    if isinstance(target, OpOverload):
        return bool(operator_schema(target).mutated_arguments)
    if isinstance(target, str):
        named = target in _IN_PLACE_METHODS if target.endswith("__") else target.endswith("_")
        return node.op == "call_module" or named
    if getattr(target, "__module__", "") == operator.add.__module__:
        return target in _IN_PLACE_FUNCTIONS
    parameters = getattr(getattr(target, "__code__", None), "co_varnames", ())
    name = getattr(target, "__name__", "_")
    return (
        isinstance(target, HigherOrderOperator) or name.endswith("_") or "out" in node.kwargs or "inplace" in parameters
    )


def _fold_constant(mask: Node) -> torch.Tensor | None:
    """Computes a constant on the CPU, without dispatch modes, with broadcast dimensions of size 1; None if it fails."""
    needed, pending = {mask}, [mask]
    while pending:
        new = [operand for operand in pending.pop().all_input_nodes if operand not in needed]
        needed.update(new)
        pending.extend(new)
    values: dict[Node, torch.Tensor] = {}
    cpu = torch.device("cpu")

    def on_cpu(argument: object) -> object:
        if isinstance(argument, Node):
            return values[argument]
        return cpu if isinstance(argument, torch.device | str) else argument

    with torch.no_grad(), cpu, suppress(RuntimeError):  # integer division by 0 raises on CPUs
        for node in mask.graph.nodes:
            if node in needed:
                arguments: Any
                arguments, keywords = map_aggregate((node.args, node.kwargs), on_cpu)  # type: ignore[arg-type]
                keywords = {name: item for name, item in keywords.items() if name != "pin_memory"}
                call = getattr(torch.Tensor, node.target) if isinstance(node.target, str) else node.target
                values[node] = call(*arguments, **keywords)
    value = values.get(mask)
    if value is None:
        return None
    for dimension in _broadcast_dims(value):
        value = value.narrow(dimension, 0, 1)
    return value


# --- contiguous masks -------------------------------------------------------------------------------------------------


class _ContiguousMask:
    """A copy of a mask with a contiguous last dimension; broadcast dimensions stay broadcast.

    Attention as a formula returns zeros for fully masked rows. A device's kernels need not: with boolean masks, an H200
    returned other numbers (torch 2.11). Unless the device is exact, the mask adds the lowest finite number, so that the
    backward has no NaN either, and fully masked rows of the result are zeroed.
    """

    def __init__(self, mask: Node, node: Node, query: Node, is_exact: bool) -> None:
        graph, fake = mask.graph, fake_of(mask)
        broadcast_dims = _broadcast_dims(fake)
        self._row_is_unmasked: Node | None = None  # for each row, whether any column is unmasked
        with graph.inserting_before(node):
            copy = mask
            for dimension in broadcast_dims:
                copy = graph.call_function(_aten.slice.Tensor, (copy, dimension, 0, 1))
            contiguous: dict[str, Any] = {"memory_format": torch.contiguous_format}
            copy = graph.call_function(_aten.clone.default, (copy,), contiguous)
            if not is_exact:
                lowest = torch.finfo(fake_of(node).dtype).min
                if fake.dtype is torch.bool:
                    self._row_is_unmasked = graph.call_function(_aten.any.dim, (copy, -1, True))
                    copy = graph.call_function(_aten.where.Scalar, (copy, 0.0, lowest))
                    copy = graph.call_function(_aten._to_copy.default, (copy,), {"dtype": fake_of(query).dtype})
                else:
                    is_unmasked = graph.call_function(_aten.ne.Scalar, (copy, -torch.inf))
                    self._row_is_unmasked = graph.call_function(_aten.any.dim, (is_unmasked, -1, True))
                    copy = graph.call_function(_aten.clamp_min.default, (copy, lowest))
            self.mask = graph.call_function(_aten.expand_as.default, (copy, mask)) if broadcast_dims else copy

    def zero_fully_masked_rows(self, node: Node) -> None:
        """Zeroes the fully masked rows of an attention's result, unless its kernel does."""
        if self._row_is_unmasked is None:
            return
        with node.graph.inserting_after(node):
            zeroed = node.graph.call_function(_aten.where.ScalarOther, (self._row_is_unmasked, node, 0.0))
        node.replace_all_uses_with(zeroed, delete_user_cb=lambda user: user is not zeroed)
