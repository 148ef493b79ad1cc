"""Saved programs as CMake projects: sources that build without fxwrap, with libtorch if they call operators."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from fxwrap.artifact.loaded import LoadedProgram
from fxwrap.artifact.native_target import native_entry, native_obstacles
from fxwrap.artifact.saving import save_for_linked_code
from fxwrap.converters.cpp import to_cpp
from fxwrap.converters.cpp.library import EmittedCpp
from fxwrap.errors import ArtifactError
from fxwrap.runtime.cache_folder import write_file
from fxwrap.runtime.native import PROGRAM_FLAGS, NativeSource, project_sources, runtime_sources
from fxwrap.symbolic import SymbolInfo, evaluate
from fxwrap.wrapper_ir import Input, Program, hints_with_fallback

_TEMPLATES = Path(__file__).with_name("cmake_project")
WEIGHTS = "weights.fxw"
_EXAMPLES = {
    torch.float32: ("float", "{kDLFloat, 32, 1}"), torch.float64: ("double", "{kDLFloat, 64, 1}"),
    torch.int64: ("int64_t", "{kDLInt, 64, 1}"), torch.int32: ("int32_t", "{kDLInt, 32, 1}"),
    torch.int16: ("int16_t", "{kDLInt, 16, 1}"), torch.int8: ("int8_t", "{kDLInt, 8, 1}"),
    torch.uint8: ("uint8_t", "{kDLUInt, 8, 1}"), torch.bool: ("uint8_t", "{kDLBool, 8, 1}"),
}  # fmt: skip
"""The C++ type and DLPack's dtype of examples, which `main.cpp` passes for inputs on the CPU."""


def export_cmake(loaded: LoadedProgram, folder: Path) -> list[Path]:
    """Writes the project of a saved program to a new or empty folder; returns its files.

    Raises ArtifactError for a program that needs Python or lacks its constants, for a folder with files, and for one
    that cannot be written.
    """
    program, emitted = loaded.program, to_cpp(loaded.program)
    _check(loaded, emitted, folder)
    units = _units(emitted)
    try:
        files = [_write(folder / name, content) for name, content in _sources(program, emitted, units).items()]
        files += [_write(folder / name, path.read_bytes()) for name, path in _runtime_files().items()]
        save_for_linked_code(
            loaded.program, folder / WEIGHTS, native_entry(program, emitted, lambda _unit: ""), loaded.convention
        )
    except OSError as error:
        remedy = "Free disk space, or choose a folder that can be written"
        reason = f"it cannot be written: {error.strerror or error}"
        raise ArtifactError(str(folder), "", reason, remedy) from error
    return [*files, folder / WEIGHTS]


def _check(loaded: LoadedProgram, emitted: EmittedCpp, folder: Path) -> None:
    obstacles = [
        *native_obstacles(loaded.program, emitted),
        *[f"@{item.line.function} is captured and replayed, which a linked program cannot: compile with "
          "cuda_graphs=False" for item in emitted.functions],
    ]  # fmt: skip
    if obstacles:
        reason = f"the program cannot be exported: {'; '.join(obstacles)}"
        raise ArtifactError(loaded.path, "", reason, "Change the model")
    if loaded.missing_constants:
        reason = f"it was saved without its {len(loaded.missing_constants)} constants"
        raise ArtifactError(loaded.path, "", reason, "Bind them with load_constants, and save it with them")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ArtifactError(str(folder), "", "it is not an empty folder", "Name a new one")


def _units(emitted: EmittedCpp) -> Mapping[str, NativeSource]:
    """Returns the translation units by file name."""
    kernels = {f"kernels_{index}.cpp": unit for index, unit in enumerate(emitted.kernel_units(), 1)}
    return {"program.cpp": NativeSource(emitted.source, PROGRAM_FLAGS), **kernels}


def _sources(program: Program, emitted: EmittedCpp, units: Mapping[str, NativeSource]) -> dict[str, bytes]:
    """Returns the files of the program by name."""
    sources = {name: path for name, path in _runtime_files().items() if name.endswith(".cpp")}
    host = [name for name, path in sources.items() if path in runtime_sources()]
    needs_torch = emitted.engine == "torch"
    values = {
        "NAME": re.sub(r"\W+", "_", program.name) or "program",
        "NEEDS_TORCH": "ON" if needs_torch else "OFF",
        "FOR_TORCH": f" for libtorch {torch.__version__}" if needs_torch else "",
        "PREFIX": "-DCMAKE_PREFIX_PATH=<libtorch> " if needs_torch else "",
        "CXX11_ABI": str(int(torch.compiled_with_cxx11_abi())),
        "BRIDGE": _listed([name for name in sources if name not in host]),
        "HOST": _listed(host),
        "PROGRAM": _listed(units),
        "FLAGS": "\n".join([_flags(name, unit) for name, unit in units.items()]),
        "INPUTS": "\n".join([f"    inputs.push_back({_example(item, program)});" for item in program.inputs]),
    }
    files = {name: unit.text.encode() for name, unit in units.items()}
    for unit in units.values():
        files |= dict(unit.files)
    for template in sorted(_TEMPLATES.iterdir()):
        text = re.sub(r"@([A-Z0-9_]+)@", lambda match: values[match[1]], template.read_text(encoding="utf-8"))
        files[template.name.removesuffix(".in")] = text.encode()
    return files


def _listed(names: Iterable[str]) -> str:
    return "\n".join([f"  {name}" for name in names])


def _flags(name: str, unit: NativeSource) -> str:
    # `.incbin` reads files from the working folder unless the assembler has the project's.
    search = ("-Wa,-I,${CMAKE_CURRENT_SOURCE_DIR}",) if unit.files else ()
    return f'set_source_files_properties({name} PROPERTIES COMPILE_OPTIONS "{";".join([*unit.flags, *search])}")'


def _example(item: Input, program: Program) -> str:
    """Returns the expression of an example, "fxwrap::Value()" for an input that main.cpp cannot create."""
    hints = hints_with_fallback(program)
    if isinstance(item.value, SymbolInfo):
        hint = hints[item.value.name]
        return f"fxwrap::Value({str(hint).lower() if isinstance(hint, bool) else repr(hint)})"
    type_ = item.value.tensor_type
    if type_.dtype not in _EXAMPLES or type_.device.type != "cpu":
        return f"fxwrap::Value() /* {item.name}: pass a tensor of {type_.dtype!s} on {type_.device} */"
    number, dtype = _EXAMPLES[type_.dtype]
    sizes = ", ".join([str(evaluate(size, hints)) for size in type_.sizes])
    return f"example<{number}>({dtype}, {{{sizes}}})"


def _runtime_files() -> dict[str, Path]:
    return {f"fxwrap/{name}": path for name, path in project_sources().items()}


def _write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, lambda file: file.write(content))
    return path
