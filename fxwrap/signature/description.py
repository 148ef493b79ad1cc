"""The signature of a program as JSON data, for saved programs and their readers in other languages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import sympy

from fxwrap.signature.convention import CallingConvention, returned_operands
from fxwrap.signature.leaves import ProgramInput, ProgramOutput, program_inputs, program_outputs
from fxwrap.symbolic import Size, SymbolInfo, print_expr
from fxwrap.torch_compat import DTYPE_NAMES, describe_tree, restore_tree
from fxwrap.wrapper_ir import OpaqueType, Program, ScalarType, TensorType, Type, Value, print_type

_NONE_TYPE = OpaqueType("NoneType")


def signature_to_json(program: Program, convention: CallingConvention) -> dict[str, object]:
    """Returns the inputs, outputs and calling convention of a program; docs/artifacts.md has the form."""
    return {
        "inputs": [_input(item) for item in program_inputs(program, convention)],
        "outputs": [_output(item) for item in program_outputs(program, convention)],
        "call": dict(convention.source) if convention.source is not None else _call(convention),
    }


def convention_from_json(described: Any, program: Program, *, trusted: bool = True) -> CallingConvention:
    """Returns the calling convention of a file. Types that this process does not know become dicts and tuples.

    With trusted=False, those are all but tuples, lists and dicts. Raises KeyError, TypeError or ValueError for another
    description, and for that of a program with other inputs and outputs.
    """
    call, inputs = described["call"], described["inputs"]
    restored = [restore_tree(tree, trusted=trusted) for tree in (*call["trees"], call["result"])]
    *trees, result = [tree for tree, _ in restored]
    arguments = tuple([str(name) for name in call["arguments"]])
    constants = {position: _constant(item) for position, item in enumerate(inputs) if "constant" in item}
    unknown = tuple(dict.fromkeys([name for _, names in restored for name in names]))
    convention = CallingConvention(
        arguments, int(call["positional"]), tuple(trees), result, constants, unknown, dict(call)
    )
    if len(arguments) != len(trees) or len(set(arguments)) != len(arguments):
        raise ValueError(f"there are {len(trees)} trees for the arguments {arguments}")
    if not 0 <= convention.positional <= len(arguments):
        raise ValueError(f"{convention.positional} of {len(arguments)} arguments are positional")
    counts = (convention.input_count, result.num_leaves), (len(program.inputs), len(returned_operands(program)))
    if counts[0] != counts[1] or len(inputs) != len(program.inputs):
        raise ValueError(f"its trees have {counts[0]} inputs and outputs, the program {counts[1]}")
    return convention


def _call(convention: CallingConvention) -> dict[str, object]:
    return {
        "arguments": list(convention.arguments),
        "positional": convention.positional,
        "trees": [describe_tree(tree) for tree in convention.trees],
        "result": describe_tree(convention.result),
    }


def _input(item: ProgramInput) -> dict[str, object]:
    described: dict[str, object] = {"name": item.name, "value": item.value.name}
    if isinstance(item.value, SymbolInfo):
        return described | {"kind": item.type.kind, "symbol": item.value.name}  # type: ignore[union-attr]
    described |= _type(item.type)
    if isinstance(item.type, TensorType):
        described["ownership"] = item.ownership.value
    if item.is_constant:
        described["constant"] = _json_number(item.constant)
    return described


def _output(item: ProgramOutput) -> dict[str, object]:
    described: dict[str, object] = {"name": item.name}
    operand = item.operand
    if isinstance(operand, Value):
        return described | _type(operand.type) | {"aliases": item.aliases}
    if isinstance(operand, sympy.Basic):
        return described | {"kind": item.type.kind, "expression": print_expr(operand)}  # type: ignore[union-attr]
    kind = "none" if operand is None else item.type.kind if isinstance(item.type, ScalarType) else "constant"
    return described | {"kind": kind, "constant": _json_number(operand)}


def _type(type_: Type) -> dict[str, object]:
    match type_:
        case TensorType():
            described: dict[str, object] = {
                "kind": "tensor", "dtype": DTYPE_NAMES[type_.dtype], "shape": _sizes(type_.sizes),
                "strides": _sizes(type_.strides), "device": str(type_.device),
            }  # fmt: skip
            offset = type_.storage_offset
            return described if offset == 0 else described | {"offset": _sizes((offset,))[0]}
        case ScalarType(kind):
            return {"kind": kind}
        case _ if type_ == _NONE_TYPE:
            return {"kind": "none"}
        case _:
            return {"kind": "opaque", "type": print_type(type_)}


def _sizes(sizes: Sequence[Size]) -> list[int | str]:
    return [size if isinstance(size, int) else print_expr(size) for size in sizes]


def _json_number(constant: object) -> object:
    """Returns a constant as JSON data: floats that JSON has no text for, and values of other types, become texts."""
    if isinstance(constant, float) and not math.isfinite(constant):
        return repr(constant)
    return constant if isinstance(constant, bool | int | float | str | None) else str(constant)


def _constant(described: Mapping[str, Any]) -> object:
    constant = described["constant"]
    return float(constant) if described["kind"] == "float" and constant is not None else constant
