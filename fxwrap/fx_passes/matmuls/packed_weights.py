"""Matmuls of packed int8 and int4 weights as matmuls of dequantised weights.

`aten._weight_int8pack_mm` and `aten._weight_int4pack_mm` of GPUs are for one row or a few: their time grows with the
rows. From a number of rows on (`DeviceSpec.matmuls.dequantised_packed_rows`), a kernel that dequantises the weights and
a matmul take less time, and so does one kernel of both where a matmul of so many dequantised rows is a kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch.fx import Node

from fxwrap.fx_passes.graph_copy import GraphCopy, size_hint
from fxwrap.fx_passes.prepared_graph import FxPassContext, NodeValues, PreparedGraph, Target
from fxwrap.loop_ir import HALF_PRECISION
from fxwrap.torch_compat import FakeTensor

_aten = torch.ops.aten


def dequantise_packed_weights(graph: PreparedGraph, context: FxPassContext) -> PreparedGraph:
    """Returns a graph in which matmuls of packed weights are matmuls where the library's calls are slower."""
    calls = [node for node in graph.nodes if _is_slow(node, graph.fakes, context)]
    if not calls:
        return graph
    copy = GraphCopy(graph)
    for node in calls:
        matmul = _MATMULS[node.target]
        copy.substitute(node, matmul(_Calls(copy, node, context), *copy.node_map[node].args), "fused")
    return copy.finish()


def _is_slow(node: Node, fakes: NodeValues, context: FxPassContext) -> bool:
    """Whether a matmul of packed weights has more rows than the library's call is made for; hints count as rows."""
    left = fakes.get(node.args[0]) if node.target in _MATMULS else None  # type: ignore[arg-type]
    if not isinstance(left, FakeTensor) or node.kwargs or str(node.target) in context.extern_operators:
        return False
    if node.target is _aten._weight_int4pack_mm.default and torch.version.hip is not None:  # another layout
        return False
    spec = context.options.device_specs().get(left.device.type)
    least = dict(spec.matmuls.dequantised_packed_rows).get(str(node.target)) if spec is not None else None
    return least is not None and size_hint(left.shape[0]) >= least and left.dtype.is_floating_point


class _Calls:
    """Inserts calls before the copy of a matmul, whose operands are nodes of the copy."""

    def __init__(self, copy: GraphCopy, node: Node, context: FxPassContext) -> None:
        self._copy, self._before, self._name = copy, copy.node_map[node], f"{node.name}_dequantised"
        self._options = context.options

    def __call__(self, target: Target, *arguments: object, **keywords: object) -> Node:
        return self._copy.call(self._before, target, arguments, self._name, keywords)

    def fake(self, node: Node) -> FakeTensor:
        """Returns the fake tensor of a node."""
        fake: FakeTensor = self._copy.fakes[node]
        return fake

    def rounds_sums(self, rows: Node) -> bool:
        """Whether the sums of a matmul are stored in half precision before a kernel reads them."""
        fake = self.fake(rows)
        matmuls = self._options.device_specs()[fake.device.type].matmuls
        few = dict(matmuls.generated_dequantised_rows).get(fake.dtype, 0)
        is_few = type(fake.shape[0]) is int and fake.shape[0] <= few
        kernels = self._options.matmul_kernels
        is_kernel = kernels == "generated" or (kernels == "auto" and is_few)
        return fake.dtype in HALF_PRECISION and not is_kernel


def _int8_matmul(call: _Calls, rows: Node, weight: Node, scales: Node) -> Node:
    """Returns rows times int8 columns, each with a scale, which multiplies the sum before that is rounded."""
    dtype = call.fake(rows).dtype
    columns = call(_aten.t.default, call(_aten._to_copy.default, weight, dtype=dtype))
    if not call.rounds_sums(rows):
        return call(_aten.mul.Tensor, call(_aten.mm.default, rows, columns), scales)
    total = call(_aten.mm.dtype, rows, columns, torch.float32)
    return call(_aten._to_copy.default, call(_aten.mul.Tensor, total, scales), dtype=dtype)


def _int4_matmul(call: _Calls, rows: Node, weight: Node, group: int, scales_and_zeros: Node) -> Node:
    """Returns rows times int4 columns, packed as `_weight_int4pack_mm` of NVIDIA GPUs reads them.

    Words are [columns / 8, width / (16 * tiles), 32, tiles / 2]. The lane 4 * n + k of a tile of 8 columns has elements
    2k, 2k + 1, 2k + 8 and 2k + 9 of its column n; a word holds those of two tiles, first the even elements, then the
    odd ones. An element is (int4 - 8) * scale + zero, with scales and zeros of `group` elements of a column.
    """
    words, dtype = call.fake(weight), call.fake(rows).dtype
    blocks, steps, _, pairs = words.shape
    columns, width = 8 * blocks, 32 * steps * pairs
    shifts = call(_aten.arange.start_step, 0, 32, 4, dtype=words.dtype, device=words.device)
    digits = call(_aten.bitwise_right_shift.Tensor, call(_aten.unsqueeze.default, weight, -1), shifts)
    digits = call(_aten.bitwise_and.Scalar, digits, 15)
    digits = call(_aten.view.default, digits, [blocks, steps, 8, 4, pairs, 2, 2, 2])
    digits = call(_aten.permute.default, digits, [0, 2, 1, 4, 6, 7, 3, 5])
    digits = call(_aten.clone.default, digits, memory_format=torch.contiguous_format)
    digits = call(_aten.view.default, digits, [columns, width // group, group])
    numbers = call(_aten.sub.Tensor, call(_aten._to_copy.default, digits, dtype=dtype), 8)
    scale, zero = [
        call(_aten.unsqueeze.default, call(_aten.t.default, call(_aten.select.int, scales_and_zeros, 2, part)), -1)
        for part in (0, 1)
    ]
    matrix = call(_aten.add.Tensor, call(_aten.mul.Tensor, numbers, scale), zero)
    matrix = call(_aten.t.default, call(_aten.view.default, matrix, [columns, width]))
    return call(_aten.mm.default, rows, matrix)


_MATMULS: Mapping[Target, Callable[..., Node]] = {
    _aten._weight_int8pack_mm.default: _int8_matmul,
    _aten._weight_int4pack_mm.default: _int4_matmul,
}
