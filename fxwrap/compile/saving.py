"""Saved programs: `fxwrap.save` and `fxwrap.load`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import torch
from torch.fx import GraphModule

from fxwrap.artifact import LoadedProgram, load_program, save_program
from fxwrap.compile.compiled import Compiled
from fxwrap.converters.from_fx import from_fx
from fxwrap.lines import ExtensionLine
from fxwrap.options import Options
from fxwrap.wrapper_ir import Program

DeviceLike = torch.device | str


def save(
    subject: Compiled | LoadedProgram | GraphModule | Program,
    path: str | Path,
    *,
    constants: bool = True,
    emitters: Collection[str] | None = None,
) -> None:
    """Saves a compiled program into one file, for `load` in a process without the model.

    The file is a zip archive of the program's text, its kernels, compiled code, constants in the safetensors format,
    the FX graph as code, and a manifest with versions, inputs, ranges of symbols and the hash of every entry. Equal
    programs have equal files. Writing is atomic.

    Args:
        subject: the result of `compile_graph` or `load`, a program, or an emitted FX graph, also a rewritten one.
        path: the file.
        constants: whether the file contains the constants; otherwise `load_constants` provides them after loading.
        emitters: the emitters whose compiled code the file contains; by default the emitter of `subject` ("fx" for a
            graph), and none for a program. A graph or program runs with the first one when it is loaded.

    Raises ArtifactError for a constant that is not a plain tensor, an in-process kernel and a folder that is not
    writable; NativeBuildError if C++ does not compile; FxImportError for a graph that `from_fx` does not support.
    """
    match subject:
        case Compiled():
            emitter: str = subject.options.emitter
            program, options, plan, default = subject.program, subject.options.text(), subject.plan, [emitter]
        case LoadedProgram():
            emitter = subject.emitter
            program, options, plan, default = subject.program, subject.metadata["options"], subject.plan, [emitter]
        case GraphModule():
            program, options, plan, default = from_fx(subject), "", None, ["fx"]
            emitter = next(iter(emitters or ()), "fx")
        case _:
            program, options, plan, default = subject, "", None, []
            emitter = next(iter(emitters or ()), Options().emitter)
    save_program(
        program, path, emitter=emitter, emitters=default if emitters is None else emitters, options=options, plan=plan,
        constants=constants,
    )  # fmt: skip


def load(
    path: str | Path,
    *,
    emitter: str | None = None,
    device: DeviceLike | Mapping[DeviceLike, DeviceLike] | None = None,
    binaries: str = "auto",
    extensions: Iterable[type[ExtensionLine]] = (),
    mmap: bool = True,
    trust: str = "full",
) -> LoadedProgram:
    """Loads a program that `save` wrote; call the result with the flat inputs.

    The hash of every entry is checked before its use. The kernels in the file are code: with trust="full", load only
    files whose authors you trust as those of packages that you install.

    Args:
        path: the file.
        emitter: the emitter to run with: "python", "cpp", "fx" or "interpreter"; by default the saved one.
        device: another device of the same type for the program ("cuda:1"), or a mapping for several devices.
        binaries: "auto" uses compiled code in the file if it is for this machine and these versions, and compiles the
            rest; "required" raises ArtifactError instead of compiling; "ignored" compiles everything.
        extensions: vendors' line classes in the program.
        mmap: whether to map constants on the CPU from the file, which is fast and shares memory between processes. The
            file must not change while they are used; `save` and renames replace files, but some tools copy in place.
        trust: "full", or "none" for a file from a stranger: it runs in the interpreter, may have no kernels, and may
            call only operators that check their operands; compiled code in it is not used.

    Raises ArtifactError for a damaged, truncated or foreign file, for a newer format, and for what `trust` does not
    allow; OptionError for an unknown value of `emitter`, `binaries` or `trust`.
    """
    return load_program(
        path, emitter=emitter, device=device, binaries=binaries, extensions=extensions, mmap=mmap,
        trust=trust,
    )  # fmt: skip
