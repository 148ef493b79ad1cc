"""Emitted Python as files that a debugger can step through."""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from pathlib import Path
from types import ModuleType

from fxwrap.runtime.native.build import cache_folder


def write_module(source: str, name: str) -> Path:
    """Writes the text to the cache folder under a name that its content decides; returns the path.

    The file appears whole or not at all, also when many processes write it at once.
    """
    digest = hashlib.sha256(source.encode()).hexdigest()[:16]
    folder = cache_folder() / "python"
    path = folder / f"{re.sub(r'[^A-Za-z0-9_]+', '_', name) or 'program'}_{digest}.py"
    if path.exists() and path.read_text() == source:
        return path
    folder.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=folder, suffix=".tmp")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(source)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path


def load_module(source: str, name: str) -> ModuleType:
    """Returns a new module made from the text, whose code belongs to the file in the cache folder."""
    path = write_module(source, name)
    module = ModuleType(path.stem)
    module.__file__ = str(path)
    # The text is our own output. It does not inherit this file's __future__: Triton reads annotations as they are.
    exec(compile(source, str(path), "exec", dont_inherit=True), module.__dict__)
    return module
