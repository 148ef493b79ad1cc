"""The text of an emitted C++ program: identifiers, literals, tables and functions."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import sympy
import torch

from fxwrap.caching import bounded_cache
from fxwrap.names import NameAllocator
from fxwrap.symbolic import CppPrinter, Size, cpp_prelude, symbol_kind
from fxwrap.wrapper_ir import Operand

WIDTH = 110
_INDENT = "    "
MAX_FUNCTION_LINES = 200
"""The maximum number of lines in a C++ function, since compile time is superlinear in it."""

_KEYWORDS = """
alignas alignof and and_eq asm auto bitand bitor bool break case catch char char8_t char16_t char32_t class co_await
co_return co_yield compl concept const consteval constexpr constinit const_cast continue decltype default delete do
double dynamic_cast else enum explicit export extern false final float for friend goto if import inline int long module
mutable namespace new noexcept not not_eq nullptr operator or or_eq override private protected public register
reinterpret_cast requires return short signed sizeof static static_assert static_cast struct switch template this
thread_local throw true try typedef typeid typename union unsigned using virtual void volatile wchar_t while xor xor_eq
"""
_BRIDGE_NAMES = """
Arg Args BoolSymbol CALL DType Device FloatSymbol Frame Functions Grid Input Inputs IntSymbol Ints KERNEL Kernel
Layout ListSlot MemoryFormat Number Numbers Observer Operator Program CallSite Slot Slots Variant Variants abi_version
alias begin_kernel call check_alignment check_layout check_rank complex copy count data_ptr defined drop element
element_bool element_float element_int empty_strided end_kernel enter_device enter_range enter_stream
exchange_random_state exit_device exit_range fail_assert fxwrap fxwrap_program item_bool item_float item_int launch
list bump_version move named none opaque owned pool_slice replay restore_random_state reuse same_input
save_random_state size size_t std storage_offset stride view
"""
_PROGRAM_NAMES = """
arguments_ constants errno f inputs int16_t int32_t int64_t int8_t kernel outputs program results_ run site stderr stdin
stdout uint16_t uint32_t uint64_t uint8_t infinity not_a_number
"""

RESERVED = frozenset(f"{_KEYWORDS} {_BRIDGE_NAMES} {_PROGRAM_NAMES}".split())
"""Identifiers that values of a program cannot have in C++."""

_DTYPES = """
uint8 int8 int16 int32 int64 float16 float32 float64 complex32 complex64 complex128 bool_ qint8 quint8 qint32
bfloat16 quint4x2 quint2x4 bits1x8 bits2x4 bits4x2 bits8 bits16 float8_e5m2 float8_e4m3fn float8_e5m2fnuz
float8_e4m3fnuz uint16 uint32 uint64 float8_e8m0fnu float4_e2m1fn_x2 bcomplex32
"""

DTYPE_NAMES: dict[torch.dtype, str] = {
    getattr(torch, name.rstrip("_")): name
    for name in _DTYPES.split()
    if hasattr(torch, name.rstrip("_"))  # bcomplex32 is new in torch 2.14
}
"""The members of the bridge's enum DType by torch's dtypes."""


def sanitize_identifier(name: str) -> str:
    """Returns a name as a C++ identifier that is not reserved and not like a macro."""
    text = re.sub(r"_{2,}", "_", re.sub(r"[^A-Za-z0-9_]", "_", name))
    macro = len(text) > 2 and text.isupper()
    plain = text and not text[0].isdigit() and text[0] != "_" and text not in RESERVED and not macro
    return text if plain else f"v_{text.lstrip('_')}"


@bounded_cache(4096)
def string_text(text: str) -> str:
    """Returns a C++ string literal, with octal escapes for bytes that are not printable ASCII."""
    parts = []
    for byte in text.encode():
        char = chr(byte)
        escaped = {"\n": "\\n", '"': '\\"', "\\": "\\\\", "?": "\\?"}.get(char)
        parts.append(escaped or (char if 32 <= byte < 127 else f"\\{byte:03o}"))
    return f'"{"".join(parts)}"'


def int_text(number: int) -> str:
    """Returns an integer literal; the minimum of int64 is an expression."""
    return "(-9223372036854775807 - 1)" if number == -(2**63) else str(number)


def float_text(number: float) -> str:
    """Returns an exact literal of type double."""
    if math.isnan(number):
        return "not_a_number"
    if math.isinf(number):
        return "infinity" if number > 0 else "-infinity"
    return repr(number)


def comment_text(text: str) -> str:
    """Returns `text` as C++ line comments, none of which ends in a backslash."""
    lines = [line.rstrip() for line in text.splitlines()] or [""]
    return "\n".join([f"// {line}|" if line.endswith("\\") else f"// {line}".rstrip() for line in lines])


def indent_statements(statements: Iterable[str]) -> str:
    """Returns the indented statements of a body."""
    return "\n".join([textwrap.indent(statement, "  ") for statement in statements])


@dataclass
class CppUnit:
    """Collects the declarations of a program: slots, symbols, devices, operators, kernels and functions."""

    slots: list[str] = field(default_factory=list)
    ints: list[tuple[str, str]] = field(default_factory=list)
    floats: list[str] = field(default_factory=list)
    lists: list[str] = field(default_factory=list)
    tables: list[str] = field(default_factory=list)
    functions: list[str] = field(default_factory=list)
    operators: list[str] = field(default_factory=list)
    _names: dict[tuple[str, str], str] = field(default_factory=dict)
    _allocator: NameAllocator = field(default_factory=NameAllocator)
    _frame_fields: dict[str, str] = field(default_factory=dict)
    needs_torch: bool = False  # the engine on libtorch runs it: it uses more than kernels and memory of the CPU
    _uses_helpers: bool = False

    def __post_init__(self) -> None:
        self._printer = CppPrinter(self._frame_fields)

    # --- names ------------------------------------------------------------------------------------------------------

    def fresh(self, name_hint: str) -> str:
        """Returns a new identifier that is or starts with the hint."""
        return self._allocator.create_from_legal(sanitize_identifier(name_hint))

    def numbered(self, prefix: str) -> str:
        """Returns the next identifier of a series: prefix_0, prefix_1, ..."""
        return self._allocator.create_numbered(f"{prefix}_")

    def _intern(self, kind: str, key: str, name_hint: str) -> tuple[str, bool]:
        """Returns the identifier of an entity of a kind, and whether it is new."""
        is_new = (kind, key) not in self._names
        if is_new:
            self._names[kind, key] = self.fresh(name_hint)
        return self._names[kind, key], is_new

    def slot(self, name: str) -> str:
        """Returns the slot of a tensor by its value's name."""
        return self._intern_slot(name, self.slots)

    def list_slot(self, name: str) -> str:
        """Returns the slot of a list of any length, or of an opaque object, by its value's name."""
        self.needs_torch = True
        return self._intern_slot(name, self.lists)

    def _intern_slot(self, name: str, slots: list[str]) -> str:
        identifier, is_new = self._intern("value", name, name)
        if is_new:
            slots.append(identifier)
        return identifier

    def fresh_slot(self, prefix: str) -> str:
        """Returns a new slot for a temporary tensor."""
        self.slots.append(self.numbered(prefix))
        return self.slots[-1]

    def symbol(self, name: str) -> str:
        """Returns the identifier of a symbol of the program."""
        identifier, is_new = self._intern("symbol", name, name)
        if is_new:
            self._frame_fields[name] = self._declare(identifier, symbol_kind(name))
        return identifier

    def scalar(self, name: str, kind: str) -> str:
        """Returns the identifier of a scalar by its value's name."""
        identifier, is_new = self._intern("value", name, name)
        if is_new:
            self._declare(identifier, kind)
        return identifier

    def fresh_symbol(self, prefix: str, kind: str) -> str:
        """Returns the identifier of a new number."""
        identifier = self.numbered(prefix)
        self._declare(identifier, kind)
        return identifier

    def _declare(self, name: str, kind: str) -> str:
        if kind == "float":
            self.floats.append(name)
        else:
            self.ints.append((name, kind))
        return frame_field(name, kind)

    def operator(self, target: str) -> str:
        """Returns the table entry of the operator "namespace.name.overload"."""
        namespace, _, rest = target.partition(".")
        name, _, overload = rest.rpartition(".")
        short = rest.removesuffix(".default").replace(".", "_")
        identifier, is_new = self._intern("operator", target, f"{namespace}_{short}")
        if is_new:
            self.needs_torch = True
            self.operators.append(target)
            shown = "" if overload == "default" else overload
            self.tables.append(f'static Operator {identifier}{{"{namespace}::{name}", "{shown}"}};')
        return identifier

    def device(self, device: torch.device | str) -> str:
        """Returns the table entry of a device."""
        name = str(device)
        identifier, is_new = self._intern("device", name, name.replace(":", "_"))
        if is_new:
            self.needs_torch = self.needs_torch or name != "cpu"
            self.tables.append(f"static Device {identifier}{{{string_text(name)}}};")
        return identifier

    def kernel(self, name: str, symbol: str, declaration: str) -> str:
        """Returns the name of a C++ kernel that is linked by its symbol."""
        identifier, is_new = self._intern("kernel", name, name)
        if is_new:
            self.tables.append(f"{declaration}\nstatic constexpr auto {identifier} = &{symbol};")
        return identifier

    def kernel_source(self, name: str, source: str) -> str:
        """Returns the name of the constant with a kernel's source."""
        identifier, is_new = self._intern("source", name, f"{name}_source")
        if is_new:
            lines = "\n".join([f"    {string_text(line)}" for line in source.splitlines(keepends=True)])
            self.tables.append(f"static constexpr char {identifier}[] =\n{lines};")
        return identifier

    def launched_kernel(self, name: str, symbol: str, variants: str, texts: Sequence[str]) -> str:
        """Returns the table entry of a kernel that is launched over a grid.

        `variants` is the symbol of its compiled code, `texts` are its language, source, signature and options.
        """
        identifier, is_new = self._intern("launched", name, name)
        if is_new:
            self.needs_torch = True
            language, source, *rest = texts
            fields = [
                *map(string_text, (name, symbol, language)),
                self.kernel_source(name, source),
                *map(string_text, rest),
            ]
            declaration = f'extern "C" const Variants {variants} __attribute__((weak));'
            record = f"static Kernel {identifier}{{{', '.join([*fields, f'&{variants}'])}}};"
            self.tables.append(f"{declaration}\n{record}")
        return identifier

    def outline(self, statements: Sequence[str]) -> list[str]:
        """Returns the statements, or calls of new functions that contain them if they are too many."""
        parts: list[list[str]] = [[]]
        length = 0
        for statement in statements:
            lines = statement.count("\n") + 1
            if length and length + lines > MAX_FUNCTION_LINES:
                parts.append([])
                length = 0
            parts[-1].append(statement)
            length += lines
        if len(parts) == 1:
            return parts[0]
        names = [self.numbered("part") for _ in parts]
        for name, part in zip(names, parts):
            self.define(name, part)
        return [f"{name}(f);" for name in names]

    def define(self, name: str, statements: Sequence[str]) -> None:
        """Defines a function."""
        self.functions.append(f"static void {name}(Frame& f) {{\n{indent_statements(statements)}\n}}")

    # --- expressions ------------------------------------------------------------------------------------------------

    def number(self, size: Operand) -> str:
        """Returns the text of a number, size or condition."""
        match size:
            case bool():
                return "true" if size else "false"
            case int():
                return int_text(size)
            case float():
                return float_text(size)
            case _:
                return self._expression(size)

    def _expression(self, size: sympy.Basic) -> str:
        for symbol in size.free_symbols:
            self.symbol(symbol.name)
        text = self._printer.print(size)
        self._uses_helpers = self._uses_helpers or "::" in text or "INT64_" in text
        return text

    def sizes(self, sizes: Sequence[Size]) -> str:
        """Returns a list of sizes."""
        return "{" + ", ".join([self.number(size) for size in sizes]) + "}"

    # --- the translation unit ---------------------------------------------------------------------------------------

    def text(self, title: str, name: str, run: Sequence[str], tables: Sequence[StaticArray]) -> str:
        """Returns the translation unit; `tables` are its inputs, constants and outputs."""
        tables = [table for table in tables if table.items]
        arrays = [
            format_list(f"static constexpr {table.kind} {table.name}[] = {{", table.items, "};") for table in tables
        ]
        body = "\n\n".join([*self.functions, f"static void run(Frame& f) {{\n{indent_statements(run)}\n}}"])
        head = [comment_text(title), '#include "bridge.h"']
        if self._uses_helpers:
            head.append(cpp_prelude())
        head += ["namespace program {", "using namespace fxwrap;", "", *self._declarations(body + "".join(arrays))]
        return "\n".join([*head, body, "", *arrays, self._export(name, [table.name for table in tables])])

    def _declarations(self, body: str) -> list[str]:
        lines = []
        for kind, names in (
            ("Slot", self.slots),
            ("IntSymbol", [name if kind == "int" else "" for name, kind in self.ints]),
            ("BoolSymbol", [name if kind == "bool" else "" for name, kind in self.ints]),
            ("FloatSymbol", self.floats),
            ("ListSlot", self.lists),
        ):
            declarations = [f"{name}{{{index}}}" for index, name in enumerate(names) if name]
            if declarations:
                lines.append(format_list(f"constexpr {kind} ", declarations, ";"))
        for name, text in (("infinity", "__builtin_inf()"), ("not_a_number", '__builtin_nan("")')):
            if name in body:
                lines.append(f"constexpr double {name} = {text};")
        return [*lines, *self.tables, ""]

    def _export(self, name: str, tables: Sequence[str]) -> str:
        fields = [f".name = {string_text(name)}"]
        counts = (("slots", self.slots), ("ints", self.ints), ("floats", self.floats), ("lists", self.lists))
        fields += [f".{counted} = {len(items)}" for counted, items in counts if items]
        fields += [f".{table} = program::{table}" for table in tables]
        fields.append(".run = program::run")
        head = "}  // namespace program\n\nFXWRAP_EXPORT const fxwrap::Program fxwrap_program = {\n"
        return f"{head}{format_list(_INDENT, fields, '};')}\n"


@dataclass(frozen=True, slots=True)
class StaticArray:
    """A static array: its field in `fxwrap::Program`, and the type and texts of its items."""

    name: str
    kind: str
    items: Sequence[str]


def frame_field(symbol: str, kind: str) -> str:
    """Returns the field of the frame for a symbol."""
    return f"f.{'floats' if kind == 'float' else 'ints'}[{symbol}]"


def format_list(before: str, items: Sequence[str], after: str) -> str:
    """Returns comma-separated items, wrapped at `WIDTH`."""
    lines = [before]
    for position, item in enumerate(items):
        text = item + ("," if position + 1 < len(items) else after)
        space = "" if position == 0 or lines[-1] == _INDENT else " "
        if position and len(lines[-1]) + len(space) + len(text) > WIDTH:
            lines.append(_INDENT)
            space = ""
        lines[-1] += space + text
    return "\n".join(lines)
