"""The environment of child processes."""

from __future__ import annotations

import os
from pathlib import Path

import fxwrap


def child_environment(**variables: str) -> dict[str, str]:
    """Returns this process's environment with these variables, in which children import this copy of fxwrap.

    The folders of PYTHONPATH follow: fxwrap's entry points, by which torch finds the backend, may be in one.
    """
    folders = [str(Path(fxwrap.__file__).parents[1]), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(folders), **variables}
