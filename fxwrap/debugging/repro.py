"""A failure as one Python file that fails alike."""

from __future__ import annotations

import logging
import os
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Literal, TypeAlias

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule

from fxwrap.debugging.graph_code import graph_code, options_code
from fxwrap.errors import FxwrapError, OptionError, ReproError
from fxwrap.options import Options
from fxwrap.runtime.cache_folder import write_file

REPRO_ENV = "FXWRAP_REPRO_AFTER"
"""The environment variable: "compile" writes a file for each compile that fails, "accuracy" also checks each call."""

Check: TypeAlias = Literal["compile", "accuracy"]
"""The check that fails: the compile, or the comparison of a call with the graph."""

log = logging.getLogger("fxwrap.compile")
_numbers = count()


@dataclass(frozen=True)
class Failure:
    """A graph that fails.

    Fields:
        graph_module: the graph of operators.
        inputs: values of its placeholders; None if only their metadata is known.
        options: the options of the compile.
        check: the check that fails.
        reason: the error's text.
    """

    graph_module: GraphModule
    inputs: Sequence[object] | None
    options: Options
    check: Check
    reason: str


def repro_after() -> Check | None:
    """Returns the value of the environment variable FXWRAP_REPRO_AFTER. Raises OptionError for an unknown one."""
    value = os.environ.get(REPRO_ENV, "")
    match value:
        case "":
            return None
        case "compile" | "accuracy":
            return value
        case _:
            raise OptionError(f'{REPRO_ENV} is "compile" or "accuracy", not {value!r}')


def with_repro_environment(options: Options) -> Options:
    """Returns the options; with FXWRAP_REPRO_AFTER=accuracy they check each call."""
    if repro_after() != "accuracy" or options.debug is not None or options.on_graph is not None:
        return options
    return options.replace(debug="bisect")


def repro_text(failure: Failure) -> str:
    """Returns the text of the file. Raises ReproError for a graph that code cannot build."""
    code = graph_code(failure.graph_module, failure.inputs)
    options, omitted = options_code(failure.options)
    reason = failure.reason.strip().replace("\\", "\\\\").replace('"""', "'''")
    notes = [f"# Not written, since code cannot build it: the option '{name}'." for name in omitted]
    return "\n".join([
        f'"""{reason}',
        "",
        "Run this file: it fails as the graph from which fxwrap wrote it.",
        '"""',
        "",
        f"# torch {torch.__version__}, Python {platform.python_version()}, {platform.platform()}",
        *notes,
        "",
        "import operator  # noqa: F401",
        "",
        "import torch",
        "from torch.fx import Graph, GraphModule",
        "",
        "import fxwrap",
        "from fxwrap.comparison import reproduce",
        "from fxwrap.debugging import random_tensor  # noqa: F401",
        "",
        f"SYMBOLS = {dict(code.symbols)!r}",
        f"OPTIONS = {options}",
        "",
        "",
        code.functions,
        "",
        'if __name__ == "__main__":',
        "    torch.manual_seed(0)",
        f"    reproduce({failure.check!r}, graph(), inputs, SYMBOLS, OPTIONS)",
        "",
    ])  # fmt: skip


def write_repro(failure: Failure, path: str | Path) -> None:
    """Writes the file. Raises ReproError for a graph that code cannot build, and OSError."""
    text = repro_text(failure)
    write_file(Path(path), lambda file: file.write(text.encode("utf-8", "surrogatepass")))


_ATTRIBUTE = "fxwrap_failure"


def attach_failure(error: BaseException, failure: Failure) -> None:
    """Lets `find_failure` return a failure for an error, offers the commands, and writes a file if asked to."""
    if find_failure(error) is not None:
        return
    error.__dict__[_ATTRIBUTE] = failure
    note = "fxwrap.save_repro(error, 'repro.py') writes a file that fails alike; fxwrap.minify(error) shrinks the graph"
    after = repro_after()
    if after is not None and (after == failure.check or failure.check == "compile"):
        note = _written(failure)
    if hasattr(error, "add_note"):  # Python 3.11
        error.add_note(note)


def _written(failure: Failure) -> str:
    """Writes a file into the current folder, and returns the note of the error."""
    name = re.sub(r"\W", "_", failure.check)
    path = Path(f"fxwrap_repro_{name}_{os.getpid()}_{next(_numbers)}.py").resolve()
    try:
        write_repro(failure, path)
    except (FxwrapError, OSError) as error:
        return f"the file {path} could not be written: {error}"
    log.warning("a file that fails alike was written: %s", path)
    return f"{path} fails alike; fxwrap.minify(error) shrinks the graph"


def find_failure(error: BaseException) -> Failure | None:
    """Returns the failure that an error, or an error that it wraps, reports."""
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        item = pending.pop()
        if item is None or id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(failure := item.__dict__.get(_ATTRIBUTE), Failure):
            return failure
        pending += [item.__context__, item.__cause__, getattr(item, "inner_exception", None)]
    return None


def compile_failure(
    graph: GraphModule | ExportedProgram, inputs: Sequence[object] | None, options: Options, error: BaseException
) -> Failure:
    """Returns the failure of a compile."""
    module = graph.graph_module if isinstance(graph, ExportedProgram) else graph
    values = None if isinstance(graph, ExportedProgram) else inputs
    return Failure(module, values, options, "compile", f"{type(error).__name__}: {error}")


def require_failure(error: BaseException) -> Failure:
    """Returns the failure that an error reports. Raises ReproError if it reports none."""
    failure = find_failure(error)
    if failure is None:
        raise ReproError(f"{type(error).__name__} is no error of a compile or of the option debug='bisect'")
    return failure
