"""AOTAutograd and graphs of Dynamo.

Why: backends of torch.compile that train have no public entry to AOTAutograd. Dynamo takes over a second to import,
which programs that only run need not pay: all imports of it are inside functions.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from types import FunctionType
from typing import Any, ParamSpec, TypeAlias, TypeVar, cast

import torch
from torch._guards import TracingContext
from torch._ops import OpOverloadPacket

CompiledCall: TypeAlias = Callable[..., Any]

_P = ParamSpec("_P")
_T = TypeVar("_T")


def one_compile_at_a_time(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Returns the function that waits for compiles of other threads, torch's included. Its calls may nest.

    Why: tracing replaces methods of torch's classes, and decompositions replace kernels of operators, for all threads.
    torch compiles under this lock; a backward is compiled later, in a thread of autograd.
    """

    @wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        from torch._dynamo.convert_frame import compile_lock

        with compile_lock:
            return function(*args, **kwargs)

    return call


def aot_autograd(
    *, partition_fn: Callable[..., object], known_results: Callable[..., Any], **compilers: object
) -> CompiledCall:
    """Returns the backend that traces forward and backward with AOTAutograd and compiles each graph.

    `compilers` are AOTAutograd's own arguments; `partition_fn` splits the joint graph. `known_results` says which nodes
    of a Dynamo graph need not run for its metadata (`metadata_from_known_results`).
    """
    from torch._dynamo.backends.common import aot_autograd as make_backend
    from torch._functorch import config

    from fxwrap.torch_compat.aot_tracing import metadata_from_known_results, without_unread_texts

    backend: CompiledCall = make_backend(partition_fn=partition_fn, **compilers)

    def preserve_eager_rng(graph_module: torch.fx.GraphModule, example_inputs: Sequence[object]) -> CompiledCall:
        # Why: on GPUs the partitioner lets checkpointed operators draw from its own generators, so that CUDA graphs can
        # capture them; these do not produce the numbers that eager draws.
        with (
            config.patch(graphsafe_rng_functionalization=False, unlift_effect_tokens=True),
            metadata_from_known_results(known_results),
            without_unread_texts(),
        ):
            return cast("CompiledCall", backend(graph_module, example_inputs))

    return preserve_eager_rng


def random_number_inputs(graph_module: torch.fx.GraphModule) -> list[int]:
    """Returns the positions of a Dynamo graph's inputs that are numbers of Python's `random`.

    Why: Dynamo before torch 2.15 traces a float as a tensor of the default dtype, and passes one of float64.
    """
    from torch._dynamo.source import RandomValueSource

    arguments = [node.meta.get("grapharg") for node in graph_module.graph.find_nodes(op="placeholder")]
    sources = [getattr(argument, "source", None) for argument in arguments]
    return [position for position, source in enumerate(sources) if isinstance(source, RandomValueSource)]


def min_cut_partitioner(
    fusible: Collection[OpOverloadPacket] = (),
    recomputable: Collection[OpOverloadPacket] = (),
    views: Collection[OpOverloadPacket] = (),
) -> Callable[..., object]:
    """Returns torch's partitioner that saves as little as possible for the backward and recomputes the rest.

    Its own lists lack operators that TorchInductor decomposes. `fusible` are those whose kernels compute operands too:
    it does not recompute an operand of any other, since a kernel would have to store it. `recomputable` are fusible
    ones that it may compute again in the backward. `views` are recomputable ones that cost nothing. It eliminates no
    common subexpressions.
    """
    from functorch.compile import min_cut_rematerialization_partition
    from torch._functorch import config, partitioners

    def partition(*arguments: object, **keywords: object) -> object:
        # Why: the lists are no arguments of the partitioner. Other threads may partition for another backend.
        with _PARTITIONER:
            known, thread = partitioners.get_default_op_list, threading.get_ident()

            def operators() -> Any:
                types = known()
                added = {*fusible}, {*recomputable}, {*views}
                return _with_operators(types, *added) if threading.get_ident() == thread else types

            partitioners.get_default_op_list = operators
            try:
                # Why: its CSE imports Inductor's pattern matcher and lowerings.
                with config.patch(cse=False):
                    return min_cut_rematerialization_partition(*arguments, **keywords)
            finally:
                partitioners.get_default_op_list = known

    return partition


_PARTITIONER = threading.RLock()
"""Held while torch's lists of operators are replaced."""


def _with_operators(
    types: Any, fusible: set[OpOverloadPacket], recomputable: set[OpOverloadPacket], views: set[OpOverloadPacket]
) -> Any:
    return replace(
        types,
        fusible_ops=types.fusible_ops | fusible | recomputable | views,
        recomputable_ops=types.recomputable_ops | recomputable | views,
        view_ops=types.view_ops | views,
    )


@dataclass(frozen=True)
class AotGraphInfo:
    """AOTAutograd's metadata of a graph's inputs and outputs, by position.

    `static_inputs` of the forward or inference graph have the same address in each call; `donated_inputs` of the
    backward may be reused. `saved_outputs` of the forward are read by the backward alone. Of `input_aliases` among the
    outputs of the forward or inference graph, AOTAutograd reads the layout only: it returns views of inputs.
    """

    static_inputs: frozenset[int] = frozenset()
    donated_inputs: frozenset[int] = frozenset()
    saved_outputs: frozenset[int] = frozenset()
    input_aliases: frozenset[int] = frozenset()


def aot_graph_info(kind: str, outputs: int = 0) -> AotGraphInfo:
    """Returns the metadata of the "forward", "backward" or "inference" graph that AOTAutograd is compiling.

    `outputs` is the number of outputs of the graph.
    """
    context = TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    if metadata is None:
        return AotGraphInfo()
    donated = metadata.bw_donated_idxs if kind == "backward" else None
    saved: frozenset[int] = frozenset()
    if kind == "forward" and context is not None and context.output_strides is not None:
        saved = frozenset(range(outputs)[metadata.tensors_saved_for_backwards_slice])
    aliases = frozenset() if kind == "backward" else _input_aliases(metadata)
    return AotGraphInfo(frozenset(metadata.static_input_indices or ()), frozenset(donated or ()), saved, aliases)


def _input_aliases(metadata: Any) -> frozenset[int]:
    """Returns the positions of outputs that are aliases of inputs; none if tokens or inner tensors are returned too."""
    from torch._functorch._aot_autograd.schemas import OutputType, SubclassCreationMeta

    if metadata.tokens or any(isinstance(item, SubclassCreationMeta) for item in metadata.subclass_fw_graph_out_meta):
        return frozenset()
    first = metadata.num_mutated_inp_runtime_indices
    items = enumerate(metadata.output_info, first)
    return frozenset([position for position, item in items if item.output_type is OutputType.alias_of_input])


def report_output_strides(strides: Sequence[tuple[int, ...] | None]) -> None:
    """Reports the output strides of the forward graph to AOTAutograd, None for outputs with their traced strides.

    AOTAutograd compiles the backward for inputs with these strides.
    """
    context = TracingContext.try_get()
    if context is not None and context.output_strides is not None and not context.output_strides:
        context.output_strides.extend(strides)


def has_float_guards() -> bool:
    """Whether the graph that AOTAutograd is compiling is right for some values of its float inputs only.

    Why: such guards, as of `torch.full(size, scale)`, are not in the entries of AOTAutograd's cache, which then returns
    the graph for all values.
    """
    context = TracingContext.try_get()
    shape_env = None if context is None or context.fake_mode is None else context.fake_mode.shape_env
    if shape_env is None:
        return False
    symbols = [symbol for guard in shape_env.guards for symbol in guard.expr.free_symbols]
    return any(not symbol.is_integer for symbol in symbols)


# Why: AOTAutograd recognises functions that take their inputs in a list by an attribute without a public name.


def boxed_call(entry: Callable[[list[object]], object]) -> CompiledCall:
    """Returns a function that AOTAutograd calls with a list of inputs, which it may empty."""
    if isinstance(entry, FunctionType):  # a builtin has no attributes
        entry._boxed_call = True  # type: ignore[attr-defined]
        return entry

    def call(inputs: list[object]) -> object:
        return entry(inputs)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def is_boxed_call(function: CompiledCall) -> bool:
    """Whether a function takes its inputs in a list."""
    return bool(getattr(function, "_boxed_call", False))


def copy_dynamo_node(
    graph: torch.fx.Graph, node: torch.fx.Node, copies: Mapping[torch.fx.Node, torch.fx.Node]
) -> torch.fx.Node:
    """Copies a node of a Dynamo graph into another graph, with the source that AOTAutograd reads of inputs."""
    copied = graph.node_copy(node, copies.__getitem__)
    if hasattr(node, "_dynamo_source"):
        copied._dynamo_source = node._dynamo_source
    return copied


def copy_dynamo_graph(graph: torch.fx.Graph) -> tuple[torch.fx.Graph, dict[torch.fx.Node, torch.fx.Node]]:
    """Returns a copy of a Dynamo graph, and the copy of each node."""
    copied, copies = torch.fx.Graph(), dict[torch.fx.Node, torch.fx.Node]()
    for node in graph.nodes:
        copies[node] = copy_dynamo_node(copied, node, copies)
    return copied, copies


def copy_dynamo_module(graph_module: torch.fx.GraphModule, graph: torch.fx.Graph) -> torch.fx.GraphModule:
    """Returns a Dynamo module with another graph and all attributes that AOTAutograd reads."""
    copied = torch.fx.GraphModule(graph_module, graph)
    for name, value in vars(graph_module).items():
        vars(copied).setdefault(name, value)
    copied.meta = graph_module.meta
    return copied
