"""The user's C++ compiler: which one it is, and how it is run.

A compiler never outlives this process, not even one that is killed, and never runs longer than a limit.
"""

from __future__ import annotations

import errno
import logging
import os
import platform
import shlex
import shutil
import signal
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeVar

from fxwrap.caching import bounded_cache
from fxwrap.errors import NativeBuildError, OptionError
from fxwrap.runtime.compiler_runs import count_compiler_runs

log = logging.getLogger("fxwrap.native")

_Item = TypeVar("_Item")

COMPILER_TIMEOUT_SECONDS = 900
"""Seconds after which a compiler or linker is stopped."""

KERNEL_FLAGS_ENV = "FXWRAP_KERNEL_FLAGS"
"""The environment variable with compiler flags that follow those of C++ kernels."""

PROBE_TIMEOUT_SECONDS = 60
"""Seconds after which a compiler that is asked for its version is stopped."""

# g++ 12 does not terminate in unroll-and-jam for some column reductions.
_GCC_KERNEL_FLAGS = ("-fno-loop-unroll-and-jam",)
# clang++ selects glibc's vector functions by this flag instead of an attribute.
_CLANG_KERNEL_FLAGS = ("-fveclib=libmvec",)
_VECTOR_MATH = "libmvec.so.1"

# Kills the process group when its input ends: a pipe that only the parent holds open, until its own end.
_SUPERVISOR = (
    'exec 3<&0 </dev/null; (read -r _ <&3; kill -KILL 0) >/dev/null 2>&1 & "$@" 3<&-; '
    "status=$?; kill -KILL $! 2>/dev/null; exit $status"
)
_PROBE_BYTES = 1 << 16
_FULL = tuple([os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT, errno.EROFS)])


@dataclass(frozen=True, slots=True)
class Compiler:
    """A C++ compiler: command, version, shared runtime libraries to link, and its flags for kernels.

    Without a libstdc++.so for `-lstdc++`, the C++ runtime is linked by path: the static library's streams crash beside
    the shared one that torch loads.
    """

    command: tuple[str, ...]
    version: str
    runtime: tuple[str, ...]
    kernel_flags: tuple[str, ...] = ()


def find_compiler() -> Compiler:
    """Returns the compiler in `CXX`, else the first of g++, c++ and clang++.

    Raises NativeBuildError without one, and OptionError for a variable that is no command.
    """
    command = _environment_words("CXX")
    if command:
        return _probe(command)
    for candidate in ("g++", "c++", "clang++"):
        if find_executable(candidate):
            return _probe((candidate,))
    raise NativeBuildError(
        "no C++ compiler found: tried g++, c++ and clang++. Install one, or set the environment variable CXX; "
        "the Python emitter (options={'emitter': 'python'}) needs none"
    )


def find_executable(name: str) -> str:
    """Returns the path of a command as `shutil.which` does, or ""; it searches again once the command is gone."""
    path = _search_path(name, os.environ.get("PATH", ""))
    return path if path and os.access(path, os.X_OK) else shutil.which(name) or ""


@bounded_cache(64)
def _search_path(name: str, _path: str) -> str:
    """Searches the folders of PATH, which takes a compile of a small graph a hundredth of its time."""
    return shutil.which(name) or ""


def compiler_identity() -> str:
    """Identifies the C++ compiler without running it: path, size, modification time and the user's flags; or ""."""
    command = _environment_words("CXX")
    for name in command[:1] or ("g++", "c++", "clang++"):
        path = find_executable(name)
        if path:
            status = os.stat(path)
            flags = "".join([f" {flag}" for flag in user_kernel_flags()])
            return f"{command or name} {os.path.realpath(path)} {status.st_size} {status.st_mtime_ns}{flags}"
    return str(command or "")


def user_kernel_flags() -> tuple[str, ...]:
    """Returns the flags of `FXWRAP_KERNEL_FLAGS`, such as `-O1`, by which kernels compile in half the time, or `-g`."""
    return _environment_words(KERNEL_FLAGS_ENV)


def _environment_words(name: str) -> tuple[str, ...]:
    """Returns the words of an environment variable, which a shell would split it into. Raises OptionError."""
    text = os.environ.get(name, "")
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise OptionError(f"{name}={text!r} cannot be split into words: {error}; correct its quotes") from None


@cache
def _probe(command: tuple[str, ...]) -> Compiler:
    version = run_compiler([*command, "--version"], seconds=PROBE_TIMEOUT_SECONDS)
    runtime = () if _library_file(command, "libstdc++.so") else _library_file(command, "libstdc++.so.6")
    if "clang" not in version:
        return Compiler(command, version, runtime, _GCC_KERNEL_FLAGS)
    if platform.machine() not in ("x86_64", "AMD64"):
        return Compiler(command, version, runtime)
    vector_math = _library_file(command, _VECTOR_MATH)
    return Compiler(command, version, (*runtime, *vector_math), _CLANG_KERNEL_FLAGS if vector_math else ())


def _library_file(command: tuple[str, ...], name: str) -> tuple[str, ...]:
    """Returns the path of a shared library that the compiler links, or an empty tuple."""
    path = run_compiler([*command, f"-print-file-name={name}"], seconds=PROBE_TIMEOUT_SECONDS).strip()
    return (path,) if os.path.isabs(path) and path.isprintable() else ()


def run_compiler(command: Sequence[str], folder: Path | None = None, seconds: float | None = None) -> str:
    """Runs a compiler command in a folder, which also takes its temporary files, and returns its output.

    Raises NativeBuildError for a missing, failing or hanging compiler, OSError where the disk is full.
    """
    log.debug("%s", shlex.join(command))
    if folder is not None:  # others ask for versions
        count_compiler_runs()
    limit = COMPILER_TIMEOUT_SECONDS if seconds is None else seconds
    status, output, errors = _run_supervised(command, folder, limit)
    if status == 0:
        return output
    shown = f"command: {shlex.join(command)}\n{output}{errors}"
    if folder is not None:
        full = next((text for text in _FULL if text in errors), "")
        if full:
            raise OSError(errno.ENOSPC, full, str(folder))
        (folder / "probe").write_bytes(bytes(_PROBE_BYTES))  # raises OSError if the compiler failed for lack of space
        (folder / "probe").unlink()
    raise NativeBuildError(f"the C++ compiler failed with exit status {status}.\n{shown}")


def _run_supervised(command: Sequence[str], folder: Path | None, limit: float) -> tuple[int, str, str]:
    """Returns exit status, output and errors of a command. All its processes end with this one and after the limit."""
    shown = shlex.join(command)
    reading, writing = os.pipe()
    environment = {**os.environ, "LC_ALL": "C", **({"TMPDIR": str(folder)} if folder is not None else {})}
    try:
        if not find_executable(command[0]):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        process = subprocess.Popen(
            ["/bin/sh", "-c", _SUPERVISOR, "sh", *command],
            cwd=folder, env=environment, stdin=reading, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            encoding="utf-8", errors="replace", start_new_session=True,
        )  # fmt: skip
    except OSError as failure:
        os.close(writing)
        raise NativeBuildError(
            f"cannot run the C++ compiler '{command[0]}': {failure.strerror}. Install it, or set another in the "
            f"environment variable CXX; the Python emitter needs none.\ncommand: {shown}"
        ) from failure
    finally:
        os.close(reading)
    try:
        output, errors = process.communicate(timeout=limit)
    except BaseException as reason:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # g++'s child would continue
        process.communicate()
        if isinstance(reason, subprocess.TimeoutExpired):
            raise NativeBuildError(
                f"the C++ compiler did not finish within {limit:g} s and was stopped. Set another in the environment "
                f"variable CXX.\ncommand: {shown}"
            ) from None
        raise
    finally:
        os.close(writing)
    return process.returncode, output, errors


def parallel_map(function: Callable[[_Item], str], items: Sequence[_Item]) -> list[str]:
    """Maps a function over items in threads, as it waits for compiler processes."""
    count = min(len(items), os.cpu_count() or 1)
    if count < 2:
        return [function(item) for item in items]
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(function, items))
