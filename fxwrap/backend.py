"""`torch.compile(model, backend="fxwrap")`: the entry Dynamo finds by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule

from fxwrap.compiler import Compiled, compile_graph
from fxwrap.converters.fx_module import boxed_function
from fxwrap.lines import Return
from fxwrap.lowering import decomposition_table, partitioner, with_plain_attention, with_stream_calls
from fxwrap.options import FIRST_CALL, Options
from fxwrap.torch_compat import TracingFacts, aot_autograd, report_output_strides, tracing_facts
from fxwrap.wrapper_ir import Ownership, Program, TensorType, Value


@dataclass(frozen=True)
class GraphInfo:
    """What is known about a graph that `on_graph` receives; inputs are named by their position.

    `kind` is "inference", "forward" or "backward"; `static_inputs` keep their address from call to call (parameters and
    buffers); `mutated_inputs` are written; `donated_inputs` may be overwritten or freed; `device` is that of
    the first input that is not on the CPU, else the CPU.
    """

    name: str
    kind: str
    device: torch.device
    static_inputs: frozenset[int] = frozenset()
    mutated_inputs: frozenset[int] = frozenset()
    donated_inputs: frozenset[int] = frozenset()


def fxwrap(
    graph_module: GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compiles what Dynamo captured, for inference and training.

    `options` are the fields of `Options`; `mode` is one of torch.compile's. Raises OptionError for unknown ones.
    """
    return make_backend(Options.from_mapping(options, mode))(graph_module, example_inputs)


def make_backend(
    options: Options, compile_with: Callable[..., Compiled] = compile_graph
) -> Callable[[GraphModule, Sequence[Any]], Callable[..., Any]]:
    """Returns a backend for `torch.compile(backend=...)`, for inference and training.

    Every graph of ATen operators that AOTAutograd makes is compiled by `compile_with`, which is called as
    `compile_graph` is; its result's `boxed` is what runs. Another function than `compile_graph` may watch the graphs.
    """
    compilers = {kind: _GraphCompiler(kind, options, compile_with) for kind in ("forward", "backward", "inference")}
    traced = aot_autograd(
        fw_compiler=compilers["forward"],
        bw_compiler=compilers["backward"],
        inference_compiler=compilers["inference"],
        partition_fn=partitioner(options),
        decompositions=dict(decomposition_table(options)),
        keep_inference_input_mutations=True,
    )

    def backend(graph_module: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        graph_module = with_plain_attention(with_stream_calls(graph_module), options)
        return traced(graph_module, example_inputs)  # type: ignore[no-any-return]

    return backend


@dataclass(frozen=True)
class _GraphCompiler:
    """Compiles one of the graphs that AOTAutograd makes. The options are held here, also for the lazy backward."""

    kind: str
    options: Options
    compile_with: Callable[..., Compiled]

    def __call__(self, graph_module: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        facts = tracing_facts(self.kind, _output_count(graph_module))
        ownership = self._ownership(graph_module, facts)
        options = self.options.replace(check_inputs=False)
        if options.on_graph is not None and options.autotune == FIRST_CALL:
            options = options.replace(autotune=True)  # the graph is given away before any call
        compiled = self.compile_with(
            graph_module, example_inputs, options=options, ownership=ownership, name=self.kind,
            free_outputs=facts.saved_outputs, static_inputs=_static_inputs(self.kind, graph_module, facts),
        )  # fmt: skip
        if facts.saved_outputs or options.output_strides == "any":
            report_output_strides(_fixed_strides(compiled.program))
        if options.on_graph is None:
            return _boxed(compiled.boxed)
        info = self._info(compiled.program, graph_module, facts)
        return _boxed(boxed_function(options.on_graph(compiled.graph_module, info)))

    def _info(self, program: Program, graph_module: GraphModule, facts: TracingFacts) -> GraphInfo:
        """Says what AOTAutograd and the program know of the graph's inputs."""
        devices = [item.value.type.device for item in program.inputs
                   if isinstance(item.value, Value) and isinstance(item.value.type, TensorType)]  # fmt: skip
        return GraphInfo(
            name=program.name,
            kind=self.kind,
            # a tensor on the CPU may be a number among those of another device
            device=next((device for device in devices if device.type != "cpu"), torch.device("cpu")),
            static_inputs=_static_inputs(self.kind, graph_module, facts),
            mutated_inputs=frozenset(
                position for position, item in enumerate(program.inputs) if item.ownership is Ownership.MUTABLE
            ),
            donated_inputs=facts.donated_inputs,
        )

    def _ownership(self, graph_module: GraphModule, facts: TracingFacts) -> dict[int, Ownership]:
        """A backward's inputs are dropped after their last use, but for the forward's own inputs."""
        if self.kind != "backward":
            return {}
        placeholders = graph_module.graph.find_nodes(op="placeholder")
        return {
            position: Ownership.OWNED if position in facts.donated_inputs else Ownership.SHARED
            for position, node in enumerate(placeholders)
            if not node.name.startswith("primals_")
        }


def _output_count(graph_module: GraphModule) -> int:
    (output,) = graph_module.graph.find_nodes(op="output")
    given = output.args[0]
    return len(given) if isinstance(given, tuple | list) else 1


def _fixed_strides(program: Program) -> list[tuple[int, ...] | None]:
    """Returns the strides of a program's outputs, None for what is no tensor or has strides that depend on symbols."""
    last = program.body.lines[-1]
    assert isinstance(last, Return), "a program ends with what it returns"
    types = [item.type if isinstance(item, Value) else None for item in last.values]
    strides = [item.strides if isinstance(item, TensorType) else (None,) for item in types]
    return [item if all(isinstance(step, int) for step in item) else None for item in strides]  # type: ignore[misc]


def _static_inputs(kind: str, graph_module: GraphModule, facts: TracingFacts) -> frozenset[int]:
    """Returns the positions of inputs that keep their address; a backward gets some of the forward's, by name."""
    if kind != "backward":
        return facts.static_inputs
    names = {f"primals_{position + 1}" for position in facts.static_inputs}
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    return frozenset(position for position, node in enumerate(placeholders) if node.name in names)


def _boxed(entry: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Marks an entry as one that takes a list and clears it."""

    def call(inputs: list[Any]) -> Any:
        return entry(inputs)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call
