"""FX graphs back as programs: what `to_fx` emits, also after it was rewritten; `docs/fx_form.md` has the forms."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fxwrap.converters import from_fx_calls
from fxwrap.converters.emitted import Emitted
from fxwrap.converters.from_fx_control import CONTROL, call_replayed, find_parts
from fxwrap.converters.from_fx_kernel_table import Kernels
from fxwrap.converters.from_fx_kernels import KERNELS
from fxwrap.converters.from_fx_memory import MEMORY
from fxwrap.converters.from_fx_modules import flattened, held_tensors
from fxwrap.converters.from_fx_numbers import NUMBERS, arithmetic, choice
from fxwrap.converters.from_fx_reader import Reader, Shared, failure, origin_of, target_text
from fxwrap.converters.from_fx_rules import Rules
from fxwrap.converters.from_fx_symbols import Symbols
from fxwrap.converters.from_fx_world import WORLD, wait
from fxwrap.errors import ReadBackError, VerifyError
from fxwrap.lines import Return
from fxwrap.lines.frees import insert_frees
from fxwrap.symbolic import SymbolInfo, make_symbol
from fxwrap.torch_compat import FakeTensor, HigherOrderOperator, OpOverload, OpOverloadPacket, without_fake_mode
from fxwrap.wrapper_ir import (
    GENERATOR,
    Block,
    Constant,
    ConstantStore,
    Input,
    KernelDefinition,
    OpaqueType,
    Ownership,
    Program,
    TensorType,
    Type,
    Value,
    leaves,
    print_line,
    released_inputs,
    types_agree,
    verify,
    writes,
)

_TABLE = {**NUMBERS, **MEMORY, **KERNELS, **CONTROL, **WORLD}


def from_fx(
    graph: GraphModule | Emitted,
    *,
    kernels: Iterable[KernelDefinition] = (),
    ownership: Mapping[str, Ownership] | None = None,
    name: str = "",
) -> Program:
    """Reads an FX graph back: one that `to_fx` gave, also after it was copied, rewritten or traced again.

    Args:
        graph: the GraphModule, or what `to_fx` returned. It is not changed.
        kernels: definitions of kernels that the graph launches, besides those that its metadata holds and those that
            this process has emitted.
        ownership: what the program may do with inputs, by the names of their placeholders. Else it is what the
            metadata says, or borrowed; an input that the graph writes is mutable where neither allows it, and one whose
            memory it takes is owned where neither says anything.
        name: the program's name, if not the one that the metadata says.

    Returns a verified program, frees after the last use of each root. Raises ReadBackError, which names the node, its
    target and what to do, for what no line of a program says, and for a graph whose program would break a rule.
    """
    module: Any = graph.graph_module if isinstance(graph, Emitted) else graph  # type: ignore[attr-defined]
    with without_fake_mode():
        return _Reading(flattened(module), kernels, ownership or {}, name).program()


class _Reading:
    """The reading of one module: its inputs, constants, body and outputs."""

    def __init__(
        self, module: GraphModule, kernels: Iterable[KernelDefinition], ownership: Mapping[str, Ownership], name: str
    ) -> None:
        self.module = module
        self.facts: Mapping[str, Any] = getattr(module, "meta", {}).get("fxwrap", {})
        self.ownership = ownership
        self.name = name or self.facts.get("name", "program")
        counts = Counter(_claims(module))
        ambiguous = frozenset([symbol for symbol, count in counts.items() if count > 1])
        symbols = Symbols(self.facts.get("symbols", {}), frozenset(counts), ambiguous)
        known = Kernels([*self.facts.get("kernels", {}).values(), *kernels])
        self.shared = Shared(symbols, Rules(symbols.info, symbols.fresh), known)
        self.reader = Reader(self.shared, module, read_call, frozenset())
        self.inputs: list[tuple[Node, Value | SymbolInfo]] = []

    def program(self) -> Program:
        reader, nodes = self.reader, list(self.module.graph.nodes)
        for node in nodes:
            if node.op == "placeholder":
                self._placeholder(node)
        for path, node, tensor in held_tensors(self.module):
            self._constant(path, node, tensor)
        find_parts(reader)
        for node in nodes:
            if node.op not in ("placeholder", "output"):
                reader.read(node)
        output = self.module.graph.output_node()
        reader.comments(output)
        returned = tuple(leaves(reader.argument(output, _flat(output))))
        reader.emit(Return(returned, origin=origin_of(output)), output)
        return self._verified(self._assembled())

    # --- inputs and constants ---------------------------------------------------------------------------------------

    def _placeholder(self, node: Node) -> None:
        reader, info, val = self.reader, node.meta.get("fxwrap_symbol"), node.meta.get("val")
        is_number = isinstance(val, int | float | torch.SymInt | torch.SymFloat | torch.SymBool)
        known = node.meta.get("fxwrap_type")
        if info is not None or (is_number and known is None):
            self._number(node, info, val)
            return
        value = reader.value(node.name, self._type(node, known, val))
        self.inputs.append((node, value))
        reader.env[node] = None if val is None and isinstance(value.type, OpaqueType) and known is None else value
        reader.given[value.name] = value
        reader.define(value)

    def _number(self, node: Node, info: SymbolInfo | None, val: Any) -> None:
        symbols = self.shared.symbols
        if info is None:
            found = symbols.of_val(val)
            is_symbol = getattr(found, "is_Symbol", False)
            prefix = "b" if isinstance(val, bool) else "f" if isinstance(val, float) else "s"
            info = symbols.info(found.name) if is_symbol else symbols.fresh(prefix)
        info = symbols.to_define(info)
        symbols.defined.add(info.name)
        symbols.stands_for(val, make_symbol(info.name))
        self.reader.known.add(info.name)
        self.reader.set_number(node, make_symbol(info.name))
        self.inputs.append((node, info))

    def _type(self, node: Node, known: Type | None, val: Any) -> Type:
        """Returns an input's type: the one it was emitted with, where the metadata does not say another one by now."""
        if isinstance(val, torch.Generator):
            return GENERATOR
        if not isinstance(val, torch.Tensor):
            if known is None and val is not None:
                raise failure(node, f"it stands for a {type(val).__name__}", "Give each value a placeholder of its own")
            if known is None and node.users:
                raise failure(node, "it has no meta['val'], so nothing says its type", "Set it to a fake tensor")
            return known or OpaqueType("NoneType")
        if not isinstance(val, FakeTensor) and val.layout is not torch.strided:
            raise failure(node, f"its layout is {val.layout}", "Only strided tensors are compiled")
        if isinstance(known, TensorType) and self._says(val, known):
            return known
        return self.shared.symbols.type_of(val)

    def _says(self, val: torch.Tensor, known: TensorType) -> bool:
        """Whether metadata agrees with a type, in all that is constant in both; plain meta tensors say no device."""
        known_place = val.device == known.device or (val.is_meta and not isinstance(val, FakeTensor))
        if not known_place or (val.dtype, val.dim()) != (known.dtype, len(known.sizes)):
            return False
        sizes, strides = (
            tuple([n if type(n) is int else _ANY for n in numbers]) for numbers in (tuple(val.shape), val.stride())
        )
        return types_agree(TensorType(val.dtype, sizes, strides, known.device), _without_place(known))

    def _constant(self, path: str, node: Node, found: torch.Tensor) -> None:
        """Makes a constant of a tensor that a node gets, or one inside of a graph within; there, equal ones are one."""
        reader, shared = self.reader, self.shared
        is_inside = node.graph is not self.module.graph
        if path in shared.constants or (is_inside and id(found) in reader.held):
            return
        known = node.meta.get("fxwrap_type")
        type_ = TensorType(found.dtype, tuple(found.shape), found.stride(), found.device)
        if isinstance(known, TensorType) and types_agree(_without_place(known), type_):
            type_ = known
        value = shared.constants[path] = reader.value(path.replace(".", "_"), type_)
        reader.held.setdefault(id(found), value)
        if not is_inside:
            reader.attributes[path] = value
        shared.payloads[value.name] = found
        if node.meta.get("fxwrap_mutable"):
            shared.declared_mutable.add(value.name)
        reader.given[value.name] = value
        reader.define(value)

    # --- the program ------------------------------------------------------------------------------------------------

    def _assembled(self) -> Program:
        reader, shared = self.reader, self.shared
        written = {reader.root_of[value.name] for line in reader.lines for value in writes(line)}
        inputs = tuple([Input(value, self._ownership(node, value, written)) for node, value in self.inputs])
        values = [item.value for item in inputs if isinstance(item.value, Value)]
        constants = list(shared.constants.values())
        return Program(
            self.name,
            inputs,
            Block((), insert_frees(reader.lines, [*values, *constants], released_inputs(inputs))),
            tuple([Constant(item, item.name in written or item.name in shared.declared_mutable) for item in constants]),
            tuple(shared.kernels.used.values()),
            tuple(shared.functions.items()),
            tuple(self.facts.get("header", ())),
            ConstantStore(dict(shared.payloads)),
        )

    def _ownership(self, node: Node, value: Value | SymbolInfo, written: set[str]) -> Ownership:
        if not isinstance(value, Value):
            return Ownership.BORROWED
        said = self.ownership.get(node.name)
        if said is None and "fxwrap_ownership" not in node.meta and value.name in self.reader.taken:
            return Ownership.OWNED
        said = said or Ownership(node.meta.get("fxwrap_ownership", "borrowed"))
        return Ownership.MUTABLE if said is Ownership.BORROWED and value.name in written else said

    def _verified(self, program: Program) -> Program:
        try:
            return verify(program)
        except VerifyError as error:
            shown = next((text[2:] for text in error.context.splitlines() if text.startswith("> ")), "")
            node = self._node_of(shown, program)
            remedy = f"Correct the graph there:\n{error.context}"
            name, target = ("", "") if node is None else (node.name, target_text(node))
            reason = f"its line breaks the rule '{error.rule}': {error.reason}"
            raise ReadBackError(name, target, reason, remedy) from error

    def _node_of(self, shown: str, program: Program) -> Node | None:
        """Returns the node of a line that an error shows."""
        for line in program.lines():
            if shown and print_line(line).partition("\n")[0] == shown:
                return self.shared.node_of.get(id(line))
        return None


_ANY = make_symbol("s0")
"""A size that is not constant, whichever."""


def _without_place(type_: TensorType) -> TensorType:
    return TensorType(type_.dtype, type_.sizes, type_.strides, type_.device)


def _flat(output: Node) -> Any:
    """Returns what a graph gives. Raises ReadBackError where that is nested."""
    tree: Any = output.args[0]
    items = tree if isinstance(tree, tuple | list) else (tree,)
    for item in items:
        if isinstance(item, tuple | list | dict | slice):
            raise failure(output, f"the graph gives a {type(item).__name__} among its outputs", "Give a flat tuple")
    return items


def _claims(module: GraphModule) -> Iterator[str]:
    """Yields the name of the symbol that each node of a module defines, its submodules' included."""
    for part in module.modules():
        if not isinstance(part, GraphModule):
            continue
        for node in part.graph.nodes:
            info = node.meta.get("fxwrap_symbol")
            passed_on = node.op == "placeholder" and part is not module and "fxwrap_type" not in node.meta
            if isinstance(info, SymbolInfo) and not passed_on:
                yield info.name


# --- calls ------------------------------------------------------------------------------------------------------------


def read_call(reader: Reader, node: Node) -> None:
    """Reads a call by what it calls."""
    target: Any = node.target
    found = _TABLE.get(target)
    if node.op == "call_module":
        call_replayed(reader, node)
    elif found is not None:
        found(reader, node)
    elif target is operator.getitem:
        _getitem(reader, node)
    elif isinstance(target, OpOverload):
        is_wait = target.namespace == from_fx_calls.COLLECTIVES and target._opname == "wait_tensor"
        (wait if is_wait else from_fx_calls.call)(reader, node)
    elif isinstance(target, HigherOrderOperator):
        raise failure(node, "no line of a program holds this operator", "Take it apart into calls before")
    elif isinstance(target, OpOverloadPacket):
        remedy = f"Name the overload, such as {target}.default"
        raise failure(node, "it calls an operator without saying which overload", remedy)
    else:
        arithmetic(reader, node)


def _getitem(reader: Reader, node: Node) -> None:
    whole = node.args[0]
    if isinstance(whole, tuple | list):
        choice(reader, node)
    elif not from_fx_calls.take_item(reader, node):
        shown = whole.name if isinstance(whole, Node) else repr(whole)
        raise failure(node, f"nothing can be taken out of '{shown}'", "Take an item of what a call gives")
