"""The drawing of a program: its calls and kernels and the tensors between them, in the language of Graphviz."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fxwrap.lines import ExternCall, Launch, PoolSlice, Return, Reuse, Yield
from fxwrap.symbolic import SymbolInfo
from fxwrap.wrapper_ir import Block, LineBase, OpaqueType, Program, Value, blocks, defined, print_type, reads, writes

__all__ = ["program_drawing"]

_HEAD = (
    "  rankdir=TB;",
    '  node [shape=box, style="rounded,filled", fillcolor="#eeeeee", fontname="Helvetica", fontsize=10];',
    '  edge [fontname="Helvetica", fontsize=8, color="#666666"];',
)
_KERNEL, _CALL, _VALUES = "#d5e8d4", "#dae8fc", "#ffffff"


def program_drawing(program: Program) -> str:
    """Returns a program as text for `dot`: kernels, calls and blocks as boxes, tensors as arrows with their types.

    A box has the handle of its line, its operators and its lines in the model's source. Memory, views and checks are
    not drawn. An arrow leads from the line that wrote a tensor last to one that reads it, or writes into it.
    """
    drawing = _Drawing()
    entering = [*[item.value for item in program.inputs], *[item.value for item in program.constants]]
    drawing.block(program.body, entering, "  ")
    for name, block in program.functions:
        drawing.cluster(f"function @{name}", block, "  ")
    return "\n".join([f"digraph {_quoted(program.name)} {{", *_HEAD, *drawing.rows, "}"]) + "\n"


@dataclass
class _Drawing:
    """The rows so far, and the number of boxes."""

    rows: list[str] = field(default_factory=list)
    count: int = 0

    def box(self, label: str, color: str, indent: str, shape: str = "") -> str:
        """Adds a box and returns its name."""
        name, self.count = f"n{self.count}", self.count + 1
        style = f", shape={shape}" if shape else ""
        self.rows.append(f"{indent}{name} [label={_quoted(label)}, fillcolor={_quoted(color)}{style}];")
        return name

    def cluster(self, label: str, block: Block, indent: str) -> None:
        """Adds a block as a frame."""
        self.rows.append(f"{indent}subgraph cluster_{self.count} {{")
        self.rows.append(f"{indent}  label={_quoted(label)};")
        self.block(block, list(block.arguments), f"{indent}  ")
        self.rows.append(f"{indent}}}")

    def block(self, block: Block, entering: Sequence[Value | SymbolInfo], indent: str) -> None:
        """Adds the lines of a block; `entering` are the values that it gets."""
        writers: dict[str, str | None] = {value.name: None for value in entering if isinstance(value, Value)}
        root_of: dict[str, str] = {}
        for line in block.lines:
            for value in defined(line):
                alias = None if isinstance(line, Reuse | PoolSlice) else line.alias_of(value)
                root_of[value.name] = value.name if alias is None else root_of.get(alias.name, alias.name)
            if not _is_drawn(line):
                continue
            box = self._line(line, indent)
            for value in dict.fromkeys([*reads(line), *writes(line)]):
                root = root_of.get(value.name, value.name)
                if root in writers and not isinstance(value.type, OpaqueType):
                    source = writers[root] = writers[root] or self.box(f"%{root}", _VALUES, indent, "ellipse")
                    self.rows.append(f"{indent}{source} -> {box} [label={_quoted(print_type(value.type))}];")
            for value in (*defined(line), *writes(line)):
                writers[root_of.get(value.name, value.name)] = box

    def _line(self, line: LineBase, indent: str) -> str:
        color = _KERNEL if isinstance(line, Launch) else _CALL if isinstance(line, ExternCall) else "#eeeeee"
        if isinstance(line, Return | Yield):
            return self.box("results", _VALUES, indent, "ellipse")
        box = self.box(_label(line), color, indent)
        for label, inner in blocks(line):
            self.cluster(f"{line.origin.handle if line.origin else line.opcode}: {label.rstrip('_')}", inner, indent)
        return box


def _is_drawn(line: LineBase) -> bool:
    has_handle = line.origin is not None and bool(line.origin.handle)
    return has_handle or bool(line.terminator) or bool(blocks(line)) or line.is_async_start


def _label(line: LineBase) -> str:
    origin = line.origin
    if origin is None:
        return line.opcode
    names = (origin.handle or line.opcode, ", ".join(origin.operators), origin.location_text())
    return "\n".join(dict.fromkeys([name for name in names if name]))


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
