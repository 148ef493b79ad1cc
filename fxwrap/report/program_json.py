"""A program as JSON: its lines with their provenance, its kernels, its inputs."""

from __future__ import annotations

from typing import Any

from fxwrap.symbolic import SymbolInfo, symbol_kind
from fxwrap.wrapper_ir import Block, LineBase, Program, TensorType, Value, blocks, defined, print_line, reads, writes
from fxwrap.wrapper_ir.printer import print_type

__all__ = ["program_to_json"]


def program_to_json(program: Program) -> dict[str, Any]:
    """Returns a program as JSON: what `show` prints, and the names, types and origins of each line.

    A line has its `number` in its block, `text`, `opcode`, the names that it `defines`, `reads` and `writes`, and the
    `handle`, `operators`, `locations` and `modules` of its origin; lines with nested blocks have them by label.
    """
    return {
        "name": program.name,
        "inputs": [
            {"name": item.name, "ownership": item.ownership.value, "type": _type(item.value)} for item in program.inputs
        ],
        "constants": [
            {"name": item.value.name, "type": _type(item.value), "mutable": item.mutable} for item in program.constants
        ],
        "lines": _lines(program.body),
        "functions": {name: _lines(block) for name, block in program.functions},
        "kernels": [
            {
                "name": kernel.name, "language": kernel.language, "hash": kernel.hash, "signature": kernel.signature,
                "options": dict(kernel.options), "source": kernel.source,
                "loops": "" if kernel.loop_ir is None else str(kernel.loop_ir).strip("\n"),
            }
            for kernel in program.kernels
        ],
        "header": dict(program.header),
    }  # fmt: skip


def _type(value: object) -> str:
    return symbol_kind(value.name) if isinstance(value, SymbolInfo) else print_type(getattr(value, "type", None))


def _lines(block: Block) -> list[dict[str, Any]]:
    return [_line(number, line) for number, line in enumerate(block.lines)]


def _line(number: int, line: LineBase) -> dict[str, Any]:
    origin = line.origin
    row: dict[str, Any] = {
        "number": number,
        "text": print_line(line).partition("\n")[0],
        "opcode": line.opcode,
        "defines": {value.name: print_type(value.type) for value in defined(line)},
        "reads": _names(reads(line)),
        "writes": _names(writes(line)),
        "bytes": {value.name: str(value.type.storage_bytes) for value in defined(line)
                  if isinstance(value.type, TensorType)},
    }  # fmt: skip
    if origin is not None:
        row |= {
            "handle": origin.handle, "nodes": origin.nodes, "operators": origin.operators,
            "locations": [f"{source.file}:{source.line}" for source in origin.sources if source.file],
            "modules": origin.modules,
        }  # fmt: skip
    if inner := blocks(line):
        row["blocks"] = {name: _lines(item) for name, item in inner}
    return row


def _names(values: list[Value]) -> list[str]:
    return list(dict.fromkeys([value.name for value in values]))
