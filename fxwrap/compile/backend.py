"""`torch.compile(model, backend="fxwrap")`: the entry Dynamo finds by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any, Literal, TypeAlias

import torch
from torch.fx import GraphModule

from fxwrap.caching import clear_caches
from fxwrap.compile.compiled import Compiled
from fxwrap.compile.compiler import collection_paused, compile_graph
from fxwrap.compile.dynamo_pause import DynamoPause
from fxwrap.compile.precompile import check_not_precompiling, graph_entry, savable_graph, torch_cache_key
from fxwrap.converters.fx.module import boxed_function
from fxwrap.debugging import with_repro_environment
from fxwrap.errors import OptionError
from fxwrap.fx_passes import (
    decomposition_table,
    find_known_results,
    pack_query_groups,
    partitioner,
    replace_in_place_functions,
    replace_stream_methods,
    simplify_attention_masks,
    with_aliases_of_inputs,
)
from fxwrap.fx_passes.effects import fake_of, storage_of
from fxwrap.lines import Return
from fxwrap.options import FIRST_CALL, Options, Step, enabled_steps
from fxwrap.runtime.plain_inputs import (
    with_plain_inputs,
    with_traced_boxed_inputs,
    with_traced_dtypes,
    with_traced_inputs,
)
from fxwrap.torch_compat import (
    AotGraphInfo,
    aot_autograd,
    aot_graph_info,
    are_disjoint_slices,
    autograd_cache,
    begin_dynamo_compile,
    boxed_call,
    cacheable_compiler,
    guard_forward_mode,
    is_aot_compiling,
    is_forward_mode_active,
    is_precompiling,
    is_traced_class,
    random_number_inputs,
    report_output_strides,
    serializable_callable,
)
from fxwrap.wrapper_ir import Ownership, Program, TensorType, Value

GraphKind: TypeAlias = Literal["inference", "forward", "backward"]

CompiledGraphFunction: TypeAlias = Callable[..., Any]
"""A compiled graph, as Dynamo and AOTAutograd call it."""

DYNAMO_PASSES: tuple[Step[GraphModule, Options], ...] = (
    Step(
        "replace_stream_methods", "turn method calls on streams and events into operators (torch 2.11)",
        lambda graph, _options: replace_stream_methods(graph),
    ),
    Step(
        "replace_in_place_functions", "activations and sums on intermediates return results, which trace faster",
        replace_in_place_functions, "fuse",
    ),
    Step(
        "simplify_attention_masks", "remove all-true attention masks, detect causal ones, make others contiguous",
        simplify_attention_masks, "fuse",
    ),
    Step(
        "pack_query_groups", "attend with one query row to key heads that several query heads share, without copies",
        pack_query_groups, "fuse",
    ),
)  # fmt: skip
"""The passes over Dynamo's graph, before AOTAutograd."""


@dataclass(frozen=True)
class GraphInfo:
    """The description of a graph for `on_graph`.

    Fields:
        name: the program's name.
        kind: "inference", "forward" or "backward".
        device: the device of the first input that is not on the CPU, else the CPU.
        static_inputs: positions of inputs whose address never changes (parameters and buffers).
        mutated_inputs: positions of inputs that the graph mutates.
        donated_inputs: positions of inputs whose memory the graph may reuse.
    """

    name: str
    kind: GraphKind
    device: torch.device
    static_inputs: frozenset[int] = frozenset()
    mutated_inputs: frozenset[int] = frozenset()
    donated_inputs: frozenset[int] = frozenset()


def fxwrap(
    graph_module: GraphModule,
    example_inputs: Sequence[object],
    *,
    options: Mapping[str, object] | None = None,
    mode: str | None = None,
) -> CompiledGraphFunction:
    """Compiles a graph that Dynamo captured, for inference and training.

    `options` are the fields of `Options`; `mode` is a mode of torch.compile. Raises OptionError for unknown ones.
    """
    return make_backend(Options.from_mapping(options, mode))(graph_module, example_inputs)


fxwrap.reset = clear_caches  # type: ignore[attr-defined]  # torch.compiler.reset() calls it

_dynamo_pause = DynamoPause()
_dynamo_pause.add(fxwrap)


def make_backend(
    chosen: Options, compile_with: Callable[..., Compiled] = compile_graph
) -> Callable[[GraphModule, Sequence[object]], CompiledGraphFunction]:
    """Returns a backend for `torch.compile(backend=...)`, for inference and training.

    `compile_with` compiles each graph of ATen operators that AOTAutograd returns. It takes the arguments of
    `compile_graph`; the `boxed` entry of its result runs.
    """

    def backend(graph_module: GraphModule, example_inputs: Sequence[object]) -> CompiledGraphFunction:
        begin_dynamo_compile(graph_module)
        guard_forward_mode()
        _dynamo_pause.renew()
        if is_forward_mode_active():  # AOTAutograd traces no tangents
            return graph_module.forward
        options = with_repro_environment(chosen)
        if options.autotune is True:
            _dynamo_pause.end()
        for step in enabled_steps(DYNAMO_PASSES, options):
            graph_module = step.run(graph_module, options)
        subclassed = [position for position, item in enumerate(example_inputs) if is_traced_class(type(item))]
        attributes = (*graph_module.parameters(), *graph_module.buffers())  # those of optimizers are no example inputs
        has_traced = any(is_traced_class(type(item)) for item in attributes)
        is_savable = compile_with is compile_graph and not has_traced
        key = torch_cache_key(options, example_inputs) if is_savable else None
        compiled: CompiledGraphFunction
        if key is None:
            check_not_precompiling(options)
            with collection_paused(options):
                autograd = _with_autograd(options, compile_with, savable=False, has_traced_attributes=has_traced)
                compiled = autograd(graph_module, example_inputs)
        else:
            with autograd_cache(graph_module, key), collection_paused(options):
                compiled = _with_autograd(options, compile_with, savable=True)(graph_module, example_inputs)
            if is_aot_compiling():
                return serializable_callable(compiled, subclassed)
        if dtypes := _random_numbers(graph_module, example_inputs):
            compiled = with_traced_dtypes(compiled, dtypes)
        if not subclassed:  # Dynamo guards the classes of inputs
            return compiled
        return with_traced_inputs(compiled)

    _dynamo_pause.add(backend)
    return backend


def _random_numbers(graph_module: GraphModule, example_inputs: Sequence[object]) -> dict[int, torch.dtype]:
    """Returns the dtypes of inputs that are numbers of Python's `random`, by position."""
    items = [(position, example_inputs[position]) for position in random_number_inputs(graph_module)]
    return {position: item.dtype for position, item in items if isinstance(item, torch.Tensor)}


def _with_autograd(
    options: Options, compile_with: Callable[..., Compiled], *, savable: bool, has_traced_attributes: bool = False
) -> CompiledGraphFunction:
    """Returns the backend that traces with AOTAutograd; torch can save its graphs if they are `savable`.

    `has_traced_attributes` is whether attributes of the graph, which become inputs, have a class that was traced.
    """
    kinds: tuple[GraphKind, ...] = ("forward", "backward", "inference")
    compilers: dict[GraphKind, Any] = {
        kind: _GraphCompiler(kind, options, compile_with, savable, has_traced_attributes) for kind in kinds
    }
    if savable:
        compilers = {kind: cacheable_compiler(compiler) for kind, compiler in compilers.items()}
    return aot_autograd(
        fw_compiler=compilers["forward"],
        bw_compiler=compilers["backward"],
        inference_compiler=compilers["inference"],
        partition_fn=partitioner(options),
        known_results=find_known_results,
        decompositions=decomposition_table(options),
        keep_inference_input_mutations=True,
    )


@dataclass(frozen=True)
class _GraphCompiler:
    kind: GraphKind
    options: Options
    compile_with: Callable[..., Compiled]
    savable: bool
    has_traced_attributes: bool

    def __call__(self, graph_module: GraphModule, example_inputs: Sequence[object]) -> CompiledGraphFunction:
        outputs = graph_module.graph.output_node().args[0]
        info = aot_graph_info(self.kind, len(outputs) if isinstance(outputs, tuple | list) else 1)
        info = replace(info, donated_inputs=_donated_without_aliases(graph_module, info.donated_inputs))
        graph_module = with_aliases_of_inputs(graph_module, info.input_aliases)
        static_inputs = self._static_inputs(graph_module, info)
        options = self.options.replace(check_inputs=False, freeze=self.options.freeze and self.kind == "inference")
        if options.autotune == FIRST_CALL and (options.on_graph is not None or is_precompiling()):
            options = options.replace(autotune=True)  # `on_graph` or torch gets the graph before any call
        compiled = self.compile_with(
            graph_module, example_inputs, options=options, ownership=self._ownership(graph_module, info),
            name=self.kind, flexible_stride_outputs=info.saved_outputs, static_inputs=static_inputs,
        )  # fmt: skip
        if info.saved_outputs or options.output_strides == "any":
            report_output_strides(_static_strides(compiled.program))
        negative = _may_be_negative(graph_module)
        if options.on_graph is not None:
            graph_info = self._graph_info(compiled.program, static_inputs, info.donated_inputs)
            function = options.on_graph(compiled.graph_module, graph_info)
            if not callable(function):
                raise OptionError(
                    f"option 'on_graph' returned {function!r} for the {self.kind} graph; it returns the function that "
                    "runs, such as the GraphModule that it received"
                )
            entry = boxed_function(function)
            entry = with_plain_inputs(entry, negative) if negative else entry
            call = boxed_call(with_traced_boxed_inputs(entry) if self.has_traced_attributes else entry)
            call.compiled = compiled  # type: ignore[attr-defined]  # holds it for `fxwrap.compiles`
            return call
        entry = graph_entry(compiled, static_inputs, negative)
        entry = with_traced_boxed_inputs(entry) if self.has_traced_attributes else entry
        return savable_graph(entry, compiled, static_inputs, negative) if self.savable else boxed_call(entry)

    def _graph_info(self, program: Program, static_inputs: frozenset[int], donated_inputs: frozenset[int]) -> GraphInfo:
        devices = [item.value.type.device for item in program.inputs
                   if isinstance(item.value, Value) and isinstance(item.value.type, TensorType)]  # fmt: skip
        return GraphInfo(
            name=program.name,
            kind=self.kind,
            # A tensor on the CPU may be a scalar among tensors of another device.
            device=next((device for device in devices if device.type != "cpu"), torch.device("cpu")),
            static_inputs=static_inputs,
            mutated_inputs=frozenset(
                position for position, item in enumerate(program.inputs) if item.ownership is Ownership.MUTABLE
            ),
            donated_inputs=donated_inputs,
        )

    def _ownership(self, graph_module: GraphModule, info: AotGraphInfo) -> dict[int, Ownership]:
        """Returns the ownership of a backward's inputs: it frees them after their last use, except the primals."""
        if self.kind != "backward":
            return {}
        placeholders = graph_module.graph.find_nodes(op="placeholder")
        return {
            position: Ownership.OWNED if position in info.donated_inputs else Ownership.SHARED
            for position, node in enumerate(placeholders)
            if not node.name.startswith("primals_")
        }

    def _static_inputs(self, graph_module: GraphModule, info: AotGraphInfo) -> frozenset[int]:
        """Returns the positions of inputs whose address never changes; a backward takes some primals, by name."""
        if self.kind != "backward":
            return info.static_inputs
        names = {f"primals_{position + 1}" for position in info.static_inputs}
        placeholders = graph_module.graph.find_nodes(op="placeholder")
        return frozenset(position for position, node in enumerate(placeholders) if node.name in names)


def _donated_without_aliases(graph_module: GraphModule, donated: frozenset[int]) -> frozenset[int]:
    """Returns the positions of donated inputs that share no element with another one, as a tensor does with its views.

    AOTAutograd donates a saved tensor and a saved view of it, both of which the backward still reads.
    """
    if not donated:
        return donated
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    sharing: dict[int | None, list[int]] = {}  # by storage
    for position in donated:
        sharing.setdefault(storage_of(placeholders[position]), []).append(position)
    sharing.pop(None, None)
    fakes = {position: fake_of(placeholders[position]) for positions in sharing.values() for position in positions}
    layouts = {position: (fake.shape, fake.stride(), fake.storage_offset()) for position, fake in fakes.items()}
    aliases = {
        position
        for positions in sharing.values()
        for position, other in permutations(positions, 2)
        if not are_disjoint_slices(layouts[position], layouts[other])
    }
    return donated - aliases


def _may_be_negative(graph_module: GraphModule) -> list[int]:
    """Returns the positions of inputs with a negative bit, which Dynamo guards, and of the gradients of a backward."""
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    values = [node.meta.get("val") for node in placeholders]
    return [
        position for position, (node, value) in enumerate(zip(placeholders, values, strict=True))
        if isinstance(value, torch.Tensor) and (value.is_neg() or node.name.startswith("tangents_"))
    ]  # fmt: skip


def _static_strides(program: Program) -> list[tuple[int, ...] | None]:
    """Returns the strides of a program's outputs; None for outputs without strides or with symbolic ones."""
    last = program.body.lines[-1]
    assert isinstance(last, Return), "a program ends with a Return"
    types = [item.type if isinstance(item, Value) else None for item in last.values]
    strides = [type_.strides if isinstance(type_, TensorType) else (None,) for type_ in types]
    return [item if all(isinstance(stride, int) for stride in item) else None for item in strides]  # type: ignore[misc]
