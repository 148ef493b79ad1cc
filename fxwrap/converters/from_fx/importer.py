"""Import of FX graphs that `to_fx` emitted, also after rewrites; `docs/fx_form.md` has the form of each line."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import sympy
import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from fxwrap import torch_compat
from fxwrap import wrapper_ir as ir
from fxwrap.converters.emitted_program import EmittedProgram
from fxwrap.converters.from_fx.calls import import_getitem, import_operator_call
from fxwrap.converters.from_fx.control import CONTROL, find_absorbed_nodes, import_replayed_call
from fxwrap.converters.from_fx.effects import EFFECTS, import_wait
from fxwrap.converters.from_fx.functional import FUNCTIONAL, import_as_write
from fxwrap.converters.from_fx.graph_importer import GraphImporter, ImportState
from fxwrap.converters.from_fx.inlining import constant_attributes, inline_subgraphs
from fxwrap.converters.from_fx.kernel_table import KernelTable
from fxwrap.converters.from_fx.kernels import KERNELS
from fxwrap.converters.from_fx.memory import MEMORY
from fxwrap.converters.from_fx.nodes import failure, target_text
from fxwrap.converters.from_fx.numbers import NUMBERS, import_arithmetic, import_conditional
from fxwrap.converters.from_fx.regions import import_region_call
from fxwrap.converters.from_fx.symbols import ImportedSymbols
from fxwrap.converters.fx.regions import called_region
from fxwrap.errors import ArgumentError, FxImportError, VerifyError
from fxwrap.garbage_collection import gc_paused
from fxwrap.inference import CallInference
from fxwrap.lines import Return
from fxwrap.lines.frees import insert_frees
from fxwrap.symbolic import SymbolInfo, make_symbol
from fxwrap.torch_compat.exported import unlifted_module

_IMPORTERS = {**NUMBERS, **MEMORY, **KERNELS, **CONTROL, **EFFECTS, **FUNCTIONAL}


@gc_paused()
def from_fx(
    graph: GraphModule | EmittedProgram | ExportedProgram,
    *,
    kernels: Iterable[ir.KernelDefinition] = (),
    ownership: Mapping[str, ir.Ownership] | None = None,
    name: str = "",
) -> ir.Program:
    """Imports an FX graph that `to_fx` emitted, also after it was copied, rewritten or traced again.

    Args:
        graph: the GraphModule, the result of `to_fx`, or that of `fxwrap.fx.export`, also loaded. It is not changed.
        kernels: definitions of kernels that the graph launches, besides those of its metadata and those that this
            process has emitted.
        ownership: the ownership of inputs, by the names of their placeholders; by default that of the metadata, or
            borrowed. A borrowed input that the graph writes becomes mutable; an input without declared ownership whose
            memory the graph consumes becomes owned.
        name: the program's name, by default that of the metadata.

    Returns a verified program, with frees after the last use of each root. Raises FxImportError, which names the node
    and a remedy, for a node without a line and for a graph whose program would break a rule of the IR; and
    ArgumentError for another object.
    """
    remedy = "Pass the graph_module of fxwrap.to_fx(program), or what a tool made of it"
    ArgumentError.check("fxwrap.from_fx", "graph", graph, (GraphModule, EmittedProgram, ExportedProgram), remedy)
    module: GraphModule
    match graph:
        case EmittedProgram():
            module = graph.graph_module  # type: ignore[attr-defined]
        case ExportedProgram():
            module = unlifted_module(graph)
        case _:
            module = graph
    with torch_compat.without_fake_mode():
        return _ProgramImport(inline_subgraphs(module), kernels, ownership or {}, name).program()


class _ProgramImport:
    """The import of one module: its inputs, constants, body and outputs."""

    def __init__(
        self,
        module: GraphModule,
        kernels: Iterable[ir.KernelDefinition],
        ownership: Mapping[str, ir.Ownership],
        name: str,
    ) -> None:
        self.module = module
        metadata = getattr(module, "meta", {})
        self.metadata: Mapping[str, Any] = metadata.get("fxwrap") or metadata.get("custom", {}).get("fxwrap", {})
        self.ownership = ownership
        self.name = name or self.metadata.get("name", "program")
        counts = Counter(_defined_symbol_names(module))
        ambiguous = frozenset([symbol for symbol, count in counts.items() if count > 1])
        declared = {name: SymbolInfo(**info) for name, info in self.metadata.get("declared_symbols", {}).items()}
        symbols = ImportedSymbols(self.metadata.get("symbols", {}), frozenset(counts), ambiguous, declared)
        known = KernelTable([*self.metadata.get("kernels", {}).values(), *kernels])
        self.state = ImportState(symbols, CallInference(symbols.info, symbols.fresh), known)
        self.importer = GraphImporter(self.state, module, import_call, frozenset())
        self.inputs: list[tuple[Node, ir.Value | SymbolInfo]] = []

    def program(self) -> ir.Program:
        importer, nodes = self.importer, list(self.module.graph.nodes)
        for node in nodes:
            if node.op == "placeholder":
                self._placeholder(node)
        order = {path: index for index, path in enumerate(self.metadata.get("constants", ()))}
        for path, node, payload in sorted(constant_attributes(self.module), key=lambda item: order.get(item[0], 0)):
            self._constant(path, node, payload)
        find_absorbed_nodes(importer)
        for node in nodes:
            if node.op not in ("placeholder", "output"):
                importer.import_node(node)
        output = self.module.graph.output_node()
        importer.emit_comments(output)
        returned = tuple(ir.leaves(importer.argument(output, _flat_outputs(output))))
        importer.emit(Return(returned), output)
        return self._verify(self._build_program())

    # --- inputs and constants ---------------------------------------------------------------------------------------

    def _placeholder(self, node: Node) -> None:
        importer, info, val = self.importer, node.meta.get("fxwrap_symbol"), node.meta.get("val")
        is_number = isinstance(val, int | float | torch.SymInt | torch.SymFloat | torch.SymBool)
        known = node.meta.get("fxwrap_type")
        if node.name in self.metadata.get("constant_inputs", ()):  # of a loaded program, which has no such metadata
            known = ir.ScalarType(type(val).__name__)
        if info is not None or (is_number and known is None):
            self._number(node, info, val)
            return
        value = importer.value(node.name, self._type(node, known, val))
        self.inputs.append((node, value))
        importer.env[node] = None if val is None and isinstance(value.type, ir.OpaqueType) and known is None else value
        importer.define_external(value)

    def _number(self, node: Node, info: SymbolInfo | None, val: object) -> None:
        symbols = self.state.symbols
        if info is None:
            number = symbols.import_number(val)
            prefix = "b" if isinstance(val, bool) else "f" if isinstance(val, float) else "s"
            info = symbols.info(number.name) if isinstance(number, sympy.Symbol) else symbols.fresh(prefix)
        info = symbols.reserve(info)
        symbols.defined.add(info.name)
        symbols.map_torch_symbol(val, make_symbol(info.name))
        self.importer.defined_symbols.add(info.name)
        self.importer.set_number(node, make_symbol(info.name))
        self.inputs.append((node, info))

    def _type(self, node: Node, known: ir.Type | None, val: object) -> ir.Type:
        """Returns an input's type: the original one, unless the metadata contradicts it."""
        if torch_compat.is_opaque(val):
            return ir.OpaqueType(torch_compat.opaque_class_name(val))
        if not isinstance(val, torch.Tensor):
            if known is None and val is not None:
                reason = f"its value is a {type(val).__name__}"
                raise failure(node, reason, "Use one placeholder for each tensor or number")
            if known is None and node.users:
                raise failure(node, "its type is unknown, since it has no meta['val']", "Set it to a fake tensor")
            return known or ir.OpaqueType("NoneType")
        if not isinstance(val, torch_compat.FakeTensor) and val.layout is not torch.strided:
            raise failure(node, f"its layout is {val.layout}", "Only strided tensors are compiled")
        if isinstance(known, ir.TensorType) and self._agrees_with_metadata(val, known):
            return known
        return self.state.symbols.type_of(val)

    def _agrees_with_metadata(self, val: torch.Tensor, known: ir.TensorType) -> bool:
        """Whether metadata agrees with a type in everything static; plain meta tensors have no device."""
        same_device = val.device == known.device or (val.is_meta and not isinstance(val, torch_compat.FakeTensor))
        if not same_device or (val.dtype, val.dim()) != (known.dtype, len(known.sizes)):
            return False
        layout = (tuple(val.shape), val.stride())
        sizes, strides = (tuple([n if type(n) is int else _ANY for n in numbers]) for numbers in layout)
        return ir.types_agree(ir.TensorType(val.dtype, sizes, strides, known.device), _strided_type(known))

    def _constant(self, path: str, node: Node, payload: Any) -> None:
        """Adds the constant for an attribute of the module; one that several submodules share is one constant."""
        importer, state = self.importer, self.state
        is_nested = node.graph is not self.module.graph
        if path in state.constants or (is_nested and id(payload) in importer.captured):
            return
        type_ = _constant_type(payload, node.meta.get("fxwrap_type"))
        value = state.constants[path] = importer.value(path.replace(".", "_"), type_)
        importer.captured.setdefault(id(payload), value)
        if not is_nested:
            importer.attributes[path] = value
        state.payloads[value.name] = payload
        if node.meta.get("fxwrap_mutable"):
            state.declared_mutable.add(value.name)
        importer.define_external(value)

    # --- the program ------------------------------------------------------------------------------------------------

    def _build_program(self) -> ir.Program:
        importer, state = self.importer, self.state
        visible = [value for _, value in self.inputs if isinstance(value, ir.Value)] + [*state.constants.values()]
        owned = [value.name for node, value in self.inputs if self._declared_ownership(node) in _CONSUMABLE]
        lines = importer.coalesced_lines(visible, owned)
        root_of = ir.alias_roots(lines, visible)
        written = {root_of[value.name] for line in lines for value in ir.writes(line)}
        consumed = {value.name for line in lines for value in ir.consumed(line)}
        inputs = tuple(
            [ir.Input(value, self._ownership(node, value, written, consumed)) for node, value in self.inputs]
        )
        mutable = state.declared_mutable | written
        return ir.Program(
            self.name,
            inputs,
            ir.Block((), ir.retarget_releases(insert_frees(lines, visible, ir.released_inputs(inputs)), visible)),
            tuple([ir.ProgramConstant(item, item.name in mutable) for item in state.constants.values()]),
            tuple(state.kernels.used.values()),
            tuple(state.functions.items()),
            tuple([(key, text) for key, text in self.metadata.get("header", ())]),
            ir.ConstantStore(dict(state.payloads)),
        )

    def _ownership(
        self, node: Node, value: ir.Value | SymbolInfo, written: set[str], consumed: set[str]
    ) -> ir.Ownership:
        if not isinstance(value, ir.Value):
            return ir.Ownership.BORROWED
        ownership = self._declared_ownership(node)
        if ownership is None and value.name in consumed:
            return ir.Ownership.OWNED
        ownership = ownership or ir.Ownership.BORROWED
        return ir.Ownership.MUTABLE if ownership is ir.Ownership.BORROWED and value.name in written else ownership

    def _declared_ownership(self, node: Node) -> ir.Ownership | None:
        declared = self.ownership.get(node.name, node.meta.get("fxwrap_ownership"))
        return None if declared is None else ir.Ownership(declared)

    def _verify(self, program: ir.Program) -> ir.Program:
        try:
            return ir.verify(program)
        except VerifyError as error:
            shown = next((text[2:] for text in error.context.splitlines() if text.startswith("> ")), "")
            node = self._node_of(shown, program)
            remedy = f"Correct the graph there:\n{error.context}"
            name, target = ("", "") if node is None else (node.name, target_text(node))
            reason = f"its line breaks the rule '{error.rule}': {error.reason}"
            raise FxImportError(name, target, reason, remedy) from error

    def _node_of(self, shown: str, program: ir.Program) -> Node | None:
        """Returns the node of a line, by its text in an error."""
        for line in program.lines():
            if shown and ir.line_text(line) == shown:
                return self.state.node_of.get(id(line))
        return None


_CONSUMABLE = (ir.Ownership.OWNED,)
"""The ownership of inputs whose content the program need not preserve."""

_ANY = make_symbol("s0")
"""Any symbolic size."""


def _constant_type(payload: Any, known: ir.Type | None) -> ir.Type:
    """Returns the type of a constant: the original one if it still holds."""
    if not isinstance(payload, torch.Tensor):
        return ir.OpaqueType(torch_compat.opaque_class_name(payload))
    type_ = ir.TensorType(payload.dtype, tuple(payload.shape), payload.stride(), payload.device)
    return known if isinstance(known, ir.TensorType) and ir.types_agree(_strided_type(known), type_) else type_


def _strided_type(type_: ir.TensorType) -> ir.TensorType:
    return ir.TensorType(type_.dtype, type_.sizes, type_.strides, type_.device)


def _flat_outputs(output: Node) -> tuple[object, ...] | list[object]:
    """Returns the outputs of a graph. Raises FxImportError if they are nested."""
    tree: object = output.args[0]
    items = tree if isinstance(tree, tuple | list) else (tree,)
    for item in items:
        if isinstance(item, tuple | list | dict | slice):
            raise failure(output, f"one of the graph's outputs is a {type(item).__name__}", "Return a flat tuple")
    return items


def _defined_symbol_names(module: GraphModule) -> Iterator[str]:
    """Yields the name of the symbol that each node of a module defines, its submodules' included."""
    for part in module.modules():
        if not isinstance(part, GraphModule):
            continue
        for node in part.graph.nodes:
            info = node.meta.get("fxwrap_symbol")
            is_operand = node.op == "placeholder" and part is not module and "fxwrap_type" not in node.meta
            if isinstance(info, SymbolInfo) and not is_operand:
                yield info.name


# --- calls ------------------------------------------------------------------------------------------------------------


def import_call(importer: GraphImporter, node: Node) -> None:
    """Imports a call by its target."""
    target: Any = node.target
    import_node = _IMPORTERS.get(target)
    if node.op == "call_module":
        is_region = called_region(importer.module, node) is not None
        (import_region_call if is_region else import_replayed_call)(importer, node)
    elif import_as_write(importer, node):
        return
    elif import_node is not None:
        import_node(importer, node)
    elif target is operator.getitem:
        _import_getitem(importer, node)
    elif isinstance(target, torch_compat.OpOverload):
        is_wait = ir.is_collective(target) and torch_compat.operator_name(target) == "wait_tensor"
        (import_wait if is_wait else import_operator_call)(importer, node)
    elif isinstance(target, torch_compat.HigherOrderOperator):
        raise failure(node, "no line of a program represents this operator", "Decompose it into calls first")
    elif isinstance(target, torch_compat.OpOverloadPacket):
        raise failure(node, "it calls an operator without an overload", f"Call an overload, such as {target}.default")
    else:
        import_arithmetic(importer, node)


def _import_getitem(importer: GraphImporter, node: Node) -> None:
    source = node.args[0]
    if isinstance(source, tuple | list):
        import_conditional(importer, node)
    elif not import_getitem(importer, node):
        shown = source.name if isinstance(source, Node) else repr(source)
        raise failure(node, f"'{shown}' has no items", "Pass the result of a call with several results")
