"""The command line's parser, and the commands for models; those for saved programs are in `saved`."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from fxwrap.artifact.environment import package_versions
from fxwrap.cli.colours import add_color_flag, coloured
from fxwrap.cli.conformance import add_conformance
from fxwrap.cli.debugging import add_bisect_arguments, add_compare_arguments
from fxwrap.cli.flags import (
    Commands,
    Parser,
    add_command,
    check_files,
    refuse_flags,
    refuse_options,
    without_broken_pipe,
)
from fxwrap.cli.saved import SUFFIX, export_saved, inspect_saved, run_saved, sign_saved
from fxwrap.cli.show import add_show_arguments, show_graphs, show_saved
from fxwrap.cli.tables import passes_table
from fxwrap.cli.target import EXPORTED_SUFFIX, Target, load_target
from fxwrap.comparison import CapturedGraph, capture
from fxwrap.compile import emit, inspect, plan_program_memory
from fxwrap.errors import CommandError, OptionError
from fxwrap.memory_planning import MemoryTrace, apply_plan, plan_svg, plan_table, plan_to_json
from fxwrap.options import EMITTERS, PLANNERS, Options
from fxwrap.passes.out_variants import use_out_variants
from fxwrap.profiling import profile
from fxwrap.report import LineTime, report_page
from fxwrap.runtime.cache_folder import write_file
from fxwrap.runtime.native import (
    build_bridge,
    build_planner,
    install_runtime,
    package_bridge,
    package_planner,
    package_runtime,
)
from fxwrap.torch_compat import quiet_fake_errors
from fxwrap.wrapper_ir import symbol_values

DISAGREEMENT, USAGE_ERROR, FAILURE = 1, 2, 3
"""Exit codes besides 0: emitters disagree; the command line is invalid; the compilation or the run failed."""

_DESCRIPTION = """\
Compile a PyTorch function and inspect the result.

A TARGET is one of
  MODULE:NAME      a function or nn.Module in an importable module (the working directory counts)
  FILE.py:NAME     the same in a file
  FILE.pt2         a program saved by torch.export.save
  FILE.fxw         for show, inspect, run and export-cmake: a program saved by fxwrap.save

NAME may also be a factory: a function without arguments that returns (function, inputs) or (function, args, kwargs).
Inputs come from --inputs, else from the target's attribute example_inputs, else from NAME_example_inputs in its module,
else from the exported program. They are positional arguments in a tuple, or keyword arguments in a dict.
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
  python -m fxwrap report model.py:make_model --training -o report.html
  python -m fxwrap compare model.py:make_model --training
  python -m fxwrap bisect model.py:make_model --training --repro repro.py
  python -m fxwrap inspect model.fxw
  python -m fxwrap run model.fxw --inputs inputs.safetensors -o outputs.safetensors
  python -m fxwrap sign model.fxw --key signing.key
  python -m fxwrap export-cmake model.fxw model/
  python -m fxwrap conformance --device npu --import vendor_package

exit codes: 0 success, 1 results disagree, 2 invalid command line, 3 compilation or run failed
"""


def main(arguments: Sequence[str]) -> int:
    """Runs a command line, help by default, and returns its exit code; error messages go to stderr."""
    try:
        with quiet_fake_errors(), without_broken_pipe():
            chosen = _parser().parse_args(arguments or ["--help"])
            check_files(chosen)
            return int(chosen.run(chosen))
    except CommandError as error:
        print(f"fxwrap: {error}", file=sys.stderr)
        return USAGE_ERROR
    except Exception as error:  # noqa: BLE001  errors of models and torch are messages, not tracebacks
        print(f"fxwrap: {type(error).__name__}: {error}", file=sys.stderr)
        return FAILURE


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        "python -m fxwrap",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    versions = ", ".join([f"{name} {version}" for name, version in package_versions().items()])
    parser.add_argument("--version", action="version", version=f"{versions}, Python {platform.python_version()}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_show(commands)
    _add_emit(commands)
    _add_plan(commands)
    _add_report(commands)
    _add_compare(commands)
    _add_bisect(commands)
    summary = "list every step of a compile, with the option that turns it on"
    add_command(commands, "passes", summary).set_defaults(run=_passes)
    _add_inspect(commands)
    _add_run(commands)
    _add_sign(commands)
    _add_export_cmake(commands)
    add_conformance(commands)
    _add_build(commands)
    return parser


def _add_inspect(commands: Commands) -> None:
    summary = "print what a saved program contains: inputs, outputs, symbols, versions, constants, sizes"
    command = add_command(commands, "inspect", summary)
    command.add_argument("target", metavar="FILE.fxw", help="a file that fxwrap.save wrote")
    command.set_defaults(run=inspect_saved)


def _add_run(commands: Commands) -> None:
    summary = "run a saved program on inputs from a file, or on random ones"
    command = add_command(commands, "run", summary)
    command.add_argument("target", metavar="FILE.fxw", help="a file that fxwrap.save wrote")
    command.add_argument(
        "--inputs", metavar="FILE", help="a .pt, .safetensors or .npz file with the inputs by name (default: random)"
    )
    command.add_argument("-o", "--output", metavar="FILE", help="write the outputs by name to such a file")
    command.add_argument("--emitter", choices=EMITTERS, help="the emitter (default: that of the file)")
    command.add_argument(
        "--trust",
        metavar="full|none|KEY",
        default="full",
        help='"none" for a file from a stranger; "ed25519:..." for one that this key must have signed (default: full)',
    )
    command.add_argument("--seed", type=int, default=0, help="seed of random inputs and operators (default: 0)")
    command.set_defaults(run=run_saved)


def _add_sign(commands: Commands) -> None:
    summary = "sign a saved program, or create a key"
    command = add_command(commands, "sign", summary)
    command.add_argument("target", metavar="FILE.fxw", nargs="?", help="a file that fxwrap.save wrote, signed in place")
    command.add_argument("--key", metavar="FILE", required=True, help="the file of the private key")
    command.add_argument("--new", action="store_true", help="create a key in that file, which must not exist")
    command.set_defaults(run=sign_saved)


def _add_export_cmake(commands: Commands) -> None:
    summary = "write a saved program as a CMake project that builds with libtorch alone"
    command = add_command(commands, "export-cmake", summary)
    command.add_argument("target", metavar="FILE.fxw", help="a file that fxwrap.save wrote")
    command.add_argument("folder", metavar="DIR", help="a new or empty folder")
    command.set_defaults(run=export_saved)


def _add_build(commands: Commands) -> None:
    summary = "compile fxwrap's native libraries before the first program needs them"
    command = add_command(commands, "build", summary)
    command.add_argument(
        "--package", metavar="DIR", help="write them to DIR for a wheel (default: to the cache folder)"
    )
    command.add_argument(
        "--runtime", metavar="PREFIX", help="install the runtime for hosts without Python below PREFIX (docs/deploy.md)"
    )
    command.set_defaults(run=_build)


def _add_show(commands: Commands) -> None:
    summary = "print the program: the typed lines between the graph and the emitted code"
    command = _add_model_command(commands, "show", summary, 'model.py:block --inputs "f32[4, 64]" --origins')
    add_show_arguments(command)
    command.set_defaults(run=_show)


def _add_emit(commands: Commands) -> None:
    summary = "print, or write to a file, the text of an emitter"
    example = "model.py:make_model --emitter cpp --training --graph 1 -o backward.cpp"
    command = _add_model_command(commands, "emit", summary, example)
    command.add_argument("--emitter", choices=EMITTERS, default="python", help="the emitter (default: python)")
    command.add_argument("-o", "--output", metavar="FILE", help="write to FILE, whole or not at all")
    command.add_argument("--graph", type=int, metavar="N", help="only graph N, from 0 (default: all)")
    add_color_flag(command)
    command.set_defaults(run=_emit)


def _add_plan(commands: Commands) -> None:
    summary = "plan the program's memory: print pools, offsets and peak memory, write them as JSON, draw them"
    command = _add_model_command(commands, "plan", summary, "model.py:make_model --training --graph 1 --svg memory.svg")
    command.add_argument(
        "--algorithm", choices=PLANNERS, default="auto", help="algorithm of offset assignment (default: auto)"
    )
    command.add_argument("--json", metavar="FILE", help="write the plan to FILE as JSON")
    command.add_argument("--svg", metavar="FILE", help="draw the memory of one graph over its lines to FILE")
    command.add_argument("--trace", metavar="FILE", help="write it as a trace for ui.perfetto.dev to FILE")
    command.add_argument(
        "--snapshot", metavar="FILE", help="write it as a memory snapshot for pytorch.org/memory_viz to FILE"
    )
    command.add_argument("--graph", type=int, metavar="N", help="only graph N, from 0 (default: all)")
    command.set_defaults(run=_plan)


def _add_report(commands: Commands) -> None:
    summary = "write one HTML page: source, graph, program, kernels, emitted code, coverage and memory, linked"
    command = _add_model_command(commands, "report", summary, "model.py:make_model --training -o report.html")
    command.add_argument("-o", "--output", metavar="FILE", default="report.html", help="default: report.html")
    command.add_argument("--profile", action="store_true", help="run it, and show the time of each line")
    command.set_defaults(run=_report, stages=True, graph=None)


def _add_compare(commands: Commands) -> None:
    summary = "run eager, a float64 reference and all emitters on the same inputs, and print a table"
    command = _add_model_command(
        commands, "compare", summary, "model.py:make_model --training --emitter cpp --emitter python"
    )
    add_compare_arguments(command, lambda chosen: (_target(chosen), _options(chosen)))


def _add_bisect(commands: Commands) -> None:
    summary = "name the first line of the compiled graphs whose value is wrong, and the part of the compiler at fault"
    command = _add_model_command(commands, "bisect", summary, "model.py:make_model --training --repro repro.py")
    add_bisect_arguments(command, lambda chosen: (_target(chosen), _options(chosen)))


def _add_model_command(commands: Commands, name: str, summary: str, example: str) -> argparse.ArgumentParser:
    """Adds a command for a model, with the arguments that all of these have."""
    command = add_command(commands, name, summary, example=example)
    command.add_argument("target", metavar="TARGET", help="MODULE:NAME, FILE.py:NAME or FILE.pt2")
    command.add_argument(
        "--inputs", metavar="TYPES", help='inputs filled at random, e.g. "f32[4, 8], i64[2], mask=bool[4]"'
    )
    command.add_argument("--training", action="store_true", help="run forward and backward")
    command.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE", help="e.g. autotune=true; may be repeated"
    )
    command.add_argument("--dynamic", action="store_true", help="compile for any sizes")
    command.add_argument("--seed", type=int, default=0, help="seed of random inputs and operators (default: 0)")
    return command


def _graphs(chosen: argparse.Namespace) -> list[CapturedGraph]:
    """Returns the compiled graphs of a command line. Raises CommandError for an unknown graph number."""
    target, options = _target(chosen), _options(chosen)
    try:
        graphs = [*capture(
            target.function, target.inputs, options=options, training=chosen.training, dynamic=chosen.dynamic
        )]  # fmt: skip
    except (TypeError, RuntimeError) as error:
        if chosen.inputs is None:
            raise
        first = next(line for line in [*str(error).splitlines(), type(error).__name__] if line.strip())
        raise CommandError(f"'{chosen.target}' fails on --inputs \"{chosen.inputs}\": {first}") from error
    if chosen.graph is None:
        return graphs
    if not 0 <= chosen.graph < len(graphs):
        raise CommandError(f"unknown graph {chosen.graph}; known graphs: {_numbered(graphs)}")
    return [graphs[chosen.graph]]


def _numbered(graphs: Sequence[CapturedGraph]) -> str:
    return ", ".join(f"{number} ({graph.name})" for number, graph in enumerate(graphs))


def _check_single(graphs: Sequence[CapturedGraph]) -> None:
    """Raises CommandError unless there is one graph, which goes into a file."""
    if len(graphs) > 1:
        raise CommandError(f"there are {len(graphs)} graphs; select one with --graph: {_numbered(graphs)}")


def _options(chosen: argparse.Namespace) -> Options:
    """Returns the options of a command line. Raises CommandError for an invalid option."""
    options: dict[str, object] = {}
    if getattr(chosen, "stages", False):
        options["compile_cache"] = False  # cached results have no stages
    for text in chosen.option:
        name, equals, value = text.partition("=")
        if not equals:
            raise CommandError(f"--option takes NAME=VALUE, not '{text}'")
        try:
            options[name] = json.loads(value)
        except ValueError:
            options[name] = value
    try:
        return Options.from_mapping(options)
    except OptionError as error:
        raise CommandError(f"--option: {error}") from error


def _target(chosen: argparse.Namespace) -> Target:
    if chosen.target.endswith(EXPORTED_SUFFIX):
        refuse_flags(chosen, ("training", "dynamic"), f"'{chosen.target}' is an exported program")
    torch.manual_seed(chosen.seed)
    return load_target(chosen.target, chosen.inputs, chosen.seed)


def _show(chosen: argparse.Namespace) -> int:
    if chosen.target.endswith(SUFFIX):
        unused = ("coverage", "stages", "inputs", "training", "option", "dynamic", "seed", "graph")
        refuse_flags(chosen, unused, f"'{chosen.target}' was compiled before it was saved")
        texts = show_saved(chosen)
    else:
        texts = show_graphs(chosen, _graphs(chosen))
    for text in texts:
        print(text)
    return 0


def _emit(chosen: argparse.Namespace) -> int:
    refuse_options(chosen, {"emitter": "--emitter"})
    if chosen.output is not None:
        refuse_flags(chosen, ("color",), "a file has no colours")
    graphs = _graphs(chosen)
    texts = [emit(graph.compiled.program, chosen.emitter).source for graph in graphs]
    if chosen.output is None:
        print("\n".join([coloured(text, chosen.emitter, chosen.color) for text in texts]))
        return 0
    _check_single(graphs)
    _write(Path(chosen.output), texts[0])
    return 0


def _plan(chosen: argparse.Namespace) -> int:
    refuse_options(chosen, {"memory_planning": "--algorithm"})
    graphs = _graphs(chosen)
    if chosen.json or chosen.svg or chosen.trace or chosen.snapshot:
        _check_single(graphs)
    for graph in graphs:
        program = use_out_variants(graph.compiled.program)
        plan = plan_program_memory(program, Options(memory_planning=chosen.algorithm))
        values = symbol_values(program)
        print(f"{graph.name}\n{plan_table(plan, values)}")
        if chosen.json:
            _write(Path(chosen.json), plan_to_json(plan))
        if chosen.svg:
            _write(Path(chosen.svg), plan_svg(plan, values))
        trace = MemoryTrace.of(apply_plan(program, plan))
        if chosen.trace:
            _write(Path(chosen.trace), trace.perfetto())
        if chosen.snapshot:
            _write(Path(chosen.snapshot), trace.snapshot())
    return 0


def _report(chosen: argparse.Namespace) -> int:
    graphs = _graphs(chosen)
    times: list[dict[str, LineTime]] = [{} for _ in graphs]
    if chosen.profile:
        target = _target(chosen)
        measured = profile(
            target.function, target.inputs, options=_options(chosen), training=chosen.training, dynamic=chosen.dynamic
        )
        times = [measured.times(number) for number in range(len(measured.graphs))]
    emitter = _options(chosen).emitter  # a captured graph runs in the interpreter
    contents = [
        replace(record.content(own), emitter=emitter, source=emit(record.program, emitter).source)
        for graph, own in zip(graphs, times, strict=True) for record in inspect(graph.compiled)
    ]  # fmt: skip
    if not contents:
        raise CommandError(f"'{chosen.target}' has no graph to report")
    title = chosen.target.rpartition(":")[2]
    _write(Path(chosen.output), report_page(contents, title))
    print(f"{chosen.output}: {len(contents)} graph{'s' if len(contents) > 1 else ''}")
    return 0


def _passes(_chosen: argparse.Namespace) -> int:
    print(passes_table())
    return 0


def _build(chosen: argparse.Namespace) -> int:
    if chosen.runtime is not None and chosen.package is not None:
        raise CommandError("--package and --runtime write different files; pass one of them")
    if chosen.runtime is not None:
        print(*install_runtime(Path(chosen.runtime)), sep="\n")
    elif chosen.package is None:
        print(build_bridge().folder, build_planner().parent, sep="\n")
    else:
        print(
            *[package(Path(chosen.package)) for package in (package_bridge, package_planner, package_runtime)], sep="\n"
        )
    return 0


def _write(path: Path, content: str | bytes) -> None:
    """Writes a file atomically, or into a device or pipe."""
    write_file(path, lambda file: file.write(content.encode() if isinstance(content, str) else content))
