"""The commands that compare and bisect a target."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import BinaryIO

from fxwrap.cli.flags import refuse_options, whole_number
from fxwrap.cli.target import Target
from fxwrap.comparison import COMPARED_EMITTERS, Backend, bisect, compare, minify
from fxwrap.options import EMITTERS, Options
from fxwrap.runtime.cache_folder import write_file

DISAGREEMENT = 1
"""The exit code if emitters, or a line, disagree with eager."""

Subject = Callable[[argparse.Namespace], tuple[Target, Options]]
"""Returns the target and the options of a command line."""


def add_compare_arguments(command: argparse.ArgumentParser, subject: Subject) -> None:
    """Adds the arguments of `compare` that other commands do not have."""
    command.add_argument("--emitter", action="append", choices=EMITTERS, help="only this one; may be repeated")
    command.add_argument(
        "--backends", metavar="NAMES", help="backends of torch.compile beside the emitters, e.g. inductor,aot_eager"
    )
    command.add_argument("--tolerance", type=float, metavar="X", help="relative error by norm that counts as equal")
    command.add_argument(
        "--repeats", type=whole_number(0), default=20, metavar="N", help="runs to time; 0 for none (default: 20)"
    )
    command.add_argument("--json", metavar="FILE", help="write the report to FILE as JSON")
    command.add_argument("--html", metavar="FILE", help="write the report to FILE as an HTML page")
    command.set_defaults(run=lambda chosen: _compare(chosen, *subject(chosen)))


def _compare(chosen: argparse.Namespace, target: Target, options: Options) -> int:
    refuse_options(chosen, {"emitter": "--emitter"})
    backends: list[Backend] = [name.strip() for name in (chosen.backends or "").split(",") if name.strip()]
    report = compare(
        target.function, target.inputs, options=options, training=chosen.training, tolerance=chosen.tolerance,
        repeats=chosen.repeats, seed=chosen.seed, dynamic=chosen.dynamic, emitters=chosen.emitter or COMPARED_EMITTERS,
        backends=backends,
    )  # fmt: skip
    for path, text in ((chosen.json, report.to_json), (chosen.html, report.to_html)):
        if path is not None:
            write_file(Path(path), partial(_write_text, text()))
    print(report)
    return 0 if report.agrees else DISAGREEMENT


def _write_text(text: str, file: BinaryIO) -> object:
    return file.write(text.encode())


def add_bisect_arguments(command: argparse.ArgumentParser, subject: Subject) -> None:
    """Adds the arguments of `bisect` that other commands do not have."""
    command.add_argument("--json", action="store_true", help="print the result as JSON")
    command.add_argument("--repro", metavar="FILE", help="minify the graph and write a Python file that fails alike")
    command.set_defaults(run=lambda chosen: _bisect(chosen, *subject(chosen)))


def _bisect(chosen: argparse.Namespace, target: Target, options: Options) -> int:
    bisection = bisect(
        target.function, target.inputs, options=options, training=chosen.training, dynamic=chosen.dynamic,
        seed=chosen.seed,
    )  # fmt: skip
    print(bisection.to_json() if chosen.json else bisection)
    if chosen.repro is not None and bisection.divergence is not None:
        minify(bisection).save(chosen.repro)
    return 0 if bisection.agrees else DISAGREEMENT
