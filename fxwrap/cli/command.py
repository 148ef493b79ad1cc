"""The commands `show`, `emit`, `plan` and `compare`."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch

from fxwrap.cli.coverage import coverage_table
from fxwrap.cli.target import Target, load_target
from fxwrap.compare import CapturedGraph, capture, compare
from fxwrap.compiler import emit, plan_program
from fxwrap.errors import CommandError, OptionError
from fxwrap.memory_planning import plan_svg, plan_table, plan_to_json
from fxwrap.options import EMITTERS, PLANNERS, Options
from fxwrap.passes.given_memory import fill_given_memory
from fxwrap.wrapper_ir import known_values, print_program

DISAGREE, WRONG_USE, FAILED = 1, 2, 3
"""Exit codes besides 0: emitters do not agree; the command line is wrong; the compilation or the run failed."""

_DESCRIPTION = """\
Compile a PyTorch function and look at what comes out.

A TARGET is one of
  MODULE:NAME      a function or nn.Module in an importable module (the working directory counts)
  FILE.py:NAME     the same in a file
  FILE.pt2         a program saved by torch.export.save

NAME may also be a function without arguments that returns (function, inputs). Inputs come from --inputs, else from the
attribute example_inputs of what is named, else from NAME_example_inputs beside it, else from the exported program.
"""

_EXAMPLES = """\
examples:
  python -m fxwrap show model.py:make_model
  python -m fxwrap show model.pt2 --origins
  python -m fxwrap show model.py:make_model --training --coverage
  python -m fxwrap show model.py:make_model --option autotune=true --option memory_planning=auto
  python -m fxwrap show mypackage.layers:attention --inputs "f32[2, 8, 16], bool[2, 8]" --training
  python -m fxwrap emit model.py:make_model --emitter cpp -o model.cpp
  python -m fxwrap plan model.py:make_model --training --svg memory.svg
  python -m fxwrap compare model.py:make_model --training

exit codes: 0 done and agreed, 1 emitters disagree, 2 wrong command line, 3 compilation or run failed
"""


def main(arguments: Sequence[str]) -> int:
    """Runs a command line and returns its exit code; messages of errors go to stderr."""
    chosen = _parser().parse_args(arguments)
    try:
        return int(chosen.run(chosen))
    except CommandError as error:
        print(f"fxwrap: {error}", file=sys.stderr)
        return WRONG_USE
    except Exception as error:  # noqa: BLE001  whatever a model or torch raises is a message here, not a traceback
        print(f"fxwrap: {type(error).__name__}: {error}", file=sys.stderr)
        return FAILED


_Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m fxwrap",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="show | emit | plan | compare")
    _add_show(commands)
    _add_emit(commands)
    _add_plan(commands)
    _add_compare(commands)
    return parser


def _add_show(commands: _Commands) -> None:
    what = "print the program: the typed lines between the graph and the emitted code"
    command = _add_command(commands, "show", what, 'model.py:block --inputs "f32[4, 64]" --origins')
    command.add_argument("--origins", action="store_true", help="end each line with the operator and source it is from")
    command.add_argument("--coverage", action="store_true", help="print which operators were fused or called, and why")
    command.add_argument("--provenance", action="store_true", help="print, as JSON, the source lines of each kernel")
    command.add_argument("--stages", action="store_true", help="print the program after each step that changed it")
    command.add_argument("--graph", type=int, metavar="N", help="only graph N, from 0 (default: all)")
    command.set_defaults(run=_show)


def _add_emit(commands: _Commands) -> None:
    what = "print, or write to a file, the text of an emitter"
    example = "model.py:make_model --emitter cpp --training --graph 1 -o backward.cpp"
    command = _add_command(commands, "emit", what, example)
    command.add_argument("--emitter", choices=EMITTERS, default="python", help="which text (default: python)")
    command.add_argument("-o", "--output", metavar="FILE", help="write to FILE, whole or not at all")
    command.add_argument("--graph", type=int, metavar="N", help="only graph N, from 0 (default: all)")
    command.set_defaults(run=_emit)


def _add_plan(commands: _Commands) -> None:
    what = "plan the program's memory: print pools, offsets and peaks, write them as JSON, draw them"
    command = _add_command(commands, "plan", what, "model.py:make_model --training --graph 1 --svg memory.svg")
    command.add_argument("--algorithm", choices=PLANNERS, default="auto", help="how offsets are found (default: auto)")
    command.add_argument("--json", metavar="FILE", help="write the plan to FILE as JSON")
    command.add_argument("--svg", metavar="FILE", help="draw the memory of one graph over its lines to FILE")
    command.add_argument("--graph", type=int, metavar="N", help="only graph N, from 0 (default: all)")
    command.set_defaults(run=_plan)


def _add_compare(commands: _Commands) -> None:
    what = "run eager, a float64 reference and all emitters on the same inputs, and print a table"
    command = _add_command(commands, "compare", what, "model.py:make_model --training --emitter cpp --emitter python")
    command.add_argument("--emitter", action="append", choices=EMITTERS, help="only this one; may be repeated")
    command.add_argument("--tolerance", type=float, metavar="X", help="relative error, by norm, that counts as equal")
    command.add_argument("--repeats", type=int, default=20, metavar="N", help="runs to time; 0 for none (default: 20)")
    command.set_defaults(run=_compare)


def _add_command(commands: _Commands, name: str, what: str, example: str) -> argparse.ArgumentParser:
    """Adds a command with the arguments that all of them take."""
    command = commands.add_parser(
        name,
        help=what,
        description=f"{what[0].upper()}{what[1:]}.",
        epilog=f"example:\n  python -m fxwrap {name} {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("target", metavar="TARGET", help="MODULE:NAME, FILE.py:NAME or FILE.pt2")
    command.add_argument("--inputs", metavar="TYPES", help='inputs filled at random, e.g. "f32[4, 8], i64[2], int"')
    command.add_argument("--training", action="store_true", help="run forward and backward")
    command.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE", help="e.g. autotune=true; may be repeated"
    )
    command.add_argument("--dynamic", action="store_true", help="compile for any sizes")
    command.add_argument("--seed", type=int, default=0, help="of random inputs and of random operators (default: 0)")
    return command


def _graphs(chosen: argparse.Namespace) -> list[CapturedGraph]:
    """Returns the graphs that a command line asks for, compiled. Raises CommandError for a number that is none."""
    target = _target(chosen)
    how = {"options": _options(chosen), "training": chosen.training, "dynamic": chosen.dynamic}
    graphs = list(capture(target.function, target.inputs, **how))
    if chosen.graph is None:
        return graphs
    if not 0 <= chosen.graph < len(graphs):
        known = ", ".join(f"{number} ({graph.name})" for number, graph in enumerate(graphs))
        raise CommandError(f"there is no graph {chosen.graph}; there are {known}")
    return [graphs[chosen.graph]]


def _options(chosen: argparse.Namespace) -> Options:
    """Returns the options that a command line gives. Raises CommandError for one that there is not."""
    given: dict[str, Any] = {}
    if getattr(chosen, "stages", False):
        given["compile_cache"] = False  # what comes from there has no stages
    for text in chosen.option:
        name, equals, value = text.partition("=")
        if not equals:
            raise CommandError(f"--option takes NAME=VALUE, not '{text}'")
        try:
            given[name] = json.loads(value)
        except ValueError:
            given[name] = value
    try:
        return Options.from_mapping(given)
    except OptionError as error:
        raise CommandError(f"--option: {error}") from error


def _target(chosen: argparse.Namespace) -> Target:
    torch.manual_seed(chosen.seed)
    return load_target(chosen.target, chosen.inputs, chosen.seed)


def _show(chosen: argparse.Namespace) -> int:
    for graph in _graphs(chosen):
        if chosen.coverage:
            print(coverage_table(graph.name, graph.compiled.coverage))
            continue
        if chosen.provenance:
            print(graph.compiled.provenance.to_json())
            continue
        stages = graph.compiled.stages if chosen.stages else graph.compiled.stages[-1:]
        for stage in stages:
            if chosen.stages:
                print(f"--- after {stage.made_by}")
            print(print_program(stage.program, origins=chosen.origins))
    return 0


def _emit(chosen: argparse.Namespace) -> int:
    graphs = _graphs(chosen)
    texts = [emit(graph.compiled.program, chosen.emitter).source for graph in graphs]
    if chosen.output is None:
        print("\n".join(texts))
        return 0
    if len(texts) > 1:
        known = ", ".join(f"{number} ({graph.name})" for number, graph in enumerate(graphs))
        raise CommandError(f"there are {len(texts)} graphs; choose one for the file with --graph: {known}")
    _write(Path(chosen.output), texts[0])
    return 0


def _plan(chosen: argparse.Namespace) -> int:
    graphs = _graphs(chosen)
    if (chosen.json or chosen.svg) and len(graphs) > 1:
        known = ", ".join(f"{number} ({graph.name})" for number, graph in enumerate(graphs))
        raise CommandError(f"there are {len(graphs)} graphs; choose one for the file with --graph: {known}")
    for graph in graphs:
        program = fill_given_memory(graph.compiled.program)
        plan = plan_program(program, Options(memory_planning=chosen.algorithm))
        values = known_values(program)
        print(f"{graph.name}\n{plan_table(plan, values)}")
        if chosen.json:
            _write(Path(chosen.json), plan_to_json(plan))
        if chosen.svg:
            _write(Path(chosen.svg), plan_svg(plan, values))
    return 0


def _write(path: Path, text: str) -> None:
    """Writes a file that appears whole or not at all."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)  # mkstemp's file is the user's alone
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _compare(chosen: argparse.Namespace) -> int:
    target = _target(chosen)
    given = {"emitters": chosen.emitter} if chosen.emitter else {}
    report = compare(
        target.function, target.inputs, options=_options(chosen), training=chosen.training, tolerance=chosen.tolerance,
        repeats=chosen.repeats, seed=chosen.seed, dynamic=chosen.dynamic, **given,
    )  # fmt: skip
    print(report)
    return 0 if report.agrees else DISAGREE
