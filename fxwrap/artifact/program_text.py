"""A program as text entries: IR, kernel sources by content hash, and origins of lines."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import sympy

from fxwrap import wrapper_ir as ir
from fxwrap.artifact.archive import MANIFEST, Archive, ArchiveWriter
from fxwrap.artifact.trust import check_is_safe
from fxwrap.devices import language_traits, registered_lines
from fxwrap.errors import ArgumentError, ArtifactError, FxwrapError
from fxwrap.lines import CORE_LINES, ExtensionLine, ExternCall, Mutate, StartCollective
from fxwrap.torch_compat import operator_overload

PROGRAM = "program.ir"
ORIGINS = "origins.json"
KERNELS = "kernels"


def parse(text: str, extensions: Iterable[type[ExtensionLine]] = ()) -> ir.Program:
    """Parses the text of a program; `extensions` are vendors' line classes besides registered ones.

    Raises ParseError, with line and column, for invalid text, and ArgumentError for another object. The program is not
    verified.
    """
    ArgumentError.check("fxwrap.parse", "text", text, (str,), "Pass the text of a program, as str(program) has it")
    return ir.parse_program(text, (*CORE_LINES, *registered_lines(), *extensions))


def check_kernels(program: ir.Program, path: str) -> None:
    """Raises ArtifactError for in-process kernels, whose source does not define all of them."""
    for kernel in program.kernels:
        options = dict(kernel.options)
        if language_traits(kernel.language).user_defined and "live" in options:
            raise ArtifactError(
                path, kernel.name,
                f"the kernel @{kernel.name} exists only in this process: {options.get('reason', '')}",
                "Change the kernel so that its text defines all of it",
            )  # fmt: skip


def write_program(writer: ArchiveWriter, program: ir.Program) -> list[dict[str, object]]:
    """Adds a program's texts; returns the manifest entries of its kernels."""
    writer.add_bytes(PROGRAM, str(program.replace(kernels=())).encode())
    writer.add_bytes(ORIGINS, _origins_text(program).encode())
    described: list[dict[str, object]] = []
    for kernel in program.kernels:
        entry = f"{KERNELS}/{kernel.hash}.{language_traits(kernel.language).file_extension}"
        writer.add_bytes(entry, kernel.source.encode())
        described.append({
            "name": kernel.name, "language": kernel.language, "hash": kernel.hash, "entry": entry,
            "signature": list(kernel.signature), "options": [list(pair) for pair in kernel.options],
        })  # fmt: skip
    return described


@dataclass(frozen=True)
class ProgramTexts:
    """The texts of a program in a file, whose hashes were checked."""

    program: str
    origins: str
    kernels: tuple[ir.KernelDefinition, ...]


def read_texts(archive: Archive) -> ProgramTexts:
    """Returns the texts of a file's program. Raises ArtifactError for damaged ones, and kernels with a wrong hash."""
    described = archive.manifest.get("kernels")
    if not isinstance(described, list):
        raise archive.error(MANIFEST, "it does not list the kernels")
    kernels = tuple([_kernel(archive, item) for item in described])
    return ProgramTexts(archive.read_text(PROGRAM), archive.read_text(ORIGINS), kernels)


def read_program(archive: Archive, extensions: Iterable[type[ExtensionLine]], trust: str = "full") -> ir.Program:
    """Returns the verified program of a file, without payloads of constants.

    Raises ArtifactError as `read_texts` and `parse_texts` do.
    """
    return parse_texts(archive, read_texts(archive), extensions, trust)


def parse_texts(
    archive: Archive, texts: ProgramTexts, extensions: Iterable[type[ExtensionLine]] = (), trust: str = "full"
) -> ir.Program:
    """Returns the verified program of texts, without payloads of constants. The archive may be closed.

    Raises ArtifactError for invalid texts, unregistered operators, and with the trust "none" for programs that a
    stranger may not write.
    """
    try:
        program = ir.verify(parse(texts.program, extensions).replace(kernels=texts.kernels))
    except FxwrapError as error:
        remedy = "Pass the line classes that it uses as `extensions`, or save it again"
        raise archive.error(PROGRAM, f"it is not a program: {error}", remedy) from None
    except (ValueError, TypeError, RecursionError) as error:
        raise archive.error(PROGRAM, f"it cannot be read: {type(error).__name__}: {error}") from None
    try:
        program = restore_origins(program, json.loads(texts.origins))
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
        raise archive.error(ORIGINS, f"it cannot be read: {type(error).__name__}: {error}") from None
    _check_numbers(archive, program)
    if trust == "none":
        check_is_safe(archive, program, PROGRAM)
    check_operators(archive, called_operators(program))
    return program


def _check_numbers(archive: Archive, program: ir.Program) -> None:
    """Raises ArtifactError for integers of more than 64 bits, which no emitted code can hold."""
    for line in program.lines():
        for leaf in [leaf for names in line.fields_by_role.values() for name in names
                     for leaf in ir.leaves(getattr(line, name))]:  # fmt: skip
            numbers = (
                leaf.atoms(sympy.Integer) if isinstance(leaf, sympy.Basic) else [leaf] if type(leaf) is int else ()
            )
            if any(not -(1 << 63) <= number < 1 << 64 for number in numbers):
                raise archive.error(PROGRAM, f"the line '{line.opcode}' has an integer of more than 64 bits")


def called_operators(program: ir.Program) -> list[str]:
    """Returns the operators that a program calls, as "namespace.name.overload"."""
    called = [line.target if isinstance(line, ExternCall | Mutate) else line.operator for line in program.lines()
              if isinstance(line, ExternCall | Mutate | StartCollective)]  # fmt: skip
    return list(dict.fromkeys(called))


def check_operators(archive: Archive, operators: Iterable[str]) -> None:
    """Raises ArtifactError for operators that are not registered in this process."""
    missing = []
    for target in operators:
        try:
            operator_overload(target)
        except LookupError:
            missing.append(target)
    if missing:
        reason = f"it calls operators that are not registered: {', '.join(missing)}"
        raise archive.error(PROGRAM, reason, "Import the package that registers them, then load the file")


def _kernel(archive: Archive, item: Mapping[str, Any]) -> ir.KernelDefinition:
    try:
        name, entry, expected = str(item["name"]), str(item["entry"]), str(item["hash"])
        options = tuple([(str(key), option) for key, option in item["options"]])
        signature = tuple([str(kind) for kind in item["signature"]])
        kernel = ir.KernelDefinition(name, str(item["language"]), archive.read_text(entry), signature, options)
    except (KeyError, TypeError, ValueError) as error:
        raise archive.error(MANIFEST, f"it does not describe a kernel: {error!r}") from None
    if kernel.hash != expected:
        reason = f"the kernel @{name} has the hash {kernel.hash}, not {expected}"
        raise archive.error(entry, reason, "Do not use the file: save the program again")
    return kernel


# --- origins --------------------------------------------------------------------------------------------------------


def _origins_text(program: ir.Program) -> str:
    """Returns the origins of all lines as JSON.

    They are a table of sources; for each line its handle and source indices; and for each launch its calls, by number.
    """
    sources: dict[ir.Source, int] = {}
    lines: list[list[object] | None] = []
    calls: dict[int, str] = {}
    for line in _iterate_lines(program):
        if line.origin is None:
            lines.append(None)
            continue
        numbers = [sources.setdefault(source, len(sources)) for source in line.origin.sources]
        known = line.origin.calls
        text = ir.print_kernel_calls(known) if isinstance(known, ir.KernelCalls) else known
        if text is not None:
            calls[len(lines)] = text
        lines.append([line.origin.handle, *numbers])
    fields = [field.name for field in dataclasses.fields(ir.Source) if field.compare]
    table = [[getattr(source, name) for name in fields] for source in sources]
    return json.dumps({"fields": fields, "sources": table, "lines": lines, "calls": calls}) + "\n"


def restore_origins(program: ir.Program, data: Mapping[str, Any]) -> ir.Program:
    """Returns a program with the origins of `_origins_text`'s data."""
    known = {field.name for field in dataclasses.fields(ir.Source)}
    sources = [
        ir.Source(**{name: _as_tuple(item) for name, item in zip(data["fields"], row, strict=True) if name in known})
        for row in data["sources"]
    ]
    calls: Mapping[str, str] = data.get("calls", {})
    remaining = iter([(item, calls.get(str(number))) for number, item in enumerate(data["lines"])])
    body = _block_with_origins(program.body, sources, remaining)
    functions = tuple([(name, _block_with_origins(block, sources, remaining)) for name, block in program.functions])
    return program.replace(body=body, functions=functions)


def _as_tuple(item: Any) -> Any:
    return tuple([_as_tuple(part) for part in item]) if isinstance(item, list) else item


def _iterate_lines(program: ir.Program) -> Iterator[ir.LineBase]:
    for block in (program.body, *[block for _, block in program.functions]):
        yield from _lines_of(block)


def _lines_of(block: ir.Block) -> Iterator[ir.LineBase]:
    for line in block.lines:
        yield line
        for _, nested in ir.blocks(line):
            yield from _lines_of(nested)


def _block_with_origins(block: ir.Block, sources: list[ir.Source], remaining: Iterator[Any]) -> ir.Block:
    lines = []
    for line in block.lines:
        item, calls = next(remaining, (None, None))
        if item is not None:
            handle, *numbers = item
            known = tuple([sources[number] for number in numbers])
            line = line.replace(origin=ir.Origin(known, handle, calls=calls if isinstance(calls, str) else None))
        if ir.blocks(line):
            line = ir.map_line(
                line,
                lambda leaf: _block_with_origins(leaf, sources, remaining) if isinstance(leaf, ir.Block) else leaf,
                (ir.Role.BLOCK,),
            )
        lines.append(line)
    return dataclasses.replace(block, lines=tuple(lines))
