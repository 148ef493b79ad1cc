"""Environment variables of Python processes that tests start."""

from __future__ import annotations

import os
from pathlib import Path

import fxwrap


def child_environment(**variables: str) -> dict[str, str]:
    """Returns this process's environment with variables; modules are imported from this checkout first.

    Other entries of PYTHONPATH remain: one may be the folder of fxwrap's metadata, with its version and entry points.
    """
    path = [str(Path(fxwrap.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path)), **variables}
