"""Processes of measurements: caches of their own, and results as JSON in the last line that they print.

Only the standard library is imported here, since some measurements include imports.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
CACHE_VARIABLES = ("FXWRAP_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


def output_of(arguments: Sequence[str], variables: Mapping[str, str], limit: float | None = None) -> str:
    """Returns what Python prints for these arguments, in a process with this checkout and more environment variables.

    Raises RuntimeError, with the process's messages, if it fails or runs longer than `limit` seconds.
    """
    paths = filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH")))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **variables}
    command = [sys.executable, *arguments]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=limit)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"stopped after {limit} s") from error
    if done.returncode:
        raise RuntimeError(f"{done.stdout}{done.stderr}\nexit code {done.returncode}: {' '.join(arguments)}")
    return done.stdout


def result_of(arguments: Sequence[str], variables: Mapping[str, str], limit: float | None = None) -> Any:
    """Returns the JSON in the last line of `output_of`."""
    return json.loads(output_of(arguments, variables, limit).splitlines()[-1])


def empty_caches(folder: Path) -> dict[str, str]:
    """Returns variables that name new cache folders, with the native libraries of an installed wheel in fxwrap's."""
    from fxwrap.runtime.native import build_bridge, build_planner

    caches = Path(tempfile.mkdtemp(dir=folder))
    own = caches / CACHE_VARIABLES[0]
    own.mkdir()
    for library in (build_bridge().folder, build_planner().parent):
        (own / library.name).symlink_to(library)
    return {name: str(caches / name) for name in CACHE_VARIABLES}
