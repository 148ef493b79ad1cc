"""The emitted code of a program in its file, for processes of the same fxwrap, which run it without reading the IR.

Such files are entries of caches: of a serving host, and of torch. The program is read when it is first asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fxwrap.artifact.archive import MANIFEST, Archive, ArchiveWriter
from fxwrap.artifact.binaries import load_binaries
from fxwrap.artifact.constants import ConstantLayout, read_constants
from fxwrap.artifact.environment import code_identity
from fxwrap.artifact.program_text import called_operators, check_operators
from fxwrap.converters.cpp.library import EmittedCpp, load_cpp
from fxwrap.converters.emitted_program import EmittedProgram
from fxwrap.converters.python import EmittedPython, PythonModuleText
from fxwrap.lines import ExtensionLine
from fxwrap.passes.communication import communication
from fxwrap.runtime.cpp_kernels import KernelText
from fxwrap.runtime.native import source_key
from fxwrap.wrapper_ir import Program

_ENTRIES: Mapping[type[EmittedProgram], str] = {EmittedPython: "emitted.py", EmittedCpp: "emitted.cpp"}
"""The entry of the text. FX graphs are not in files as code, since their users may rewrite them."""


def write_emitted(writer: ArchiveWriter, program: Program, emitted: EmittedProgram) -> dict[str, object]:
    """Adds the emitted text of a program; returns its manifest entry.

    None is added, and the entry is empty, for a program whose text alone does not define its run: one with vendors'
    lines, with collectives, whose ranks compare their programs, or with captured functions in C++.
    """
    entry = _ENTRIES.get(type(emitted))
    if entry is None or communication(program) or any(isinstance(line, ExtensionLine) for line in program.lines()):
        return {}
    if isinstance(emitted, EmittedCpp) and emitted.functions:
        return {}
    writer.add_bytes(entry, emitted.source.encode())
    devices = {item.value.name: str(item.value.tensor_type.device) for item in program.constants}
    described: dict[str, object] = {
        "identity": code_identity(), "entry": entry, "constant_devices": devices,
        "operators": called_operators(program),
    }  # fmt: skip
    if isinstance(emitted, EmittedPython):
        text = emitted.text
        described |= {name: getattr(text, name) for name in ("name", "function", "checks_inputs", "has_complex_inputs")}
    return described


def read_emitted(archive: Archive) -> tuple[EmittedProgram, ConstantLayout, Mapping[str, torch.Tensor]] | None:
    """Returns the emitted program of a file, with its constants by name and their layout, ready to run.

    None if the file has none, or for another version of fxwrap or torch, or another machine. Raises ArtifactError for
    a damaged file, and for operators that are not registered.
    """
    manifest = archive.manifest
    described = manifest.get("emitted")
    if not isinstance(described, dict) or described.get("identity") != code_identity():
        return None
    try:
        emitter, entry = str(manifest["emitter"]), str(described["entry"])
        source = archive.read_text(entry)
        check_operators(archive, map(str, described["operators"]))
        kernels = tuple([_kernel_text(archive, item) for item in manifest["kernels"]])
        layout = ConstantLayout.from_json(manifest["constants"])
        devices = {str(name): torch.device(str(device)) for name, device in described["constant_devices"].items()}
        if load_binaries(archive, emitter, kernels, lambda: {source_key(source)}):
            return None
        constants = read_constants(archive, layout, devices, False) if layout.views else {}
        if emitter == "cpp":
            return load_cpp(source, [constants[view.name] for view in layout.views]), layout, constants
        flags = bool(described["checks_inputs"]), bool(described["has_complex_inputs"])
        text = PythonModuleText(source, str(described["name"]), str(described["function"]), *flags)
        return EmittedPython(text, kernels, lambda: constants), layout, constants
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise archive.error(MANIFEST, f"it does not describe the emitted code: {error!r}") from None


def _kernel_text(archive: Archive, item: Mapping[str, Any]) -> KernelText:
    options = tuple([(str(key), option) for key, option in item["options"]])
    signature = tuple([str(kind) for kind in item["signature"]])
    return KernelText(str(item["language"]), archive.read_text(str(item["entry"])), signature, options)
