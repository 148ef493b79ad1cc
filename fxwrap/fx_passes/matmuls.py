"""Rewrites of matmuls: fused epilogues, packing, separate biases, and products of vectors without matmuls.

A GEMM that adds a bias and applies an activation to its accumulators saves a kernel that reads and writes the result.
Small matmuls with one left operand (queries, keys and values) are bound by their launches, so one matmul with the
weights side by side is faster, although the weights must be copied. Where a library is slow with a bias, the kernel
that reads the result adds it. `DeviceSpec` declares where each rewrite is profitable. A matmul over one term is a
multiplication, and a batch of products of two vectors a sum of each row, which fuse with their readers; libraries
start a matmul for each row.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch.fx import Node

from fxwrap.devices import ROW_ALIGNMENT, DeviceSpec
from fxwrap.fx_passes.graph_copy import GraphCopy, bytes_of, fake_call, fresh_like, same_layout
from fxwrap.fx_passes.prepared_graph import FxPassContext, NodeValues, PreparedGraph, Target
from fxwrap.fx_passes.storage_aliases import StorageAliases, same_layouts
from fxwrap.options import Options
from fxwrap.torch_compat import FakeTensor

_aten = torch.ops.aten

MATMULS = frozenset({_aten.mm.default, _aten.addmm.default})
_VIEWS = frozenset({_aten.view.default, _aten._unsafe_view.default})
_FORMULA: Mapping[Target, Callable[..., float]] = {
    _aten.add.Tensor: operator.add,
    _aten.add.Scalar: operator.add,
    _aten.sub.Tensor: operator.sub,
    _aten.mul.Tensor: operator.mul,
    _aten.mul.Scalar: operator.mul,
    _aten.pow.Tensor_Scalar: operator.pow,
    _aten.tanh.default: math.tanh,
    _aten.clone.default: float,
    _aten._to_copy.default: float,
}
"""The operators in formulas of GELU's tanh approximation, as functions of numbers."""
_MAX_FORMULA_LENGTH = 16


@dataclass(frozen=True)
class Matmul:
    """A matmul of two matrices; `bias`, if any, is a vector added to each row."""

    node: Node
    left: Node
    right: Node
    bias: Node | None


def _match_matmul(node: Node, fakes: NodeValues, context: FxPassContext) -> Matmul | None:
    if node.target not in MATMULS or node.kwargs or str(node.target) in context.extern_operators:
        return None
    match node.target, node.args:
        case _aten.mm.default, (Node() as left, Node() as right):
            return Matmul(node, left, right, None)
        case _aten.addmm.default, (Node() as bias, Node() as left, Node() as right):
            fake = fakes.get(bias)
            return Matmul(node, left, right, bias) if isinstance(fake, FakeTensor) and fake.ndim == 1 else None
        case _:
            return None


def matmuls_of(graph: PreparedGraph, context: FxPassContext) -> list[Matmul]:
    """Returns the matmuls of matrices, with and without a bias, that passes may rewrite."""
    matches = [_match_matmul(node, graph.fakes, context) for node in graph.nodes]
    return [matmul for matmul in matches if matmul is not None]


def matrix_bytes(node: Node, fakes: NodeValues) -> int | None:
    """Returns the bytes of all matrices that the left operand of a matmul multiplies, if they have static sizes."""
    left = _left_operand(node)
    if left is None:
        return None
    matrices = [fakes.get(user.args[-1]) for user in left.users if _left_operand(user) is left]  # type: ignore[arg-type]
    static = [
        item for item in matrices if isinstance(item, FakeTensor) and all(type(size) is int for size in item.shape)
    ]
    return sum(map(bytes_of, static)) if len(static) == len(matrices) else None


def _left_operand(node: Node) -> Node | None:
    left = node.args[-2] if node.target in MATMULS else None
    return left if isinstance(left, Node) else None


# --- products of vectors ----------------------------------------------------------------------------------------------


def rewrite_vector_products(graph: PreparedGraph, context: FxPassContext) -> PreparedGraph:
    """Returns a graph in which products of vectors are multiplications, which fuse, or their sums."""
    if not {"aten.mul.Tensor", "aten.sum.dim_IntList"}.isdisjoint(context.extern_operators):
        return graph
    rewrites: dict[Node, Callable[[GraphCopy, Node], Node]] = {}
    for node in graph.nodes:
        if (operands := _matmul_operands(node, graph.fakes, context)) is None:
            continue
        if is_outer_product(*operands):
            rewrites[node] = _multiplication
        elif _is_inner_product(*operands):
            rewrites[node] = _row_sum
    if not rewrites:
        return graph
    copy = GraphCopy(graph)
    for node, rewrite in rewrites.items():
        copy.substitute(node, rewrite(copy, copy.node_map[node]), "fused")
    return copy.finish()


def _matmul_operands(
    node: Node, fakes: NodeValues, context: FxPassContext
) -> tuple[FakeTensor, FakeTensor, FakeTensor] | None:
    """Returns the operands and the result of a matmul, or of a batch of matmuls."""
    if node.target not in (_aten.mm.default, _aten.bmm.default) or str(node.target) in context.extern_operators:
        return None
    left, right = [fakes.get(operand) if isinstance(operand, Node) else None for operand in node.args[:2]]
    result = fakes.get(node)
    if node.kwargs or not all(isinstance(item, FakeTensor) for item in (left, right, result)):
        return None
    return left, right, result  # type: ignore[return-value]


def _multiplication(copy: GraphCopy, before: Node) -> Node:
    return copy.call(before, _aten.mul.Tensor, before.args, f"{before.name}_outer")


def _is_inner_product(left: FakeTensor, right: FakeTensor, result: FakeTensor) -> bool:
    """Whether a matmul is a batch of rows [batch, 1, width] times columns [batch, width, 1], in floating point."""
    ones = (left.shape[-2], right.shape[-1])
    is_batch = len(result.shape) == 3 and all(type(size) is int and size == 1 for size in ones)
    return is_batch and left.dtype is right.dtype is result.dtype and result.dtype.is_floating_point


def _row_sum(copy: GraphCopy, before: Node) -> Node:
    """Returns the sums of products, which are rounded once to half precision."""
    name = f"{before.name}_inner"
    row, column = before.args
    operands = [row, copy.call(before, _aten.transpose.int, (column, 1, 2), f"{name}_row")]
    dtype = copy.fakes[before].dtype
    wide = torch.float32 if dtype.itemsize < 4 else dtype
    if wide is not dtype:
        operands = [copy.call(before, _aten._to_copy.default, (item,), name, {"dtype": wide}) for item in operands]
    products = copy.call(before, _aten.mul.Tensor, operands, f"{name}_products")
    total = copy.call(before, _aten.sum.dim_IntList, (products, [-1], True), name)
    return total if wide is dtype else copy.call(before, _aten._to_copy.default, (total,), name, {"dtype": dtype})


def is_outer_product(left: FakeTensor, right: FakeTensor, result: FakeTensor) -> bool:
    """Whether a matmul is over one term, and a multiplication has the same dtype and layout."""
    if type(left.shape[-1]) is not int or left.shape[-1] != 1:
        return False
    multiplied = fake_call(_aten.mul.Tensor, (left, right))
    return multiplied.dtype == result.dtype and same_layouts(multiplied, result)


# --- epilogues --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Epilogue:
    """An activation that is the only reader of a matmul: `matmul_output`, the matmul or a view of it, is its input."""

    matmul: Matmul
    matmul_output: Node
    formula: tuple[Node, ...]
    is_gelu: bool

    @property
    def end(self) -> Node:
        """The node of the activation's result."""
        return self.formula[-1]


def fuse_epilogues(graph: PreparedGraph, context: FxPassContext) -> PreparedGraph:
    """Returns a graph in which a matmul and the activation after it are one call."""
    specs = context.options.device_specs()
    epilogues = [
        epilogue for matmul in matmuls_of(graph, context) if _supports_epilogue(matmul, graph.fakes, specs)
        and (epilogue := _match_epilogue(matmul, graph.fakes, context.options)) is not None
    ]  # fmt: skip
    if not epilogues:
        return graph
    copy = GraphCopy(graph)
    zeros: dict[Hashable, Node] = {}
    for epilogue in epilogues:
        _fuse_epilogue(copy, epilogue, zeros)
    return copy.finish()


def _spec_of(fake: object, specs: Mapping[str, DeviceSpec]) -> DeviceSpec | None:
    return specs.get(fake.device.type) if isinstance(fake, FakeTensor) else None


def _supports_epilogue(matmul: Matmul, fakes: NodeValues, specs: Mapping[str, DeviceSpec]) -> bool:
    """Whether a library applies an activation before it rounds: its kernels for aligned rows do."""
    fake = fakes.get(matmul.node)
    spec = _spec_of(fake, specs)
    if fake is None or spec is None or fake.dtype not in spec.matmuls.epilogue_dtypes:
        return False
    lengths = (fake.shape[1], fakes[matmul.left].shape[1])
    return all(type(length) is int and length * fake.dtype.itemsize % ROW_ALIGNMENT == 0 for length in lengths)


def _match_epilogue(matmul: Matmul, fakes: NodeValues, options: Options) -> _Epilogue | None:
    """Returns the activation that is the only reader of a matmul, if a library has it."""
    matmul_output = matmul.node
    while len(matmul_output.users) == 1 and (user := next(iter(matmul_output.users))).target in _VIEWS:
        matmul_output = user
    formula = _match_activation_formula(matmul_output, options)
    if formula is None:
        return None
    fake, result = fakes[matmul_output], fakes.get(formula[-1])
    if not isinstance(result, FakeTensor) or result.dtype != fake.dtype or not same_layout(result, fake):
        return None
    is_relu = formula[0].target == _aten.relu.default
    if not is_relu and not _is_gelu(matmul_output, formula):
        return None
    return _Epilogue(matmul, matmul_output, formula, is_gelu=not is_relu)


def _match_activation_formula(matmul_output: Node, options: Options) -> tuple[Node, ...] | None:
    """Returns the nodes of an activation of one tensor, in order; only the last has other readers."""
    users = list(matmul_output.users)
    if len(users) == 1 and users[0].target in (_aten.relu.default, _aten.gelu.default):
        return None if str(users[0].target) in options.preserve_ops else (users[0],)
    reached: dict[Node, None] = {}
    pending = users
    while pending and len(reached) <= _MAX_FORMULA_LENGTH:
        node = pending.pop(0)
        if node in reached or node.target not in _FORMULA or str(node.target) in options.preserve_ops:
            continue
        if all(operand is matmul_output or operand in reached for operand in node.all_input_nodes):
            reached[node] = None
            pending += node.users
    for end in reached:
        formula = _formula_nodes(end, reached)
        inner = [node for node in (matmul_output, *formula) if node is not end]
        has_tanh = any(node.target == _aten.tanh.default for node in formula)
        if has_tanh and all(user in formula for node in inner for user in node.users):
            return tuple([node for node in reached if node in formula])
    return None


def _formula_nodes(end: Node, reached: Collection[Node]) -> set[Node]:
    """Returns the nodes among `reached` that a node depends on, itself included."""
    nodes, pending = {end}, [end]
    while pending:
        new = [node for node in pending.pop().all_input_nodes if node in reached and node not in nodes]
        nodes.update(new)
        pending += new
    return nodes


def _is_gelu(matmul_output: Node, formula: Sequence[Node]) -> bool:
    """Whether nodes compute GELU's tanh approximation, in any algebraic form.

    The formula consists of polynomials and one tanh. It is compared with GELU at more points than it has terms.
    """
    if formula[0].target == _aten.gelu.default:
        return formula[0].kwargs.get("approximate") == "tanh"
    for step in range(-40, 41):
        x = step / 8
        values: dict[Node, float] = {matmul_output: x}
        for node in formula:
            value = _evaluate(node, values)
            if value is None:
                return False
            values[node] = value
        expected = 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
        if abs(values[formula[-1]] - expected) > 1e-7 * max(1.0, abs(x)):
            return False
    return True


def _evaluate(node: Node, values: Mapping[Node, float]) -> float | None:
    """Returns the value of a formula's operator on numbers; None for arguments that are not numbers."""
    operands: list[Any] = [values[item] if isinstance(item, Node) else item for item in node.args]
    if not all(isinstance(item, int | float) for item in operands):
        return None
    match node.target:
        case _aten._to_copy.default:
            dtype = node.kwargs.get("dtype")
            is_cast = set(node.kwargs) == {"dtype"} and isinstance(dtype, torch.dtype) and dtype.is_floating_point
            return float(operands[0]) if is_cast else None
        case _aten.clone.default:
            return float(operands[0])
        case _:
            return None if node.kwargs else _FORMULA[node.target](*operands)


def _fuse_epilogue(copy: GraphCopy, epilogue: _Epilogue, zeros: dict[Hashable, Node]) -> None:
    """Replaces a matmul and its activation by one call; `zeros` caches the biases of matmuls without one."""
    matmul, end = epilogue.matmul, epilogue.end
    before = copy.node_map[matmul.node]
    fake = copy.fakes[before]
    if matmul.bias is None:
        key = (fake.shape[1], fake.dtype, fake.device)
        if key not in zeros:
            keywords = {"dtype": fake.dtype, "device": fake.device}
            zeros[key] = copy.call(before, _aten.full.default, ([fake.shape[1]], 0), "no_bias", keywords)
        bias = zeros[key]
    else:
        bias = copy.node_map[matmul.bias]
    operands = (bias, copy.node_map[matmul.left], copy.node_map[matmul.right])
    keywords = {"use_gelu": True} if epilogue.is_gelu else {}
    fused = copy.call(before, _aten._addmm_activation.default, operands, f"{matmul.node.name}_epilogue", keywords)
    result = fused if epilogue.matmul_output is matmul.node else copy.node_map[epilogue.matmul_output]
    copy.substitute(end, result, "fused", erased=[node for node in epilogue.formula if node is not end])
    copy.substitute(matmul.node, fused, "fused")


# --- packed matmuls ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _PackableMatmul:
    """A matmul whose right operand is `weight`, an input or constant of the graph, or its transpose."""

    matmul: Matmul
    weight: Node
    transposed: bool

    @property
    def group(self) -> Hashable:
        """A key that is equal for matmuls that may be packed."""
        return (self.matmul.left, self.transposed, self.matmul.bias is not None)


def _packable(matmul: Matmul) -> _PackableMatmul | None:
    if matmul.bias is not None and matmul.bias.op == "call_function":
        return None
    weight = transpose_operand(matmul.right)
    base = matmul.right if weight is None else weight
    return _PackableMatmul(matmul, base, weight is not None) if base.op in ("placeholder", "get_attr") else None


def transpose_operand(node: Node) -> Node | None:
    """Returns the operand of a node that transposes a matrix, else None."""
    match node.target, node.args:
        case (_aten.t.default, (Node() as base,)) | (_aten.permute.default, (Node() as base, [1, 0])):
            return base
        case _aten.transpose.int, (Node() as base, 0 | -2, 1 | -1):
            return base
        case _:
            return None


def pack_matmuls(graph: PreparedGraph, context: FxPassContext) -> PreparedGraph:
    """Returns a graph in which small matmuls with one left operand are one matmul and slices of its result."""
    specs = context.options.device_specs()
    if not any(spec.matmuls.packed_bytes for spec in specs.values()):
        return graph
    fakes, views = graph.fakes, StorageAliases(graph, context)
    groups: dict[Hashable, list[_PackableMatmul]] = {}
    for matmul in matmuls_of(graph, context):
        packable = _packable(matmul)
        if packable is not None:
            groups.setdefault(packable.group, []).append(packable)
    packs = []
    for group in groups.values():
        spec = specs.get(fakes[group[0].matmul.node].device.type)
        if spec is None or not spec.matmuls.packed_bytes or len(group) < 2:
            continue
        members = [item for item in group if _is_static(item, fakes)]
        if not _may_be_profitable(members, fakes, spec.matmuls.packed_bytes):
            continue  # before the results of their readers are inferred, in each of equal layers
        members = [item for item in members if _may_be_slice(views, item.matmul.node)]
        if _is_profitable(members, fakes, spec.matmuls.packed_bytes):
            packs.append(members)
    if not packs:
        return graph
    copy = GraphCopy(graph)
    for members in packs:
        _pack(copy, members)
    return copy.finish()


def _is_static(item: _PackableMatmul, fakes: NodeValues) -> bool:
    """Whether all operands have static sizes and strides, and one dtype."""
    matmul = item.matmul
    operands = [fakes.get(node) for node in (matmul.node, matmul.left, item.weight, matmul.bias) if node is not None]
    return all(
        isinstance(fake, FakeTensor) and fake.dtype == operands[0].dtype  # type: ignore[union-attr]
        and all(type(size) is int for size in (*fake.shape, *fake.stride()))
        for fake in operands
    )  # fmt: skip


def _is_profitable(members: Sequence[_PackableMatmul], fakes: NodeValues, copy_budget: int) -> bool:
    """Whether the saved calls cost more than copying the weights; biases cost one more copy."""
    copied = sum(bytes_of(fakes[item.weight]) for item in members)
    has_bias = any(item.matmul.bias is not None for item in members)
    return len(members) > 1 and copied <= copy_budget * (len(members) - 1 - has_bias)


def _may_be_profitable(group: Sequence[_PackableMatmul], fakes: NodeValues, copy_budget: int) -> bool:
    """Whether packing some matmuls of a group may be profitable: of each number of them, those of the least weights."""
    copied = accumulate(sorted([bytes_of(fakes[item.weight]) for item in group]))
    has_bias = any(item.matmul.bias is not None for item in group)
    return any(total <= copy_budget * (saved - has_bias) for saved, total in enumerate(copied) if saved)


def _may_be_slice(views: StorageAliases, node: Node) -> bool:
    """Whether a matmul's result may be a slice of a wider result."""
    fake = views.fakes[node]
    if views.is_mutated(node) or views.is_returned(node) or not fake.is_contiguous():
        return False
    strides = (2 * fake.shape[1], 1)
    return views.accepts_layout(node, fresh_like(fake.fake_mode, fake, strides))


def _pack(copy: GraphCopy, members: Sequence[_PackableMatmul]) -> None:
    first = members[0].matmul
    before = copy.node_map[first.node]
    dim = 0 if members[0].transposed else 1
    weights = [copy.node_map[item.weight] for item in members]
    name = f"{first.node.name}_packed"
    weight = copy.call(before, _aten.cat.default, (weights, dim), f"{name}_weight")
    right = copy.call(before, _aten.t.default, (weight,), f"{name}_t") if dim == 0 else weight
    operands = (copy.node_map[first.left], right)
    if first.bias is not None:
        biases = [copy.node_map[item.matmul.bias] for item in members if item.matmul.bias is not None]
        bias = copy.call(before, _aten.cat.default, (biases, 0), f"{name}_bias")
        packed = copy.call(before, _aten.addmm.default, (bias, *operands), name)
    else:
        packed = copy.call(before, _aten.mm.default, operands, name)
    start = 0
    for item in members:
        node = item.matmul.node
        end = start + copy.fakes[copy.node_map[node]].shape[1]
        copy.substitute(node, copy.call(before, _aten.slice.Tensor, (packed, 1, start, end), f"{node.name}_slice"))
        start = end


# --- biases -----------------------------------------------------------------------------------------------------------


def unfuse_biases(graph: PreparedGraph, context: FxPassContext) -> PreparedGraph:
    """Returns a graph in which the kernels that read matmuls add their biases."""
    specs = context.options.device_specs()
    matmuls = [matmul for matmul in matmuls_of(graph, context) if _prefers_unfused_bias(matmul, graph.fakes, specs)]
    if not matmuls:
        return graph
    views = StorageAliases(graph, context)
    matmuls = [
        matmul for matmul in matmuls
        if not views.is_mutated(matmul.node) and not views.is_returned(matmul.node)
        and views.has_kernels_as_readers(matmul.node)
    ]  # fmt: skip
    if not matmuls:
        return graph
    copy = GraphCopy(graph)
    for matmul in matmuls:
        before, name = copy.node_map[matmul.node], matmul.node.name
        bias, *operands = before.args
        plain = copy.call(before, _aten.mm.default, operands, f"{name}_plain")
        copy.substitute(matmul.node, copy.call(before, _aten.add.Tensor, (plain, bias), f"{name}_biased"), "fused")
    return copy.finish()


def _prefers_unfused_bias(matmul: Matmul, fakes: NodeValues, specs: Mapping[str, DeviceSpec]) -> bool:
    """Whether a library adds a bias more slowly than the kernel that reads the result."""
    fake = fakes.get(matmul.node)
    spec = _spec_of(fake, specs)
    if fake is None or spec is None or matmul.bias is None:
        return False
    return fake.dtype in spec.matmuls.unfused_bias_dtypes and fakes[matmul.bias].dtype == fake.dtype
