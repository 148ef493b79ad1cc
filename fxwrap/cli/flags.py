"""Command-line flags: unknown ones and ones without a meaning are refused, and a closed pipe is no error."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from fxwrap.errors import CommandError
from fxwrap.runtime.cache_folder import is_stream


class Parser(argparse.ArgumentParser):
    """A parser that takes whole names only: a prefix of a flag is an error."""

    def __init__(self, prog: str, **keywords: Any) -> None:
        super().__init__(prog, **{**keywords, "allow_abbrev": False})
        self.set_defaults(parser=self)


Commands: TypeAlias = "argparse._SubParsersAction[Parser]"
"""The commands of the command line, to which one is added."""


def add_command(commands: Commands, name: str, summary: str, details: str = "", example: str = "") -> Parser:
    """Adds a command. Its description is the summary and the details; `example` has the arguments after its name."""
    description = " ".join([f"{summary[0].upper()}{summary[1:]}.", *([details] if details else [])])
    epilog = f"example:\n  python -m fxwrap {name} {example}" if example else None
    return commands.add_parser(
        name, help=summary, description=description, epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip


def refuse_flags(chosen: argparse.Namespace, names: Sequence[str], reason: str) -> None:
    """Raises CommandError for flags of a command line that are set and have no meaning there."""
    unused = [f"--{name}" for name in names if getattr(chosen, name) != chosen.parser.get_default(name)]
    if unused:
        raise CommandError(f"{', '.join(unused)}: {reason}, so it has no effect; leave it out")


_FILES = ("output", "json", "html", "repro", "svg", "trace", "snapshot")
"""The flags whose value, if it is a text, is a file that a command writes."""


def check_input_file(path: str | Path) -> None:
    """Raises CommandError if there is no such file."""
    if not Path(path).is_file():
        is_folder = Path(path).is_dir()
        raise CommandError(f"'{path}' is a folder, not a file" if is_folder else f"file '{path}' does not exist")


def check_files(chosen: argparse.Namespace) -> None:
    """Raises CommandError, before the work, for a file that cannot be written."""
    for path in [Path(value) for name in _FILES if isinstance(value := getattr(chosen, name, None), str)]:
        if is_stream(path):
            continue
        if not path.parent.is_dir():
            raise CommandError(f"cannot write '{path}': the folder '{path.parent}' does not exist; create it first")
        if not os.access(path.parent, os.W_OK):
            raise CommandError(f"cannot write '{path}': the folder '{path.parent}' is not writable")


def refuse_options(chosen: argparse.Namespace, flags: Mapping[str, str]) -> None:
    """Raises CommandError for an --option that a flag of the command decides: `flags` has the flag by the option."""
    for name in [text.partition("=")[0] for text in chosen.option]:
        if name in flags:
            raise CommandError(f"--option {name}: {flags[name]} decides it here, so it has no effect; leave it out")


def whole_number(least: int) -> Callable[[str], int]:
    """Returns the type of a flag that takes whole numbers from `least` on."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"takes a whole number from {least} on, not '{text}'")
        return int(text)

    return parse


@contextmanager
def without_broken_pipe() -> Iterator[None]:
    """Ends the command quietly where the reader of stdout went away, as `head` does."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the flush at exit must not fail
        raise SystemExit(0) from None
