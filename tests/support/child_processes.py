"""Child processes: their environment, and processes forked from one that has imported torch and fxwrap.

Those imports take a process two to four seconds, most of the time of a short one.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.context import BaseContext
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType

import torch

import fxwrap

_RANKS = ("rank", "compile_rank", "overlap_rank", "speed_rank", "training_rank")
# What the first compile of a process imports: 0.3 s.
_FIRST_COMPILE = ("sympy.tensor.tensor", "torch.distributed.tensor.experimental", "torch.export._trace")
# AOTAutograd imports the last one for a log.
_PRELOADED = (
    *("tests.support.quick_torch", *[f"tests.distributed.{name}" for name in _RANKS]),
    *(*_FIRST_COMPILE, "torch._inductor.debug"),
)


def child_environment(**variables: str) -> dict[str, str]:
    """Returns this process's environment with these variables, in which children import this copy of fxwrap.

    The folders of PYTHONPATH follow: fxwrap's entry points, by which torch finds the backend, may be in one.
    """
    folders = [str(Path(fxwrap.__file__).parents[1]), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(folders), **variables}


def forking_context() -> BaseContext:
    """Returns the context of processes that are forked from one which has imported what they need.

    They have no state of this process. Where there are GPUs they are started anew: a process with a CUDA context cannot
    be forked, and even counting devices may make one.
    """
    if torch.cuda.is_available():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_PRELOADED])
    return context


def run_python(
    arguments: Sequence[object], environment: Mapping[str, str] | None = None, timeout: float = 600
) -> subprocess.CompletedProcess[str]:
    """Runs `python ARGUMENTS...`, which begin with `-c` or `-m`, in a forked process.

    For code that does not depend on the modules which it finds imported, nor on the interpreter's own variables.
    """
    words = [str(word) for word in arguments]
    variables = dict(child_environment() if environment is None else environment)
    with TemporaryDirectory() as folder:
        outputs = (Path(folder) / "output", Path(folder) / "errors")
        process = forking_context().Process(target=_run_python, args=(words, variables, *map(str, outputs)))
        process.start()
        process.join(timeout)
        process.kill()
        process.join()
        texts = [path.read_text() if path.exists() else "" for path in outputs]
    return subprocess.CompletedProcess(words, process.exitcode, *texts)


def _run_python(arguments: Sequence[str], environment: Mapping[str, str], output: str, errors: str) -> None:
    os.environ.clear()
    os.environ |= environment
    for number, path in ((1, output), (2, errors)):
        with open(path, "w") as file:
            os.dup2(file.fileno(), number)
    option, source, *rest = arguments
    sys.argv = [option, *rest]
    if option == "-m":
        runpy.run_module(source, run_name="__main__", alter_sys=True)
        return
    main = sys.modules["__main__"] = ModuleType("__main__")
    exec(compile(source, "<string>", "exec"), vars(main))
