"""Lowering: a graph becomes a program."""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from fxwrap.errors import FusionWarning, GraphError
from fxwrap.lines import CheckLayout, Return
from fxwrap.lines.frees import insert_frees
from fxwrap.lowering.aligned_products import with_aligned_products
from fxwrap.lowering.associative_scans import with_associative_scans
from fxwrap.lowering.blocks import BlockLowering
from fxwrap.lowering.body import Body, Request
from fxwrap.lowering.builder import Builder, ProgramState
from fxwrap.lowering.control import lower_higher_order
from fxwrap.lowering.define import Outcome, outcome_of
from fxwrap.lowering.effects import attribute_of, is_token
from fxwrap.lowering.emit import KernelRefused
from fxwrap.lowering.equal_calls import with_equal_calls_once
from fxwrap.lowering.fake import fake_values
from fxwrap.lowering.layouts import with_layouts
from fxwrap.lowering.nodes import literal
from fxwrap.lowering.peak import peak_note
from fxwrap.lowering.products import with_products
from fxwrap.lowering.source import GraphSource, graph_source
from fxwrap.lowering.symbols import bind_sizes, check_ranges, check_ranks, input_symbol, replace_unsolvable
from fxwrap.options import Options
from fxwrap.passes.order_streams import order_streams
from fxwrap.printers import KernelPrinter, print_kernel
from fxwrap.provenance import number_calls
from fxwrap.torch_compat import tree_flatten
from fxwrap.wrapper_ir import (
    Block,
    Constant,
    ConstantStore,
    Input,
    OpaqueType,
    Ownership,
    Program,
    TensorType,
    Value,
    leaves,
    released_inputs,
)


def lower(
    graph: GraphModule | ExportedProgram,
    example_inputs: Sequence[Any] | None = None,
    *,
    options: Options | None = None,
    ownership: Mapping[int, Ownership] | None = None,
    name: str = "program",
) -> Program:
    """Lowers a graph of ATen operators to a program, which takes and gives what the graph takes and gives, flat.

    Args:
        graph: a hand-written graph, one from make_fx or AOTAutograd, or an exported program, whose parameters and
            buffers become constants of the program. It is not changed.
        example_inputs: one value a placeholder; needed only where nodes have no fake `meta["val"]`.
        options: see `Options`.
        ownership: what the program may do with an input, by its position; borrowed otherwise, or mutable when the graph
            writes it.
        name: the program's name.

    Raises GraphError for a graph that cannot be compiled: the node, its place in the model's source and a remedy.
    """
    return lower_with_coverage(graph, example_inputs, options=options, ownership=ownership, name=name).program


@dataclass(frozen=True)
class Lowered:
    """A program, what became of each call of the graph it is from, and the nodes that were refused a kernel.

    `warned` says whether a warning told the user of any of these.
    """

    program: Program
    coverage: tuple[Outcome, ...]
    refused: frozenset[str]
    warned: bool = False


def lower_with_coverage(
    graph: GraphModule | ExportedProgram | GraphSource,
    example_inputs: Sequence[Any] | None = None,
    *,
    options: Options | None = None,
    ownership: Mapping[int, Ownership] | None = None,
    name: str = "program",
    refused: frozenset[str] = frozenset(),
    free_outputs: Collection[int] = (),
    print_kernel: KernelPrinter = print_kernel,
) -> Lowered:
    """Lowers a graph as `lower` does, and says which of its calls were fused, and why the others were not.

    `graph` may be what `graph_source` made of one. `refused` are nodes that are called although there are rules to fuse
    them; `print_kernel` chooses how kernels are printed.
    """
    options = (options or Options()).with_devices()
    source = graph if isinstance(graph, GraphSource) else graph_source(graph, example_inputs, options, name)
    warned = False
    while True:
        try:
            request = Request(options, refused, print_kernel)
            lowered = _Lowering(source, example_inputs, request, ownership or {}, free_outputs).lowered()
            return replace(lowered, warned=warned)
        except KernelRefused as error:
            if options.fallback == "error" and not error.planned:
                raise
            if not error.planned:
                warned = True
                warnings.warn(f"{error}; these operators are called instead", FusionWarning, stacklevel=3)
            refused |= error.nodes


class _Lowering:
    """The lowering of a program: what its inputs and constants are, its body, and what it gives back."""

    def __init__(
        self,
        source: GraphSource,
        example_inputs: Sequence[Any] | None,
        request: Request,
        ownership: Mapping[int, Ownership],
        free_outputs: Collection[int] = (),
    ) -> None:
        fakes = fake_values(source.graph_module, example_inputs)
        source, fakes = with_associative_scans(source, fakes)
        source, fakes = with_equal_calls_once(source, fakes, request.options)
        source, fakes = with_products(source, fakes, request.options)
        if request.options.output_strides == "any":
            free_outputs = range(len(tree_flatten(source.output.args)[0]))
        source, fakes = with_layouts(source, fakes, request.options, example_inputs, free_outputs)
        source, fakes = with_aligned_products(source, fakes, request.options, free_outputs)
        self.source = source
        self.request = request
        self.ownership = ownership
        self.state = ProgramState(request.options.symbol_ranges, request.options.symbol_hints)
        self.builder = Builder(fakes, self.state)
        blocks = BlockLowering(self.builder, self, request, lower_higher_order)
        self.body = Body(
            source.graph_module, self.builder, request, self._get_attr, partial(lower_higher_order, blocks),
            source.gives_written,
        )  # fmt: skip
        self.inputs: list[tuple[Node, Any]] = []
        self.constants: dict[str, Value] = {}
        self._constant_of: dict[int, Value] = {}

    def lowered(self) -> Lowered:
        builder = self.builder
        placeholders = self.source.graph_module.graph.find_nodes(op="placeholder")
        replace_unsolvable(builder, [builder.fakes[node] for node in placeholders])
        for node in placeholders:
            self._placeholder(node)
        values = [value for _, value in self.inputs if isinstance(value, Value)]
        bind_sizes(builder, [*values, *self.constants.values()])
        if self.request.options.check_inputs:
            check_ranks(builder, values)
            check_ranges(builder)
            self._check_layouts(values)
        own = {value.name for position, (_, value) in enumerate(self.inputs)
               if self.ownership.get(position) is Ownership.OWNED}  # fmt: skip
        hint = self.body.lower(keeps=lambda value: value.name not in own)
        program = number_calls(self._assemble(self._outputs()))
        if program.kernels:
            note = peak_note(program, builder, list(self.source.graph_module.graph.nodes), hint)
            program = program.replace(header=tuple(sorted([*program.header, *([("peak", note)] if note else [])])))
        replaced = [outcome_of(node, node.name, became) for node, became in self.source.replaced.items()]
        return Lowered(program, (*replaced, *self.state.outcomes), self.request.refused)

    def _placeholder(self, node: Node) -> None:
        builder, fake = self.builder, self.builder.fakes[node]
        if node.name in self.source.constants:
            builder.env[node] = self._constant(node.name, fake, self.source.constants[node.name])
        elif is_token(node):
            self.inputs.append((node, Value(builder.unique(node.name), OpaqueType("NoneType"))))
            builder.env[node] = None
        elif isinstance(fake, torch.Tensor):
            builder.env[node] = builder.add_root(node.name, fake)
            self.inputs.append((node, builder.env[node]))
        elif isinstance(fake, torch.SymInt | torch.SymFloat | torch.SymBool):
            builder.env[node] = builder.expression(fake)
            self.inputs.append((node, input_symbol(builder, fake)))
        elif isinstance(fake, torch.Generator):
            builder.env[node] = builder.add_generator(node.name, fake)
            self.inputs.append((node, builder.env[node]))
        elif isinstance(fake, tuple | list | dict):
            raise GraphError(node.name, "it stands for several values", "Give each a placeholder of its own")
        else:
            self.inputs.append((node, Value(builder.unique(node.name), builder.type_of(fake))))
            builder.env[node] = fake

    def constant(self, payload: torch.Tensor, name: str) -> Value:
        """Returns the value of a tensor of the program's own."""
        found = self._constant_of.get(id(payload))
        return self._constant(name, payload, payload) if found is None else found

    def _constant(self, name: str, fake: torch.Tensor, payload: torch.Tensor) -> Value:
        value = self._constant_of[id(payload)] = self.builder.add_root(name, fake)
        self.constants[value.name] = value
        self.state.constants[value.name] = payload
        return value

    def _get_attr(self, node: Node) -> None:
        payload = attribute_of(node)
        if not isinstance(payload, torch.Tensor):
            self.builder.env[node] = payload
            return
        key = str(node.target)
        value = self._constant_of.get(id(payload))
        if value is None:
            fake = self.builder.fakes[node]
            value = self._constant(key.replace(".", "_"), payload if fake is None else fake, payload)
        if key.rpartition(".")[2].startswith(("_tensor_constant", "lifted_tensor")):
            self.body.read_only.add(value.name)
        self.builder.env[node] = value

    def _check_layouts(self, values: list[Value]) -> None:
        for value in values:
            if isinstance(value.type, TensorType):
                self.builder.emit(CheckLayout(value, value.type, value.name))

    def _outputs(self) -> tuple[Any, ...]:
        output = self.source.output
        return tuple(leaves(literal(self.builder, output.args[0], output)))

    def _assemble(self, returned: tuple[Any, ...]) -> Program:
        builder = self.builder
        inputs = [Input(value, self._ownership(position, value)) for position, (_, value) in enumerate(self.inputs)]
        values = [item.value for item in inputs if isinstance(item.value, Value)]
        given = [*values, *self.constants.values()]
        lines = insert_frees([*builder.lines, Return(returned)], given, released_inputs(inputs))
        constants = tuple(Constant(value, value.name in builder.mutated) for value in self.constants.values())
        program = Program(
            re.sub(r"\W", "_", self.source.name),
            tuple(inputs),
            Block((), lines),
            constants,
            tuple(self.state.kernels.values()),
            tuple(self.state.functions.items()),
            header=_header(self.request.options, builder.device_types()),
            store=ConstantStore(dict(self.state.constants)),
        )
        return order_streams(program)

    def _ownership(self, position: int, value: Any) -> Ownership:
        if not isinstance(value, Value) or not isinstance(value.type, TensorType):
            return Ownership.BORROWED
        given = self.ownership.get(position, Ownership.BORROWED)
        if value.name in self.builder.mutated and given in (Ownership.BORROWED, Ownership.SHARED):
            return Ownership.MUTABLE
        return given


def _header(options: Options, device_types: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Says what a program was made for: the options, but for what will emit it, and the types of its devices."""
    text = options.replace(emitter=Options().emitter).text()
    parts = {"options": text, "target": ", ".join(device_types)}
    return tuple([(name, part) for name, part in parts.items() if part])
