"""Rewrites of matmuls: packing, separate biases, and products of vectors without matmuls.

Small matmuls with one left operand (queries, keys and values) are bound by their launches, so one matmul with the
weights side by side is faster, although the weights must be copied. Where a library is slow with a bias, the kernel
that reads the result adds it. `DeviceSpec` declares where each rewrite is profitable. A matmul over one term is a
multiplication, and a batch of products of two vectors a sum of each row, which fuse with their readers; libraries
start a matmul for each row.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch.fx import Node

from fxwrap.devices import DeviceSpec
from fxwrap.fx_passes.graph_copy import GraphCopy, bytes_of, fake_call, fresh_like
from fxwrap.fx_passes.prepared_graph import FxPassContext, NodeValues, PreparedGraph
from fxwrap.fx_passes.storage_aliases import StorageAliases, same_layouts
from fxwrap.torch_compat import FakeTensor

_aten = torch.ops.aten

MATMULS = frozenset({_aten.mm.default, _aten.addmm.default})


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
    spec = specs.get(fake.device.type) if isinstance(fake, FakeTensor) else None
    if fake is None or spec is None or matmul.bias is None:
        return False
    return fake.dtype in spec.matmuls.unfused_bias_dtypes and fakes[matmul.bias].dtype == fake.dtype
