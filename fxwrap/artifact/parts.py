"""A program as texts: the IR, its kernels by content hash, and where its lines came from."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from fxwrap.artifact.archive import MANIFEST, Archive, ArchiveWriter
from fxwrap.device_registry import language_facts, registered_lines
from fxwrap.errors import ArtifactError, FxwrapError
from fxwrap.lines import CORE_LINES, Call, ExtensionLine, Mutate, StartCollective
from fxwrap.torch_compat import operator_overload
from fxwrap.wrapper_ir import (
    Block,
    KernelDefinition,
    LineBase,
    Origin,
    Program,
    Role,
    Source,
    blocks,
    map_line,
    parse_program,
    verify,
)

PROGRAM = "program.ir"
ORIGINS = "origins.json"
KERNELS = "kernels"


def check_kernels(program: Program, path: str) -> None:
    """Raises ArtifactError for a kernel that is more than its text, which only this process has."""
    for kernel in program.kernels:
        options = dict(kernel.options)
        if language_facts(kernel.language).by_user and "live" in options:
            raise ArtifactError(
                path, kernel.name, f"the kernel @{kernel.name} is only in this process: {options.get('reason', '')}",
                "Change the kernel so that its text is all that it is",
            )  # fmt: skip


def write_program(writer: ArchiveWriter, program: Program) -> list[dict[str, Any]]:
    """Adds a program's texts; returns what the manifest says of its kernels."""
    writer.add_bytes(PROGRAM, str(program.replace(kernels=())).encode())
    writer.add_bytes(ORIGINS, _origins_text(program).encode())
    described = []
    for kernel in program.kernels:
        entry = f"{KERNELS}/{kernel.hash}.{language_facts(kernel.language).ending}"
        writer.add_bytes(entry, kernel.source.encode())
        described.append({
            "name": kernel.name, "language": kernel.language, "hash": kernel.hash, "entry": entry,
            "signature": list(kernel.signature), "options": [list(pair) for pair in kernel.options],
        })  # fmt: skip
    return described


def read_program(archive: Archive, extensions: Iterable[type[ExtensionLine]]) -> Program:
    """Returns the program of a file, verified; it has no payloads of constants.

    Raises ArtifactError for texts that are no program, a kernel whose hash is another, and operators that are missing.
    """
    described = archive.manifest.get("kernels")
    if not isinstance(described, list):
        raise archive.error(MANIFEST, "it does not list the kernels")
    kernels = tuple([_kernel(archive, item) for item in described])
    text = archive.read_text(PROGRAM)
    try:
        program = verify(parse_program(text, (*CORE_LINES, *registered_lines(), *extensions)).replace(kernels=kernels))
    except FxwrapError as error:
        remedy = "Give load the line classes that it uses as `extensions`, or save it again"
        raise archive.error(PROGRAM, f"it is no program: {error}", remedy) from None
    except (ValueError, TypeError, RecursionError) as error:
        raise archive.error(PROGRAM, f"it cannot be read: {type(error).__name__}: {error}") from None
    origins = archive.read_text(ORIGINS)
    try:
        program = with_origins(program, json.loads(origins))
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
        raise archive.error(ORIGINS, f"it cannot be read: {type(error).__name__}: {error}") from None
    _check_operators(archive, program)
    return program


def _check_operators(archive: Archive, program: Program) -> None:
    """Raises ArtifactError where nobody has registered an operator that a program calls."""
    called = [line.target if isinstance(line, Call | Mutate) else line.operator for line in program.lines()
              if isinstance(line, Call | Mutate | StartCollective)]  # fmt: skip
    missing = []
    for target in dict.fromkeys(called):
        try:
            operator_overload(target)
        except LookupError:
            missing.append(target)
    if missing:
        reason = f"it calls operators that are not registered: {', '.join(missing)}"
        raise archive.error(PROGRAM, reason, "Import the package that registers them, then load the file")


def _kernel(archive: Archive, item: Mapping[str, Any]) -> KernelDefinition:
    try:
        name, entry, wanted = str(item["name"]), str(item["entry"]), str(item["hash"])
        options = tuple([(str(key), option) for key, option in item["options"]])
        signature = tuple([str(kind) for kind in item["signature"]])
        made = KernelDefinition(name, str(item["language"]), archive.read_text(entry), signature, options)
    except (KeyError, TypeError, ValueError) as error:
        raise archive.error(MANIFEST, f"it does not describe a kernel: {error!r}") from None
    if made.hash != wanted:
        reason = f"the kernel @{name} has the hash {made.hash}, and {wanted} was written"
        raise archive.error(entry, reason, "Do not use the file: save the program again")
    return made


# --- origins --------------------------------------------------------------------------------------------------------


def _origins_text(program: Program) -> str:
    """Returns the origins of all lines as JSON: each source once, and for each line its handle and its sources."""
    sources: dict[Source, int] = {}
    lines: list[list[Any] | None] = []
    for line in _in_order(program):
        if line.origin is None:
            lines.append(None)
            continue
        numbers = [sources.setdefault(source, len(sources)) for source in line.origin.sources]
        lines.append([line.origin.handle, *numbers])
    table = [list(dataclasses.astuple(source)) for source in sources]
    fields = [field.name for field in dataclasses.fields(Source)]
    return json.dumps({"fields": fields, "sources": table, "lines": lines}) + "\n"


def with_origins(program: Program, found: Mapping[str, Any]) -> Program:
    """Returns a program with the origins that `found` says, line by line."""
    known = {field.name for field in dataclasses.fields(Source)}
    sources = [
        Source(**{name: item for name, item in zip(found["fields"], row, strict=True) if name in known})
        for row in found["sources"]
    ]
    remaining = iter(found["lines"])
    body = _block_with_origins(program.body, sources, remaining)
    functions = tuple([(name, _block_with_origins(block, sources, remaining)) for name, block in program.functions])
    return program.replace(body=body, functions=functions)


def _in_order(program: Program) -> Iterator[LineBase]:
    for block in (program.body, *[block for _, block in program.functions]):
        yield from _lines_of(block)


def _lines_of(block: Block) -> Iterator[LineBase]:
    for line in block.lines:
        yield line
        for _, nested in blocks(line):
            yield from _lines_of(nested)


def _block_with_origins(block: Block, sources: list[Source], remaining: Iterator[Any]) -> Block:
    lines = []
    for line in block.lines:
        item = next(remaining, None)
        if item is not None:
            handle, *numbers = item
            line = line.replace(origin=Origin(tuple([sources[number] for number in numbers]), handle))
        if blocks(line):
            line = map_line(
                line,
                lambda leaf: _block_with_origins(leaf, sources, remaining) if isinstance(leaf, Block) else leaf,
                (Role.BLOCK,),
            )
        lines.append(line)
    return dataclasses.replace(block, lines=tuple(lines))
