"""The command line: `python -m fxwrap show|emit|plan|compare|passes|build ...`."""

from fxwrap.cli.command import main

__all__ = ["main"]
