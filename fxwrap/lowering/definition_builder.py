"""The first pass over a graph: each node becomes definitions, a number, or an extern call with its decline reason."""

from __future__ import annotations

import operator
from collections.abc import Collection, Hashable, Sequence

import sympy
import torch
from torch.fx import Node

from fxwrap.fx_passes.effects import (
    FLEX_OPERATORS,
    aliased_operands,
    has_ordered_effect,
    launches_user_kernel,
    mutated_operands,
    operator_label,
)
from fxwrap.fx_passes.matmuls.rewrites import matrix_bytes
from fxwrap.loop_ir import FLOAT8, KERNEL_DTYPES, Scalar
from fxwrap.lowering.builder import (
    Builder,
    FakeValue,
    LoweringRequest,
    NodeCoverage,
    NodeOperand,
    node_coverage,
    node_error,
)
from fxwrap.lowering.calls.nodes import is_in_operand_memory, literal, returns_tensors
from fxwrap.lowering.calls.reinplace import ReinplacePlan
from fxwrap.lowering.calls.slice_writes import SliceWrite, resolve_slice
from fxwrap.lowering.control.collectives import in_flight_operands, received_operands
from fxwrap.lowering.decline_reasons import Arguments, DeclineRules
from fxwrap.lowering.fusion.definitions import (
    Definition,
    DefinitionLabel,
    ElementReader,
    Indices,
    InPlaceScatter,
    InPlaceStore,
    Scattered,
    Stored,
    Viewed,
    broadcast_indices,
    copy_definition,
    definitions_in,
    replace_definitions,
    symbols_in,
    unwrap_views,
)
from fxwrap.lowering.graph_definitions import (
    CallStep,
    DefinitionOperand,
    DefinitionStorages,
    GraphDefinitions,
    RuleResult,
    as_definition,
    library_call_reason,
)
from fxwrap.lowering.rules import LIBRARY_RULES, RULES, Declined, LoweringResult, OperatorCall
from fxwrap.lowering.symbols.cpu_scalars import CpuScalarReads, ScalarRead
from fxwrap.lowering.symbols.unbacked import derive_symbols, is_asserted_read
from fxwrap.symbolic import make_symbol
from fxwrap.torch_compat import HigherOrderOperator, OpOverload, is_opaque, storage_identity
from fxwrap.wrapper_ir import TensorType, Value
from fxwrap.wrapper_ir.operators import OperatorSchema, is_assertion, operator_schema


class DefinitionBuilder:
    """Defines a graph's nodes in order."""

    def __init__(self, builder: Builder, request: LoweringRequest, reinplacing: ReinplacePlan) -> None:
        self.builder = builder
        self.options = request.options
        self.tuned_devices = request.tuned_devices
        self.reinplacing = reinplacing
        self.operands: dict[Node, DefinitionOperand] = {}
        self.shared: dict[Hashable, Definition] = {}
        self.in_memory: set[Definition] = set()
        self.steps: list[CallStep] = []
        self.coverage: list[NodeCoverage] = []
        self.results: dict[Definition, RuleResult] = {}
        self.labels: dict[Definition, DefinitionLabel] = {}
        self.mutations: list[tuple[Definition, int]] = []
        self.slice_writes: dict[Definition, Node] = {}
        self.storages = DefinitionStorages()
        self.stored_types: dict[Stored, TensorType] = {}
        self._bound: set[sympy.Symbol] = set()
        self._scalars = CpuScalarReads(builder.state.symbols.fresh, self._operator_of)
        self._read: set[ScalarRead] = set()
        self._specs = request.options.device_specs()
        self._decline_rules = DeclineRules(request, self._specs)

    def result(self) -> GraphDefinitions:
        """Returns the definitions of the nodes so far."""
        return GraphDefinitions(
            self.operands, self.steps, self.results, self.labels, self.stored_types, self.mutations, self.slice_writes,
            self.reinplacing, self.storages, self.coverage, self.in_memory,
        )  # fmt: skip

    def add_input(self, node: Node, value: NodeOperand) -> None:
        """Adds a placeholder or attribute: a tensor in memory, or a literal."""
        if isinstance(value, Value) and isinstance(value.type, TensorType):
            self.operands[node] = self._stored(self.builder.storages.fake(value), node.name)
        else:
            self.operands[node] = value

    def add_call(self, node: Node, position: int) -> None:
        """Adds a call_function node. Raises GraphError if it needs a symbol that no earlier node defines."""
        self._define_node(node, position)
        is_known = self.builder.symbols.is_known
        missing = {item.name for item in symbols_in(self.operands[node]) - self._bound if not is_known(item)}
        if missing:
            reason = f"it needs the symbol {min(missing)}, which no earlier node defines"
            raise node_error(node, reason, "Compute the number, or read it from a tensor, before")

    def _define_node(self, node: Node, position: int) -> None:
        builder, target = self.builder, node.target
        if not self.options.runtime_asserts and is_assertion(target):
            self.operands[node] = None
            return
        derive_symbols(builder, node)
        fake = builder.fakes[node]
        if target is operator.getitem and isinstance(self.operands.get(node.args[0]), tuple | dict):  # type: ignore[arg-type]
            self.operands[node] = self.operands[node.args[0]][node.args[1]]  # type: ignore[index]
        elif isinstance(target, HigherOrderOperator):
            if operator_label(target) in FLEX_OPERATORS:
                self._define_extern_call(node, position, fake, "", "fused")
                return
            reason = "it runs graphs or an operator of its own"
            self._define_extern_call(
                node, position, fake, "it is a user kernel" if launches_user_kernel(node) else reason
            )
        elif node in self.reinplacing.copies:
            self.operands[node] = self.operands[node.args[0]]  # type: ignore[index]
            self._share_storage(node, fake)
            self._record_coverage(node, "view")
        elif node in self.reinplacing.parts:
            self.operands[node] = None  # the call that it is a part of writes its result
            self._record_coverage(node, "view")
        elif node in self.reinplacing.slice_writes:
            self._define_slice_write(node, self.reinplacing.slice_writes[node], position)
            self._share_storage(node, fake)
        elif node in self.reinplacing.written:
            self._define_reinplaced(node, position, fake)
            for key, operand in self.reinplacing.written[node].items():
                self._share_storage(operand, fake if key is None else fake[key])
        elif not self._define_copy(node, position):
            self._define_operator(node, position, fake)

    def _define_operator(self, node: Node, position: int, fake: FakeValue) -> None:
        reason: str | None = library_call_reason(str(node.target)) or "it returns a number"
        if returns_tensors(fake):
            if isinstance(node.target, OpOverload):
                reason = self._define(node, node.target, fake, position)
        elif not isinstance(node.target, OpOverload) or (self._is_known_number(fake) and not is_asserted_read(node)):
            self.operands[node] = self.builder.symbols.expression(fake)
            self._record_coverage(node, "number")
            return
        if reason is not None:
            self._define_extern_call(node, position, fake, reason)

    def _record_coverage(self, node: Node, kind: str, reason: str = "") -> None:
        self.coverage.append(node_coverage(node, self.builder.qualified(node), kind, reason))

    def _operator_of(self, definition: Definition) -> str:
        label = self.labels.get(definition)
        return "" if label is None else label.operator

    # --- definitions ------------------------------------------------------------------------------------------------

    def _define(self, node: Node, target: OpOverload, fake: FakeValue, position: int) -> str | None:
        """Defines a node by its rule; returns the decline reason if it stays an extern call."""
        applied = self._apply_rule(node, target, fake)
        if isinstance(applied, str):
            return applied
        schema, result, reads = applied
        self._add_scalar_reads(reads, position)
        if isinstance(result, Definition):
            self.operands[node] = self._register(node, schema, result, fake, position, node.name)
        else:
            self.operands[node] = tuple([
                None if item is None else self._register(node, schema, item, fake[i], position, f"{node.name}_{i}", i)
                for i, item in enumerate(result)
            ])  # fmt: skip
        definitions = definitions_in(self.operands[node])
        self._record_coverage(node, "view" if all(isinstance(item, Viewed) for item in definitions) else "fused")
        return None

    def _apply_rule(
        self, node: Node, target: OpOverload, fake: FakeValue, base: Definition | None = None
    ) -> tuple[OperatorSchema, LoweringResult, list[ScalarRead]] | str:
        """Returns the operator, its rule's result, and the reads that this depends on; or the decline reason.

        With `base`, that is the first argument.
        """
        schema, arguments = self._arguments(node, target)
        if base is not None:
            arguments = ((base, *arguments[0][1:]), arguments[1])
        arguments, reads = self._replace_cpu_scalars(node, fake, arguments)
        reason = self._decline_rules.reason(self.builder.qualified(node), node.target, schema, fake, arguments)
        if reason is not None:
            return reason
        first = fake if isinstance(fake, torch.Tensor) else next(item for item in fake if item is not None)
        spec = self._specs[first.device.type]
        (positional, keywords), symbols = arguments, self.builder.symbols
        call = OperatorCall(
            schema.name, positional, dict(keywords), fake, first.device, symbols.sizes, spec, symbols.may_lack,
            self.options.matmul_kernels, first.device.type in self.tuned_devices, self.shared, self.in_memory,
            matrix_bytes(node, self.builder.fakes) if self.options.combo_kernels and spec.combo_kernel_bytes else None,
        )  # fmt: skip
        try:
            return schema, (RULES.get(schema.name) or LIBRARY_RULES[schema.name])(call), reads
        except Declined as declined:
            return str(declined)

    def _register(
        self,
        node: Node,
        schema: OperatorSchema,
        definition: Definition,
        fake: torch.Tensor,
        position: int,
        name: str,
        index: int = 0,
    ) -> Definition:
        """Records a rule's definition under the node's name; a view of an operator that copies becomes a copy."""
        is_view = schema.aliased_argument is not None and not schema.may_alias
        if isinstance(definition, Viewed) and not is_view and not is_in_operand_memory(node, fake, self.builder.fakes):
            definition = copy_definition(definition)
        if definition not in self.results:
            self.labels[definition] = DefinitionLabel(name, schema.name)
            self.results[definition] = RuleResult(node, position, fake, index)
            if not isinstance(definition, Viewed):
                self.storages.add(definition, storage_identity(fake))
        return definition

    def _can_fuse(self, node: Node) -> bool:
        return self._decline_rules.can_fuse(self.builder.qualified(node))

    def _arguments(self, node: Node, target: OpOverload) -> tuple[OperatorSchema, Arguments]:
        schema = operator_schema(target)
        arguments = tuple([self._operand(argument, node) for argument in node.args])
        keywords = tuple([(name, self._operand(argument, node)) for name, argument in node.kwargs.items()])
        if schema.replacement is not None:
            target, arguments, keywords = schema.replacement(target, arguments, keywords)
            schema = operator_schema(target)
        return schema, (arguments, keywords)

    def _replace_cpu_scalars(
        self, node: Node, fake: FakeValue, arguments: Arguments
    ) -> tuple[Arguments, list[ScalarRead]]:
        """Replaces zero-dimensional CPU tensors by scalars if all other tensors are on one other device.

        Returns the arguments, and the reads that they depend on.
        """
        results = fake if isinstance(fake, tuple | list) else (fake,)
        devices = [item.device for item in results if isinstance(item, torch.Tensor)]
        operands = [(self.operands[operand], operand) for operand in node.all_input_nodes]
        nodes = {item: operand for item, operand in operands if isinstance(item, Definition)}
        replacements, reads = self._scalars.replacements(list(definitions_in(arguments)), devices, nodes)
        self.labels |= {new: self.labels[old] for old, new in replacements.items()}
        return (replace_definitions(arguments, replacements) if replacements else arguments), reads

    def _add_scalar_reads(self, reads: Sequence[ScalarRead], position: int) -> None:
        """Adds the steps of the reads that have none yet."""
        for read in reads:
            if read not in self._read:
                self._read.add(read)
                symbol = make_symbol(read.symbol.name)
                self._bound.add(symbol)
                bound = frozenset((symbol,))
                self.steps.append(CallStep(read.node, position, [read.definition], bound=bound, scalar_read=read))

    def _operand(self, argument: object, node: Node) -> DefinitionOperand:
        if isinstance(argument, Node):
            return self.operands[argument]
        if isinstance(argument, list | tuple):
            return tuple([self._operand(item, node) for item in argument])
        return literal(self.builder, argument, node)

    # --- stores in place --------------------------------------------------------------------------------------------

    def _share_storage(self, node: Node, fake: FakeValue) -> None:
        """Records that views of a result are in the memory of a node's definition, which a call writes in place."""
        assert isinstance(fake, torch.Tensor), "a call writes a tensor in place"
        self.storages.share(fake, unwrap_views(as_definition(self.operands[node])))

    def _define_copy(self, node: Node, position: int) -> bool:
        """Defines a `copy_` of a computed tensor into a stored one: the kernel that computes it writes there."""
        if node.target is not torch.ops.aten.copy_.default or not self._can_fuse(node):
            return False
        target, value = [self.operands.get(argument) for argument in node.args[:2]]  # type: ignore[arg-type]
        if not isinstance(target, Stored) or not isinstance(value, Definition):
            return False
        if not self._store_in_place(target, value, node, position, position):
            return False
        self.operands[node] = target
        self._record_coverage(node, "fused")
        return True

    def _define_slice_write(self, node: Node, write: SliceWrite, position: int) -> None:
        """Defines a write of a slice: by the kernel that computes the source, or by a call that copies it.

        Readers of the tensor's old content, the source included, are materialised before: a kernel may not read
        elements around those that it overwrites.
        """
        whole = self.operands[node] = as_definition(self.operands[write.base])
        if write.source is None:
            self._record_coverage(node, "view")
            return
        fake = self.builder.fakes[write.base]
        resolved = resolve_slice(self.builder, self.builder.symbols.tensor_type(fake), write)
        type_ = resolved.type
        symbols = symbols_in([type_.sizes, type_.storage_offset, [check.condition for check in resolved.checks]])
        target = self._new_stored(type_, f"{node.name}_window")
        self.storages.add_alias(target, whole)
        self.slice_writes[target] = node
        if write.scatters:
            if self._can_fuse(node) and self._scatter_in_place(target, write.source, node, position, symbols):
                self._record_coverage(node, "fused")
                return
            self._define_operator(write.source, position, self.builder.fakes[write.source])
        value = as_definition(self.operands[write.source])
        aliases = self.storages.aliases_of(whole)
        fuses = self._can_fuse(node) and unwrap_views(value) not in aliases
        if fuses and self._store_in_place(target, value, node, position, position - 1, symbols):
            self._record_coverage(node, "fused")
            return
        self._overwrite(aliases, position)
        step = CallStep(node, position, [value, whole], writes=aliases, symbols=frozenset(symbols_in(value) | symbols))
        self.steps.append(step)
        self._record_coverage(node, "call", "it overwrites a slice of its operand")

    def _define_reinplaced(self, node: Node, position: int, fake: FakeValue) -> None:
        """Defines a call that writes its operand in place: a kernel scatters into the operand if it can."""
        operand = self.reinplacing.written[node].get(None)
        target = None if operand is None else self.operands[operand]
        if isinstance(target, Stored) and self._scatter_in_place(target, node, node, position, symbols_in(target)):
            self.operands[node] = target
            self._record_coverage(node, "fused")
        else:
            self._define_extern_call(node, position, fake, "it writes its operand in place")

    def _scatter_in_place(
        self, target: Stored, call: Node, node: Node, position: int, symbols: Collection[sympy.Symbol]
    ) -> bool:
        """Defines a call at indirect indices as a scatter into a stored tensor if it has such a rule.

        Returns whether it has. `node` is the result in the graph. Readers of the tensor's old content are materialised
        before: the scatter writes in any order.
        """
        if not isinstance(call.target, OpOverload):
            return False
        applied = self._apply_rule(call, call.target, self.builder.fakes[call], target)
        if isinstance(applied, str):
            return False
        schema, result, reads = applied
        if not isinstance(result, Scattered) or result.initial is not target:
            return False
        self._add_scalar_reads(reads, position)
        scatter = InPlaceScatter(
            result.sizes, result.dtype, result.device, target, result.space, result.mode, result.bodies, target,
            frozenset(symbols),
        )  # fmt: skip
        self.labels[scatter] = DefinitionLabel(node.name, schema.name)
        self.results[scatter] = RuleResult(node, position)
        self._overwrite(self.storages.aliases_of(target), position - 1)
        return True

    def _store_in_place(
        self,
        target: Stored,
        value: Definition,
        node: Node,
        position: int,
        last_read: int,
        symbols: Collection[sympy.Symbol] = (),
    ) -> bool:
        """Defines a store of `value` into a stored tensor if one kernel can do it; returns whether it can.

        Readers of that memory up to position `last_read` are materialised before. `symbols` are those of the target.
        """
        computed = not isinstance(unwrap_views(value), Stored)
        if not computed or not {target.dtype, value.dtype} <= KERNEL_DTYPES or target.device != value.device:
            return False
        if not self._decline_rules.has_kernels(target.device) or self._may_overlap(target):
            return False
        if FLOAT8 & {target.dtype, value.dtype} and not self._specs[target.device.type].float8_kernels:
            return False

        def body(reader: ElementReader, indices: Indices) -> Scalar:
            return reader.load(value, broadcast_indices(value.sizes, indices)).to(target.compute_dtype)

        store = InPlaceStore(target.sizes, target.dtype, target.device, body, target, frozenset(symbols))
        self.labels[store] = DefinitionLabel(node.name, "aten.copy_.default")
        self.results[store] = RuleResult(node, position)
        self._overwrite(self.storages.aliases_of(target), last_read)
        return True

    def _overwrite(self, definitions: Collection[Definition], position: int) -> None:
        """Records that definitions are overwritten at a position."""
        self.mutations.extend((definition, position) for definition in definitions)
        self._scalars.invalidate(definitions)

    # --- calls ------------------------------------------------------------------------------------------------------

    def _define_extern_call(
        self, node: Node, position: int, fake: FakeValue, reason: str, coverage: str = "call"
    ) -> None:
        if isinstance(node.target, HigherOrderOperator):  # its arguments contain graphs and operators
            arguments = [self.operands[operand] for operand in node.all_input_nodes]
        else:
            arguments = [self._operand(argument, node) for argument in (*node.args, *node.kwargs.values())]
            arguments += [self.operands[operand] for operand in in_flight_operands(node)]
        writes = self._written_definitions(node)
        self._overwrite(writes, position)
        defines: list[Definition] = []
        self.operands[node] = self._results(node, fake, defines)
        symbols = symbols_in(arguments)
        bound = {item for item in symbols_in(self.operands[node]) if not self.builder.symbols.is_known(item)}
        bound -= self._bound
        self._bound |= bound
        if is_assertion(node.target):
            bound |= symbols  # uses of these symbols follow the check
        self.steps.append(
            CallStep(
                node, position, list(definitions_in(arguments)), defines, writes, frozenset(symbols), frozenset(bound),
                has_ordered_effect(node),
            )
        )  # fmt: skip
        self._record_coverage(node, coverage, reason)

    def _written_definitions(self, node: Node) -> list[Definition]:
        """Returns every definition in the memory that a call writes."""
        written: dict[Definition, None] = {}
        for item in (*mutated_operands(node, self.builder.fakes), *received_operands(node, self.builder.fakes)):
            written |= dict.fromkeys(self.storages.on_storage(self.builder.fakes[item]))
        for item in self.reinplacing.written.get(node, {}).values():
            written |= dict.fromkeys(self.storages.aliases_of(as_definition(self.operands[item])))
        return list(written)

    def _results(self, node: Node, fake: FakeValue, defines: list[Definition]) -> DefinitionOperand:
        """Returns the operand of an extern call; adds its tensors to `defines`."""

        def make(item: FakeValue, name: str) -> DefinitionOperand:
            if isinstance(item, torch.Tensor):
                defines.append(self._stored(item, name))
                return defines[-1]
            if isinstance(item, tuple | list):
                return tuple([make(part, f"{name}_{number}") for number, part in enumerate(item)])
            if isinstance(item, dict):  # the tensors that a user kernel writes, by parameter
                return {key: make(part, f"{name}_{key}") for key, part in item.items()}
            return None if item is None else self.builder.symbols.expression(item)

        written = self.reinplacing.written.get(node)
        if written is not None:  # these results alias the operands that the call writes
            if None in written:
                return self.operands[written[None]]
            items = fake.items() if isinstance(fake, dict) else enumerate(fake)
            parts = {key: self.operands[written[key]] if key in written else make(item, f"{node.name}_{key}")
                     for key, item in items}  # fmt: skip
            return parts if isinstance(fake, dict) else tuple(parts.values())
        results = make(fake, node.name)
        for index, operand in aliased_operands(node).items():
            assert isinstance(results, tuple)
            self.storages.add(as_definition(results[index]), storage_identity(self.builder.fakes[operand]))
        return results

    def _stored(self, fake: torch.Tensor, name: str) -> Stored:
        """Returns a definition for a tensor in memory."""
        definition = self._new_stored(self.builder.symbols.tensor_type(fake), name)
        self.storages.add(definition, storage_identity(fake))
        return definition

    def _new_stored(self, type_: TensorType, name: str) -> Stored:
        definition = Stored(type_.sizes, type_.dtype, type_.device)
        self.labels[definition] = DefinitionLabel(name)
        self.stored_types[definition] = type_
        return definition

    def _may_overlap(self, target: Stored) -> bool:
        """Whether elements of a tensor share memory; True for one of unknown strides."""
        type_ = self.stored_types.get(target)
        return type_ is None or any(
            stride == 0 for size, stride in zip(type_.sizes, type_.strides, strict=True) if size != 1
        )

    def _is_known_number(self, fake: FakeValue) -> bool:
        if fake is None or isinstance(fake, torch.Tensor | tuple | list) or is_opaque(fake):
            return False
        symbols = self.builder.symbols
        return symbols.unknown(symbols.expression(fake)) <= self._bound
