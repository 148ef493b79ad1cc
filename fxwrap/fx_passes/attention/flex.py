"""FlexAttention: calls that become one kernel get scalar functions that lowering can inline; others are expanded.

A forward call stays in the graph if its kernel language has a schedule for it; its `score_mod` and `mask_mod` become
graphs of ATen operators on scalars. Lowering may still decline it: then this pass expands it into operators that fuse.

On devices with few threads, a loop (`map_impl`) runs over the blocks of query rows. An iteration gathers the key blocks
that its rows visit, so the time is proportional to the visited blocks, and memory holds one row of blocks of the score
matrix. On massively parallel devices, where the host would wait for each number of blocks, the whole matrix is computed
at once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

from fxwrap.errors import GraphError
from fxwrap.fx_passes.attention.captured_gradients import (
    CapturedGradients,
    UnsupportedGradientsError,
    split_captured_gradients,
)
from fxwrap.fx_passes.attention.flex_formulas import SINK_MOD, WEIGHT_MOD, FlexAttention, RowLoop
from fxwrap.fx_passes.decompositions import decomposition_table
from fxwrap.fx_passes.effects import attribute_of, operator_label
from fxwrap.fx_passes.fake_propagation import in_one_mode
from fxwrap.fx_passes.graph_copy import GraphCopy, size_hint
from fxwrap.fx_passes.model_source import location_of
from fxwrap.fx_passes.prepared_graph import PreparedGraph
from fxwrap.options import Options
from fxwrap.torch_compat import (
    FakeTensor,
    HigherOrderOperator,
    flex_decompositions,
    fresh_fake_mode,
    in_fake_mode,
    in_tracing_fake_mode,
    is_flex_default_block,
    map_impl,
    without_fake_mode,
)

_aten = torch.ops.aten

log = logging.getLogger("fxwrap.compile")

_ROWS = 128
"""Query rows of an iteration without a block mask."""

_CAPTURED = 3
"""The position of the gradients of captured tensors in the results of a backward."""

_Path: TypeAlias = tuple[Any, ...]
"""The position of a tensor in the results of a call."""


def expand_flex_attention(graph: PreparedGraph, options: Options) -> PreparedGraph:
    """Returns a graph in which FlexAttention and its backward are calls for kernels, or operators that fuse."""
    calls = [node for node in graph.nodes if _label(node) in _EXPANSIONS and node.users]
    if not calls:
        return graph
    copy, declined = GraphCopy(graph), dict[str, str]()
    for node in calls:
        call = _Call(copy, node, options)
        reason = _decline_reason(call) or call.scalarize()
        if reason is not None:
            declined[node.name] = reason
            call.replace(_EXPANSIONS[_label(node)](call))
    return _with_reasons(copy.finish(), declined)


def expand_declined_attention(graph: PreparedGraph, options: Options, declined: Mapping[str, str]) -> PreparedGraph:
    """Returns a graph in which calls of FlexAttention are operators that fuse, in loops.

    `declined` are the names of such calls, and of other nodes, with reasons.
    """
    calls = [node for node in graph.nodes if _label(node) in _EXPANSIONS and node.name in declined]
    if not calls:
        return graph
    copy = GraphCopy(graph)
    for node in calls:
        call = _Call(copy, node, options)
        call.replace(_EXPANSIONS[_label(node)](call))
    return _with_reasons(copy.finish(), {node.name: declined[node.name] for node in calls})


def _with_reasons(graph: PreparedGraph, declined: Mapping[str, str]) -> PreparedGraph:
    """Returns a graph with the reasons why calls are no kernels of their own, which are logged too."""
    for name, reason in declined.items():
        log.info("'%s' is no kernel of its own, but matmuls and kernels around them: %s", name, reason)
    reasons = {name: f"no attention kernel: {reason}" for name, reason in declined.items()}
    return replace(graph, coverage_reasons={**graph.coverage_reasons, **reasons})


_KERNEL_LANGUAGES = frozenset({"cpp", "triton"})
"""Languages whose printers have a schedule for attention and for its gradients."""

_MAX_HEAD_WIDTH = 512


def _decline_reason(call: _Call) -> str | None:
    """Returns why lowering cannot make a call kernels of its own; None where its operands do not prevent it."""
    attention = call.attention
    operands = (attention.query, attention.key, attention.value)
    widths = (attention.query.shape[3], attention.value.shape[3])
    if not all(type(size) is int for size in (*widths, *[item.shape[1] for item in operands])):
        return "the number or the width of its heads is symbolic"
    if any(size > _MAX_HEAD_WIDTH for size in widths):
        return f"its heads are wider than {_MAX_HEAD_WIDTH}"
    if not has_attention_kernel(operands, widths, call.options):
        return "the options or its dtypes leave no kernel language"
    return None


def has_attention_kernel(operands: Sequence[Tensor], widths: Sequence[int | torch.SymInt], options: Options) -> bool:
    """Whether a kernel can compute attention of queries, keys and values with these widths of heads."""
    query = operands[0]
    spec = options.device_specs().get(query.device.type)
    return (
        options.choose_kernel_form is None
        and options.fuse
        and spec is not None
        and options.kernel_language(spec) in _KERNEL_LANGUAGES
        and all(type(size) is int and size <= _MAX_HEAD_WIDTH for size in widths)
        and all(item.dtype == query.dtype and item.dtype in _KERNEL_DTYPES for item in operands)
    )


_KERNEL_DTYPES = frozenset({torch.float32, torch.float64, torch.bfloat16, torch.float16})


def _label(node: Node) -> str:
    return operator_label(node.target) if isinstance(node.target, HigherOrderOperator) else ""


class _Call:
    """One call. Functions of its arguments are traced, and inserted before it.

    `results` are the nodes that read each used tensor of its results, by position.
    """

    def __init__(self, copy: GraphCopy, node: Node, options: Options) -> None:
        self.node = node
        self.options = options
        self._copy = copy
        self._before = copy.node_map[node]
        attributes = {item: attribute_of(item) for item in node.all_input_nodes if item.op == "get_attr"}
        self._modules = {item: value for item, value in attributes.items() if isinstance(value, GraphModule)}
        self._operands = [item for item in node.all_input_nodes if item not in self._modules]
        self._fakes = [copy.fakes[copy.node_map[item]] for item in self._operands]
        mode = next(item.fake_mode for item in self._fakes if isinstance(item, FakeTensor))
        # make_fx over real tensors has modes without a ShapeEnv, which a number of blocks needs.
        self._mode = mode if mode.shape_env is not None else fresh_fake_mode()
        self._tuples: list[Node] = []
        self.results: dict[_Path, list[Node]] = {}
        self._find_results(node, ())

    def _find_results(self, node: Node, path: _Path) -> None:
        self._tuples.append(node)
        for user in node.users:
            inner = (*path, user.args[1])
            if isinstance(self._fake(user), tuple | list):
                self._find_results(user, inner)
            else:
                self.results.setdefault(inner, []).append(user)

    def _fake(self, node: Node) -> Any:
        return self._copy.fakes[self._copy.node_map[node]]

    @property
    def fake_arguments(self) -> tuple[Any, ...]:
        """The call's arguments, with fake values."""
        return self._arguments(self._fakes)

    def _arguments(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """Returns the call's arguments for these values of its operands."""
        env = {**dict(zip(self._operands, values, strict=True)), **self._modules}
        arguments: Any = map_arg(self.node.args, env.__getitem__)
        return tuple(arguments)

    @property
    def joint_position(self) -> int | None:
        """The position of the joint graph among the arguments of a backward; None for a forward."""
        return 8 if _label(self.node) == "flex_attention_backward" else None

    @property
    def captured_count(self) -> int:
        """The number of gradients of captured tensors, or of their sums over scores, that a backward returns."""
        return len(self._fake(self.node)[_CAPTURED])

    @property
    def attention(self) -> FlexAttention:
        """The call's operands that forward and backward have in common, with fake values."""
        arguments = self.fake_arguments
        if self.joint_position is not None:
            arguments = (*arguments[:3], arguments[7], *arguments[9:])
        return FlexAttention.from_arguments(*arguments)

    def scalarize(self) -> str | None:
        """Replaces the call's functions by graphs of ATen operators on scalars; returns why they cannot be traced.

        The results of a backward are then sums over scores, from which operators after it compute the gradients of
        captured tensors.
        """
        attention, joint = self.attention, self.joint_position
        score_position, mask_position = (3, 4) if joint is None else (joint - 1, joint + 1)
        block_mask: Any = self.node.args[mask_position]
        with in_fake_mode(self._mode):
            score, gradient = [torch.empty((), dtype=attention.dtype, device=attention.query.device) for _ in range(2)]
            indices = [torch.empty((), dtype=torch.int32, device=score.device) for _ in range(4)]
        graphs: dict[Any, tuple[list[object], Callable[..., object]]] = {
            self.node.args[score_position]: ([score, *indices, *attention.score_buffers], attention.score_mod),
            block_mask[-1]: ([*indices, *attention.mask_buffers], attention.mask_mod),
        }
        options: Any = self.node.args[(joint or score_position) + 3]
        for option, function in ((WEIGHT_MOD, attention.weight_mod), (SINK_MOD, attention.sink_mod)):
            if function is not None:
                graphs[options[option]] = [*indices, *attention.score_buffers], function
        captured = [path[1] for path in self.results if path[0] == _CAPTURED] if joint is not None else []
        if joint is not None:
            function = self.fake_arguments[joint]
            operands = [score, *indices, gradient, *attention.score_buffers]
            graphs[self.node.args[joint]] = operands, function if captured else _score_gradient(function)
        modules: dict[Any, GraphModule] = {}
        gradients: CapturedGradients | None = None
        try:
            for node, (operands, function) in graphs.items():
                modules[node] = self._traced(function, operands, keeps_scatters=bool(captured))
                _inline_literals(modules[node].graph)
                modules[node].graph.eliminate_dead_code()
            if joint is not None and captured:
                traced = modules[self.node.args[joint]]
                gradients = split_captured_gradients(traced, attention.score_buffers, captured, attention.dtype)
                modules[self.node.args[joint]] = gradients.joint
        except (RuntimeError, ValueError, NotImplementedError, GraphError, UnsupportedGradientsError) as error:
            return str(error).partition("\n")[0]
        replaced: dict[Node, Node] = {}
        for node, module in modules.items():
            name = f"{self.node.name}_{node.target}"
            replaced[self._copy.node_map[node]] = self._copy.attribute(self._before, name, module)
        arguments: Any = map_arg(self._before.args, lambda node: replaced.get(node, node))
        mask = _with_used_lists(arguments[mask_position], attention.blocks.is_trivial, joint is not None)
        self._before.args = (*arguments[:mask_position], mask, *arguments[mask_position + 1 :])
        if gradients is not None:
            self._insert_after(gradients)
        return None

    def _insert_after(self, gradients: CapturedGradients) -> None:
        """Makes the call's results sums over scores, and inserts the operators that compute gradients from them."""
        copy, call, name = self._copy, self._before, self.node.name
        results = copy.fakes[call]
        copy.fakes[call] = call.meta["val"] = (*results[:_CAPTURED], gradients.sums)
        paths = [path for path in self.results if path[0] == _CAPTURED]
        for node in self._tuples[1:]:
            copy.fakes[copy.node_map[node]] = copy.node_map[node].meta["val"] = gradients.sums
        (whole, *_) = [copy.node_map[node] for node in self._tuples[1:]]
        after = whole.next
        sums = [copy.element(after, whole, number, name, origin=call) for number in range(len(gradients.sums))]

        def compute(leading: Sequence[Tensor], arguments: Any) -> list[Tensor]:
            dense = gradients.after(*leading, *arguments[12])
            return [self.with_layout(path, item) for path, item in zip(paths, dense, strict=True)]

        for path, result in zip(paths, self.insert(compute, sums, after), strict=True):
            for user in self.results[path]:
                copy.substitute(user, result, "fused")

    def insert(
        self, function: Callable[..., object], leading: Sequence[Node] = (), before: Node | None = None
    ) -> list[Node]:
        """Inserts the calls of a function of a list of tensors and the call's arguments; returns its results.

        They are inserted before the call, or before another node of the copy.
        """
        module = self._trace(function, [self._copy.fakes[item] for item in leading])
        operands = [*leading, *[self._copy.node_map[item] for item in self._operands]]
        name = self.node.name
        return [*self._copy.inline(before or self._before, module, operands, name, f"{name}_{len(leading)}")]

    def insert_loop(self, function: Callable[..., object], over: Sequence[Node]) -> list[Node]:
        """Inserts a loop of a function of a list of slices and the call's arguments; returns its stacked results."""
        fakes = [self._copy.fakes[item] for item in over]
        with in_fake_mode(self._mode):
            slices = [item[0] for item in fakes]
        module, name = self._trace(function, slices), self.node.name
        yielded: Any = module.graph.output_node().args[0]
        results = [item.meta["val"] for item in yielded]
        with in_fake_mode(self._mode):
            stacked = tuple([item.new_empty((fakes[0].shape[0], *item.shape)) for item in results])
        body = self._copy.attribute(self._before, f"{name}_body", module)
        operands = [self._copy.node_map[item] for item in self._operands]
        loop = self._copy.call(self._before, map_impl, (body, [*over], operands), name, fake=stacked)
        return [self._copy.element(self._before, loop, index, name) for index in range(len(stacked))]

    def _traced(
        self, function: Callable[..., object], values: Sequence[object], keeps_scatters: bool = False
    ) -> GraphModule:
        """Returns the graph of a function's ATen operators on fake values.

        With `keeps_scatters`, the sums of gradients of captured tensors stay calls.
        """
        table = {**decomposition_table(self.options), **({} if keeps_scatters else flex_decompositions())}
        fakes = in_one_mode(values, self._mode)
        with in_tracing_fake_mode(self._mode), torch.no_grad():
            return make_fx(function, decomposition_table=table)(*fakes)

    def _trace(self, function: Callable[..., object], leading: Sequence[object]) -> GraphModule:
        count = len(leading)

        def run(*values: object) -> Any:
            return function(values[:count], self._arguments(values[count:]))

        try:
            module = self._traced(run, [*leading, *self._fakes])
        except (RuntimeError, ValueError, TypeError, AttributeError) as error:  # about what the functions return
            remedy = "Write functions of scalars that torch.vmap can vectorise; index captured tensors"
            reason = f"its score_mod or mask_mod cannot be vectorised: {error}"
            raise GraphError(self.node.name, reason, remedy, location_of(self.node)) from error
        for node in module.graph.nodes:
            node.meta = {**self._before.meta, **node.meta}
        return module

    def replace(self, results: Sequence[Node]) -> None:
        """Replaces the call's used results, in order."""
        for users, result in zip(self.results.values(), results, strict=True):
            for user in users:
                self._copy.substitute(user, result, "fused", self._tuples)

    def with_layout(self, path: _Path, result: Tensor) -> Tensor:
        """Returns a result in the dtype and with the strides of the call's."""
        fake = self._fake(self.results[path][0])
        strides = [size_hint(stride) for stride in fake.stride()]
        order = sorted(range(fake.dim()), key=lambda dim: -strides[dim])
        dense = result.to(fake.dtype).permute(order).contiguous()
        return dense.permute([order.index(dim) for dim in range(fake.dim())])


def _inline_literals(graph: Graph) -> None:
    """Makes numbers of a traced function calls of `full`, in place: they are tensors in memory, which kernels read."""
    for node in graph.find_nodes(op="call_function", target=_aten.lift_fresh_copy.default):
        source = node.args[0]
        literal = attribute_of(source) if source.op == "get_attr" else None
        if not isinstance(literal, Tensor) or isinstance(literal, FakeTensor) or literal.ndim or not literal.is_cpu:
            continue
        with without_fake_mode():
            number = literal.item()
        keywords: dict[str, Any] = {"dtype": literal.dtype, "device": literal.device}
        with graph.inserting_before(node):
            full = graph.call_function(_aten.full.default, ([], number), keywords)
        full.meta = node.meta
        node.replace_all_uses_with(full)


def _with_used_lists(block_mask: tuple[Any, ...], is_trivial: bool, is_backward: bool) -> tuple[Any, ...]:
    """Returns a block mask with the lists that kernels read; the others are None, and need not be computed.

    Nothing reads the lists of the only block, and the forward reads no lists of query blocks.
    """
    unused = range(len(block_mask) - 1) if is_trivial else range(0) if is_backward else _QUERY_LISTS
    return tuple([None if isinstance(item, Node) and number in unused else item
                  for number, item in enumerate(block_mask)])  # fmt: skip


def drop_unread_block_lists(joint: GraphModule) -> GraphModule:
    """Lets calls of FlexAttention without a block mask read no lists of blocks, in place; returns the joint graph.

    The forward would compute them, and save them for the backward.
    """
    for node in joint.graph.nodes:
        position = _MASK_POSITIONS.get(_label(node)) if node.op == "call_function" else None
        if position is None:
            continue
        mask = node.args[position]
        if all(is_flex_default_block(size) for size in mask[-3:-1]):
            mask = _with_used_lists(mask, is_trivial=True, is_backward=False)
            node.args = (*node.args[:position], mask, *node.args[position + 1 :])
    return joint


_MASK_POSITIONS = {"flex_attention": 4, "flex_attention_backward": 9}
"""The positions of the block mask among the arguments of calls."""

_QUERY_LISTS = range(6, 10)
"""The positions of the lists of query blocks in a block mask."""


def _score_gradient(joint: Callable[..., Any]) -> Callable[..., object]:
    """Returns a joint function whose gradients of indices and captured tensors, which nothing uses, are None."""

    def run(*operands: object) -> tuple[object, ...]:
        gradient, *others = joint(*operands)
        return (gradient, *[None] * len(others))

    return run


def _forward(call: _Call) -> list[Node]:
    loop = _row_loop(call)
    if loop is None:

        def attend(_leading: object, arguments: Any) -> list[Tensor]:
            attention = FlexAttention.from_arguments(*arguments)
            results = attention.attend(attention.query, attention.key, attention.value, attention.everything())
            return [call.with_layout(path, results[path[0]]) for path in call.results]

        return call.insert(attend)
    used = [path[0] for path in call.results]

    def iterations(_leading: object, arguments: Any) -> list[Tensor]:
        return RowLoop(FlexAttention.from_arguments(*arguments), loop).iterations()

    def body(slices: Sequence[Tensor], arguments: Any) -> list[Tensor]:
        results = RowLoop(FlexAttention.from_arguments(*arguments), loop).attend(*slices)
        return [results[index] for index in used]

    def assemble(stacked: Sequence[Tensor], arguments: Any) -> list[Tensor]:
        rows = RowLoop(FlexAttention.from_arguments(*arguments), loop)
        return [call.with_layout(path, rows.assemble(item)) for path, item in zip(call.results, stacked, strict=True)]

    return call.insert(assemble, call.insert_loop(body, call.insert(iterations)))


def _row_loop(call: _Call) -> int | None:
    """Returns the rows of an iteration of the loop; None where the whole score matrix is computed at once."""
    attention = FlexAttention.from_arguments(*call.fake_arguments)
    spec = call.options.device_specs().get(attention.query.device.type)
    if spec is None or spec.massively_parallel:
        return None
    length = attention.query.shape[2]
    if attention.blocks.is_trivial:
        return _ROWS if size_hint(length) > 2 * _ROWS else None
    rows = attention.blocks.q_block_size
    return min(rows, length) if type(length) is int else rows


def _backward(call: _Call) -> list[Node]:
    def gradients(_leading: Any, arguments: Any) -> list[Tensor]:
        query, key, value, out, logsumexp, grad_out, grad_logsumexp, score_mod, joint, *rest = arguments
        attention = FlexAttention.from_arguments(query, key, value, score_mod, *rest)
        results: Any = attention.gradients(out, logsumexp, grad_out, grad_logsumexp, joint, call.captured_count)
        chosen = [results[path[0]] if len(path) == 1 else results[path[0]][path[1]] for path in call.results]
        return [call.with_layout(path, item) for path, item in zip(call.results, chosen, strict=True)]

    return call.insert(gradients)


_EXPANSIONS: dict[str, Callable[[_Call], list[Node]]] = {
    "flex_attention": _forward,
    "flex_attention_backward": _backward,
}
