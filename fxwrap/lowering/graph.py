"""Lowering: a graph becomes a program."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from fxwrap.errors import FusionWarning, GraphError
from fxwrap.lines import CheckLayout, Mutate, Return
from fxwrap.lowering.builder import Builder, origin_of
from fxwrap.lowering.define import Defining, Outcome, Step, definitions_in
from fxwrap.lowering.definitions import Definition, Written, viewed_base
from fxwrap.lowering.emit import Emission, KernelRefused, symbol_hints
from fxwrap.lowering.fake import fake_values
from fxwrap.lowering.frees import insert_frees
from fxwrap.lowering.fusion import Fusion, Item
from fxwrap.lowering.nodes import literal
from fxwrap.lowering.operators import operator_facts
from fxwrap.lowering.peak import peak_note
from fxwrap.lowering.realise import Use, Uses
from fxwrap.lowering.source import GraphSource, graph_source, location_of
from fxwrap.lowering.symbols import bind_sizes, symbol_info
from fxwrap.options import Options
from fxwrap.printers import KernelPrinter, print_kernel
from fxwrap.symbolic import Size
from fxwrap.torch_compat import OpOverload
from fxwrap.wrapper_ir import (
    Block,
    Constant,
    ConstantStore,
    Input,
    KernelDefinition,
    Ownership,
    Program,
    TensorType,
    Value,
    leaves,
)

_EFFECTS = "effects"
"""What each operator call with an effect depends on, and makes anew: such calls keep their order."""


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
    """A program, what became of each call of the graph it is from, and the nodes that were refused a kernel."""

    program: Program
    coverage: tuple[Outcome, ...]
    refused: frozenset[str]


def lower_with_coverage(
    graph: GraphModule | ExportedProgram,
    example_inputs: Sequence[Any] | None = None,
    *,
    options: Options | None = None,
    ownership: Mapping[int, Ownership] | None = None,
    name: str = "program",
    refused: frozenset[str] = frozenset(),
    print_kernel: KernelPrinter = print_kernel,
) -> Lowered:
    """Lowers a graph as `lower` does, and says which of its calls were fused, and why the others were not.

    `refused` are nodes that are called although there are rules to fuse them; `print_kernel` chooses how kernels are
    printed.
    """
    options = options or Options()
    source = graph_source(graph, example_inputs, options, name)
    while True:
        try:
            return _Lowering(source, example_inputs, options, ownership or {}, refused, print_kernel).lowered()
        except KernelRefused as error:
            if options.fallback == "error" and not error.planned:
                raise
            if not error.planned:
                warnings.warn(f"{error}; these operators are called instead", FusionWarning, stacklevel=3)
            refused |= error.nodes


class _Lowering:
    def __init__(
        self,
        source: GraphSource,
        example_inputs: Sequence[Any] | None,
        options: Options,
        ownership: Mapping[int, Ownership],
        refused: frozenset[str] = frozenset(),
        print_kernel: KernelPrinter = print_kernel,
    ) -> None:
        self.source = source
        self.print_kernel = print_kernel
        self.refused = refused
        self.options = options
        self.ownership = ownership
        fakes = fake_values(source.graph_module, example_inputs)
        self.builder = Builder(fakes, options.symbol_ranges)
        self.inputs: list[tuple[Node, Any]] = []
        self.constants: dict[str, Value] = {}
        self.attributes: dict[str, Value] = {}
        self.read_only: set[str] = set()

    def lowered(self) -> Lowered:
        defining = self._define()
        hint = symbol_hints(self.builder)
        uses = self._uses(defining, hint)
        fusion = self._fused(defining, uses, hint)
        items = fusion.items()
        dying = self._dying(fusion, defining)
        emission = Emission(self.builder, defining, uses, self.options, hint, dying, self.print_kernel)
        for node, value in self.builder.env.items():
            emission.record(defining.known.get(node), value)
        wanted = {definition for item in items if item.kernel is not None for definition in item.kernel.reads}
        wanted |= {definition for definition, use in uses.by_definition.items() if use.external}
        for item in items:
            self._emit(emission, item, wanted)
        for node in self.source.output.all_input_nodes:
            emission.ensure(node)
        returned = self._outputs()
        program = self._assemble(returned, tuple(emission.kernels.values()))
        if program.kernels:
            note = peak_note(program, self.builder, list(self.source.graph_module.graph.nodes), hint)
            program = program.replace(header=tuple(sorted([*program.header, *([("peak", note)] if note else [])])))
        return Lowered(program, tuple(defining.outcomes), self.refused)

    def _define(self) -> Defining:
        """Walks the graph once: inputs and constants get values, calls definitions or steps."""
        builder, nodes = self.builder, list(self.source.graph_module.graph.nodes)
        for node in nodes:
            if node.op == "placeholder":
                self._placeholder(node)
        values = [value for _, value in self.inputs if isinstance(value, Value)]
        bind_sizes(builder, [*values, *self.constants.values()])
        if self.options.check_inputs:
            self._check_layouts(values)
        defining = Defining(builder, self.options, self.refused)
        needed = _needed(nodes)
        for position, node in enumerate(nodes):
            if node.op == "get_attr" and node in needed:
                self._get_attr(node)
            if node.op == "call_function" and node in needed:
                defining.call(node, position)
            elif node in builder.env:
                defining.given(node, builder.env[node])
        return defining

    def _uses(self, defining: Defining, hint: Callable[[Size], int]) -> Uses:
        """Records what every definition reads, what is needed in memory, and decides what else is."""
        uses = Uses(hint)
        for definition, position in defining.position_of.items():
            uses.add(definition, position)
        read = [definition for step in defining.steps for definition in step.reads]
        read += [item for node in self.source.output.all_input_nodes for item in definitions_in(defining.known[node])]
        for definition in read:
            uses.add(viewed_base(definition), 0).external = True
        for definition in defining.position_of:
            if isinstance(definition, Written):
                uses.by_definition[definition].external = True
        uses.decide(defining.mutations)
        return uses

    def _fused(self, defining: Defining, uses: Uses, hint: Callable[[Size], int]) -> Fusion:
        """Returns operator calls and kernels in the order in which they run."""
        fusion = Fusion(uses, hint, defining.on_memory_of)
        events: list[tuple[int, Step | Use]] = [(step.position, step) for step in defining.steps]
        events += [(use.position, use) for use in uses.units()]
        for _, event in sorted(events, key=lambda pair: pair[0]):
            if isinstance(event, Use):
                fusion.define(event)
            else:
                after: list[object] = [*event.symbols, *event.writes, *([_EFFECTS] if event.effectful else [])]
                after += [item for definition in event.writes for item in fusion.readers(definition)]
                made = [*event.defines, *event.bound, *event.writes, *([_EFFECTS] if event.effectful else [])]
                fusion.call(event.node, made, [viewed_base(definition) for definition in event.reads], after)
        return fusion

    def _dying(self, fusion: Fusion, defining: Defining) -> dict[Definition, Item]:
        """Returns the last reader of each definition whose memory the program may overwrite after that."""
        kept: set[Definition] = {definition for definition, _ in defining.mutations}
        for node in self.source.output.all_input_nodes:
            kept |= {viewed_base(definition) for definition in definitions_in(defining.known[node])}
        for position, (node, _) in enumerate(self.inputs):
            if self.ownership.get(position) is not Ownership.OWNED:
                kept |= set(definitions_in(defining.known[node]))
        constants = {value.name for value in self.constants.values()}
        for node, value in self.builder.env.items():
            if isinstance(value, Value) and value.name in constants:
                kept |= set(definitions_in(defining.known[node]))
        return {
            definition: item for definition, item in fusion.last_readers().items()
            if definition not in kept and not defining.shares_memory(definition)
        }  # fmt: skip

    def _emit(self, emission: Emission, item: Item, wanted: set[Definition]) -> None:
        before = len(self.builder.mutated)
        emission.emit(item, wanted)
        if item.node is not None and len(self.builder.mutated) != before:
            self._check_mutable(item.node)

    def _placeholder(self, node: Node) -> None:
        builder, fake = self.builder, self.builder.fakes[node]
        if node.name in self.source.constants:
            builder.env[node] = self._constant(node.name, fake, self.source.constants[node.name])
        elif isinstance(fake, torch.Tensor):
            builder.env[node] = builder.add_root(node.name, fake)
            self.inputs.append((node, builder.env[node]))
        elif isinstance(fake, torch.SymInt | torch.SymFloat | torch.SymBool):
            info = symbol_info(builder, fake)
            builder.env[node] = builder.expression(fake)
            builder.known_symbols.add(info.name)
            self.inputs.append((node, info))
        elif isinstance(fake, tuple | list | dict):
            raise GraphError(node.name, "it stands for several values", "Give each a placeholder of its own")
        else:
            self.inputs.append((node, Value(builder.unique(node.name), builder.type_of(fake))))
            builder.env[node] = fake

    def _constant(self, name: str, fake: torch.Tensor, payload: torch.Tensor) -> Value:
        value = self.builder.add_root(name, fake)
        self.constants[value.name] = value
        self.builder.constants[value.name] = payload
        return value

    def _get_attr(self, node: Node) -> None:
        payload: Any = self.source.graph_module
        for part in str(node.target).split("."):
            payload = getattr(payload, part)
        if not isinstance(payload, torch.Tensor):
            self.builder.env[node] = payload
            return
        key = str(node.target)
        known = self.attributes.get(key)
        if known is not None:
            self.builder.env[node] = known
            return
        fake = self.builder.fakes[node]
        value = self._constant(key.replace(".", "_"), payload if fake is None else fake, payload)
        if key.rpartition(".")[2].startswith(("_tensor_constant", "lifted_tensor")):
            self.read_only.add(value.name)
        self.builder.env[node] = self.attributes[key] = value

    def _check_layouts(self, values: list[Value]) -> None:
        for value in values:
            if isinstance(value.type, TensorType):
                self.builder.emit(CheckLayout(value, value.type, value.name))

    def _check_mutable(self, node: Node) -> None:
        for name in self.builder.mutated & self.read_only:
            reason = f"it writes the constant '{name}', which is not mutable"
            raise GraphError(node.name, reason, "Register the tensor as a buffer of the module", location_of(node))

    def _outputs(self) -> tuple[Any, ...]:
        builder, output = self.builder, self.source.output
        tree = output.args[0]
        items = list(tree) if isinstance(tree, tuple | list) else [tree]
        by_name = {node.name: node for node in builder.env}
        returned = []
        for position, item in enumerate(items):
            result = literal(builder, item, output)
            overwritten = self.source.mutations.get(position)
            if overwritten is None:
                returned.append(result)
                continue
            target = builder.env[by_name[overwritten]]
            if target is not result:
                builder.mutated.add(builder.root_of[target.name].name)
                origin = origin_of(item) if isinstance(item, Node) else None
                builder.emit(Mutate((), "aten.copy_.default", (target, result), (target,), origin=origin))
        return tuple(leaf for leaf in leaves(tuple(returned)))

    def _assemble(self, returned: tuple[Any, ...], kernels: tuple[KernelDefinition, ...]) -> Program:
        builder = self.builder
        inputs = [Input(value, self._ownership(position, value)) for position, (_, value) in enumerate(self.inputs)]
        releasable = [
            item.value for item in inputs
            if isinstance(item.value, Value) and item.ownership in (Ownership.SHARED, Ownership.OWNED)
        ]  # fmt: skip
        values = [item.value for item in inputs if isinstance(item.value, Value)]
        lines = insert_frees([*builder.lines, Return(returned)], [*values, *self.constants.values()], releasable)
        constants = tuple(
            Constant(value, value.name in builder.mutated) for value in self.constants.values()
        )
        return Program(
            re.sub(r"\W", "_", self.source.name),
            tuple(inputs),
            Block((), lines),
            constants,
            kernels,
            header=_header(self.options, builder.device_types()),
            store=ConstantStore(dict(builder.constants)),
        )

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


def _needed(nodes: list[Node]) -> set[Node]:
    """Returns the nodes that the output, or an effect, depends on."""
    needed: set[Node] = set()
    for node in reversed(nodes):
        if node.op == "output" or node in needed or _has_effect(node):
            needed.add(node)
            needed.update(node.all_input_nodes)
    return needed


def _has_effect(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and not operator_facts(node.target).is_pure
