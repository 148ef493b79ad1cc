"""Loops over experts become grouped matmuls: one for all experts, on rows that are sorted by their expert.

As a model writes it, a loop has `nonzero`, a gather, matmuls and an addition at indices for each expert. The number of
rows of an expert depends on the data, so that a GPU's host waits in each iteration. All iterations together have one
row for each index of an expert, a number that is known before. Sorted by expert, they are the operands of grouped
matmuls; each call of the body computes all rows. Results are gathered in the order of the indices and summed over the
experts of a token in one kernel, in an order that is always the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from fxwrap.devices import DeviceSpec
from fxwrap.fx_passes.attention_nodes import sizes_of
from fxwrap.fx_passes.effects import name_of
from fxwrap.fx_passes.expert_bodies import ExpertBody, ExpertLoop, expert_loops, row_dimension
from fxwrap.fx_passes.expert_conditions import are_distinct
from fxwrap.fx_passes.expert_rows import MATMULS, RowCheck, coordinate, stacked_operand
from fxwrap.fx_passes.graph_copy import GraphCopy, expression_of, expressions_of, is_contiguous
from fxwrap.fx_passes.grouped_rows import GroupedLoop, GroupedRows, Terminal
from fxwrap.fx_passes.prepared_graph import FxPassContext, NodeValues, PreparedGraph

_ALIGNMENT = 16
"""The multiple of bytes that rows of a grouped matmul's operands must have."""


def group_expert_loops(graph: PreparedGraph, context: FxPassContext) -> PreparedGraph:
    """Returns a graph in which loops over experts, whose weights are slices of one tensor, are grouped matmuls."""
    if "aten._grouped_mm.default" in context.extern_operators:
        return graph
    specs = context.options.device_specs()
    loops = [_grouped_loop(loop, graph.fakes, specs) for loop in expert_loops(graph)]
    if not any(loops):
        return graph
    copy = GraphCopy(graph)
    for loop in loops:
        if loop is not None:
            result = GroupedRows(copy, loop, graph.fakes).result()
            copy.substitute(loop.loop.result, result, "fused", loop.loop.inner_nodes())
    return copy.finish()


def _grouped_loop(loop: ExpertLoop, fakes: NodeValues, specs: Mapping[str, DeviceSpec]) -> GroupedLoop | None:
    """Returns a loop with what its operands and its last calls are, if grouped matmuls can compute it."""
    body = loop.bodies[0]
    stacked = {}
    for node, operands in loop.externals.items():
        if any(item is not node for item in operands):
            operand = stacked_operand(operands, fakes)
            if operand is None or expression_of(fakes[operand.stacked].shape[operand.dim]) != len(loop.bodies):
                return None
            stacked[node] = operand
    terminal = _terminal(body, fakes)
    if terminal is None or not _fits(loop, terminal, fakes):
        return None
    if not RowCheck(body, stacked, fakes).holds(terminal.read):
        return None
    matmuls = [node for node in body.nodes if name_of(node) in MATMULS and node.args[-1] in stacked]
    if not matmuls or not all(_has_grouped_matmul(node, fakes, specs) for node in matmuls):
        return None
    return GroupedLoop(loop, stacked, terminal)


def _has_grouped_matmul(node: Node, fakes: NodeValues, specs: Mapping[str, DeviceSpec]) -> bool:
    """Whether the library has a grouped matmul for the operands: of its dtypes, with aligned rows."""
    left, right = [fakes[item] for item in node.args[-2:]]  # type: ignore[index]
    spec = specs.get(right.device.type)
    if spec is None or right.dtype not in spec.grouped_gemm_dtypes or fakes[node].dtype != right.dtype:
        return False
    return is_contiguous(left) and all(_is_aligned(fake) for fake in (right, fakes[node]))


def _is_aligned(fake: torch.Tensor) -> bool:
    """Whether the matrix is not empty, and begins and continues at multiples of the alignment."""
    numbers = [*fake.shape[1:], *fake.stride(), fake.storage_offset()]
    if not all(type(number) is int and number for number in numbers[:-1]) or type(numbers[-1]) is not int:
        return False
    unit, *strides = sorted(fake.stride())
    return unit == 1 and all(number * fake.dtype.itemsize % _ALIGNMENT == 0 for number in (*strides, numbers[-1]))


# --- the last call of a body ------------------------------------------------------------------------------------------


def _terminal(body: ExpertBody, fakes: NodeValues) -> Terminal | None:
    """Returns what a body's last call adds or writes, and where."""
    assert body.terminal is not None
    node = body.terminal
    match name_of(node), node.args:
        case "index_add", (_, 0, Node() as index, Node() as rows) if not node.kwargs:
            positions: Sequence[Any] = [index]
        case "scatter_add", (_, 0, Node() as index, Node() as rows):
            positions = [_repeated(index, body, fakes)]
        case "index_put", (_, [*positions], Node() as rows, *more):
            return _stored(body, positions, rows, bool(more and more[0]), fakes)
        case _:
            return None
    axes = _axes(body, positions)
    return None if axes is None else Terminal(rows, axes, True)


def _repeated(index: Node, body: ExpertBody, fakes: NodeValues) -> Node | None:
    """Returns the vector that an index of `scatter` repeats along all further dimensions."""
    match name_of(index), index.args:
        case "expand", (Node() as source, _) if name_of(source) == "unsqueeze" and fakes[source].ndim == 2:
            vector: Any = source.args[0]
            return vector if row_dimension(index, body, fakes) == 0 else None
        case _:
            return None


def _stored(body: ExpertBody, positions: Sequence[Any], rows: Node, adds: bool, fakes: NodeValues) -> Terminal | None:
    """Returns what `index_put` adds or writes: the rows, or rows that were added to the elements read there."""
    axes = _axes(body, positions)
    if axes is None or adds:
        return None if axes is None else Terminal(rows, axes, True)
    indices = body.condition.indices
    others = [axis for axis in range(fakes[indices].ndim) if axis not in axes]
    if others and not are_distinct(indices, others, fakes):
        return None
    if any(node.args[0] is body.result for node in body.nodes):
        return _accumulated(body, positions, rows, axes, fakes)
    return None if others else Terminal(rows, axes, False)


def _accumulated(
    body: ExpertBody, positions: Sequence[Any], stored: Node, axes: tuple[int, ...], fakes: NodeValues
) -> Terminal | None:
    """Returns what is added where a body reads elements of the result, adds rows, and stores the sums there.

    The sum may be computed in another dtype than the result's.
    """
    chain = [stored]
    if name_of(stored) == "to_copy":
        chain.append(stored.args[0])  # type: ignore[arg-type]
    total = chain[-1]
    match name_of(total), total.args, total.kwargs:
        case "add", (Node() as one, Node() as other), {} if not total.kwargs and total in body.nodes:
            operands = [one, other]
        case _:
            return None
    read = [item for item in operands if item.args and item.args[0] is body.result]
    rows = [item for item in operands if item not in read]
    if len(rows) != 1 or name_of(read[0]) != "index" or list(read[0].args[1]) != list(positions):  # type: ignore[arg-type]
        return None
    readers = [node for node in body.nodes if node.args[0] is body.result]
    links = [*read, *reversed(chain)]
    single = all([*node.users] == [after] for node, after in zip(links, [*links[1:], body.terminal], strict=True))
    same = expressions_of(fakes[rows[0]].shape) == expressions_of(fakes[stored].shape)
    return Terminal(rows[0], axes, True, tuple(links)) if readers == read and single and same else None


def _axes(body: ExpertBody, positions: Sequence[Any]) -> tuple[int, ...] | None:
    """Returns the dimensions of the indices whose coordinates are the positions, if these are different dimensions."""
    axes = body.condition.axes
    if len(positions) == 1 and isinstance(positions[0], Node) and positions[0] not in body.nodes:
        return axes  # the condition itself
    columns = [coordinate(item) if isinstance(item, Node) and item in body.nodes else None for item in positions]
    if not columns or None in columns or len(set(columns)) < len(columns):
        return None
    return tuple([axes[column] for column in columns if column is not None])


def _fits(loop: ExpertLoop, terminal: Terminal, fakes: NodeValues) -> bool:
    """Whether the result has a row for each coordinate, and the layout of a sum."""
    result, rows, indices = fakes[loop.result], terminal.rows, loop.indices
    body = loop.bodies[0]
    sizes, axes = sizes_of(indices, fakes), terminal.axes
    if not all(type(size) is int for size in sizes[1:]) or row_dimension(rows, body, fakes) != 0:
        return False
    expected = [*[sizes[axis] for axis in axes], *sizes_of(rows, fakes)[1:]]
    shape = sizes_of(loop.result, fakes)
    same_dtype = result.dtype == fakes[loop.base].dtype and (bool(terminal.read) or fakes[rows].dtype == result.dtype)
    return shape == expected and is_contiguous(result) and same_dtype and bool(result.is_floating_point())
