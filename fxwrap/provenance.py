"""From kernels and operator calls to the model's source, and back: what profilers and readers of emitted code ask."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fxwrap.lines import Call, IndexPut, Launch, Mutate, Scatter
from fxwrap.wrapper_ir import Block, LineBase, Origin, Program, Role, blocks, map_line


@dataclass(frozen=True)
class Provenance:
    """Where the calls of a program came from.

    `calls` has the origin of each call of a kernel or operator by its handle, in the program's order; `lines` the
    handles of all that a place of the model's source became, by "file:line", with the file's folder.
    """

    calls: Mapping[str, Origin]
    lines: Mapping[str, tuple[str, ...]]

    def to_json(self) -> str:
        """Returns both mappings as JSON, `calls` with the nodes, operators, places and modules of each."""
        calls = {
            handle: {
                "nodes": origin.nodes,
                "original_nodes": tuple(dict.fromkeys([item.original for item in origin.sources if item.original])),
                "operators": origin.operators,
                "lines": _places(origin),
                "modules": origin.modules,
            }
            for handle, origin in self.calls.items()
        }
        return json.dumps({"calls": calls, "lines": self.lines}, indent=2)


def provenance(program: Program) -> Provenance:
    """Returns where the calls of a program came from, by the origins of its lines, nested ones included."""
    calls: dict[str, Origin] = {}
    lines: dict[str, list[str]] = {}
    for line in program.lines():
        if line.origin is None or not line.origin.handle:
            continue
        calls[line.origin.handle] = line.origin
        for place in _places(line.origin):
            lines.setdefault(place, []).append(line.origin.handle)
    return Provenance(calls, {place: tuple(handles) for place, handles in lines.items()})


def _places(origin: Origin) -> tuple[str, ...]:
    return tuple(dict.fromkeys([f"{source.file}:{source.line}" for source in origin.sources if source.file]))


def number_calls(program: Program) -> Program:
    """Returns the program with a handle on each line that calls a kernel or an operator: its name and a number.

    The numbers count the calls of one name from 1, in the program's order, blocks before the line they are in.
    """
    counts: dict[str, int] = {}
    functions = tuple([(name, _numbered(block, counts)) for name, block in program.functions])
    return program.replace(body=_numbered(program.body, counts), functions=functions)


def _numbered(block: Block, counts: dict[str, int]) -> Block:
    return replace(block, lines=tuple([_with_handle(line, counts) for line in block.lines]))


def _with_handle(line: LineBase, counts: dict[str, int]) -> LineBase:
    if blocks(line):
        inner: LineBase = map_line(line, partial(_nested, counts=counts), (Role.BLOCK,))
        return inner
    name = _callee(line)
    if not name:
        return line
    counts[name] = counts.get(name, 0) + 1
    numbered: LineBase = line.replace(origin=replace(line.origin or Origin(), handle=f"{name}:{counts[name]}"))
    return numbered


def _nested(leaf: Any, counts: dict[str, int]) -> Any:
    return _numbered(leaf, counts) if isinstance(leaf, Block) else leaf


def _callee(line: LineBase) -> str:
    """Returns the name of the kernel or the operator that a line calls, or ""."""
    match line:
        case Launch():
            return line.kernel
        case Call() | Mutate():
            return line.target.removesuffix(".default")
        case Scatter():
            return "aten.scatter"
        case IndexPut():
            return "aten.index_put"
        case _:
            return ""
