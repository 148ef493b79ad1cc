"""The parts of an emitted C++ program: identifiers, literals, tables of names, functions, and the whole text."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import sympy
import torch

from fxwrap.symbolic import CppPrinter, cpp_prelude, symbol_kind

WIDTH = 110
_INDENT = "    "
PART_LINES = 200
"""The longest run of statements in one C++ function: compilers take more than linear time in a function's length."""

_KEYWORDS = """
alignas alignof and and_eq asm auto bitand bitor bool break case catch char char8_t char16_t char32_t class co_await
co_return co_yield compl concept const consteval constexpr constinit const_cast continue decltype default delete do
double dynamic_cast else enum explicit export extern false final float for friend goto if import inline int long module
mutable namespace new noexcept not not_eq nullptr operator or or_eq override private protected public register
reinterpret_cast requires return short signed sizeof static static_assert static_cast struct switch template this
thread_local throw true try typedef typeid typename union unsigned using virtual void volatile wchar_t while xor xor_eq
"""
_BRIDGE_NAMES = """
Arg Args BoolSymbol DType Device FloatSymbol Frame FxwrapValue Grid Input Inputs IntSymbol Ints Kernel Layout
ListSlot MemoryFormat Number Numbers Operator Program Site Slot Slots Variant Variants abi_version alias call
check_alignment check_layout check_rank complex count data_ptr defined drop element element_bool element_float
element_int empty_strided enter_device enter_stream exchange_random_state exit_device
fail_assert fxwrap fxwrap_program fxwrap_run item_bool item_float item_int launch list mark_written move named
none owned pool_slice restore_random_state reuse save_random_state size size_t std storage_offset stride view
"""
_PROGRAM_NAMES = """
arguments_ constants errno f inputs int16_t int32_t int64_t int8_t kernel outputs program results_ run site stderr stdin
stdout uint16_t uint32_t uint64_t uint8_t infinity not_a_number
"""

RESERVED = frozenset(f"{_KEYWORDS} {_BRIDGE_NAMES} {_PROGRAM_NAMES}".split())
"""What a value of a program cannot be called in C++."""

_DTYPES = """
uint8 int8 int16 int32 int64 float16 float32 float64 complex32 complex64 complex128 bool_ qint8 quint8 qint32
bfloat16 quint4x2 quint2x4 bits1x8 bits2x4 bits4x2 bits8 bits16 float8_e5m2 float8_e4m3fn float8_e5m2fnuz
float8_e4m3fnuz uint16 uint32 uint64 float8_e8m0fnu float4_e2m1fn_x2
"""

DTYPE_NAMES: dict[torch.dtype, str] = {getattr(torch, name.rstrip("_")): name for name in _DTYPES.split()}
"""The members of the bridge's enum DType by torch's dtypes."""

def sanitized(name: str) -> str:
    """Returns a name as a C++ identifier that no macro of the standard library has."""
    text = re.sub(r"_{2,}", "_", re.sub(r"[^A-Za-z0-9_]", "_", name))
    macro = len(text) > 2 and text.isupper()
    plain = text and not text[0].isdigit() and text[0] != "_" and text not in RESERVED and not macro
    return text if plain else f"v_{text.lstrip('_')}"


@lru_cache(maxsize=4096)
def string_text(text: str) -> str:
    """Returns a C++ string literal; bytes that are not printable ASCII are written in octal."""
    parts = []
    for byte in text.encode():
        char = chr(byte)
        escaped = {"\n": "\\n", '"': '\\"', "\\": "\\\\", "?": "\\?"}.get(char)
        parts.append(escaped or (char if 32 <= byte < 127 else f"\\{byte:03o}"))
    return f'"{"".join(parts)}"'


def int_text(number: int) -> str:
    """Returns an integer literal; the smallest 64-bit one has none of its own."""
    return "(-9223372036854775807 - 1)" if number == -(2**63) else str(number)


def float_text(number: float) -> str:
    """Returns a literal of type double with all its digits."""
    if math.isnan(number):
        return "not_a_number"
    if math.isinf(number):
        return "infinity" if number > 0 else "-infinity"
    return repr(number)


def comment_text(text: str) -> str:
    """Returns `text` as C++ comments: one a line, none of which a backslash joins with the next."""
    lines = [line.rstrip() for line in text.splitlines()] or [""]
    return "\n".join([f"// {line}|" if line.endswith("\\") else f"// {line}".rstrip() for line in lines])


def indented(statements: Iterable[str]) -> str:
    """Returns statements, one after another, as the body of braces."""
    return "\n".join([textwrap.indent(statement, "  ") for statement in statements])


@dataclass
class CppUnit:
    """Collects what stands above a program's statements: slots, symbols, devices, operators, kernels, functions."""

    slots: list[str] = field(default_factory=list)
    ints: list[tuple[str, str]] = field(default_factory=list)
    floats: list[str] = field(default_factory=list)
    lists: list[str] = field(default_factory=list)
    tables: list[str] = field(default_factory=list)
    functions: list[str] = field(default_factory=list)
    _names: dict[tuple[str, str], str] = field(default_factory=dict)
    _taken: set[str] = field(default_factory=set)
    _counts: dict[str, int] = field(default_factory=dict)
    _series: dict[str, int] = field(default_factory=dict)
    _places: dict[str, str] = field(default_factory=dict)
    _uses_helpers: bool = False

    def __post_init__(self) -> None:
        self._printer = CppPrinter(self._places)

    # --- names ------------------------------------------------------------------------------------------------------

    def fresh(self, wish: str) -> str:
        """Returns an identifier that nothing has yet, as near to the wish as can be."""
        name = sanitized(wish)
        found = name
        while found in self._taken:
            self._counts[name] = self._counts.get(name, 0) + 1
            found = f"{name}_{self._counts[name]}"
        self._taken.add(found)
        return found

    def numbered(self, prefix: str) -> str:
        """Returns the next identifier of a series: prefix_0, prefix_1, ..."""
        while True:
            found = f"{prefix}_{self._series.get(prefix, 0)}"
            self._series[prefix] = self._series.get(prefix, 0) + 1
            if found not in self._taken:
                self._taken.add(found)
                return found

    def _named(self, kind: str, key: str, wish: str) -> tuple[str, bool]:
        """Returns the identifier of a thing, and whether it is new."""
        found = self._names.get((kind, key))
        if found is not None:
            return found, False
        made = self._names[kind, key] = self.fresh(wish)
        return made, True

    def slot(self, name: str) -> str:
        """Returns the slot of a tensor by its value's name."""
        found, new = self._named("value", name, name)
        if new:
            self.slots.append(found)
        return found

    def list_slot(self, name: str) -> str:
        """Returns the slot of a list of any length, or of a generator, by its value's name."""
        found, new = self._named("value", name, name)
        if new:
            self.lists.append(found)
        return found

    def fresh_slot(self, prefix: str) -> str:
        """Returns a slot of its own for a tensor that no value names."""
        self.slots.append(self.numbered(prefix))
        return self.slots[-1]

    def symbol(self, name: str) -> str:
        """Returns the identifier of a symbol of the program."""
        found, new = self._named("symbol", name, name)
        if new:
            self._places[name] = self._declare(found, symbol_kind(name))
        return found

    def scalar(self, name: str, kind: str) -> str:
        """Returns the identifier of a number that a value of the program names."""
        found, new = self._named("value", name, name)
        if new:
            self._declare(found, kind)
        return found

    def fresh_symbol(self, prefix: str, kind: str) -> str:
        """Returns the identifier of a number that the program does not name."""
        found = self.numbered(prefix)
        self._declare(found, kind)
        return found

    def _declare(self, name: str, kind: str) -> str:
        if kind == "float":
            self.floats.append(name)
        else:
            self.ints.append((name, kind))
        return place(name, kind)

    def operator(self, target: str) -> str:
        """Returns the table entry of the operator "namespace.name.overload"."""
        namespace, _, rest = target.partition(".")
        name, _, overload = rest.rpartition(".")
        short = rest.removesuffix(".default").replace(".", "_")
        found, new = self._named("operator", target, f"{namespace}_{short}")
        if new:
            shown = "" if overload == "default" else overload
            self.tables.append(f'static Operator {found}{{"{namespace}::{name}", "{shown}"}};')
        return found

    def device(self, device: torch.device) -> str:
        """Returns the table entry of a device."""
        return self.device_named(str(device))

    def device_named(self, device: str) -> str:
        """Returns the table entry of a device by torch's name for it."""
        found, new = self._named("device", device, device.replace(":", "_"))
        if new:
            self.tables.append(f"static Device {found}{{{string_text(device)}}};")
        return found

    def kernel(self, name: str, symbol: str, declaration: str) -> str:
        """Returns the readable name of a C++ kernel that is linked under a symbol."""
        found, new = self._named("kernel", name, name)
        if new:
            self.tables.append(f"{declaration}\nstatic constexpr auto {found} = &{symbol};")
        return found

    def kernel_source(self, name: str, source: str) -> str:
        """Returns the name of a constant that holds a kernel's source text."""
        found, new = self._named("source", name, f"{name}_source")
        if new:
            lines = "\n".join([f"    {string_text(line)}" for line in source.splitlines(keepends=True)])
            self.tables.append(f"static constexpr char {found}[] =\n{lines};")
        return found

    def launched_kernel(self, name: str, symbol: str, variants: str, texts: Sequence[str]) -> str:
        """Returns the table entry of a kernel that is launched over a grid, by its symbol.

        `variants` is what its compiled code is linked under, `texts` its language, source, signature and options.
        """
        found, new = self._named("launched", name, name)
        if new:
            language, source, *rest = texts
            fields = [*map(string_text, (symbol, language)), self.kernel_source(name, source), *map(string_text, rest)]
            declared = f'extern "C" const Variants {variants} __attribute__((weak));'
            record = f"static Kernel {found}{{{', '.join([*fields, f'&{variants}'])}}};"
            self.tables.append(f"{declared}\n{record}")
        return found

    def part(self, statements: Sequence[str]) -> list[str]:
        """Returns the statements, or, where they are many, calls of new functions that hold them."""
        parts: list[list[str]] = [[]]
        length = 0
        for statement in statements:
            lines = statement.count("\n") + 1
            if length and length + lines > PART_LINES:
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
        """Writes a function of this name."""
        self.functions.append(f"static void {name}(Frame& f) {{\n{indented(statements)}\n}}")

    # --- expressions ------------------------------------------------------------------------------------------------

    def number(self, size: Any) -> str:
        """Returns the text of a size or condition over the symbols of the program."""
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
        self._uses_helpers = self._uses_helpers or "::" in text or "INT64_C" in text
        return text

    def sizes(self, sizes: Sequence[Any]) -> str:
        """Returns a list of sizes."""
        return "{" + ", ".join([self.number(size) for size in sizes]) + "}"

    # --- the whole --------------------------------------------------------------------------------------------------

    def text(self, title: str, name: str, run: Sequence[str], tables: Sequence[Table]) -> str:
        """Returns the translation unit; `tables` are its inputs, constants and outputs."""
        filled = [table for table in tables if table.items]
        arrays = [listed(f"static constexpr {table.kind} {table.name}[] = {{", table.items, "};") for table in filled]
        body = "\n\n".join([*self.functions, f"static void run(Frame& f) {{\n{indented(run)}\n}}"])
        head = [comment_text(title), '#include "bridge.h"']
        if self._uses_helpers:
            head.append(cpp_prelude())
        head += ["namespace program {", "using namespace fxwrap;", "", *self._declarations(body + "".join(arrays))]
        return "\n".join([*head, body, "", *arrays, self._export(name, [table.name for table in filled])])

    def _declarations(self, body: str) -> list[str]:
        lines = []
        for kind, names in (
            ("Slot", self.slots),
            ("IntSymbol", [name if kind == "int" else "" for name, kind in self.ints]),
            ("BoolSymbol", [name if kind == "bool" else "" for name, kind in self.ints]),
            ("FloatSymbol", self.floats),
            ("ListSlot", self.lists),
        ):
            declared = [f"{name}{{{index}}}" for index, name in enumerate(names) if name]
            if declared:
                lines.append(listed(f"constexpr {kind} ", declared, ";"))
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
        return f"{head}{listed(_INDENT, fields, '};')}\n"


@dataclass(frozen=True, slots=True)
class Table:
    """An array of a program: its field in `fxwrap::Program`, the type of its items, their texts."""

    name: str
    kind: str
    items: Sequence[str]


def place(symbol: str, kind: str) -> str:
    """Returns where a frame keeps a number."""
    return f"f.{'floats' if kind == 'float' else 'ints'}[{symbol}]"


def listed(before: str, items: Sequence[str], after: str) -> str:
    """Returns items with commas between them, over lines of `WIDTH` where they are many."""
    lines = [before]
    for position, item in enumerate(items):
        text = item + ("," if position + 1 < len(items) else after)
        space = "" if position == 0 or lines[-1] == _INDENT else " "
        if position and len(lines[-1]) + len(space) + len(text) > WIDTH:
            lines.append(_INDENT)
            space = ""
        lines[-1] += space + text
    return "\n".join(lines)
