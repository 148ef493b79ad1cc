"""Lowers one graph, a program's or a block's: definitions, materialisation, fusion, then lines in order."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate

from torch.fx import Node

from fxwrap.devices import language_traits
from fxwrap.errors import GraphError
from fxwrap.fx_passes.effects import has_effect
from fxwrap.fx_passes.prepared_graph import RECOMPUTED
from fxwrap.fx_passes.stream_calls import stream_number
from fxwrap.lowering.builder import Builder, LoweringRequest, node_error
from fxwrap.lowering.calls.reinplace import plan_reinplacing
from fxwrap.lowering.control.streams import StreamPlan
from fxwrap.lowering.definition_builder import DefinitionBuilder
from fxwrap.lowering.emit import LineEmitter
from fxwrap.lowering.fusion.def_use import DefUseChains
from fxwrap.lowering.fusion.definition_plans import DefinitionPlan, MaterialisationPlan
from fxwrap.lowering.fusion.definitions import Definition, InPlaceWrite, Reduced, unwrap_views
from fxwrap.lowering.fusion.fusion import Fusion, ScheduledItem
from fxwrap.lowering.fusion.materialise import plan_materialisation
from fxwrap.lowering.fusion.reader_order import move_readers_before_overwriting
from fxwrap.lowering.graph_definitions import CallStep, GraphDefinitions
from fxwrap.lowering.kernel_schedules import KernelSchedules, is_matmul
from fxwrap.lowering.scatter_layouts import lay_out_scatters
from fxwrap.lowering.symbols.table import SizeHints
from fxwrap.symbolic import Size
from fxwrap.wrapper_ir import TensorType, Value

_EFFECTS = "effects"
"""A token that every operator call with an effect depends on and redefines: such calls keep their order."""


@dataclass(eq=False)
class GraphLowering:
    """The lowering of one graph, whose placeholders already have operands in the builder's `env`.

    `lower_attribute` adds the operand of a `get_attr` node there, `lower_higher_order` lowers a call of a higher-order
    operator. `returns_mutated_inputs` is whether the graph may return a mutated placeholder itself.
    """

    nodes: Sequence[Node]
    builder: Builder
    request: LoweringRequest
    lower_attribute: Callable[[Node], None]
    lower_higher_order: Callable[[Node, Collection[str]], None]
    returns_mutated_inputs: bool = False

    def __post_init__(self) -> None:
        self.output = next(node for node in self.nodes if node.op == "output")
        tracker = self.builder.buffer.streams
        self.streams: StreamPlan | None = None if tracker is None else tracker.plan
        self._specs = self.request.options.device_specs()

    def lower(self, must_preserve: Callable[[Value], bool], read_only: Set[str] = frozenset()) -> Callable[[Size], int]:
        """Emits the graph's lines; afterwards every operand of the output is in the builder's `env`.

        `must_preserve` returns whether the memory of an input or constant must keep its content; `read_only` are the
        names of the roots that no call may write, to which `lower_attribute` may add. Returns the hint of sizes.
        """
        definitions = self._define()
        hint = SizeHints(self.builder.state.symbols)
        plan = self._materialise(definitions, hint)
        schedules = KernelSchedules(self.builder, definitions, plan, self.request, hint, self.nodes)
        fusion = self._schedule(definitions, schedules)
        mutated = {definition for definition, _ in definitions.mutations}
        preserved = self._preserved(definitions, must_preserve) | mutated
        items = move_readers_before_overwriting(fusion, preserved, mutated)
        kernels = [item.kernel for item in items if item.kernel is not None]
        schedules = lay_out_scatters(schedules, kernels)
        definitions = schedules.definitions
        stored = {definition for kernel in kernels for definition in (*kernel.reads, *kernel.operands)}
        last_reader = self._overwritable_after(fusion, items, definitions, preserved)
        emitter = LineEmitter(
            self.builder, definitions, plan, self.request, schedules, last_reader, stored | plan.external,
            self.lower_higher_order, self.nodes,
        )  # fmt: skip
        for item in items:
            self._emit(emitter, item, read_only)
        emitter.raise_declined()
        for node in self.output.all_input_nodes:
            emitter.ensure(node)
        self.builder.await_in_flight(self.builder.in_flight.roots())
        self.builder.state.coverage.extend(definitions.coverage)
        return hint

    def _define(self) -> GraphDefinitions:
        """Defines the live nodes in order."""
        builder, preserved = self.builder, self.request.options.lowerings
        # kernels of matmuls store slices without a launch of their own
        generates = self.request.options.matmul_kernels == "generated"
        reinplacing = plan_reinplacing(self.nodes, builder.fakes, self.returns_mutated_inputs, preserved, generates)
        definitions = DefinitionBuilder(builder, self.request, reinplacing)
        live = _live_nodes(self.nodes)
        for position, node in enumerate(self.nodes):
            if node.op == "get_attr" and node in live:
                self.lower_attribute(node)
            if node.op == "call_function" and node in live:
                try:
                    definitions.add_call(node, position)
                except GraphError as error:
                    raise error if error.node else node_error(node, error.reason, error.remedy) from None
            elif node in builder.env:
                definitions.add_input(node, builder.env[node])
        return definitions.result()

    def _materialise(self, definitions: GraphDefinitions, hint: Callable[[Size], int]) -> MaterialisationPlan:
        """Decides which definitions are materialised."""
        builds_regions = self.request.options.choose_kernel_form is not None or any(
            language_traits(spec.kernel_language).takes_regions for spec in self._specs.values()
        )
        chains = DefUseChains(definitions.labels, definitions.region_operands() if builds_regions else None)
        for definition, result in definitions.results.items():
            chains.add(definition, result.position)
        reads = [definition for step in definitions.steps for definition in step.reads]
        reads += [*definitions.of_nodes(self.output.all_input_nodes), *definitions.in_memory]
        external = {chains.add(unwrap_views(definition), 0).definition for definition in reads}
        external |= {definition for definition in definitions.results if isinstance(definition, InPlaceWrite)}
        external |= self._unfused_operands(chains)
        if self.streams is not None:
            segment = self.streams.segment
            for use in chains.uses.values():
                if any(segment(consumer.position) != segment(use.position) for consumer in use.consumers):
                    external.add(use.definition)
        matmuls = [item for item, label in chains.labels.items() if is_matmul(item, label.operator)]
        return plan_materialisation(chains, external, definitions.mutations, hint, self._specs, matmuls)

    def _unfused_operands(self, chains: DefUseChains) -> set[Definition]:
        """Returns the operands of the matmuls whose operands are materialised."""
        unfused, qualified = self.request.unfused_operands, self.builder.qualified
        return {
            operand
            for use in (chains.uses.values() if unfused else ())
            if isinstance(use.definition, Reduced) and qualified(self.nodes[use.position]) in unfused
            for operand, _ in chains.tracer.trace(use.definition).reads
        }

    def _segments(self) -> Callable[[int], object] | None:
        """Returns the part of the graph of each position, among whose nodes kernels are fused.

        A forward's kernels compute nothing that its backward recomputes, which would need memory until then.
        """
        streams = self.streams
        if not any(RECOMPUTED in node.meta for node in self.nodes):
            return None if streams is None else streams.segment
        backwards = list(accumulate([node.meta.get(RECOMPUTED, 0) for node in self.nodes], max))
        return lambda position: (backwards[position], streams and streams.segment(position))

    def _schedule(self, definitions: GraphDefinitions, schedules: KernelSchedules) -> Fusion:
        """Fuses definitions to kernels, and orders kernels and calls."""
        plan, aliases_of = schedules.plan, definitions.storages.aliases_of
        fusion = Fusion(
            plan, schedules.hint, aliases_of, self._specs, schedules.can_join, schedules.has_parts,
            definitions.are_disjoint, self._segments(),
        )  # fmt: skip
        steps: list[CallStep | DefinitionPlan] = [*definitions.steps, *plan.computed()]
        for step in sorted(steps, key=lambda step: step.position):
            if isinstance(step, DefinitionPlan):
                fusion.define(step)
                continue
            tokens = [_EFFECTS] if step.has_ordered_effect else []
            readers = [item for definition in step.writes for item in fusion.readers(definition)]
            reads = [unwrap_views(definition) for definition in step.reads]
            defines = [*step.defines, *step.bound, *step.writes, *tokens]
            fusion.call(step.scalar_read or step.node, defines, reads, [*step.symbols, *step.writes, *tokens, *readers])
        fusion.divide(schedules.parts)
        return fusion

    def _preserved(self, definitions: GraphDefinitions, must_preserve: Callable[[Value], bool]) -> set[Definition]:
        """Returns the results of the graph, and the inputs and constants that must keep their content."""
        preserved: set[Definition] = {unwrap_views(item) for item in definitions.of_nodes(self.output.all_input_nodes)}
        for node, value in self.builder.env.items():
            if isinstance(value, Value) and isinstance(value.type, TensorType) and must_preserve(value):
                preserved |= set(definitions.of_nodes([node]))
        return preserved

    def _overwritable_after(
        self, fusion: Fusion, items: Sequence[ScheduledItem], definitions: GraphDefinitions, preserved: Set[Definition]
    ) -> dict[Definition, ScheduledItem]:
        """Returns the last reader, in the order of `items`, of each definition that may be overwritten after that."""
        order = {id(item): number for number, item in enumerate(items)}
        last_reader = {}
        for definition in fusion.read_definitions():
            aliases = definitions.storages.aliases_of(definition)  # their memory is freed after the last of them
            if preserved.isdisjoint(aliases):
                readers = [item for alias in aliases for item in fusion.readers(alias)]
                last_reader[definition] = max(readers, key=lambda item: order[id(item)])
        return last_reader

    def _emit(self, emitter: LineEmitter, item: ScheduledItem, read_only: Set[str]) -> None:
        mutated = self.builder.storages.mutated
        count = len(mutated)
        with self.builder.buffer.on_stream(self._stream(item)):
            emitter.emit(item)
        if item.node is not None and len(mutated) != count:
            for name in mutated & read_only:
                reason = f"it writes the constant '{name}', which is not mutable"
                raise node_error(item.node, reason, "Register the tensor as a buffer of the module")

    def _stream(self, item: ScheduledItem) -> int:
        if self.streams is None:
            return 0
        if item.kernel is not None:
            return self.streams.stream(item.kernel.members[0].plan.position)
        return 0 if item.node is None else stream_number(item.node)


def _live_nodes(nodes: Sequence[Node]) -> set[Node]:
    """Returns the nodes that the output, or an effect, depends on."""
    live: set[Node] = set()
    for node in reversed(nodes):
        if node.op == "output" or node in live or has_effect(node):
            live.add(node)
            live.update(node.all_input_nodes)
    return live
