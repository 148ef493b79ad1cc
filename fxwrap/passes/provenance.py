"""Provenance of kernel launches and operator calls in the model's source, for profilers and readers of code."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

from fxwrap.lines import ExternCall, IndexPut, Launch, Mutate, Scatter
from fxwrap.wrapper_ir import Block, LineBase, Origin, Program, blocks


@dataclass(frozen=True)
class Provenance:
    """The origins of a program's calls.

    `calls` has the origin of each kernel launch and operator call by its handle, in the program's order; `lines` has
    the handles of the calls from a line of the model's source, by "file:line" with the full path.
    """

    calls: Mapping[str, Origin]
    lines: Mapping[str, tuple[str, ...]]

    def to_json(self) -> str:
        """Returns both mappings as JSON, `calls` with the nodes, operators, source lines and modules of each."""
        calls = {
            handle: {
                "nodes": origin.nodes,
                "original_nodes": tuple(dict.fromkeys([item.original for item in origin.sources if item.original])),
                "operators": origin.operators,
                "lines": origin.source_lines,
                "modules": origin.modules,
            }
            for handle, origin in self.calls.items()
        }
        return json.dumps({"calls": calls, "lines": self.lines}, indent=2)


def provenance(program: Program) -> Provenance:
    """Returns the provenance of a program's calls, including those in nested blocks."""
    calls: dict[str, Origin] = {}
    lines: dict[str, list[str]] = {}
    for line in program.lines():
        if line.origin is None or not line.origin.handle:
            continue
        calls[line.origin.handle] = line.origin
        for location in line.origin.source_lines:
            lines.setdefault(location, []).append(line.origin.handle)
    return Provenance(calls, {location: tuple(handles) for location, handles in lines.items()})


def assign_call_handles(program: Program) -> Program:
    """Returns the program with a handle on each kernel launch and operator call: its name and a number.

    Numbers count the calls of one name from 1 in the program's order.
    """
    counts: dict[str, int] = {}
    functions = tuple([(name, _assign_in_block(block, counts)) for name, block in program.functions])
    return program.replace(body=_assign_in_block(program.body, counts), functions=functions)


def _assign_in_block(block: Block, counts: dict[str, int]) -> Block:
    return replace(block, lines=tuple([_assign_handle(line, counts) for line in block.lines]))


def _assign_handle(line: LineBase, counts: dict[str, int]) -> LineBase:
    if blocks(line):
        inner: LineBase = line.replace(**{name: _assign_in_block(block, counts) for name, block in blocks(line)})
        return inner
    name = _callee(line)
    if not name:
        return line
    counts[name] = counts.get(name, 0) + 1
    numbered: LineBase = line.replace(origin=replace(line.origin or Origin(), handle=f"{name}:{counts[name]}"))
    return numbered


def _callee(line: LineBase) -> str:
    """Returns the name of the kernel or operator that a line calls, or ""."""
    match line:
        case Launch():
            return line.kernel
        case ExternCall() | Mutate():
            return line.target.removesuffix(".default")
        case Scatter():
            return "aten.scatter"
        case IndexPut():
            return "aten.index_put"
        case _:
            return ""
