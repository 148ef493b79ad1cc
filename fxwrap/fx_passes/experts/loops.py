"""Loops over experts become grouped matmuls: one for all experts, on rows that are sorted by their expert.

As a model writes it, a loop has `nonzero`, a gather, matmuls and an addition at indices for each expert. The number of
rows of an expert depends on the data, so that a GPU's host waits in each iteration. All iterations together have one
row for each index of an expert, a number that is known before. Sorted by expert, they are the operands of grouped
matmuls; each call of the body computes all rows. Results are gathered in the order of the indices and summed over the
experts of a token in one kernel, in an order that is always the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fxwrap.devices import DeviceSpec
from fxwrap.fx_passes.attention.nodes import sizes_of
from fxwrap.fx_passes.cse import eliminate_common_subexpressions
from fxwrap.fx_passes.effects import name_of
from fxwrap.fx_passes.experts.bodies import ExpertBody, ExpertLoop, ExpertResult, expert_loops, row_dimension
from fxwrap.fx_passes.experts.conditions import are_distinct, expert_condition
from fxwrap.fx_passes.experts.gradients import GradientSum
from fxwrap.fx_passes.experts.grouped_rows import MATRIX_ALIGNMENT, GroupedLoop, GroupedMethod, GroupedRows, Terminal
from fxwrap.fx_passes.experts.masks import encode_masks_of_experts, selects_by_mask
from fxwrap.fx_passes.experts.rows import MATMULS, RowCheck, StackedOperand, coordinate, stacked_operand, sums_rows
from fxwrap.fx_passes.experts.writes import simplify_gradients_of_writes
from fxwrap.fx_passes.graph_copy import GraphCopy, bytes_of, expressions_of, is_contiguous, storages_of
from fxwrap.fx_passes.matmuls.prepacked_weights import frozen_nodes
from fxwrap.fx_passes.prepared_graph import FxPassContext, NodeValues, PreparedGraph
from fxwrap.fx_passes.storage_aliases import written_storages
from fxwrap.options import Options
from fxwrap.torch_compat import sums_empty_groups


def group_expert_loops(graph: PreparedGraph, context: FxPassContext) -> PreparedGraph:
    """Returns a graph in which loops over experts, whose weights are slices of one tensor, are grouped matmuls."""
    if "aten._grouped_mm.default" in context.extern_operators or not _may_have_experts(graph):
        return graph
    source = graph
    graph = simplify_gradients_of_writes(encode_masks_of_experts(graph))
    positions = {node: position for position, node in enumerate(graph.nodes)}
    loops = [_grouped_loop(loop, graph, context) for loop in expert_loops(graph)]
    chosen = _separate([loop for loop in loops if loop is not None and _is_movable(loop.loop, positions, graph.fakes)])
    if not chosen:
        return simplify_gradients_of_writes(source)
    copy = GraphCopy(graph)
    for loop in chosen:
        rows = GroupedRows(copy, loop, graph.fakes)
        copy.substitute(loop.loop.result, rows.result(), "fused", loop.loop.inner_nodes())
        for _, item in sorted([(_position(item, positions), item) for item in _results(loop)], key=itemgetter(0)):
            if isinstance(item, GradientSum):
                copy.substitute(item.root, rows.gradient(item), "fused", item.inner_nodes)
            else:
                for node, result in zip(item.nodes, rows.results(item, first_user(item, positions)), strict=True):
                    copy.substitute(node, result, "fused")
    return group_expert_loops(copy.finish(), context)


def _may_have_experts(graph: PreparedGraph) -> bool:
    """Whether a call selects rows by a mask or writes at indices: without one there is nothing to rewrite."""
    return any(name_of(node) == "index_put" or selects_by_mask(node, graph) for node in graph.nodes)


def _results(loop: GroupedLoop) -> list[ExpertResult | GradientSum]:
    """Returns the further results of a loop."""
    return [*loop.loop.results, *loop.loop.gradients]


def first_user(result: ExpertResult, positions: Mapping[Node, int]) -> Node:
    """Returns the first call that reads a result of an expert."""
    return min(result.users, key=positions.__getitem__)


def _position(item: ExpertResult | GradientSum, positions: Mapping[Node, int]) -> int:
    """Returns the position of the call before which a result is computed."""
    return positions[item.root if isinstance(item, GradientSum) else first_user(item, positions)]


def _separate(loops: Sequence[GroupedLoop]) -> list[GroupedLoop]:
    """Returns the first of the loops, and those whose sums of gradients share no addition with one before them."""
    chosen, seen = [], set[Node]()
    for loop in loops:
        nodes = {node for total in loop.loop.gradients for node in (total.root, *total.inner_nodes)}
        if seen.isdisjoint(nodes):
            chosen.append(loop)
            seen |= nodes
    return chosen


def _is_movable(loop: ExpertLoop, positions: Mapping[Node, int], fakes: NodeValues) -> bool:
    """Whether the calls of a loop can be computed where its results are.

    No call between the first and the last one writes a tensor that the loop reads, and each result is read after those
    of all experts.
    """
    for item in loop.results:
        last = max(positions[node] for node in (*item.nodes, loop.result))
        if positions[first_user(item, positions)] <= last:
            return False
    roots = [loop.result, *[total.root for total in loop.gradients]]
    inner = [*loop.inner_nodes(), *roots, *[node for total in loop.gradients for node in total.inner_nodes]]
    places = [positions[node] for node in (*inner, *[first_user(item, positions) for item in loop.results])]
    between = list(positions)[min(places) : max(places) + 1]
    written = written_storages(between, fakes)
    read = {storage for node in inner for item in node.all_input_nodes for storage in storages_of(fakes.get(item))}
    return written.isdisjoint(read)


def group_expert_loops_in_joint_graph(joint: GraphModule, options: Options) -> GraphModule:
    """Returns a joint graph of training in which loops over experts, and their backward, are grouped matmuls."""
    fakes = {node: node.meta["val"] for node in joint.graph.nodes if "val" in node.meta}
    source = PreparedGraph(joint, "joint", fakes=fakes)
    if not _may_have_experts(source):
        return joint
    # The rows of experts are read from equal views.
    graph = eliminate_common_subexpressions(source)
    grouped = group_expert_loops(graph, FxPassContext(options))
    return joint if grouped is graph else grouped.graph_module


def _grouped_loop(loop: ExpertLoop, graph: PreparedGraph, context: FxPassContext) -> GroupedLoop | None:
    """Returns a loop with what its operands and its last calls are, if it can be computed for all rows at once."""
    body, fakes = loop.bodies[0], graph.fakes
    stacked = {}
    for node, operands in loop.externals.items():
        if any(item is not node for item in operands):
            operand = stacked_operand(operands, fakes)
            if operand is None:
                return None
            stacked[node] = operand
    terminals = _terminals(loop, fakes)
    if terminals is None or not RowCheck(body, stacked, fakes).holds(terminals[loop.last_call].read):
        return None
    contiguous = [total.root for total in loop.gradients] + [node for item in loop.results for node in item.nodes]
    if not all(is_contiguous(fakes[node]) for node in contiguous):
        return None
    matmuls = [node for node in body.nodes if name_of(node) in MATMULS and node.args[-1] in stacked]
    sums = [node for node in body.nodes if sums_rows(node, body, fakes)]
    spec = context.options.device_specs().get(fakes[loop.indices].device.type)
    if spec is None or not matmuls:
        return None
    method = _method(matmuls, sums, stacked, graph, spec, context)
    return None if method is None else GroupedLoop(loop, stacked, terminals, method)


def _method(
    matmuls: Sequence[Node], sums: Sequence[Node], stacked: Mapping[Node, StackedOperand], graph: PreparedGraph,
    spec: DeviceSpec, context: FxPassContext,
) -> GroupedMethod | None:  # fmt: skip
    """Returns how a device multiplies the rows of all experts in less time than a loop; None if it cannot."""
    fakes = graph.fakes
    has_grouped = [*[_has_grouped_matmul(node, fakes, spec) for node in matmuls],
                   *[_has_grouped_sum(node, fakes, spec) for node in sums]]  # fmt: skip
    separate = [item for item in stacked.values() if item.is_separate]
    if all(has_grouped) and all(is_contiguous(fakes[item.sources[0]]) for item in separate):
        matrices = [stacked[node.args[-1]] for node in matmuls if stacked[node.args[-1]].is_separate]  # type: ignore[index]
        frozen = frozen_nodes(graph, context) if context.options.freeze and spec.matmuls.stacked_expert_bytes else set()
        is_frozen = all(frozen.issuperset(item.sources) and _are_matrices(item, fakes) for item in matrices)
        if matrices and not sums and is_frozen:
            return GroupedMethod.FROZEN
        if sum(bytes_of(fakes[item.sources[0]]) for item in separate) <= spec.matmuls.stacked_expert_bytes:
            return GroupedMethod.LIBRARY
    dtypes = {fakes[node].dtype for node in (*matmuls, *sums)}
    return GroupedMethod.EACH if dtypes <= spec.matmuls.sorted_expert_dtypes else None


def _are_matrices(operand: StackedOperand, fakes: NodeValues) -> bool:
    """Whether operands are tensors of each expert's own, perhaps transposed."""
    return not operand.views or operand.is_transposed(fakes)


def _has_grouped_matmul(node: Node, fakes: NodeValues, spec: DeviceSpec) -> bool:
    """Whether the library has a grouped matmul for the operands: of its dtypes, with aligned rows."""
    left, right = [fakes[item] for item in node.args[-2:]]  # type: ignore[index]
    if right.dtype not in spec.matmuls.grouped_dtypes or fakes[node].dtype != right.dtype:
        return False
    return is_contiguous(left) and all(_is_aligned(fake) for fake in (right, fakes[node]))


def _has_grouped_sum(node: Node, fakes: NodeValues, spec: DeviceSpec) -> bool:
    """Whether the library has a grouped matmul along the rows of the operands: of its dtypes, with aligned rows.

    Rows of each operand must be contiguous: libraries on GPUs have empty groups in this layout alone.
    """
    operands = [fakes[item] for item in node.args if isinstance(item, Node)]
    if operands[0].dtype not in spec.matmuls.grouped_dtypes or not sums_empty_groups(operands[0].device):
        return False
    units = [0, 1] if len(operands) > 1 else [1]
    has_rows = all(fake.stride(dim) == 1 for fake, dim in zip(operands, units, strict=True))
    return has_rows and all(fake.dtype == fakes[node].dtype and _has_aligned_strides(fake) for fake in operands)


def _is_aligned(fake: torch.Tensor) -> bool:
    """Whether the matrix is not empty, and begins and continues at multiples of the alignment."""
    return all(type(size) is int and size > 0 for size in fake.shape[1:]) and _has_aligned_strides(fake)


def _has_aligned_strides(fake: torch.Tensor) -> bool:
    numbers = [*fake.stride(), fake.storage_offset()]
    if not all(type(number) is int for number in numbers) or 0 in fake.stride():
        return False
    unit, *strides = sorted(fake.stride())
    return unit == 1 and all(number * fake.dtype.itemsize % MATRIX_ALIGNMENT == 0 for number in (*strides, numbers[-1]))


# --- the last call of a body ------------------------------------------------------------------------------------------


def _terminals(loop: ExpertLoop, fakes: NodeValues) -> dict[Node, Terminal] | None:
    """Returns the writes of the first body's last calls: to the result, and to gradients of rows."""
    body = loop.bodies[0]
    terminals: dict[Node, Terminal] = {}
    for node in (loop.last_call, *body.gradients):
        if name_of(node) == "select_backward":
            continue
        terminal = _terminal(node, body, fakes)
        result, base = (loop.result, loop.base) if node is loop.last_call else (node, node.args[0])
        if terminal is None or not _fits(loop, terminal, fakes[result], fakes[base], fakes):  # type: ignore[index]
            return None
        if node is not loop.last_call and (not terminal.adds or terminal.read):
            return None
        terminals[node] = terminal
    return terminals


def _terminal(node: Node, body: ExpertBody, fakes: NodeValues) -> Terminal | None:
    """Returns the rows that a call adds or writes, with their positions."""
    match name_of(node), node.args:
        case "index_add", (_, 0, Node() as index, Node() as rows) if not node.kwargs:
            positions: Sequence[Any] = [index]
        case "scatter_add", (_, 0, Node() as index, Node() as rows):
            positions = [_repeated(index, body, fakes)]
        case "index_put", (_, [*positions], Node() as rows, *more):
            adds = bool(more and more[0])
            if adds and positions[0] is None:
                return _with_leading_dimensions(body, positions, rows, fakes)
            return _stored(body, positions, rows, adds, fakes)
        case _:
            return None
    axes = _axes(body, positions, fakes)
    return None if axes is None else Terminal(rows, axes, True)


def _with_leading_dimensions(
    body: ExpertBody, positions: Sequence[Any], rows: Node, fakes: NodeValues
) -> Terminal | None:
    """Returns the rows that `index_put` adds after dimensions of size 1, as `tokens[None, index]` has them."""
    indices = [item for item in positions if item is not None]
    leading = len(positions) - len(indices)
    axes = _axes(body, indices, fakes) if positions[leading:] == indices else None
    return None if axes is None else Terminal(rows, axes, True, leading=leading)


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
    axes = _axes(body, positions, fakes)
    if axes is None or adds:
        return None if axes is None else Terminal(rows, axes, True)
    indices = body.condition.indices
    others = [axis for axis in range(fakes[indices].ndim) if axis not in axes]
    if others and not are_distinct(indices, others, fakes):
        return None
    if any(body.reads_result(node, node.args[0]) for node in body.nodes):
        return _accumulated(body, positions, rows, axes, fakes)
    return None if others else Terminal(rows, axes, False)


def _accumulated(
    body: ExpertBody, positions: Sequence[Any], stored: Node, axes: tuple[int, ...], fakes: NodeValues
) -> Terminal | None:
    """Returns the summands where a body reads elements of the result, adds rows, and stores the sums there.

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
    read = [item for item in operands if item.args and body.reads_result(item, item.args[0])]
    rows = [item for item in operands if item not in read]
    if len(rows) != 1 or name_of(read[0]) != "index" or list(read[0].args[1]) != list(positions):  # type: ignore[arg-type]
        return None
    readers = [node for node in body.nodes if body.reads_result(node, node.args[0])]
    links = [*read, *reversed(chain)]
    single = all([*node.users] == [after] for node, after in zip(links, [*links[1:], body.terminal], strict=True))
    same = expressions_of(fakes[rows[0]].shape) == expressions_of(fakes[stored].shape)
    return Terminal(rows[0], axes, True, tuple(links)) if readers == read and single and same else None


def _axes(body: ExpertBody, positions: Sequence[Any], fakes: NodeValues) -> tuple[int, ...] | None:
    """Returns the dimensions of the indices whose coordinates are the positions, if these are different dimensions."""
    axes = body.condition.axes
    if len(positions) == 1 and isinstance(positions[0], Node) and positions[0] not in body.nodes:
        return axes if expert_condition(positions[0], fakes) == body.condition else None
    columns = [coordinate(item) if isinstance(item, Node) and item in body.nodes else None for item in positions]
    if not columns or None in columns or len(set(columns)) < len(columns):
        return None
    return tuple([axes[column] for column in columns if column is not None])


def _fits(loop: ExpertLoop, terminal: Terminal, result: torch.Tensor, base: torch.Tensor, fakes: NodeValues) -> bool:
    """Whether a result has a row for each coordinate, and the layout of a sum."""
    rows, indices = terminal.rows, loop.indices
    body = loop.bodies[0]
    sizes, axes, leading = sizes_of(indices, fakes), terminal.axes, terminal.leading
    if not all(type(size) is int for size in sizes[1:]) or row_dimension(rows, body, fakes) != leading:
        return False
    expected = [*[1] * leading, *[sizes[axis] for axis in axes], *sizes_of(rows, fakes)[leading + 1 :]]
    shape = expressions_of(result.shape)
    same_dtype = result.dtype == base.dtype and (bool(terminal.read) or fakes[rows].dtype == result.dtype)
    return shape == expected and is_contiguous(result) and same_dtype and bool(result.is_floating_point())
