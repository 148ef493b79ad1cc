"""Emitted Python as files, which debuggers can step through."""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from pathlib import Path
from types import ModuleType

from fxwrap.runtime.native.build import cache_folder


def write_module(source: str, name: str) -> Path:
    """Writes the text to the cache folder under a content-based name; returns the path. The write is atomic."""
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
    """Returns a new module with the text's code, which refers to its file in the cache folder."""
    path = write_module(source, name)
    module = ModuleType(path.stem)
    module.__file__ = str(path)
    # dont_inherit: Triton evaluates annotations, which this file's __future__ import would turn into strings.
    exec(compile(source, str(path), "exec", dont_inherit=True), module.__dict__)
    return module
