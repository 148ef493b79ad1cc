"""Programs and emitted texts as rows, each with the origin that links it to the other texts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from fxwrap.wrapper_ir import Block, LineBase, Origin, Program, Source, blocks, print_line, print_program


@dataclass(frozen=True)
class Row:
    """One row of a text: `origin` is an index of `OriginTable`, -1 for none; `number` that of a line of the body."""

    text: str
    origin: int = -1
    number: int = -1


@dataclass
class OriginTable:
    """The distinct origins of lines, by their text: lines with one origin are linked to the same rows everywhere."""

    origins: list[Origin] = field(default_factory=list)
    _indices: dict[str, int] = field(default_factory=dict)

    def index(self, origin: Origin | None) -> int:
        """Returns the index of an origin, which is added if it is new; -1 for none."""
        text = "" if origin is None else str(origin)
        if origin is None or not text:
            return -1
        if text not in self._indices:
            self._indices[text] = len(self.origins)
            self.origins.append(origin)
        return self._indices[text]

    def of_text(self, text: str) -> int:
        """Returns the index of the origin with this text, -1 if there is none."""
        return self._indices.get(text, -1)


def program_rows(program: Program, table: OriginTable) -> list[Row]:
    """Returns the rows of a program without its kernels, with one row for each input."""
    head, _, _ = print_program(program.replace(body=Block((), ()), kernels=(), functions=())).partition("{\n}\n")
    name, separator, rest = head.partition("(")
    inputs, end, tail = rest.rpartition(")")
    parts = [part for part in _split_inputs(inputs) if part]
    named = zip(parts, [item.name for item in program.inputs], strict=True)
    rows = [Row(f"{name}{separator}")]
    rows += [Row(f"    {part}", table.index(Origin((Source(name),)))) for part, name in named]
    rows.append(Row(f"{end}{tail}{{"))
    rows += _block_rows(program.body, "  ", table, numbered=True)
    rows.append(Row("}"))
    rows += [Row(f"constant %{constant.value.name}") for constant in program.constants]
    for function, block in program.functions:
        arguments = ", ".join([f"%{value.name}" for value in block.arguments])
        rows += [Row(f"function @{function}({arguments}) {{"), *_block_rows(block, "  ", table), Row("}")]
    return rows


def _split_inputs(text: str) -> Iterator[str]:
    """Yields the inputs of a program's head; a comma inside brackets separates sizes."""
    depth, start = 0, 0
    for position, character in enumerate(text):
        depth += (character in "[(<") - (character in "])>")
        if character == "," and depth == 0:
            yield text[start : position + 1].strip()
            start = position + 1
    yield text[start:].strip()


def _block_rows(block: Block, indent: str, table: OriginTable, *, numbered: bool = False) -> list[Row]:
    rows: list[Row] = []
    origin = -1
    for position, line in enumerate(block.lines):
        own = table.index(line.origin)
        origin = own if own >= 0 else origin  # frees and checks belong to the line before them
        texts = print_line(line, indent).split("\n")
        number = position if numbered else -1
        rows.append(Row(texts[0], origin, number))
        rows += _nested_rows(line, texts[1:], origin, indent, table)
    return rows


def _nested_rows(line: LineBase, texts: list[str], origin: int, indent: str, table: OriginTable) -> Iterator[Row]:
    position = 0
    for _, block in blocks(line):
        nested = _block_rows(block, f"{indent}  ", table)
        yield Row(texts[position], origin)
        yield from nested
        position += 1 + len(nested)
    yield from [Row(text, origin) for text in texts[position:]]


def emitted_rows(source: str, table: OriginTable) -> list[Row]:
    """Returns the rows of an emitted text: a comment with an origin precedes the rows of its lines."""
    rows: list[Row] = []
    origin, indent = -1, 0
    for text in source.rstrip("\n").split("\n"):
        stripped = text.lstrip()
        if stripped.startswith(("# ", "// ")):
            named = table.of_text(stripped.lstrip("#/").strip())
            if named >= 0:
                origin, indent = named, len(text) - len(stripped)
        elif stripped and len(text) - len(stripped) < indent:
            origin = -1  # the function ended
        rows.append(Row(text, origin if stripped else -1))
    return rows
