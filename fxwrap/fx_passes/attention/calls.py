"""Calls of attention kernels in the place of formulas: FlexAttention, its backward, or the library's kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import scaled_dot_product_attention

from fxwrap.devices import DeviceSpec
from fxwrap.fx_passes.attention.decoding import has_few_rows
from fxwrap.fx_passes.attention.elements import ReadTensor, UnsupportedScoresError, read_buffer
from fxwrap.fx_passes.attention.flex_formulas import (
    RELATIVE_LOGSUMEXP,
    SINK_MOD,
    WEIGHT_MOD,
    result_fakes,
    single_block,
)
from fxwrap.fx_passes.attention.formulas import DROPOUT
from fxwrap.fx_passes.attention.nodes import permutation, sizes_of
from fxwrap.fx_passes.attention.operands import AttentionOperands, kernel_operand, plain_stage
from fxwrap.fx_passes.attention.parts import AttentionBackward, AttentionFormula, Dropout
from fxwrap.fx_passes.attention.score_gradients import ScoreGradients, score_gradients
from fxwrap.fx_passes.attention.scores import ScoreFunctions, score_functions
from fxwrap.fx_passes.attention.sinks import Sink
from fxwrap.fx_passes.dropout_masks import drawn_mask
from fxwrap.fx_passes.effects import name_of
from fxwrap.fx_passes.graph_copy import GraphCopy, is_contiguous, same_strides, size_hint, storages_of
from fxwrap.fx_passes.prepared_graph import NodeValues, PreparedGraph
from fxwrap.torch_compat import (
    FakeTensor,
    flex_attention_backward_operator,
    flex_attention_operator,
    in_fake_mode,
    in_tracing_fake_mode,
)

_aten = torch.ops.aten

_SMALL = "two matmuls and a kernel between them are faster for these sizes"

_WIDE = "two matmuls and a kernel between them are faster for heads of this width"


def _output_fake(query: FakeTensor, value: FakeTensor, order: Sequence[int]) -> FakeTensor:
    """Returns an output whose dimensions are in memory in an order."""
    sizes = (*query.shape[:3], value.shape[3])
    with in_fake_mode(query.fake_mode):
        output: Any = query.new_empty([sizes[dim] for dim in order]).permute([*map(order.index, range(4))])
    return output  # type: ignore[no-any-return]


_HEADS_FIRST, _ROWS_FIRST, _COLUMNS_FIRST = (0, 1, 2, 3), (0, 2, 1, 3), (0, 1, 3, 2)
"""Orders of an output's dimensions (batch, heads, rows, width) in memory."""


def _order_of(formula: AttentionFormula, chain: Sequence[Node]) -> Sequence[int]:
    """Returns the order in which readers of the output have its elements; `chain` replaces it."""
    return _COLUMNS_FIRST if formula.is_output_transposed else _ROWS_FIRST if len(chain) > 1 else _HEADS_FIRST


def _is_contiguous_copy(node: Node) -> bool:
    return node.target is _aten.clone.default and node.kwargs.get("memory_format") is torch.contiguous_format


class AttentionRewriter:
    """Writes calls of FlexAttention into a copy of the graph."""

    def __init__(self, copy: GraphCopy, fakes: NodeValues, written: set[int], specs: Mapping[str, DeviceSpec]) -> None:
        self.specs = specs
        self.copy = copy
        self.fakes = fakes
        self.written = written

    def replace(self, formula: AttentionFormula, operands: AttentionOperands) -> None:
        """Replaces a formula, with its backward if it has one. Raises UnsupportedScoresError."""
        if formula.backward is not None:
            self._replace_with_backward(formula, operands, formula.backward)
            return
        functions = score_functions(formula, operands, self.fakes, self.written)
        spec = self.specs.get(self.fakes[formula.output].device.type)
        in_library = (
            functions.only_scale and formula.logsumexp is None and spec is not None
            and self._reaches(formula, spec.attention.library_sizes)
        )  # fmt: skip
        before, name = self._first_result(formula, operands, functions.reads), f"{formula.softmax.name}_attention"
        tensors = self._kernel_operands(before, operands, name)
        query, key, _ = [self.copy.fakes[item] for item in tensors]
        in_kernel = spec is not None and (
            self._reaches(formula, spec.attention.streaming_sizes) or has_few_rows(query, key, spec)
        )
        if not in_library and not in_kernel:
            raise UnsupportedScoresError(_SMALL)
        chain = self._split_and_copies(formula, operands)
        result = None
        if in_library:
            result = self._library_call(before, tensors, functions.scale, _order_of(formula, chain), name)
        if result is None and not in_kernel:
            raise UnsupportedScoresError(_SMALL)
        if result is None:
            buffers = self._buffers(before, operands, functions.reads, name)
            order = _order_of(formula, chain)
            forward = self._forward_call(before, formula, functions, tensors, buffers, order, name)
            if formula.logsumexp is not None:
                self._replace_logsumexp(formula.logsumexp, before, self.copy.element(before, forward, 1, name), name)
            result = self.copy.element(before, forward, 0, name)
        self._replace_output(formula, chain, before, result, name)

    def _kernel_operands(self, before: Node, operands: AttentionOperands, name: str) -> list[Node]:
        """Returns queries, keys and values as a kernel reads them."""
        stages = (operands.query, operands.key, operands.value)
        return [kernel_operand(self.copy, before, stage, operands, name) for stage in stages]

    def _buffers(
        self, before: Node, operands: AttentionOperands, reads: Sequence[ReadTensor], name: str
    ) -> tuple[Node, ...]:
        """Returns the tensors that functions of scores read."""
        return tuple([read_buffer(self.copy, before, item, operands.heads, name) for item in reads])

    def _first_result(
        self, formula: AttentionFormula, operands: AttentionOperands, reads: Sequence[ReadTensor]
    ) -> Node:
        """Returns the node of the copy that a kernel's results are first needed at, and moves its operands before it.

        Raises UnsupportedScoresError.
        """
        before = self.copy.node_map[formula.output]
        if formula.logsumexp is None:
            return before
        before = self.copy.node_map[formula.logsumexp]
        nodes = [self.copy.node_map[node] for node in (*operands.nodes, *[item.node for item in reads])]
        if formula.dropout is not None or not self.copy.hoist(nodes, before, self.written):
            raise UnsupportedScoresError("its log-sum-exp is computed before its operands")
        return before

    def _replace_logsumexp(self, node: Node, before: Node, result: Node, name: str) -> None:
        """Replaces the log-sum-exp of rows by that of a kernel, (batch, heads, rows)."""
        copy, fake = self.copy, self.fakes[node]
        result = copy.call(before, _aten._to_copy.default, (result,), name, {"dtype": fake.dtype})
        result = copy.call(before, _aten.view.default, (result, copy.size_arguments(before, fake.shape)), name)
        copy.substitute(node, result, "fused")

    def _replace_output(
        self, formula: AttentionFormula, chain: Sequence[Node], before: Node, result: Node, name: str
    ) -> None:
        """Replaces the formula's output, or the nodes `chain` that read it, by that of a kernel."""
        erased = (formula.query_key, *formula.inner, formula.output)
        if not chain:
            if formula.is_output_transposed:
                result = self.copy.call(before, _aten.transpose.int, (result, -2, -1), name)
            sizes = self.copy.size_arguments(before, self.fakes[formula.output].shape)
            result = self.copy.call(before, _aten.view.default, (result, sizes), name)
            self.copy.substitute(formula.output, result, "fused", erased[:-1])
            return
        split, *contiguous = chain
        self.copy.substitute(split, result, "fused", erased)
        for clone in contiguous:
            self.copy.substitute(clone, self.copy.node_map[clone.all_input_nodes[0]], "view")

    def _replace_with_backward(
        self, formula: AttentionFormula, operands: AttentionOperands, backward: AttentionBackward
    ) -> None:
        """Replaces a formula by a call of FlexAttention, and its backward by one of FlexAttention's backward."""
        copy = self.copy
        functions = score_gradients(formula, operands, self.fakes, self.written)
        self._check_backward_device(formula)
        order = {node: position for position, node in enumerate(copy.node_map)}
        reads = functions.forward.reads
        if any(order[item.node] > order[formula.output] for item in reads):
            raise UnsupportedScoresError("its backward reads a bias or mask of its own")
        before, name = self._first_result(formula, operands, reads), f"{formula.softmax.name}_attention"
        if formula.dropout is not None:
            self._draw_mask(formula.dropout, name)
        tensors = self._kernel_operands(before, operands, name)
        chain = self._split_and_copies(formula, operands)
        buffers = self._buffers(before, operands, reads, name)
        order_in_memory = _order_of(formula, chain)
        forward = self._forward_call(before, formula, functions.forward, tensors, buffers, order_in_memory, name)
        results = [self.copy.element(before, forward, position, name) for position in range(3)]
        self._replace_output(formula, chain, before, results[0], name)
        if formula.logsumexp is not None:
            total = copy.call(before, _aten.add.Tensor, (results[1], results[2]), name)
            self._replace_logsumexp(formula.logsumexp, before, total, name)
        if operands.key.group > 1:
            backward = backward.of_key_heads()
        before = copy.node_map[min(backward.results, key=order.__getitem__)]
        formula = replace(formula, backward=backward)
        self._replace_backward(before, formula, operands, functions, (*tensors, *results), buffers, name)

    def _replace_backward(
        self, before: Node, formula: AttentionFormula, operands: AttentionOperands, functions: ScoreGradients,
        tensors: tuple[Node, ...], buffers: tuple[Node, ...], name: str,
    ) -> None:  # fmt: skip
        """Replaces a formula's backward by a call of FlexAttention's.

        `tensors` are queries, keys, values, output, log-sum-exp without maxima, and maxima.
        """
        copy, backward, (*inputs, output, total, maxima) = self.copy, formula.backward, tensors
        assert backward is not None
        grad_total, name = self._logsumexp_gradient(backward, before, total, name), f"{name}_backward"
        width_dim = -2 if formula.is_output_transposed else -1
        stage = plain_stage(backward.grad_output, width_dim, operands, self.fakes)
        gradient = kernel_operand(copy, before, stage, operands, name)
        relative = copy.attribute(before, f"{name}_scores", functions.relative_score_mod)
        joint = copy.attribute(before, f"{name}_joint", functions.joint)
        block_mask = self._block_mask(before, functions.backward_mask_mod, name)
        of_mask = (*buffers, self._least_maxima(before, maxima, operands, name)) if functions.reads_least else buffers
        options = self._kernel_options(before, formula, {WEIGHT_MOD: functions.backward_weight_mod}, name)
        fakes = self._gradient_fakes(inputs, backward, functions.matrices)
        arguments = (*inputs, output, total, gradient, grad_total, relative, joint, block_mask, functions.forward.scale,
                     options, (*buffers, maxima), of_mask)  # fmt: skip
        call = copy.call(before, flex_attention_backward_operator(), arguments, name, fake=fakes)
        self._replace_gradients(backward, formula.sink, call, before, name)
        if formula.sink is not None and backward.grad_sink is not None:
            statistics = (output, total, maxima, gradient)
            result = self._sink_gradient(formula.sink, backward.grad_sink, statistics, before, name)
            copy.substitute(backward.grad_sink, result, "fused")

    def _least_maxima(self, before: Node, maxima: Node, operands: AttentionOperands, name: str) -> Node:
        """Returns the least maximum of the rows of each head, (batch, heads): of all heads where groups share keys."""
        if operands.key.group == 1:
            return self.copy.call(before, _aten.amin.default, (maxima, [2]), name)
        least = self.copy.call(before, _aten.amin.default, (maxima, [1, 2]), name)
        sizes = self.copy.size_arguments(before, self.copy.fakes[maxima].shape[:2])
        least = self.copy.call(before, _aten.unsqueeze.default, (least, 1), name)
        return self.copy.call(before, _aten.expand.default, (least, sizes), name)

    def _logsumexp_gradient(self, backward: AttentionBackward, before: Node, like: Node, name: str) -> Node | None:
        """Returns the gradient of the log-sum-exp of rows in the layout of another node; None where it is unused."""
        if backward.logsumexp is None:
            return None
        gradient, copy = self.copy.node_map[backward.logsumexp[0]], self.copy
        if not copy.hoist([gradient], before, self.written):
            raise UnsupportedScoresError("the gradient of its log-sum-exp is computed from other gradients of it")
        fake = copy.fakes[like]
        result = copy.call(before, _aten._to_copy.default, (gradient,), name, {"dtype": fake.dtype})
        return copy.call(before, _aten.reshape.default, (result, copy.size_arguments(before, fake.shape)), name)

    def _sink_gradient(
        self, sink: Sink, gradient: Node, tensors: tuple[Node, ...], before: Node, name: str
    ) -> Node:  # fmt: skip
        """Returns the gradient of the logits of a sink, in the sizes and dtype of the node `gradient`.

        It is the sink's weight times the sum of the output times its gradient, negated. `tensors` are output,
        log-sum-exp without maxima, maxima, and the output's gradient.
        """
        copy = self.copy
        output, logsumexp, maxima, grad_output = tensors
        dtype = copy.fakes[maxima].dtype

        def call(target: Any, *arguments: Any, **keywords: Any) -> Node:
            return copy.call(before, target, arguments, name, keywords)

        rows = copy.size_arguments(before, [*copy.fakes[maxima].shape, 1])
        logits = call(_aten.reshape.default, copy.node_map[sink.logits], rows)
        logits = call(_aten._to_copy.default, logits, dtype=dtype)
        shift, total = [call(_aten.unsqueeze.default, item, -1) for item in (maxima, logsumexp)]
        difference = call(_aten.sub.Tensor, call(_aten.sub.Tensor, logits, shift), total)
        factors = [call(_aten._to_copy.default, item, dtype=dtype) for item in (output, grad_output)]
        sums = call(_aten.sum.dim_IntList, call(_aten.mul.Tensor, *factors), [-1], True)
        product = call(_aten.mul.Tensor, call(_aten.exp.default, difference), call(_aten.neg.default, sums))
        fake = self.fakes[gradient]
        result = call(_aten._to_copy.default, product, dtype=fake.dtype)
        return call(_aten.view.default, result, copy.size_arguments(before, fake.shape))

    def _kernel_options(
        self, before: Node, formula: AttentionFormula, functions: Mapping[str, torch.fx.GraphModule | None], name: str
    ) -> dict[str, Any]:
        """Returns the options of a call; `functions` of indices are among them, if they are not None."""
        options: dict[str, Any] = {"ROWS_GUARANTEED_SAFE": not formula.zeroes_fully_masked_rows, "BACKEND": "FLASH"}
        if formula.backward is not None:
            options[RELATIVE_LOGSUMEXP] = True
        for option, function in functions.items():
            if function is not None:
                options[option] = self.copy.attribute(before, f"{name}_{option}", function)
        return options

    def _check_backward_device(self, formula: AttentionFormula) -> None:
        """Raises UnsupportedScoresError where the device's kernels are slower than the formula."""
        spec = self.specs.get(self.fakes[formula.output].device.type)
        if spec is None or not self._reaches(formula, spec.attention.streaming_backward_sizes):
            raise UnsupportedScoresError(_SMALL)
        query: Any = formula.query_key.args[-2]
        output = self.fakes[formula.output].shape
        widths = self.fakes[query].shape[-1], output[-2 if formula.is_output_transposed else -1]
        if max(map(size_hint, widths)) > spec.attention.streaming_backward_width:
            raise UnsupportedScoresError(_WIDE)
        dropout = formula.dropout
        if dropout is not None and not (
            self._reaches(formula, spec.attention.streaming_dropout_sizes) and is_contiguous(self.fakes[dropout.mask])
        ):
            raise UnsupportedScoresError(DROPOUT)

    def _replace_gradients(
        self, backward: AttentionBackward, sink: Sink | None, call: Node, before: Node, name: str
    ) -> None:  # fmt: skip
        """Replaces the gradients of a formula by the results of a call of FlexAttention's backward."""
        copy, fakes = self.copy, self.fakes
        nodes = (backward.grad_query, backward.grad_key, backward.grad_value)
        for index, node in enumerate(nodes):
            if node is not None:
                result = self.copy.element(before, call, index, name)
                if node.target in (_aten.bmm.default, _aten.mm.default):
                    result = self._matrices(result, node, backward, before, name)
                elif fakes[node].ndim == 5:
                    result = copy.call(before, _aten.unsqueeze.default, (result, 2), name)
                copy.substitute(node, result, "fused", tuple(backward.inner))
        if backward.matrices:
            captured = self.copy.element(before, call, 3, name)
        for index, node in enumerate(backward.matrices):
            result = self.copy.element(before, captured, index, name)
            result = self._matrices(result, node, backward, before, name)
            if sink is not None and not same_strides(copy.fakes[result], fakes[node]):  # columns of a wider matrix
                padding, columns = ([1, 0], (1,)) if sink.is_first else ([0, 1], (0, -1))
                result = copy.call(before, _aten.constant_pad_nd.default, (result, padding), name)
                result = copy.call(before, _aten.slice.Tensor, (result, -1, *columns), name)
            copy.substitute(node, result, "fused")

    def _matrices(self, result: Node, node: Node, backward: AttentionBackward, before: Node, name: str) -> Node:
        """Returns the matrices of a result as those of the node that it replaces."""
        if node in backward.transposed:
            result = self.copy.call(before, _aten.transpose.int, (result, -2, -1), name)
        sizes = self.copy.size_arguments(before, self.fakes[node].shape)
        return self.copy.call(before, _aten.view.default, (result, sizes), name)

    def _draw_mask(self, dropout: Dropout, name: str) -> None:
        """Replaces the mask of dropped weights by one of the same random numbers, drawn without these weights.

        On CPUs `native_dropout` draws it as `bernoulli` of booleans; elsewhere it drops elements of another tensor.
        """
        copy, fake = self.copy, self.fakes[dropout.weights]
        before = copy.node_map[dropout.node]
        if fake.device.type == "cpu":
            mask = drawn_mask(copy, before, self.fakes[dropout.mask], dropout.kept_probability, name)
            copy.substitute(dropout.mask, mask, "fused")
            return
        keywords = {"dtype": fake.dtype, "device": fake.device}
        sizes = copy.size_arguments(before, fake.shape)
        unused = copy.call(before, _aten.empty.memory_format, (sizes,), name, keywords)
        call = copy.call(before, _aten.native_dropout.default, (unused, *dropout.node.args[1:]), name)
        copy.substitute(dropout.mask, copy.element(before, call, 1, name), "fused")

    def _gradient_fakes(
        self, tensors: Sequence[Node], backward: AttentionBackward, matrices: tuple[FakeTensor, ...]
    ) -> tuple[Any, ...]:
        """Returns the gradients of (batch, heads, rows or keys, width), in memory as the nodes that they replace."""
        fakes = [self.copy.fakes[item] for item in tensors]
        results, of_scores = [], list[torch.Tensor]()
        nodes = (backward.grad_query, backward.grad_key, backward.grad_value)
        with in_fake_mode(fakes[0].fake_mode):
            for fake, node in zip(fakes, nodes, strict=True):
                if node is not None and node.target not in (_aten.bmm.default, _aten.mm.default):
                    summed = self.fakes[node]
                    summed = summed.select(2, 0) if summed.ndim == 5 else summed
                    results.append(fake.new_empty_strided(summed.shape, summed.stride()))
                else:
                    is_transposed = node in backward.transposed
                    results.append(fake.new_empty(fake.mT.shape).mT if is_transposed else fake.new_empty(fake.shape))
            for fake, node in zip(matrices, backward.matrices, strict=True):
                replaced = self.fakes[node].mT if node in backward.transposed else self.fakes[node]
                has_key_rows = is_contiguous(replaced.mT) and not is_contiguous(replaced)
                of_scores.append(fake.new_empty(fake.mT.shape).mT if has_key_rows else fake)
        return (*results, tuple(of_scores))

    def _block_mask(self, before: Node, mask_mod: torch.fx.GraphModule, name: str) -> tuple[object, ...]:
        """Returns one block of all rows and keys."""
        return single_block(self.copy.attribute(before, f"{name}_mask", mask_mod))

    def _reaches(self, formula: AttentionFormula, least_sizes: Sequence[tuple[torch.dtype, int]]) -> bool:
        """Whether the scores have as many rows and keys as a dtype needs; symbolic ones count as their hints."""
        least = dict(least_sizes).get(self.fakes[formula.output].dtype)
        return least is not None and min(map(size_hint, self.fakes[formula.query_key].shape[-2:])) >= least

    def _library_call(
        self, before: Node, tensors: Sequence[Node], scale: float, order: Sequence[int], name: str
    ) -> Node | None:
        """Returns the output of the kernel that torch selects; None if it selects none, or the operands are unusual.

        The output's dimensions are in memory in an order.
        """
        fakes = [self.copy.fakes[item] for item in tensors]
        is_static = all(type(size) is int for fake in fakes for size in fake.shape)
        if not is_static or len({fake.shape[1] for fake in fakes}) > 1:
            return None
        with in_tracing_fake_mode(fakes[0].fake_mode), torch.no_grad():
            module = make_fx(lambda q, k, v: scaled_dot_product_attention(q, k, v, scale=scale))(*fakes)
        if any(node.target in (_aten.bmm.default, _aten.matmul.default) for node in module.graph.nodes):
            return None
        result: Node = self.copy.inline(before, module, tensors, name, name)
        fake = self.copy.fakes[result]
        if is_contiguous(fake.permute(*order)):
            return result
        keywords = {"memory_format": torch.contiguous_format}
        if order == _HEADS_FIRST:
            return self.copy.call(before, _aten.clone.default, (result,), name, keywords)
        moved = self.copy.call(before, _aten.permute.default, (result, [*order]), name)
        dense = self.copy.call(before, _aten.clone.default, (moved,), name, keywords)
        return self.copy.call(before, _aten.permute.default, (dense, [*map(order.index, range(4))]), name)

    def _forward_call(
        self, before: Node, formula: AttentionFormula, functions: ScoreFunctions, tensors: Sequence[Node],
        buffers: tuple[Node, ...], order: Sequence[int], name: str,
    ) -> Node:  # fmt: skip
        """Returns a call of FlexAttention, whose output's dimensions are in memory in an order."""
        copy = self.copy
        score_mod = copy.attribute(before, f"{name}_scores", functions.score_mod)
        block_mask = self._block_mask(before, functions.mask_mod, name)
        of_indices = {WEIGHT_MOD: functions.weight_mod, SINK_MOD: functions.sink_mod}
        options = self._kernel_options(before, formula, of_indices, name)
        arguments = (*tensors, score_mod, block_mask, functions.scale, options, buffers, buffers)
        fakes = result_fakes(_output_fake(copy.fakes[tensors[0]], copy.fakes[tensors[2]], order))
        return copy.call(before, flex_attention_operator(), arguments, name, fake=fakes)

    def _split_and_copies(self, formula: AttentionFormula, operands: AttentionOperands) -> list[Node]:
        """Returns the nodes that read the output as (batch, heads, rows, width); none if it is not split like this.

        These are the view that splits batch and heads, and copies after its transposition to (batch, rows, heads,
        width), which are views of an output that is stored like this.
        """
        if formula.is_output_transposed:
            return []
        split = next(iter(formula.output.users))
        sizes = sizes_of(split, self.fakes) if isinstance(self.fakes.get(split), FakeTensor) else []
        is_split = len(formula.output.users) == 1 and name_of(split) in ("view", "_unsafe_view", "unsafe_view")
        if not is_split or len(sizes) != 4 or tuple(sizes[:2]) != (operands.batch, operands.heads):
            return []
        if storages_of(self.fakes[split]) & self.written:
            return []
        transposed = next(iter(split.users), None)
        if transposed is None or len(split.users) > 1 or permutation(transposed, self.fakes) != [0, 2, 1, 3]:
            return [split]
        copies = [user for user in transposed.users if _is_contiguous_copy(user)]
        is_returned = any(user.op == "output" for user in transposed.users)
        return [split, *copies] if copies and not is_returned else [split]

    def finish(self, reasons: Mapping[str, str]) -> PreparedGraph:
        """Returns the edited graph, with the reasons why other softmaxes stay as they are."""
        result = self.copy.finish()
        return replace(result, coverage_reasons={**result.coverage_reasons, **reasons})
