"""The bytes of the blocks that a printed Triton kernel loads, from the ranges that their addresses vary along."""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fxwrap.printers.triton.kernel_source import KernelSource, defined_names, loads, pointer_names

_STAGES = "LOOP_STAGES"


@dataclass(frozen=True, eq=False)
class Definition:
    """The statement that defines a name where it is used, with the definitions before it; None for other values."""

    statement: ast.Assign | None = None
    before: Mapping[str, Definition] = field(default_factory=dict)


Definitions = dict[str, Definition]


class BlockSizes:
    """The sizes of the blocks of one kernel."""

    def __init__(self, kernel: KernelSource) -> None:
        self.kernel = kernel
        self._varies: dict[Definition, frozenset[tuple[str, int]] | None] = {}

    def define(self, definitions: Definitions, statement: ast.stmt) -> None:
        """Records the names that a statement defines."""
        definition = Definition()
        if isinstance(statement, ast.Assign) and self.kernel.is_pure(statement, memory=True):
            definition = Definition(statement, dict(definitions))
        definitions |= dict.fromkeys(defined_names(statement), definition)

    def loaded_bytes(self, load: ast.Call, definitions: Mapping[str, Definition]) -> int | None:
        """Returns the bytes of a load's block; 0 for a scalar, None if a range has an unknown size."""
        ranges = self._ranges(load, definitions)
        if ranges is None:
            return None
        elements = math.prod([size for _, size in ranges])
        pointers = self.kernel.pointers
        roots = [root for name in pointer_names(load.args[0], pointers) for root in pointers[name]]
        return elements * self._itemsize(min(roots)) if elements > 1 and roots else 0

    def _itemsize(self, root: int) -> int:
        bits = "".join([item for item in self.kernel.signature[root] if item.isdigit()])
        return max(int(bits) // 8, 1)

    def _ranges(self, node: ast.AST, definitions: Mapping[str, Definition]) -> frozenset[tuple[str, int]] | None:
        """Returns the ranges that an expression varies along, by the text of their dimension, with their sizes."""
        ranges = frozenset[tuple[str, int]]()
        subscripts = {id(item.value): item for item in ast.walk(node) if isinstance(item, ast.Subscript)}
        for item in ast.walk(node):
            more: frozenset[tuple[str, int]] | None = frozenset()
            if isinstance(item, ast.Call) and ast.unparse(item.func) == "tl.arange":
                size = self.kernel.integer(item.args[1])
                dimension = ast.unparse(subscripts[id(item)].slice) if id(item) in subscripts else ""
                more = None if size is None else frozenset([(dimension, size)])
            elif isinstance(item, ast.Name) and (definition := definitions.get(item.id)) is not None:
                more = self._ranges_of(definition)
            if more is None:
                return None
            ranges |= more
        return ranges

    def _ranges_of(self, definition: Definition) -> frozenset[tuple[str, int]] | None:
        if definition.statement is None:
            return frozenset()
        if definition not in self._varies:
            self._varies[definition] = self._ranges(definition.statement.value, definition.before)
        return self._varies[definition]


def pipelined_bytes(source: str, signature: tuple[str, ...], options: Sequence[tuple[str, object]]) -> int:
    """Returns the bytes of shared memory for the loads of a kernel's pipelined loops: a block for each stage but one.

    Args:
        source: of a printed kernel.
        signature: of the kernel.
        options: of the kernel.
    """
    constants = {name: item for name, item in options if name.isupper()}
    stages = constants.get(_STAGES, 1)
    if not isinstance(stages, int) or stages < 2:
        return 0
    sizes, definitions = BlockSizes(KernelSource(source, signature, constants)), Definitions()

    def loop_bytes(statements: Sequence[ast.stmt], looped: bool) -> int:
        total = 0
        for statement in statements:
            if isinstance(statement, ast.For | ast.If):
                total += loop_bytes([*statement.body, *statement.orelse], looped or isinstance(statement, ast.For))
                continue
            total += sum([sizes.loaded_bytes(load, definitions) or 0 for load in loads(statement) if looped])
            sizes.define(definitions, statement)
        return total

    return (stages - 1) * loop_bytes(sizes.kernel.body, looped=False)
