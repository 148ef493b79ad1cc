"""The command that runs the conformance suite on a vendor's device."""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from fxwrap.cli.flags import Commands, add_command, whole_number
from fxwrap.errors import CommandError
from fxwrap.options import EMITTERS
from fxwrap.runtime.cache_folder import write_file
from fxwrap.testing.conformance import GROUPS, ConformanceReport, merge_reports, run_conformance


def add_conformance(commands: Commands) -> None:
    """Adds the command."""
    summary = "run small programs on a registered device and compare each with eager PyTorch on the CPU"
    details = "Exit code 1 if a case fails; what a device does not support is listed with the reason."
    command = add_command(commands, "conformance", summary, details, "--device npu --import vendor_package")
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
    command.add_argument(
        "--jobs", type=whole_number(1), default=1, metavar="N", help="share the cases among N processes"
    )
    command.add_argument("--part", default="0/1", help=argparse.SUPPRESS)
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
    if chosen.jobs > 1:
        report = _run_in_processes(chosen, emitters)
    else:
        number, _, count = chosen.part.partition("/")
        part = int(number), int(count)
        report = run_conformance(chosen.device, groups=chosen.group or GROUPS, emitters=emitters, part=part)
    if chosen.json is not None:
        write_file(Path(chosen.json), lambda file: file.write(report.to_json().encode()))
    print(report)
    return 0 if report.passes else 1


def _run_in_processes(chosen: argparse.Namespace, emitters: Sequence[str]) -> ConformanceReport:
    """Runs the parts of the cases in processes of their own. Raises CommandError if one of them dies."""
    command = [sys.executable, "-m", "fxwrap", "conformance", "--device", chosen.device]
    for flag, items in (("import", chosen.modules), ("group", chosen.group or ()), ("emitter", emitters)):
        command += [text for item in items for text in (f"--{flag}", item)]
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, f"{number}.json") for number in range(chosen.jobs)]
        parts = [
            subprocess.Popen([*command, "--part", f"{number}/{chosen.jobs}", "--json", str(file)],
                             stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            for number, file in enumerate(files)
        ]  # fmt: skip
        for part, file in zip(parts, files, strict=True):
            errors = part.communicate()[1]
            if not file.exists():
                end = errors.strip().rpartition("\n")[2]
                raise CommandError(f"a process of the run ended with code {part.returncode}: {end}; use --jobs 1")
        return merge_reports([ConformanceReport.from_json(file.read_text()) for file in files])
