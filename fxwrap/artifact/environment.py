"""The environment that a compile depends on, as a key for external caches."""

from __future__ import annotations

import hashlib
import os
import platform
from functools import cache
from importlib import metadata
from pathlib import Path
from types import NoneType

import torch

from fxwrap.errors import ArgumentError
from fxwrap.options import Options
from fxwrap.runtime.native import binary_target

PACKAGES = ("fxwrap", "torch", "triton", "sympy")
"""The packages whose versions can change emitted code."""


def environment_key(options: Options | None = None) -> str:
    """Returns a hash, 64 hex digits, of everything that a compile depends on besides the graph.

    It covers the versions of fxwrap, torch, triton, sympy and Python, the machine's architecture, the CUDA version
    torch was built for, and the options. Passes count by name, point and key; one without a key makes
    `Options.cacheable` false, and nothing may be cached. Other functions (lowerings, decompositions, a partitioner,
    `on_graph`) count by module and qualified name: a cache that outlives an edit of theirs must add its own key.
    """
    ArgumentError.check("fxwrap.environment_key", "options", options, (Options, NoneType), "Pass fxwrap.Options(...)")
    text = f"{environment_text()}\noptions={(options or Options()).resolve_devices().text()}"
    return hashlib.sha256(text.encode()).hexdigest()


def environment_text() -> str:
    """Returns versions and machine as `name=text` lines, without options."""
    parts = [f"{name}={text}" for name, text in package_versions().items()]
    parts += [f"python={platform.python_version()}", f"machine={platform.machine()}", f"cuda={torch.version.cuda}"]
    return "\n".join(parts)


def package_versions() -> dict[str, str]:
    """Returns the versions of the packages that can change emitted code, by name; "absent" for a missing one."""
    return {name: version(name) for name in PACKAGES}


@cache
def version(package: str) -> str:
    """Returns the version of a package, which is fixed for the process; "absent" for a missing one."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "absent"


@cache
def code_identity() -> str:
    """Returns a hash of versions, machine and fxwrap's sources, which are fixed for the process.

    Processes with the same one emit the same code for a program, and run each other's.
    """
    text = "\0".join((environment_text(), repr(binary_target()), sources_hash_of_process()))
    return hashlib.sha256(text.encode()).hexdigest()


@cache
def sources_hash_of_process() -> str:
    """Returns the hash of fxwrap's sources, which are fixed for the process."""
    return sources_hash()


def sources_hash(root: Path = Path(__file__).parent.parent) -> str:
    """Returns a hash of the files of fxwrap's package: programs of an edited fxwrap have another key."""
    digest = hashlib.sha256()
    for folder, folders, names in os.walk(root):
        folders[:] = sorted([name for name in folders if name != "__pycache__"])
        for name in sorted(names):
            path = os.path.join(folder, name)
            with open(path, "rb") as file:
                content = file.read()
            digest.update(f"{os.path.relpath(path, root)} {len(content)}\n".encode())
            digest.update(content)
    return digest.hexdigest()
