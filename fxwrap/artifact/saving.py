"""Saves programs."""

from __future__ import annotations

import io
import logging
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from torch.fx import GraphModule
from torch.fx.graph import CodeGen

from fxwrap.artifact.archive import ArchiveWriter
from fxwrap.artifact.binaries import write_binaries
from fxwrap.artifact.constants import check_no_objects, check_savable, declared_layout, layout_of, write_constants
from fxwrap.artifact.devices import program_devices
from fxwrap.artifact.emitted_code import write_emitted
from fxwrap.artifact.environment import package_versions
from fxwrap.artifact.native_target import TARGETS
from fxwrap.artifact.program_text import check_kernels, write_program
from fxwrap.artifact.user_kernels import with_ordinary_kernels
from fxwrap.converters.cpp.library import is_compiled_by_triton
from fxwrap.converters.emitted_program import EmittedProgram, kernel_uses
from fxwrap.converters.fx import to_fx
from fxwrap.devices import language_traits
from fxwrap.errors import ArtifactError, FxwrapError, OptionError
from fxwrap.lines import GUARD_MESSAGE, Assert, SizeOf
from fxwrap.memory_planning import MemoryPlan, plan_to_json
from fxwrap.passes.communication import communication
from fxwrap.passes.window_checks import check_windows
from fxwrap.runtime.cache_folder import write_file
from fxwrap.runtime.cpp_kernels import KernelText
from fxwrap.runtime.triton.architectures import architectures_of_this_machine, compile_for_architectures
from fxwrap.runtime.triton.compile import KernelUse
from fxwrap.signature import CallingConvention, signature_to_json
from fxwrap.symbolic import SymbolInfo
from fxwrap.torch_compat import graph_python_code, process_group
from fxwrap.wrapper_ir import Program, Role, program_key, symbol_infos, symbols_used

PLAN = "memory_plan.json"
GRAPH = "graph.py"

log = logging.getLogger("fxwrap.artifact")


@dataclass(frozen=True)
class SavedContent:
    """A program and the description of it that its file contains.

    Fields:
        program: the program.
        emitter: the emitter that runs it by default.
        options: the text of the options that it was compiled with.
        plan: its memory plan, if it has one.
        group_sizes: the ranks of its process groups by name; None for those of this process.
        step: the description of the training step that it is; None for other programs.
        convention: its arguments and result; None for the flat ones.
    """

    program: Program
    emitter: str = "python"
    options: str = ""
    plan: MemoryPlan | None = None
    group_sizes: Mapping[str, int] | None = None
    step: Mapping[str, object] | None = None
    convention: CallingConvention | None = None


def save_program(
    content: SavedContent,
    path: str | Path,
    *,
    emitters: Iterable[str] = (),
    constants: bool = True,
    target: str = "any",
    architectures: Sequence[str] = (),
) -> None:
    """Saves a program, with compiled code for `emitters`.

    With the target "native", the file also runs without Python, and users' Triton kernels are ordinary ones in it.
    Triton kernels are also compiled for `architectures` ("sm_90").

    Raises OptionError for an unknown target or architecture; KernelBuildError for a kernel that does not compile for
    one; ArtifactError for unsupported programs, read-only folders and, with the target "native", programs that need
    Python; NativeBuildError where C++ does not compile. The previous file then remains.
    """
    if target not in TARGETS:
        raise OptionError(f"unknown target {target!r}; known: {', '.join(TARGETS)}")
    program = with_ordinary_kernels(content.program) if target == "native" else content.program
    original, file_path, program = content.program, Path(path), _checked(program, str(path), with_payloads=constants)
    content = replace(content, program=program)
    metadata = _metadata(content) | {"key": program_key(program, content.options)}
    metadata |= {} if content.step is None else {"step": content.step}
    graph = _graph_text(program)

    _report_guarded_sizes(program, str(path))
    uses = _triton_uses(program)
    compile_for_architectures(uses, architectures)
    if target == "native" and not architectures:
        new = set(program.kernels) - set(original.kernels)  # this process has compiled the others
        texts = {KernelText.of(item) for item in new}
        compile_for_architectures([use for use in uses if use.kernel in texts], architectures_of_this_machine())
    again = bool(architectures)

    def add_binaries(writer: ArchiveWriter) -> dict[str, object]:
        if target != "native":
            return write_binaries(writer, program, emitters, relink=again)
        binaries = write_binaries(writer, program, (*emitters, "cpp"), relink=again)
        _check_runs_without_python(binaries, str(file_path))
        return binaries

    def write(file: IO[bytes]) -> None:
        _write_archive(file, content, metadata, add_binaries, constants=constants, graph=graph)

    try:
        write_file(file_path, write)
    except OSError as error:
        remedy = "Free disk space, or choose a folder that can be written"
        raise ArtifactError(str(file_path), "", f"it cannot be written: {error.strerror or error}", remedy) from error


def program_content(
    content: SavedContent, emitted: EmittedProgram, label: str, call: Mapping[str, object], *, has_bridge: bool
) -> bytes:
    """Returns the content of a saved program, with the emitted code and the libraries that this process runs it with.

    `emitted` is the program in the form of its emitter, `label` names it in errors, and `call` describes how it is
    called. `has_bridge` adds the bridge, too. Raises as `save_program` does.
    """
    program, file = content.program, io.BytesIO()
    _check(program, label, with_payloads=True)
    metadata = {**_metadata(content), "call": call}

    def add_code(writer: ArchiveWriter) -> dict[str, object]:
        metadata["emitted"] = write_emitted(writer, program, emitted)
        return write_binaries(writer, program, (content.emitter,), emitted, reuse=True, has_bridge=has_bridge)

    _write_archive(file, content, metadata, add_code)
    return file.getvalue()


def save_for_linked_code(
    program: Program, path: Path, native: Mapping[str, object], convention: CallingConvention
) -> None:
    """Saves a program whose code the host links itself; `native` describes it to the C runtime.

    Raises as `save_program` does, and OSError.
    """
    program = _checked(program, str(path), with_payloads=True)
    content = SavedContent(program, "cpp", convention=convention)
    write_file(path, lambda file: _write_archive(file, content, _metadata(content), lambda _writer: {"native": native}))


def _triton_uses(program: Program) -> list[KernelUse]:
    """Returns the kernels of a program whose compiled Triton code a file contains, with typical arguments."""
    return [use for use in kernel_uses(program).values()
            if is_compiled_by_triton(language_traits(use.kernel.language))]  # fmt: skip


def _report_guarded_sizes(program: Program, path: str) -> None:
    """Logs one line if guards of the graph restrict the sizes that callers of the file may pass."""
    guards = [
        line for line in program.body.lines if isinstance(line, Assert) and line.message.startswith(GUARD_MESSAGE)
    ]
    if not guards:
        return
    symbols = {symbol.name for line in guards for symbol in symbols_used(line, Role.ATTR)}
    sizes = [f"{line.symbol.name} is {line.of} {line.dim} of '{line.tensor.name}'" for line in program.body.lines
             if isinstance(line, SizeOf) and line.symbol.name in symbols]  # fmt: skip
    conditions = ", ".join([line.message.removeprefix(GUARD_MESSAGE) for line in guards])
    log.warning(
        "%s: the traced graph restricts sizes of its inputs: %s (%s). Others raise InputError. For those, trace the "
        "model with examples of them, or remove the code that depends on the size", path, conditions, ", ".join(sizes),
    )  # fmt: skip


def _checked(program: Program, label: str, *, with_payloads: bool) -> Program:
    """Returns a program with checked windows. Raises ArtifactError for one that cannot be saved."""
    program = check_windows(program)
    _check(program, label, with_payloads=with_payloads)
    return program


def _check(program: Program, label: str, *, with_payloads: bool) -> None:
    """Raises ArtifactError for a program that cannot be saved."""
    check_kernels(program, label)
    check_no_objects(program, label)
    if with_payloads or program.store.tensors:
        check_savable(program, label)


def _write_archive(
    file: IO[bytes],
    content: SavedContent,
    metadata: Mapping[str, object],
    add_binaries: Callable[[ArchiveWriter], dict[str, object]],
    *,
    constants: bool = True,
    graph: str = "",
) -> None:
    """Writes all entries and the manifest; `graph` is the code of the FX graph or ""."""
    program, plan = content.program, content.plan
    with ArchiveWriter(file) as writer:
        kernels = write_program(writer, program)
        if graph:
            writer.add_bytes(GRAPH, graph.encode())
        if plan is not None:
            writer.add_bytes(PLAN, plan_to_json(plan).encode())
        contents, names = program.store.operands(), [item.value.name for item in program.constants]
        tensors = {name: contents[name] for name in names if name in contents}
        layout = layout_of(tensors) if tensors or not program.constants else declared_layout(program)
        if constants and program.constants:
            write_constants(writer, layout, tensors)
        entries = {"kernels": kernels, "constants": {"inside": constants, **layout.to_json()}}
        binaries = add_binaries(writer)
        writer.close({**metadata, **entries, "binaries": binaries})


def _check_runs_without_python(binaries: Mapping[str, Any], path: str) -> None:
    """Raises ArtifactError, with all reasons, for a program that needs Python."""
    obstacles = binaries["native"]["obstacles"]
    if obstacles:
        reason = f"the program does not run without Python: {'; '.join(obstacles)}"
        raise ArtifactError(path, "", reason, "Change the model, or save for Python: target='any'")


def current_group_sizes(program: Program) -> dict[str, int]:
    """Returns the number of ranks of the process groups that a program names, of those that are initialised."""
    groups = {item.label: process_group(item.label) for item in communication(program) if item.input is None}
    return {label: group.size() for label, group in sorted(groups.items()) if group is not None}


def _graph_text(program: Program) -> str:
    """Returns the code of the FX graph, for readers: loading does not use it. "" without an FX form."""
    if any(item.value.name not in program.store.tensors for item in program.constants):
        return ""
    try:
        graph_module = to_fx(program).graph_module
    except (FxwrapError, LookupError):  # a line without an FX form, an unregistered operator
        return ""
    graphs = {name: module for name, module in graph_module.named_modules() if isinstance(module, GraphModule)}
    return "\n".join([
        (f"# {name}\n" if name else "") + graph_python_code(module.graph, CodeGen()).src
        for name, module in graphs.items()
    ])  # fmt: skip


def _metadata(content: SavedContent) -> dict[str, object]:
    program, sizes = content.program, content.group_sizes
    sizes = current_group_sizes(program) if sizes is None else sizes
    return {
        "signature": signature_to_json(program, content.convention or CallingConvention.of_flat(program)),
        **({"groups": dict(sizes)} if sizes else {}),
        "name": program.name,
        "emitter": content.emitter,
        "options": content.options,
        "written_by": {**package_versions(), "python": platform.python_version()},
        "devices": [str(device) for device in program_devices(program)],
        "symbols": {name: _symbol(info) for name, info in symbol_infos(program).items()},
    }


def _symbol(info: SymbolInfo) -> dict[str, object]:
    return {"range": [info.lower, info.upper], "hint": info.hint, "divisor": info.divisor}
