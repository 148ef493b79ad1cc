"""The text of kernels back to kernels."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from fxwrap.errors import ParseError
from fxwrap.loop_ir.atoms import Axis
from fxwrap.loop_ir.body_operations import (
    Compute,
    Constant,
    DeviceAssert,
    IndexValue,
    Load,
    Operation,
    Reduce,
    ReductionResult,
    Scan,
    Store,
    SymbolicScalar,
)
from fxwrap.loop_ir.index_text import parse_index, parse_size
from fxwrap.loop_ir.kernel import Buffer, Kernel
from fxwrap.loop_ir.operations import KERNEL_DTYPES, OPERATIONS, STORE_MODES
from fxwrap.loop_ir.verify import verify_kernel
from fxwrap.symbolic import parse_expr
from fxwrap.torch_compat import DTYPE_NAMES

_DTYPES: Mapping[str, torch.dtype] = {name: dtype for dtype, name in DTYPE_NAMES.items() if dtype in KERNEL_DTYPES}
_HEAD = re.compile(
    r"kernel\((?P<inputs>.*)\) -> \((?P<outputs>.*)\) for \[(?P<axes>.*?)\](?: reduce \[(?P<reduced>.*)\])? \{$"
)
_LINE = re.compile(r"  (?:%(?P<position>\d+) = )?(?P<operation>.*?)(?:  # (?P<origin>[^\n'\"]*))?$")
_BUFFER = re.compile(r"(\w+): (\w+)\[(.*)\]( ascending)?$")
_LOAD = re.compile(r"load (\w+)\[(.*)\](?: if %(\d+) else (\S+))?$")
_STORE = re.compile(rf"store(?: ({'|'.join(STORE_MODES)}))? (\w+)\[(.*)\] %(\d+)(?: if %(\d+))?$")
_REQUIRE = re.compile(r"require(?: (\w+))? %(\d+) (['\"].*['\"])(?: if %(\d+))?$")
_COMBINE = re.compile(r"(reduce|scan) (\w+)((?: %\d+)+)(?: of (\w+))?(?: over((?: \w+)+))?$")
_RESULT = re.compile(r"part (\d+) %(\d+)$")
_COMPUTE = re.compile(r"(\w+)((?: %\d+)+)$")


def parse_kernel(text: str) -> Kernel:
    """Returns the kernel of a text; `str(parse_kernel(text)) == text` for the text of every valid kernel.

    Raises ParseError with line and column for other text, and KernelError for an invalid kernel.
    """
    lines = text.rstrip("\n").split("\n")
    head = _HEAD.match(lines[0])
    if head is None or lines[-1] != "}":
        raise ParseError("a kernel is 'kernel(inputs) -> (outputs) for [axes] {', operations, and '}'", 1, 1, lines[0])
    axes, reduced = [_at(1, lines[0], _axes, head[name] or "") for name in ("axes", "reduced")]
    inputs, outputs = [_at(1, lines[0], _buffers, head[name]) for name in ("inputs", "outputs")]
    by_name = {axis.name: axis for axis in (*axes, *reduced)}
    operations = [
        _at(number, line, _line, line, number - 2, by_name) for number, line in enumerate(lines[1:-1], start=2)
    ]
    return verify_kernel(Kernel(axes, reduced, inputs, outputs, tuple(operations)))


def _at(number: int, line: str, parse: Any, *arguments: Any) -> Any:
    """Returns the result of a parser; its errors get the number and the text of the line."""
    try:
        return parse(*arguments)
    except ParseError as error:
        raise ParseError(error.reason, number, max(1, line.find(error.text) + error.column), line) from None


def _error(reason: str, text: str) -> ParseError:
    return ParseError(reason, 1, 1, text)


def _parts(text: str) -> list[str]:
    """Returns the items of a list whose sizes may have commas in parentheses."""
    return re.split(r", (?=\w+: )", text) if text else []


def _axes(text: str) -> tuple[Axis, ...]:
    axes = []
    for part in _parts(text):
        name, mark, size = part.partition(": ")
        if not mark:
            raise _error("an axis is 'name: size'", part)
        axes.append(Axis(name, parse_size(size)))
    return tuple(axes)


def _buffers(text: str) -> tuple[Buffer, ...]:
    buffers = []
    for part in _parts(text):
        match = _BUFFER.match(part)
        if match is None:
            raise _error("a buffer is 'name: dtype[extent]', perhaps 'ascending'", part)
        buffers.append(Buffer(match[1], _dtype(match[2]), parse_size(match[3]), bool(match[4])))
    return tuple(buffers)


def _dtype(name: str) -> torch.dtype:
    dtype = _DTYPES.get(name)
    if dtype is None:
        raise _error(f"unknown dtype '{name}'; known: {', '.join(_DTYPES)}", name)
    return dtype


def _line(line: str, position: int, axes: Mapping[str, Axis]) -> Operation:
    match = _LINE.match(line)
    if match is None:
        raise _error("an operation is indented by two blanks", line)
    operation = _operation(match["operation"], axes)
    has_value = not isinstance(operation, Store | DeviceAssert)
    if (match["position"] is not None) != has_value or (has_value and int(match["position"]) != position):
        expected = f"this is operation %{position}" if has_value else "stores and assertions have no value"
        raise _error(expected, line.strip())
    return replace(operation, origin=match["origin"] or "")


def _operation(text: str, axes: Mapping[str, Axis]) -> Operation:
    store = _STORE.match(text)
    if store is not None:
        mode, buffer, index, value, mask = store.groups()
        return Store(buffer, parse_index(index, axes), int(value), _optional(mask), mode or "set")
    require = _REQUIRE.match(text)
    if require is not None:
        error, condition, message, mask = require.groups()
        return DeviceAssert(int(condition), _literal(message), _optional(mask), error=error or "index")
    name, _, value_text = text.partition(" ")
    return _value(value_text, _dtype(name), axes)


def _value(text: str, dtype: torch.dtype, axes: Mapping[str, Axis]) -> Operation:
    load = _LOAD.match(text)
    if load is not None:
        buffer, index, mask, other = load.groups()
        return Load(buffer, parse_index(index, axes), dtype, _optional(mask), _literal(other) if other else 0)
    word, _, rest = text.partition(" ")
    if word == "number":
        return SymbolicScalar(parse_expr(rest), dtype)
    if word == "index":
        return IndexValue(parse_index(rest, axes), dtype)
    combine = _COMBINE.match(text)
    if combine is not None:
        operands = _operands(combine[3])
        over = (combine[5] or "").split()
        unknown = [name for name in over if name not in axes]
        if unknown or ((over or combine[4]) and combine[1] == "scan"):
            raise _error(f"there is no axis '{unknown[0]}'" if unknown else "a scan names no axes and no dtype", rest)
        reduced = tuple([axes[name] for name in over])
        if combine[1] == "scan":
            return Scan(combine[2], operands, dtype)
        precision = None if combine[4] is None else _dtype(combine[4])
        return Reduce(combine[2], operands, dtype, axes=reduced, operand_precision=precision)
    result = _RESULT.match(text)
    if result is not None:
        return ReductionResult(int(result[2]), int(result[1]), dtype)
    compute = _COMPUTE.match(text)
    if compute is not None:
        if compute[1] not in OPERATIONS:
            raise _error(f"unknown operation '{compute[1]}'", compute[1])
        return Compute(compute[1], _operands(compute[2]), dtype)
    return Constant(_literal(text), dtype)


def _operands(text: str) -> tuple[int, ...]:
    return tuple([int(item.removeprefix("%")) for item in text.split()])


def _optional(text: str | None) -> int | None:
    return None if text is None else int(text)


def _literal(text: str) -> Any:
    if text.removeprefix("-") in ("inf", "nan"):
        return float(text)
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        raise _error(f"'{text}' is no literal", text) from None
