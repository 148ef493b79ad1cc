"""`fxwrap.save`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from os import PathLike
from pathlib import Path

from torch.fx import GraphModule

from fxwrap.artifact import SavableProgram, SavedContent, save_program
from fxwrap.converters.from_fx import from_fx
from fxwrap.errors import ArgumentError
from fxwrap.options import Options
from fxwrap.wrapper_ir import Program

_REMEDY = "Pass what fxwrap.compile_graph or fxwrap.load returns, a program, or an emitted graph"


def save(
    subject: SavableProgram | GraphModule | Program,
    path: str | Path,
    *,
    constants: bool = True,
    emitters: Collection[str] | None = None,
    target: str = "any",
    architectures: Sequence[str] = (),
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
        target: "native" for a file that the C runtime runs without Python (docs/deploy.md); it has the compiled code
            of the emitter "cpp" too.
        architectures: NVIDIA GPUs that the Triton kernels are compiled for, besides those of this process: "sm_80",
            "sm_90". No such GPU is needed here. Others run the code of an earlier GPU of their generation, or PTX.

    Raises OptionError for an unknown target or architecture; KernelBuildError for a kernel that Triton cannot compile
    for one; ArtifactError for a constant that is not a plain tensor, an in-process kernel, a folder that is not
    writable and, with target="native", for each item that needs Python, by name; NativeBuildError if C++ does not
    compile; FxImportError for a graph that `from_fx` does not support; ArgumentError for another subject or path.
    """
    ArgumentError.check("fxwrap.save", "subject", subject, (SavableProgram, GraphModule, Program), _REMEDY)
    ArgumentError.check("fxwrap.save", "path", path, (str, PathLike), "Pass the path of the file")
    match subject:
        case SavableProgram():
            subject.save(path, constants=constants, emitters=emitters, target=target, architectures=architectures)
            return
        case GraphModule():
            program, emitter, default = from_fx(subject), "fx", ["fx"]
        case _:
            program, emitter, default = subject, Options().emitter, []
    content = SavedContent(program, next(iter(emitters or ()), emitter))
    chosen = default if emitters is None else emitters
    save_program(content, path, emitters=chosen, constants=constants, target=target, architectures=architectures)
