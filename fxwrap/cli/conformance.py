"""The command that runs the conformance suite on a vendor's device."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import TypeAlias

from fxwrap.cli.flags import Parser
from fxwrap.errors import CommandError
from fxwrap.options import EMITTERS
from fxwrap.runtime.cache_folder import write_file
from fxwrap.testing.conformance import GROUPS, run_conformance

Commands: TypeAlias = "argparse._SubParsersAction[Parser]"
"""The commands of the command line, to which one is added."""


def add_conformance(commands: Commands) -> None:
    """Adds the command."""
    summary = "run small programs on a registered device and compare each with eager PyTorch on the CPU"
    command = commands.add_parser(
        "conformance",
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}. Exit code 1 if a case fails; what a device does not support "
        "is listed with the reason.",
        epilog="example:\n  python -m fxwrap conformance --device npu --import vendor_package",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("--device", required=True, help='a device type or device, such as "npu" or "npu:1"')
    command.add_argument(
        "--import", action="append", default=[], metavar="MODULE", dest="modules",
        help="import MODULE first, which registers the device; may be repeated",
    )  # fmt: skip
    command.add_argument("--group", action="append", choices=GROUPS, help="only this one; may be repeated")
    command.add_argument(
        "--emitter", action="append", choices=EMITTERS, help="may be repeated (default: python, fx and interpreter)"
    )
    command.add_argument("--json", metavar="FILE", help="write the outcomes to FILE as JSON")
    command.set_defaults(run=_conformance)


def _conformance(chosen: argparse.Namespace) -> int:
    """Runs the suite; returns 1 if a case failed, or none passed."""
    sys.path.insert(0, "")  # modules of the working directory count
    for name in chosen.modules:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise CommandError(f"cannot import '{name}': {error}") from error
    emitters = chosen.emitter or ("python", "fx", "interpreter")
    report = run_conformance(chosen.device, groups=chosen.group or GROUPS, emitters=emitters)
    if chosen.json is not None:
        write_file(Path(chosen.json), lambda file: file.write(report.to_json().encode()))
    print(report)
    return 0 if report.passes else 1
