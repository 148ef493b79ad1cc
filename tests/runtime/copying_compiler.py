"""A compiler that builds the bridge at once: it copies the libraries of a built one, and compiles everything else."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

_SCRIPT = """#!/bin/sh
case "$1" in --version) echo copying 1; exit;; -print*) echo libstdc++.so.6; exit;; esac
for last; do :; done
case "$*" in
  *-DNDEBUG*) echo > "$last";;
  *"-o libfxwrap_bridge.so" | *"-o _fxwrap_binding.so") cp "BRIDGE/$last" "$last";;
  *) exec COMPILER "$@";;
esac
"""


def write_script(path: Path, text: str) -> Path:
    """Writes an executable file."""
    path.write_text(text)
    path.chmod(0o755)
    return path


def write_compiler(path: Path, bridge: Path) -> Path:
    """Writes a compiler that copies this bridge."""
    real = os.environ.get("CXX") or shutil.which("g++") or "c++"
    return write_script(path, _SCRIPT.replace("BRIDGE", str(bridge)).replace("COMPILER", real))
