"""Names of kernel functions, as profilers and debuggers show them: `fxwrap_` and a description; content hashes.

In sources that fxwrap did not print, the function is called `kernel`.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any, Final

_PREFIX: Final = "fxwrap_"
"""Distinguishes fxwrap's kernels from others in a profile, and from functions of C, Python and Triton."""

_UNNAMED: Final = "kernel"
_MAX_NAME_LENGTH: Final = 100
_DEFINITION = re.compile(rf'^(?:def|extern "C" void) ({_PREFIX}\w+)\(', re.MULTILINE)
_DESCRIBED = re.compile(r"tl\.make_tensor_descriptor\((\w+)")

EARLY_READS: Final = "early_reads"
"""The option of a kernel that waits for the launches before it: the positions of the tensors that it reads before."""


DEPENDENT: Final = "dependent"
"""The option of a launcher, beside those of its kernel: launches may start before those before them have ended."""


def make_function_name(readable: str, content: str = "") -> str:
    """Returns the identifier of a printed function: from a readable name, or `kernel` for "".

    Digits of a hash of a non-empty `content` distinguish functions of the same readable name.
    """
    if not readable:
        return _UNNAMED
    cleaned = re.sub(r"[^A-Za-z0-9_]+", "_", readable)[:_MAX_NAME_LENGTH]
    digits = f"_{hashlib.sha256(content.encode()).hexdigest()[:8]}" if content else ""
    return f"{_PREFIX}{cleaned}{digits}"


def find_function_name(source: str) -> str:
    """Returns the name of the function in a kernel's source."""
    match = _DEFINITION.search(source)
    return match[1] if match else _UNNAMED


def is_printed(source: str) -> bool:
    """Whether fxwrap printed a kernel's source."""
    return _DEFINITION.search(source) is not None


def described_parameters(source: str) -> frozenset[int]:
    """Returns the positions of the tensors that a kernel's descriptors describe, whose addresses 16 divides.

    Launches of a kernel with descriptors pass scratch memory, in which its programs make these.
    """
    names = frozenset(_DESCRIBED.findall(source))
    head = re.search(rf"^def {find_function_name(source)}\(([^)]*)\)", source, re.MULTILINE) if names else None
    parameters = head[1].split(", ") if head else []
    return frozenset([position for position, name in enumerate(parameters) if name in names])


def kernel_content_hash(
    language: str, source: str, signature: tuple[str, ...], options: tuple[tuple[str, Any], ...]
) -> str:
    """Returns the content hash of a kernel, 64 hex digits: it covers all that a launch depends on."""
    content = repr((language, signature, options, source))
    return hashlib.sha256(content.encode()).hexdigest()
