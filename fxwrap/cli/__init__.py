"""The command line: `python -m fxwrap show|emit|plan|compare|passes MODULE:NAME | FILE.py:NAME | FILE.pt2`."""

from fxwrap.cli.command import main

__all__ = ["main"]
