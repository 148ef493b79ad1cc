"""Emitted Python as files, which debuggers can step through."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from types import ModuleType

from fxwrap.runtime.cache_folder import cache_folders, read_cache_file, write_cache_file, write_to_cache


def write_module(source: str, name: str) -> Path:
    """Writes the text to the cache folder under a content-based name; returns the path. Raises CacheError."""
    content = source.encode()
    stem = re.sub(r"[^A-Za-z0-9_]+", "_", name[:100]) or "program"
    file = f"python/{stem}_{hashlib.sha256(content).hexdigest()[:16]}.py"
    for folder in cache_folders():
        if read_cache_file(folder / file) == content:
            return folder / file
    return write_to_cache(lambda folder: write_cache_file(folder, file, content))


def load_module(source: str, name: str) -> ModuleType:
    """Returns a new module with the text's code, which refers to its file in the cache folder."""
    path = write_module(source, name)
    module = ModuleType(path.stem)
    module.__file__ = str(path)
    # dont_inherit: Triton evaluates annotations, which this file's __future__ import would turn into strings.
    exec(compile(source, str(path), "exec", dont_inherit=True), module.__dict__)
    return module
