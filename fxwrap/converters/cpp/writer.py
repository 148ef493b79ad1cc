"""The statements of an emitted C++ program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import sympy
import torch

from fxwrap import wrapper_ir as ir
from fxwrap.converters.cpp import text as cpp_text
from fxwrap.converters.cpp.text import frame_field
from fxwrap.errors import UnsupportedError
from fxwrap.lines import Bind
from fxwrap.symbolic import expression_kind
from fxwrap.wrapper_ir import ListType, ScalarType, Tag, Type, element_type


@dataclass
class BlockScope:
    """The state of a block that is being written.

    `slots_by_root` has the slots of the live values of each root, `expression_symbols` the symbols of the expressions
    evaluated so far, and `outputs` the values that the block yields.
    """

    statements: list[str] = field(default_factory=list)
    slots_by_root: dict[str, dict[str, str]] = field(default_factory=dict)
    root_of: dict[str, str] = field(default_factory=dict)
    expression_symbols: dict[sympy.Basic, str] = field(default_factory=dict)
    outputs: tuple[ir.Operand, ...] = ()


def unsupported(line: ir.LineBase, reason: str) -> UnsupportedError:
    """Returns the error to raise for a line that C++ cannot express."""
    return UnsupportedError(ir.line_text(line), "cpp", reason)


def uses_list_slot(type_: ir.Type) -> bool:
    """Returns whether values of a type are in a list slot: lists of any length, generators and opaque objects."""
    return isinstance(type_, ir.ListType | ir.OpaqueType)


class CppWriter:
    """Writes blocks, with a slot of the program's frame for each value. `convert` writes a line."""

    def __init__(self, unit: cpp_text.CppUnit, convert: Callable[[ir.LineBase], None]) -> None:
        self.unit = unit
        self.scope = BlockScope()
        self._convert = convert
        self._origin = ""

    def lines(self, block: ir.Block) -> None:
        """Writes the lines of a block into the current scope, with comments on their origins."""
        for line in block.lines:
            origin = str(line.origin) if line.origin is not None else ""
            if origin and origin != self._origin:
                self.emit(cpp_text.comment_text(origin))
            self._origin = origin
            self._convert(line)

    def emit(self, statement: str) -> None:
        """Adds a statement."""
        self.scope.statements.append(statement)

    # --- values -----------------------------------------------------------------------------------------------------

    def track_value(self, value: ir.Value, base: ir.Value | None = None) -> None:
        """Records a value with a slot and its root, so that a free drops all its aliases."""
        if not isinstance(value.type, ir.TensorType) and not uses_list_slot(value.type):
            return
        roots = self.scope.root_of
        root = roots[base.name] if base is not None else value.name
        roots[value.name] = root
        self.scope.slots_by_root.setdefault(root, {})[value.name] = self.name_of(value)

    def define(self, value: ir.Value, base: ir.Value | None = None) -> str:
        """Records a tensor that the next statement defines and returns its slot."""
        self.track_value(value, base)
        return self.unit.slot(value.name)

    def name_of(self, value: ir.Value) -> str:
        """Returns the slot of a tensor, list or opaque object, or the symbol of a scalar."""
        if isinstance(value.type, ir.ScalarType):
            return self.unit.scalar(value.name, value.type.kind)
        return self.unit.list_slot(value.name) if uses_list_slot(value.type) else self.unit.slot(value.name)

    def check_type(self, line: ir.LineBase, value: ir.Value) -> None:
        """Raises UnsupportedError unless a value is a tensor, list, opaque object or real number."""
        real = isinstance(value.type, ir.ScalarType) and value.type.kind in ("int", "float", "bool")
        if not real and not isinstance(value.type, ir.TensorType) and not uses_list_slot(value.type):
            raise unsupported(line, f"%{value.name} is neither a tensor, a list, an object nor a real number")

    def drop(self, slots: Sequence[str]) -> None:
        """Emits the release of slots."""
        if slots:
            self.emit(" ".join([f"drop(f, {slot});" for slot in slots]))

    # --- arguments --------------------------------------------------------------------------------------------------

    def argument(self, line: ir.LineBase, item: ir.Operand) -> list[str]:
        """Returns the texts of an argument of a call site; a list has several."""
        match item:
            case ir.Value():
                self.check_type(line, item)
                return [self.name_of(item)]
            case None:
                return ["none"]
            case bool():
                return ["true" if item else "false"]
            case int():
                return [cpp_text.int_text(item)]
            case float():
                return [cpp_text.float_text(item)]
            case str():
                return [cpp_text.string_text(item)]
            case tuple():
                return [f"list({len(item)})", *self.arguments(line, item)]
            case sympy.Basic():
                return [self._symbol(item)]
            case _:
                return [self._constant(line, item)]

    def arguments(self, line: ir.LineBase, items: Sequence[ir.Operand]) -> list[str]:
        """Returns the texts of arguments of a call site."""
        return [text for item in items for text in self.argument(line, item)]

    def _symbol(self, expression: sympy.Basic) -> str:
        """Returns the symbol of an expression, after a statement that evaluates it if necessary."""
        if isinstance(expression, sympy.Symbol):
            return self.unit.symbol(expression.name)
        symbol = self.scope.expression_symbols.get(expression)
        if symbol is None:
            kind = expression_kind(expression)
            symbol = self.scope.expression_symbols[expression] = self.unit.fresh_symbol("number", kind)
            self.emit(f"{cpp_text.frame_field(symbol, kind)} = {self.unit.number(expression)};")
        return symbol

    def _constant(self, line: ir.LineBase, item: object) -> str:
        match item:
            case complex():
                return f"complex({cpp_text.float_text(item.real)}, {cpp_text.float_text(item.imag)})"
            case torch.dtype():
                return self.dtype(line, item)
            case torch.device():
                return self.unit.device(item)
            case torch.layout():
                return f"Layout::{str(item).removeprefix('torch.')}"
            case torch.memory_format():
                return f"MemoryFormat::{str(item).removeprefix('torch.')}"
            case _:
                raise unsupported(line, f"C++ cannot express an argument of class {type(item).__name__}")

    def dtype(self, line: ir.LineBase, dtype: torch.dtype) -> str:
        """Returns the bridge's name of a dtype."""
        if dtype not in cpp_text.DTYPE_NAMES:
            raise unsupported(line, f"the C++ bridge has no name for {dtype}")
        return f"DType::{cpp_text.DTYPE_NAMES[dtype]}"

    def number(self, item: ir.Operand) -> str:
        """Returns the text of a scalar, size or condition."""
        if isinstance(item, ir.Value) and isinstance(item.type, ir.ScalarType):
            return cpp_text.frame_field(self.name_of(item), item.type.kind)
        return self.unit.number(item)

    def condition_text(self, item: ir.Operand) -> str:
        """Returns the text of a predicate: a boolean tensor, scalar or expression."""
        if isinstance(item, ir.Value) and isinstance(item.type, ir.TensorType):
            return f"item_bool(f, {self.name_of(item)})"
        return self.number(item)

    # --- statements -------------------------------------------------------------------------------------------------

    def call(self, target: str, arguments: Sequence[str], results: Sequence[str] = ()) -> None:
        """Emits a call of the operator "namespace.name.overload"."""
        self.emit(f"CALL(f, {self.unit.operator(target)}, ({', '.join(arguments)}), ({', '.join(results)}));")

    def results(self, results: tuple[ir.Result, ...]) -> list[str]:
        """Returns the texts of a call site's results."""
        texts: list[str] = []
        for item in results:
            if isinstance(item, tuple):
                texts += [f"list({len(item)})", *self.results(item)]
            else:
                texts.append("none" if item is None else self.name_of(item))
        return texts

    def emit_allocation(self, line: ir.LineBase, slot: str, type_: ir.TensorType) -> None:
        """Emits an allocation."""
        if (group := type_.symmetric_group) is not None:
            operands = (type_.sizes, type_.strides, type_.dtype, type_.device, group)
            self.call("fxwrap.allocate_symmetric.default", self.arguments(line, operands), [slot])
            return
        self.emit(self.allocation_text(line, slot, type_))

    def allocation_text(self, line: ir.LineBase, slot: str, type_: ir.TensorType) -> str:
        """Returns the statement that allocates ordinary memory."""
        sizes, strides = self.unit.sizes(type_.sizes), self.unit.sizes(type_.strides)
        dtype, device = self.dtype(line, type_.dtype), self.unit.device(type_.device)
        return f"empty_strided(f, {slot}, {sizes}, {strides}, {dtype}, {device});"

    def emit_view(
        self, slot: str, base: str, sizes: Sequence[ir.Size], strides: Sequence[ir.Size], offset: str
    ) -> None:
        """Emits a view; `offset` is the text of its offset from the base's first element."""
        self.emit(f"view(f, {slot}, {base}, {self.unit.sizes(sizes)}, {self.unit.sizes(strides)}, {offset});")

    # --- blocks -----------------------------------------------------------------------------------------------------

    def block(
        self,
        block: ir.Block,
        consume_outputs: Callable[[tuple[ir.Operand, ...]], None],
        *,
        begin: Callable[[], None] = lambda: None,
        preserve: Sequence[ir.Value] = (),
    ) -> list[str]:
        """Returns the statements of a nested block.

        `begin` emits the first statements, `consume_outputs` the statements that use the yielded values. The last ones
        drop all other values except those in `preserve`.
        """
        outer, self.scope = self.scope, BlockScope()
        for value in block.arguments:
            self.track_value(value)
        begin()
        self.lines(block)
        outputs = self.scope.outputs
        consume_outputs(outputs)
        preserved = {value.name for value in (*preserve, *ir.values_in(outputs))}
        slots_by_name = self.scope.slots_by_root.values()
        self.drop([slot for slots in slots_by_name for name, slot in slots.items() if name not in preserved])
        statements, self.scope = self.scope.statements, outer
        return self.unit.outline(statements)

    def alias_arguments(self, arguments: Sequence[ir.Value], operands: Sequence[ir.Operand]) -> None:
        """Emits the assignment of operands to a block's arguments, which alias tensors."""
        for argument, operand in zip(arguments, operands):
            self._assign_value(argument, operand, "alias")

    def move_outputs(self, results: tuple[ir.Result, ...], outputs: tuple[ir.Operand, ...]) -> None:
        """Emits the move of the values that a block yielded to results."""
        items = zip(ir.leaves(results), ir.leaves(outputs))
        pairs = [(result, item) for result, item in items if isinstance(result, ir.Value)]
        names = {result.name for result, _ in pairs}
        for position, (result, item) in enumerate(pairs):  # a block may yield its opaque arguments in another order
            if isinstance(item, ir.Value) and isinstance(item.type, ir.OpaqueType) and item.name in names:
                copy = ir.Value(f"{item.name}.yielded", item.type)
                self._assign_value(copy, item, "alias")
                pairs[position] = (result, copy)
        for result, item in pairs:
            self._assign_value(result, item, "move")

    def track_results(self, results: tuple[ir.Result, ...]) -> None:
        """Records the results of a line with nested blocks."""
        for value in ir.values_in(results):
            self.track_value(value)

    def _assign_value(self, value: ir.Value, item: ir.Operand, function: Literal["alias", "move"]) -> None:
        if isinstance(value.type, ir.ScalarType):
            self.emit(f"{cpp_text.frame_field(self.name_of(value), value.type.kind)} = {self.number(item)};")
        elif item is None:
            self.drop([self.name_of(value)])
        else:
            assert isinstance(item, ir.Value)
            function = "alias" if isinstance(item.type, ir.OpaqueType) else function  # other lines may use it too
            self.emit(f"{function}(f, {self.name_of(value)}, {self.name_of(item)});")


def read_key_path(writer: CppWriter, line: Bind) -> tuple[str, list[str]]:
    """Returns the text of the number at a key path, and the slots to drop afterwards.

    A statement copies an element that is a tensor from its list to such a slot.
    """
    name = writer.name_of(line.source)
    type_, positions, steps = _split_at_tensor(line.source.type, line.path)
    text, temporaries = "", []
    indices = "{" + ", ".join(map(str, positions)) + "}"
    if isinstance(type_, ScalarType):
        text = f"element_{type_.kind}(f, {name}, {indices})" if positions else frame_field(name, type_.kind)
    elif positions:
        temporaries = [writer.unit.fresh_slot("element")]
        writer.emit(f"element(f, {temporaries[0]}, {name}, {indices});")
        name = temporaries[0]
    for step in steps:
        match step.name:
            case "size" | "stride" | "storage_offset":
                text = f"{step.name}({', '.join(['f', name, *map(str, step.arguments)])})"
            case "divide":
                text = f"{text} / {step.arguments[0]}"
            case "truth":
                text = f"{text} != 0" if text else f"item_bool(f, {name})"
            case _:
                raise unsupported(line, f"a value of type {type_} has no elements")
    return text, temporaries


def _split_at_tensor(type_: Type, path: Sequence[Tag]) -> tuple[Type, list[int], list[Tag]]:
    """Returns the type of the element after the first `element` steps, their positions, and the other steps."""
    steps, positions = list(path), []
    while isinstance(type_, ListType) and steps and steps[0].name == "element":
        positions.append(int(steps.pop(0).arguments[0]))
        type_ = element_type(type_)
    return type_, positions, steps
