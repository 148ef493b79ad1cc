"""Command-line flags: unknown ones and ones without a meaning are refused, and a closed pipe is no error."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from fxwrap.errors import CommandError


class Parser(argparse.ArgumentParser):
    """A parser that takes whole names only: a misspelt flag never stands for another one."""

    def __init__(self, prog: str, **keywords: Any) -> None:
        super().__init__(prog, **{**keywords, "allow_abbrev": False})
        self.set_defaults(parser=self)


def refuse_flags(chosen: argparse.Namespace, names: Sequence[str], reason: str) -> None:
    """Raises CommandError for flags of a command line that are set and have no meaning there."""
    unused = [f"--{name}" for name in names if getattr(chosen, name) != chosen.parser.get_default(name)]
    if unused:
        raise CommandError(f"{', '.join(unused)}: {reason}, so it has no effect; leave it out")


@contextmanager
def without_broken_pipe() -> Iterator[None]:
    """Ends the command quietly where the reader of stdout went away, as `head` does."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the flush at exit must not fail
        raise SystemExit(0) from None
