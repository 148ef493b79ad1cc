"""The gradients of FlexAttention as two kernels of the loop IR, which compute scores again (FlashAttention's backward).

The gradient of queries sums over keys, and those of keys and values sum over queries and over the query heads of a
group. Both need the log-sum-exp of rows and sums of output times its gradient, which a kernel before them stores.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fxwrap.fx_passes.attention.captured_gradients import matrix_orders
from fxwrap.fx_passes.effects import attribute_of
from fxwrap.loop_ir import (
    Axis,
    Buffer,
    Index,
    IndirectIndex,
    Kernel,
    KernelBuilder,
    Scalar,
    as_index,
    canonicalize_axes,
    rename_axes,
    strided_index,
)
from fxwrap.lowering.attention_scores import AttentionCall, Positions, ScoreBuilder, store_element
from fxwrap.lowering.builder import Builder, LoweringRequest
from fxwrap.lowering.fusion.kernels import extent_of
from fxwrap.lowering.launches import emit_whole_kernel
from fxwrap.lowering.rules import Declined
from fxwrap.lowering.rules.indexing import check_any_order
from fxwrap.lowering.scalar_graphs import ScalarKernelBuilder, ScatteredNumber
from fxwrap.lowering.symbols.table import SizeHints
from fxwrap.wrapper_ir import TensorType, Value

_GRADIENT = 5
"""The position of the gradient of the modified score among the operands of a joint graph, after score and indices."""


@dataclass(frozen=True)
class _GradientCall:
    """The operands of a call of `flex_attention_backward`, as values of a program.

    `joint` is the graph of a score, its indices, the gradient of the modified score and the buffers, which returns the
    gradient of the score.
    """

    attention: AttentionCall
    out: Value
    logsumexp: Value
    grad_out: Value
    grad_logsumexp: Value | None
    joint: GraphModule

    @classmethod
    def of(cls, builder: Builder, node: Node) -> _GradientCall:
        """Returns the operands of a node. Raises Declined for a call without a gradient of the output."""
        arguments: Any = (*node.args, (), ())[:14]
        query, key, value, out, logsumexp, grad_out, grad_logsumexp, score_mod, joint, *rest = arguments
        if grad_out is None:
            raise Declined("its output has no gradient")
        attention = AttentionCall.of(builder, node, (query, key, value, score_mod, *rest))
        grad_total = None if grad_logsumexp is None else builder.value(grad_logsumexp)
        tensors = builder.value(out), builder.value(logsumexp), builder.value(grad_out)
        return cls(attention, *tensors, grad_total, attribute_of(joint))


def emit_attention_gradients(builder: Builder, request: LoweringRequest, node: Node) -> None:
    """Emits the kernels of a call of `flex_attention_backward`, and records its operand.

    Raises Declined if an operator of the call's functions cannot be computed element by element, and FxwrapError for
    kernels that their language cannot express.
    """
    call, fakes = _GradientCall.of(builder, node), builder.fakes[node]
    used = {user.args[1] for user in node.users}
    outputs = [
        builder.add_root(f"{node.name}_{position}", fake) if position in used else None
        for position, fake in enumerate(fakes[:3])
    ]
    sums = _sums(builder, request, node, call, fakes[3] if 3 in used else ())
    type_ = call.out.tensor_type
    dtype = torch.float64 if type_.dtype is torch.float64 else torch.float32
    of_rows = TensorType.contiguous(dtype, type_.sizes[:3], type_.device)
    terms = _RowTerms(*[builder.add_buffer(f"{node.name}_{name}", of_rows) for name in ("terms", "shifts")])
    inputs, kernel = _row_terms(builder, request, call, terms)
    emit_whole_kernel(builder, request, node, "flex_attention_row_terms", kernel, inputs, [terms.terms, terms.shifts])
    grad_query, grad_key, grad_value = outputs
    # A tile of the kernel that streams queries has neighbouring keys, those that vary along memory, as lanes of a CPU.
    spec, has_lanes = request.options.device_specs()[type_.device.type], (grad_key or grad_value) is not None
    by_key = [item for item in sums if item.is_matrix and has_lanes and not spec.massively_parallel]
    by_query = [item for item in sums if item not in by_key]
    if grad_query is not None or by_query:
        gradient = _GradientBuilder(ScalarKernelBuilder(builder, request.options), call, terms)
        inputs, kernel = gradient.of_query(grad_query, by_query)
        name = "flex_attention_grad_captured" if grad_query is None else "flex_attention_grad_query"
        _emit(builder, request, node, name, kernel, inputs, [grad_query], by_query)
    if (grad_key or grad_value) is not None:
        gradient = _GradientBuilder(ScalarKernelBuilder(builder, request.options), call, terms)
        inputs, kernel = gradient.of_key_and_value(grad_key, grad_value, by_key)
        _emit(builder, request, node, "flex_attention_grad_key_value", kernel, inputs, [grad_key, grad_value], by_key)
    builder.env[node] = (*outputs, tuple([item.value for item in sums]) or (None,) * len(fakes[3]))


def _emit(
    builder: Builder, request: LoweringRequest, node: Node, name: str, kernel: Kernel, inputs: Sequence[Value],
    gradients: Sequence[Value | None], sums: Sequence[_Sum],
) -> None:  # fmt: skip
    """Emits the launch of a kernel of gradients and sums over scores, and allocations of those that have none."""
    written = [item for item in gradients if item is not None]
    written += [item.value for item in sums if not item.starts_as_zeros]
    updated = [item.value for item in sums if item.starts_as_zeros]
    emit_whole_kernel(builder, request, node, name, kernel, inputs, written, updated)


@dataclass(frozen=True)
class _Sum:
    """A sum over scores that the joint graph returns.

    Fields:
        position: its position among the sums.
        value: the tensor to whose elements numbers are added.
        order: the positions of batch, head, query and key among the indices of an element, if each score has its own
            element, else None.
        starts_as_zeros: whether a kernel before writes zeros.
    """

    position: int
    value: Value
    order: tuple[int, ...] | None
    starts_as_zeros: bool

    @property
    def is_matrix(self) -> bool:
        """Whether each score has its own element."""
        return self.order is not None


def _sums(
    builder: Builder, request: LoweringRequest, node: Node, call: _GradientCall, fakes: Sequence[torch.Tensor]
) -> tuple[_Sum, ...]:
    """Returns the sums over scores, and emits kernels that write zeros, unless a kernel writes all elements."""
    attention = call.attention
    sizes = (*attention.query.tensor_type.sizes[:3], attention.key.tensor_type.sizes[2])
    orders = matrix_orders(call.joint) if fakes else {}
    sums: list[_Sum] = []
    for position, fake in enumerate(fakes):
        value = builder.add_root(f"{node.name}_3_{position}", fake)
        order = orders.get(position)
        if order is None:
            check_any_order()
        is_whole = order is not None and value.tensor_type.sizes == tuple([sizes[number] for number in order])
        is_written = is_whole and attention.key_blocks.is_trivial
        sums.append(_Sum(position, value, order, not is_written))
        if not is_written:
            _emit_zeros(builder, request, node, value)
    return tuple(sums)


def _emit_zeros(builder: Builder, request: LoweringRequest, node: Node, value: Value) -> None:
    body, type_ = KernelBuilder(), value.tensor_type
    axes = [Axis(f"axis{number}", size) for number, size in enumerate(type_.sizes)]
    zero = body.constant(0.0, type_.dtype)
    kernel = body.finish(axes, [], [], [store_element(body, "out0", value, axes, zero)])
    kernel = canonicalize_axes(kernel, SizeHints(builder.state.symbols))
    emit_whole_kernel(builder, request, node, "zeros", kernel, (), [value])
    builder.storages.mark_mutated(value)


@dataclass(frozen=True)
class _RowTerms:
    """The statistics that the gradients of a row's scores share, as tensors of (batch, heads, rows).

    Fields:
        terms: the sum of the output times its gradient, less the gradient of the log-sum-exp.
        shifts: the log-sum-exp in its unit, 0 for a fully masked row.
    """

    terms: Value
    shifts: Value


def _row_terms(
    builder: Builder, request: LoweringRequest, call: _GradientCall, terms: _RowTerms
) -> tuple[tuple[Value, ...], Kernel]:
    """Returns the kernel of the terms of rows, and the values that it reads."""
    elements, dtype = ScalarKernelBuilder(builder, request.options), terms.terms.tensor_type.dtype
    *row, column = [Axis(f"axis{number}", size) for number, size in enumerate(call.out.tensor_type.sizes)]
    at = tuple(map(as_index, row))
    factors = [elements.load(item, (*at, as_index(column))).to(dtype) for item in (call.out, call.grad_out)]
    (term,) = elements.body.reduce("sum", factors[0] * factors[1])
    if call.grad_logsumexp is not None:
        term = term - elements.load(call.grad_logsumexp, at).to(dtype) / call.attention.stats_unit
    total = elements.load(call.logsumexp, at).to(dtype)
    results = {terms.terms: term, terms.shifts: total.equals(-math.inf).where(0.0, total)}
    written = [store_element(elements.body, f"out{number}", value, at, result)
               for number, (value, result) in enumerate(results.items())]  # fmt: skip
    kernel = elements.body.finish(row, [column], [buffer for buffer, _ in elements.inputs], written)
    return tuple([value for _, value in elements.inputs]), canonicalize_axes(kernel, SizeHints(builder.state.symbols))


@dataclass(frozen=True)
class _Elements:
    """The values of a query and a key in a kernel.

    Fields:
        weight: the weight of the value, times its factor, 0 where the score is masked.
        grad_score: the gradient of the score, 0 where it is masked.
        mask: whether the score is unmasked.
        scattered: numbers that are added to the gradients of captured tensors, where the score is unmasked.
    """

    weight: Scalar
    grad_score: Scalar
    mask: Scalar
    scattered: tuple[ScatteredNumber, ...]


class _GradientBuilder(ScoreBuilder):
    def __init__(self, elements: ScalarKernelBuilder, call: _GradientCall, terms: _RowTerms) -> None:
        super().__init__(elements, call.attention)
        self.gradient_call = call
        self.terms = terms
        self.value_width = Axis("value_width", call.attention.value.tensor_type.sizes[3])

    def of_query(self, output: Value | None, sums: Sequence[_Sum]) -> tuple[tuple[Value, ...], Kernel]:
        """Returns the kernel of the gradient of queries, unless it is None, and the values that it reads.

        It adds numbers of the joint graph to `sums`.
        """
        call, written, columns = self.call, list[Buffer](), list[Axis]()
        rows, query = self.rows(call.key_blocks, self.query_count)
        keys, key, is_full = self.streamed(call.key_blocks, self.key_count)
        elements = self._elements(query, key, key, is_full)
        if output is not None:
            column = Axis("column", self.width.size)
            columns.append(column)
            (total,) = self.body.reduce("sum", elements.grad_score * self.load_key(call.key, key, column), keys)
            result = total * self.elements.reader.number(call.scale, self.dtype)
            indices = (self.batch_index, self.head_index, query.index, column)
            written.append(store_element(self.body, "out0", output, indices, result, query.inside))
        self._write(written, sums, elements, (query, key), keys, columns)
        axes = [item for item in (self.batch, self.key_head, self.group) if item is not None]
        return self._finish([*axes, *rows, *columns], [self.width, self.value_width, *keys], written)

    def _write(
        self, written: list[Buffer], sums: Sequence[_Sum], elements: _Elements, positions: tuple[Positions, Positions],
        streamed: Sequence[Axis], columns: Sequence[Axis],
    ) -> None:  # fmt: skip
        """Adds the numbers of the joint graph to sums over scores, those with allocations of their own first."""
        for item in sorted(sums, key=lambda item: item.starts_as_zeros):
            name = f"out{len(written)}"
            scattered = elements.scattered[item.position]
            if item.order is None:
                self._add(name, item.value, scattered, elements.mask, positions, streamed, columns)
            else:
                self._set(name, item, scattered, elements.mask, positions, columns)
            written.append(Buffer(name, item.value.tensor_type.dtype, extent_of(item.value.tensor_type)))

    def _set(
        self, name: str, item: _Sum, scattered: ScatteredNumber, mask: Scalar, positions: tuple[Positions, Positions],
        columns: Sequence[Axis],
    ) -> None:  # fmt: skip
        """Writes a number of each score to its own element of an output, once for all columns."""
        query, key = positions
        indices = (self.batch_index, self.head_index, query.index, key.index)
        assert item.order is not None
        type_ = item.value.tensor_type
        index = strided_index(tuple([indices[number] for number in item.order]), type_.strides)
        number = scattered.number.to(self.dtype)
        conditions = list[Scalar]()
        if mask.constant is not True:
            number = mask.where(number, 0.0)
            conditions += [mask] if item.starts_as_zeros else []
        self.body.store(name, index, number.to(type_.dtype), self._once(conditions, positions, columns))

    def _once(
        self, conditions: Sequence[Scalar], positions: tuple[Positions, Positions], columns: Sequence[Axis]
    ) -> Scalar | None:
        """Returns the condition of a store that happens once for all columns; None for no condition."""
        first = [self.body.index(as_index(column)).equals(0) for column in columns]
        inside = [item.inside for item in positions if item.inside is not None and item.inside not in conditions]
        parts = [*conditions, *first, *inside]
        return functools.reduce(operator.and_, parts) if parts else None

    def _add(
        self, name: str, output: Value, scattered: ScatteredNumber, mask: Scalar,
        positions: tuple[Positions, Positions], keys: Sequence[Axis], columns: Sequence[Axis],
    ) -> None:  # fmt: skip
        """Adds a number of each unmasked score to an element of an output, once for all columns.

        Numbers of one element for all keys are summed before.
        """
        body, number = self.body, scattered.number.to(self.dtype)
        query, _ = positions
        with self.unmasked(*positions):
            index = self.elements.scatter_index(scattered, output)
        is_masked = mask.constant is not True
        number = mask.where(number, 0.0) if is_masked else number
        conditions = [mask] if is_masked else []
        if self._axes_of(index).isdisjoint(keys):
            (number,) = body.reduce("sum", number, keys)
            conditions = []
        conditions += [body.index(as_index(column)).equals(0) for column in columns]
        conditions += [] if query.inside is None else [query.inside]
        condition = functools.reduce(operator.and_, conditions) if conditions else None
        body.store(name, index, number, condition, "add")

    def _axes_of(self, index: Index) -> frozenset[Axis]:
        """Returns the axes that an index depends on, also through values that it is computed from."""
        axes = Kernel((), (), (), (), tuple(self.body.operations)).value_axes
        computed = [axes[atom.operation] for atom in index.atoms() if isinstance(atom, IndirectIndex)]
        return frozenset(index.axes()).union(*computed)

    def of_key_and_value(
        self, grad_key: Value | None, grad_value: Value | None, sums: Sequence[_Sum]
    ) -> tuple[tuple[Value, ...], Kernel]:
        """Returns the kernel of the gradients of keys and values, of which one may be None, and what it reads.

        Keys that all batches share sum over batches too. It writes the numbers of the joint graph to matrices `sums`.
        """
        call, blocks = self.call, self.call.query_blocks
        if blocks is None:
            raise Declined("its block mask has no lists of query blocks")
        is_shared = call.key.tensor_type.sizes[0] == 1 and call.query.tensor_type.sizes[0] != 1
        rows, key = self.rows(blocks, self.key_count)
        queries, query, is_full = self.streamed(blocks, self.query_count)
        outer = [*([self.batch] if is_shared else []), *([] if self.group is None else [self.group])]
        streamed = [*outer, *queries]
        elements = self._elements(query, key, query, is_full)
        batch = as_index(0) if is_shared else self.batch_index
        columns, widths, written = [], [self.width], []
        if grad_key is not None:
            columns.append(Axis("column", self.width.size))
            widths.append(self.value_width)
            factor = self.load_query(call.query, query, columns[-1])
            (total,) = self.body.reduce("sum", elements.grad_score * factor, streamed)
            result = total * self.elements.reader.number(call.scale, self.dtype)
            indices = (batch, self.key_head_index, key.index, columns[-1])
            written.append(store_element(self.body, "out0", grad_key, indices, result, key.inside))
        if grad_value is not None:
            columns.append(Axis("value_column", self.value_width.size))
            factor = self.load_query(self.gradient_call.grad_out, query, columns[-1])
            (total,) = self.body.reduce("sum", elements.weight * factor, streamed)
            indices = (batch, self.key_head_index, key.index, columns[-1])
            name = f"out{len(written)}"
            written.append(store_element(self.body, name, grad_value, indices, total, key.inside))
        self._write(written, sums, elements, (query, key), streamed, columns)
        axes = [*([] if is_shared else [self.batch]), self.key_head, *rows, *columns]
        return self._finish(axes, [*widths, *streamed], written)

    def _elements(self, query: Positions, key: Positions, streamed: Positions, is_full: Scalar | None) -> _Elements:
        """Returns the weight of a query and a key, and the gradient of their score, 0 where it is masked."""
        call, gradients, body = self.call, self.gradient_call, self.body
        products = [
            (self.load_query(call.query, query, self.width), self.load_key(call.key, key, self.width)),
            (self.load_query(gradients.grad_out, query, self.value_width),
             self.load_key(call.value, key, self.value_width)),
        ]  # fmt: skip
        if streamed is query:  # left factors are those of rows
            products = [(right, left) for left, right in products]
        score = self.score(query, key, streamed, is_full, products[0])
        shift = self.load_query(self.terms.shifts, query) * call.stats_unit
        weights = score.masked((score.modified - shift).exp(), 0.0)
        left, right = products[1]
        (grad_weights,) = body.reduce("sum", left * right, [self.value_width])
        factor = self.weight_factor(query, key)
        grad_weights = grad_weights if factor is None else grad_weights * factor
        difference = grad_weights - self.load_query(self.terms.terms, query)
        is_same = _returns_gradient(gradients.joint)
        grad_modified = weights * (score.masked(difference, 0.0) if is_same else difference)
        indices = self.indices(query, key)
        with self.unmasked(query, key):
            operands = [score.scaled, *indices, grad_modified, *call.score_buffers]
            results: Any = self.elements.results(gradients.joint, operands)
        grad_score, *scattered = results
        weights = weights if factor is None else weights * factor
        if not is_same:
            grad_score = score.masked(grad_score.to(self.dtype), 0.0)
        return _Elements(weights, grad_score, score.mask, tuple(scattered))

    def _finish(
        self, axes: Sequence[Axis], reduced: Sequence[Axis], outputs: Sequence[Buffer]
    ) -> tuple[tuple[Value, ...], Kernel]:
        inputs = [buffer for buffer, _ in self.elements.inputs]
        kernel = rename_axes(self.body.finish(axes, reduced, inputs, outputs))
        return tuple([value for _, value in self.elements.inputs]), kernel


def _returns_gradient(joint: GraphModule) -> bool:
    """Whether the gradient of a score is that of the modified score, as it is if numbers are added to scores."""
    operands = joint.graph.find_nodes(op="placeholder")
    results: Any = joint.graph.output_node().args[0]
    return results[0] is operands[_GRADIENT]
