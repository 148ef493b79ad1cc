"""Programs kept in files: `fxwrap.save` and `fxwrap.load`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from fxwrap.artifact import Loaded, load_program, save_program
from fxwrap.compiler import Compiled
from fxwrap.converters.from_fx import from_fx
from fxwrap.lines import ExtensionLine
from fxwrap.wrapper_ir import Program


def save(
    subject: Compiled | Loaded | GraphModule | Program,
    path: str | Path,
    *,
    constants: bool = True,
    emitters: Collection[str] | None = None,
) -> None:
    """Saves what was compiled into one file, for `load` in a process that never saw the model.

    The file is a zip archive of the program's text, its kernels, compiled code, constants in the safetensors format,
    the FX graph as code to read, and a manifest with versions, inputs, ranges of symbols and the hash of every entry.
    Equal programs give equal files. A file appears whole or not at all, also when several processes write it.

    Args:
        subject: what `compile_graph` or `load` gave, a program, or an FX graph that fxwrap emitted, also after it was
            rewritten: see `from_fx`.
        path: the file.
        constants: whether the payloads of constants go into the file; without, `load_constants` gives them later.
        emitters: the emitters that compiled code goes into the file for, compiled now where it is not yet; by default
            the one that `subject` was compiled for ("fx" for a graph), and none for a program. The first is the one
            that a graph or program runs with when it is loaded.

    Raises ArtifactError for what cannot be saved: a constant that is no plain tensor, a kernel that is only in this
    process, a folder that cannot be written to. NativeBuildError where C++ does not compile, ReadBackError for a graph
    that no program says.
    """
    match subject:
        case Compiled():
            emitter, options, plan = subject.options.emitter, subject.options.text(), subject.plan
            program, own = subject.program, [emitter]
        case Loaded():
            emitter, options, plan = subject.emitter, subject.metadata["options"], subject.plan
            program, own = subject.program, [emitter]
        case GraphModule():
            program, options, plan = from_fx(subject), "", None
            emitter, own = next(iter(emitters or ()), "fx"), ["fx"]
        case _:
            program, options, plan = subject, "", None
            emitter, own = next(iter(emitters or ()), "python"), []
    save_program(
        program, path, emitter=emitter, emitters=own if emitters is None else emitters, options=options, plan=plan,
        constants=constants,
    )  # fmt: skip


def load(
    path: str | Path,
    *,
    emitter: str | None = None,
    device: torch.device | str | Mapping[Any, Any] | None = None,
    binaries: str = "auto",
    extensions: Iterable[type[ExtensionLine]] = (),
    mmap: bool = True,
) -> Loaded:
    """Loads what `save` wrote: something to call, as what was saved is.

    Every entry is checked by its hash before it is used. Nothing runs but the program's own kernels; those are code, so
    load files from where you would install a package from.

    Args:
        path: the file.
        emitter: how the program runs: "python", "cpp", "fx" or "interpreter"; by default as it was compiled.
        device: another device of the same type for the program ("cuda:1"), or a mapping where it uses several.
        binaries: "auto" uses compiled code in the file where it is for this machine and these versions, and compiles
            what is missing; "required" raises ArtifactError instead of compiling; "ignored" compiles everything.
        extensions: vendors' line classes that the program uses.
        mmap: whether constants on the CPU are in memory that is the file's, which is fastest, and shared by processes.
            The file must then stay as it is while they are used; `save` and moves never change a file in place, some
            other ways of copying do. Without, they are read into memory of their own.

    Raises ArtifactError for a file that is damaged, truncated, foreign or of a newer format, naming the entry and what
    to do; OptionError for an unknown emitter or choice of binaries.
    """
    return load_program(path, emitter=emitter, device=device, binaries=binaries, extensions=extensions, mmap=mmap)
