"""What the function of a kernel's text is called, which profilers and debuggers show: `fxwrap_` and what it does.

Texts that fxwrap did not print call it `kernel`.
"""

from __future__ import annotations

import hashlib
import re
from typing import Final

_PREFIX: Final = "fxwrap_"
"""Tells fxwrap's kernels from others in a profile, and their names from functions of C, Python and Triton."""

_UNNAMED: Final = "kernel"
_LONGEST: Final = 100
_DEFINED = re.compile(rf'^(?:def|extern "C" void) ({_PREFIX}\w+)\(', re.MULTILINE)


def function_name(readable: str, content: str = "") -> str:
    """Returns what a printed function is called, a valid identifier: by a readable name, or `kernel` for "".

    Digits of a hash of `content`, where there is any, tell it from functions of the same name.
    """
    if not readable:
        return _UNNAMED
    cleaned = re.sub(r"[^A-Za-z0-9_]+", "_", readable)[:_LONGEST]
    digits = f"_{hashlib.sha256(content.encode()).hexdigest()[:8]}" if content else ""
    return f"{_PREFIX}{cleaned}{digits}"


def function_in(source: str) -> str:
    """Returns what the function of a kernel's text is called."""
    found = _DEFINED.search(source)
    return found[1] if found else _UNNAMED
