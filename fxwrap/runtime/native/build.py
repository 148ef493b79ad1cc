"""Compiling emitted C++ with the user's compiler, through a content-addressed cache on disk.

Two kinds of entries: the bridge with its Python binding, built once for each torch, Python and compiler; and
programs. An entry is a folder made under a temporary name and renamed into place, so what can be seen is complete.
Processes that want the same entry at the same time wait for one another.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch

from fxwrap.errors import NativeBuildError
from fxwrap.runtime.native.provided import provided_kernel

_HERE = Path(__file__).parent
# Files that are compiled together: reading torch's headers takes longer than all else that most of them need.
_BRIDGE_UNITS = (
    ("typed_calls.cpp",),
    (
        *("values.cpp", "bridge.cpp", "checks.cpp", "streams.cpp", "execute.cpp", "driver.cpp", "launch.cpp"),
        *("plans.cpp", "cublas.cpp", "products.cpp", "cudnn.cpp", "convolutions.cpp", "attention.cpp"),
    ),
)
_BINDING_UNITS = (("binding.cpp",), ("launcher.cpp",))
_HEADERS = (
    *("bridge.h", "frame.h", "values.h", "calls.h", "checks.h", "driver.h", "launch.h", "binding.h"),
    *("plans.h", "library.h", "cublas.h", "cudnn.h"),
)
BRIDGE_LIBRARIES = ("libfxwrap_bridge.so", "_fxwrap_binding.so")
"""The files of the bridge: its library, and its Python binding."""

_BRIDGE, _BINDING = BRIDGE_LIBRARIES

_COMMON_FLAGS = ("-std=c++20", "-fPIC", "-fvisibility=hidden")
_BRIDGE_FLAGS = ("-O2", "-DNDEBUG", "-DAT_PER_OPERATOR_HEADERS")
# Straight-line calls: no optimisation runs as fast and compiles fastest (benchmarks/bridge_calls.py).
PROGRAM_FLAGS = ("-O0",)
# Compilers tune for half the width of the vectors that AVX-512 has; loops over whole rows are faster with all of it.
_WIDEST_VECTORS = ("-mprefer-vector-width=512",) if platform.machine() in ("x86_64", "AMD64") else ()
# Kernels keep eager's rounding (no contraction) and its wrap-around of integers; nothing reads errno or traps.
KERNEL_FLAGS = (
    *("-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-fwrapv"),
    *_WIDEST_VECTORS,
)
# g++ 12 never ends its unroll-and-jam of some sums of columns; without it no kernel was slower.
_GCC_KERNEL_FLAGS = ("-fno-loop-unroll-and-jam",)
# clang++ has no attribute for functions that glibc has vector versions of; it knows them by the name of their library.
_CLANG_KERNEL_FLAGS = ("-fveclib=libmvec",)
_VECTOR_MATH = "libmvec.so.1"
LONGEST_COMMAND = 900
"""Seconds after which a compiler or linker is stopped."""
_KERNEL_HEADER = "kernel.h"


@dataclass(frozen=True, slots=True)
class NativeSource:
    """A further translation unit of a program: its text, the flags for it (those of CPU kernels by default), and files
    that stand beside it by name while it is compiled."""

    text: str
    flags: tuple[str, ...] = KERNEL_FLAGS
    files: tuple[tuple[str, bytes], ...] = ()


@dataclass(frozen=True, slots=True)
class BridgeBuild:
    """The built bridge: its folder, and the seconds that building took in this process (0.0 when it was cached)."""

    folder: Path
    seconds: float


def cache_folder() -> Path:
    """The folder of compiled code: `FXWRAP_CACHE_DIR`, else `fxwrap` in the user's cache folder."""
    chosen = os.environ.get("FXWRAP_CACHE_DIR")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fxwrap"


def compile_cpp(source_text: str, *, name: str, extra_sources: Iterable[NativeSource] = ()) -> Path:
    """Compile an emitted program to a shared library, or find it in the cache; return its path.

    `source_text` is the emitted translation unit, which includes `bridge.h`; `extra_sources` are linked with it (CPU
    kernels). The sources are kept beside the library for debuggers. `CXX` names the compiler (default: g++, c++ or
    clang++, whichever is found first). Raises NativeBuildError with the command and the compiler's output.
    """
    sources = (NativeSource(source_text, PROGRAM_FLAGS), *extra_sources)
    compiler = _compiler()
    bridge = build_bridge().folder
    stem = re.sub(r"\W+", "_", name) or "program"
    key = _digest(
        _environment(compiler),
        _bridge_digest(),
        str(bridge),
        *(text for source in sources for text in (source.text, *source.flags)),
        *(f"{file} {hashlib.sha256(content).hexdigest()}" for source in sources for file, content in source.files),
        *[_kernel_header() for source in sources if _KERNEL_HEADER in source.text],
        _processor() if any("-march=native" in source.flags for source in sources) else "",
    )

    def build(folder: Path) -> None:
        paths = [folder / f"{stem}.cpp", *[folder / f"{stem}_kernels_{index}.cpp" for index in range(1, len(sources))]]
        units = list(zip(sources, paths, strict=True))
        for source, path in units:
            path.write_text(source.text, encoding="utf-8")
            for file, content in source.files:
                (folder / file).write_bytes(content)
        ahead = _take_ahead(compiler, source_text, paths[0].with_suffix(".o"))
        _in_parallel(lambda unit: _compile_unit(compiler, *unit), units[ahead:])
        objects = [path.with_suffix(".o").name for path in paths]
        bridge_flags = [f"-L{bridge}", "-lfxwrap_bridge", f"-Wl,-rpath,{bridge}"]
        shared = ["-fopenmp"] if any("-fopenmp" in source.flags for source in sources) else []
        linked = [*shared, *objects, *bridge_flags, *compiler.runtime]
        _run([*compiler.command, "-shared", *linked, "-o", f"{stem}.so"], folder)
        for item in (*objects, *[file for source in sources for file, _ in source.files]):
            (folder / item).unlink()

    return _entry(cache_folder() / "programs" / key, build) / f"{stem}.so"


def _compile_unit(compiler: _Compiler, source: NativeSource, path: Path) -> str:
    """Compiles a translation unit to an object file beside it. One of CPU kernels is compiled once: programs of every
    emitter have the same, each in a library of its own."""
    if source.flags != KERNEL_FLAGS or source.files:
        return _run(_unit_command(compiler, source, path), path.parent)
    key = _digest(_environment(compiler), source.text, *KERNEL_FLAGS, _kernel_header(), _processor())

    def build(folder: Path) -> None:
        unit = folder / _UNIT
        unit.write_text(source.text, encoding="utf-8")
        _run(_unit_command(compiler, source, unit), folder)
        unit.unlink()

    made = _entry(cache_folder() / "units" / key, build) / _UNIT.with_suffix(".o")
    shutil.copyfile(made, path.with_suffix(".o"))
    return ""


_UNIT = Path("kernels.cpp")


def _unit_command(compiler: _Compiler, source: NativeSource, path: Path) -> list[str]:
    own = compiler.kernel_flags if source.flags == KERNEL_FLAGS else ()
    flags = (*_COMMON_FLAGS, *source.flags, *own, "-I", str(_HERE))
    return [*compiler.command, *flags, "-c", path.name, "-o", path.with_suffix(".o").name]


def compile_ahead(source_text: str) -> None:
    """Compiles an emitted translation unit beside other work, for `compile_cpp` to take.

    Raises as `compile_cpp` does.
    """
    compiler = _compiler()

    def build(folder: Path) -> None:
        path = folder / _AHEAD.with_suffix(".cpp")
        path.write_text(source_text, encoding="utf-8")
        _run(_unit_command(compiler, NativeSource(source_text, PROGRAM_FLAGS), path), folder)

    _entry(_ahead_folder(compiler, source_text), build)


_AHEAD = Path("program.o")


def _ahead_folder(compiler: _Compiler, source_text: str) -> Path:
    return cache_folder() / "programs" / f"ahead-{_digest(_environment(compiler), _bridge_digest(), source_text)}"


def _take_ahead(compiler: _Compiler, source_text: str, target: Path) -> bool:
    """Moves what was compiled ahead to its place; says whether there was something, and nobody else took it first."""
    folder = _ahead_folder(compiler, source_text)
    try:
        os.replace(folder / _AHEAD, target)
    except OSError:
        return False
    shutil.rmtree(folder, ignore_errors=True)
    return True


def compiled_kernels(symbols: tuple[str, ...]) -> dict[str, Path]:
    """Returns the libraries of those kernels that are compiled, by symbol; the cache keeps a note for each."""
    found = {symbol: path for symbol in symbols if (path := provided_kernel(symbol)) is not None}
    others = tuple([symbol for symbol in symbols if symbol not in found])
    for symbol, note in zip(others, _kernel_notes(others) if others else (), strict=True):
        if note.is_file():
            library = cache_folder() / note.read_text(encoding="utf-8")
            if library.is_file():
                found[symbol] = library
    return found


def record_kernels(symbols: Sequence[str], library: Path) -> None:
    """Notes that kernels are in a library, which lies in the cache."""
    text = str(library.relative_to(cache_folder()))
    for note in _kernel_notes(symbols):
        note.parent.mkdir(parents=True, exist_ok=True)
        temporary = note.with_name(f"{note.name}.{os.getpid()}")
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, note)


def _kernel_notes(symbols: Sequence[str]) -> list[Path]:
    compiler = _compiler()
    whole = _digest(_environment(compiler), _bridge_digest(), _kernel_header(), *KERNEL_FLAGS, _processor())
    return [cache_folder() / "kernels" / _digest(whole, symbol) for symbol in symbols]


def build_bridge() -> BridgeBuild:
    """Build the bridge and its Python binding for this torch, Python and compiler, or find them in the cache."""
    compiler = _compiler()
    folder = cache_folder() / f"bridge-{_digest(_environment(compiler), _bridge_digest())}"
    start = time.perf_counter()
    built = False

    def build(target: Path) -> None:
        nonlocal built
        built = True
        _build_bridge(compiler, target)

    _entry(folder, build)
    return BridgeBuild(folder, time.perf_counter() - start if built else 0.0)


def _build_bridge(compiler: _Compiler, folder: Path) -> None:
    torch_root = Path(torch.__file__).parent
    library_folder = str(torch_root / "lib")
    include = ["-isystem", str(torch_root / "include"), "-isystem", sysconfig.get_paths()["include"]]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    flags = [*_COMMON_FLAGS, *_BRIDGE_FLAGS, abi, *include]

    def compiled(unit: Sequence[str]) -> str:
        text, made = folder / unit[0], Path(unit[0]).with_suffix(".o").name
        text.write_text("".join([f'#include "{_HERE / source}"\n' for source in unit]), encoding="utf-8")
        _run([*compiler.command, *flags, "-c", text.name, "-o", made], folder)
        text.unlink()
        return made

    objects = _in_parallel(compiled, [*_BRIDGE_UNITS, *_BINDING_UNITS])
    bridge_objects, binding_objects = objects[: len(_BRIDGE_UNITS)], objects[len(_BRIDGE_UNITS) :]
    torch_flags = [f"-L{library_folder}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{library_folder}", *compiler.runtime]
    link = [*compiler.command, "-shared", *bridge_objects, *torch_flags, f"-Wl,-soname,{_BRIDGE}", "-o", _BRIDGE]
    _run(link, folder)
    binding = [
        *binding_objects,
        "-L.",
        "-lfxwrap_bridge",
        "-Wl,-rpath,$ORIGIN",
        "-ltorch_python",
    ]
    _run([*compiler.command, "-shared", *binding, *torch_flags, "-o", _BINDING], folder)
    for item in objects:
        (folder / item).unlink()


@dataclass(frozen=True, slots=True)
class _Compiler:
    """A C++ compiler: its command, its version, the shared runtimes to link, and flags of its own for kernels.

    Where an installation has no libstdc++.so for `-lstdc++` to find, the C++ runtime is named by its file: the compiler
    would link the static library, whose streams crash beside the shared one that torch has loaded.
    """

    command: tuple[str, ...]
    version: str
    runtime: tuple[str, ...]
    kernel_flags: tuple[str, ...] = ()


def _compiler() -> _Compiler:
    chosen = os.environ.get("CXX", "")
    if chosen:
        return _probe(tuple(shlex.split(chosen)))
    for candidate in ("g++", "c++", "clang++"):
        if shutil.which(candidate):
            return _probe((candidate,))
    raise NativeBuildError(
        "no C++ compiler found: tried g++, c++ and clang++. Install one, or name it in the environment variable CXX; "
        "the Python emitter (options={'emitter': 'python'}) needs none"
    )


def compiler_identity() -> str:
    """Returns what says which C++ compiler is used, without asking it: its path, and its file's size and time.

    "" where there is none.
    """
    chosen = shlex.split(os.environ.get("CXX", ""))
    for name in chosen[:1] or ("g++", "c++", "clang++"):
        path = shutil.which(name)
        if path:
            facts = os.stat(path)
            return f"{chosen or name} {os.path.realpath(path)} {facts.st_size} {facts.st_mtime_ns}"
    return str(chosen or "")


@cache
def _probe(command: tuple[str, ...]) -> _Compiler:
    version = _run([*command, "--version"], Path.cwd())
    runtime = () if _library_file(command, "libstdc++.so") else _library_file(command, "libstdc++.so.6")
    if "clang" not in version:
        return _Compiler(command, version, runtime, _GCC_KERNEL_FLAGS)
    if platform.machine() not in ("x86_64", "AMD64"):
        return _Compiler(command, version, runtime)
    vector_math = _library_file(command, _VECTOR_MATH)
    return _Compiler(command, version, (*runtime, *vector_math), _CLANG_KERNEL_FLAGS if vector_math else ())


def _library_file(command: tuple[str, ...], name: str) -> tuple[str, ...]:
    """The file of a shared library where the compiler finds one, else nothing."""
    asked = subprocess.run([*command, f"-print-file-name={name}"], capture_output=True, text=True, check=False)
    found = asked.stdout.strip()
    return (found,) if os.path.isabs(found) else ()


def _environment(compiler: _Compiler) -> str:
    return "\n".join(
        (
            *compiler.command,
            shutil.which(compiler.command[0]) or "",
            compiler.version,
            *compiler.runtime,
            *compiler.kernel_flags,
            torch.__version__,
            str(torch.__file__),
            str(sysconfig.get_config_var("SOABI")),
            *_COMMON_FLAGS,
        )
    )


@cache
def _bridge_digest() -> str:
    files = (*_HEADERS, *[file for unit in (*_BRIDGE_UNITS, *_BINDING_UNITS) for file in unit])
    return _digest(*_BRIDGE_FLAGS, *((_HERE / name).read_text(encoding="utf-8") for name in files))


@cache
def _kernel_header() -> str:
    return (_HERE / _KERNEL_HEADER).read_text(encoding="utf-8")


@cache
def _processor() -> str:
    """What -march=native depends on: the instruction sets of this machine's processor."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            text = "".join(takewhile(str.strip, file))  # of the first processor: the system takes long to write all
    except OSError:
        return platform.processor()
    lines = text.splitlines()
    return "\n".join(next((s for s in lines if s.startswith(key)), "") for key in ("model name", "flags", "Features"))


def _digest(*parts: str) -> str:
    state = hashlib.sha256()
    for part in parts:
        data = part.encode()
        state.update(len(data).to_bytes(8, "little"))
        state.update(data)
    return state.hexdigest()[:32]


def _entry(folder: Path, build: Callable[[Path], None]) -> Path:
    """The cache entry `folder`, made by `build(temporary folder)` if it is not there yet."""
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(cache_folder() / "locks" / folder.name):
        if folder.is_dir():
            return folder
        temporary = Path(tempfile.mkdtemp(prefix="building-", dir=folder.parent))
        try:
            build(temporary)
            temporary.chmod(0o755)
            os.replace(temporary, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return folder


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock file `path`, which the system releases with the process; deleting the file would race."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _in_parallel(function: Callable[[Any], str], items: Sequence[Any]) -> list[str]:
    """Returns what a function gives for each item; several threads call it, as it waits for the compiler."""
    count = min(len(items), os.cpu_count() or 1)
    if count < 2:
        return [function(item) for item in items]
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(function, items))


def _run(command: list[str], folder: Path) -> str:
    """Run a compiler command in `folder` and return its output."""
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen(
            command, cwd=folder, stdout=pipe, stderr=pipe, text=True, errors="replace", start_new_session=True
        )
    except OSError as failure:
        raise NativeBuildError(
            f"cannot run the C++ compiler '{command[0]}': {failure.strerror}. Install it, or name another in the "
            f"environment variable CXX; the Python emitter needs none.\ncommand: {shlex.join(command)}"
        ) from failure
    try:
        printed, complaints = process.communicate(timeout=LONGEST_COMMAND)
    except BaseException as reason:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # g++ waits for the compiler itself, which would go on alone
        process.communicate()
        if isinstance(reason, subprocess.TimeoutExpired):
            raise NativeBuildError(
                f"the C++ compiler did not end within {LONGEST_COMMAND} s and was stopped. Name another in the "
                f"environment variable CXX.\ncommand: {shlex.join(command)}"
            ) from None
        raise
    if process.returncode != 0:
        raise NativeBuildError(
            f"the C++ compiler failed with exit status {process.returncode}.\ncommand: {shlex.join(command)}\n"
            f"{printed}{complaints}"
        )
    return printed


def binary_target() -> dict[str, Any]:
    """Returns what a compiled library depends on besides its source, as plain data; see `unusable`.

    The versions of torch and Python and of the bridge's and kernels' own sources, the machine, its C library, and the
    instructions of its processor, which kernels are compiled for.
    """
    return {
        "torch": f"{torch.__version__} {torch.version.git_version}",
        "python": str(sysconfig.get_config_var("SOABI")),
        "bridge": _digest(_bridge_digest(), _kernel_header(), *_COMMON_FLAGS, *PROGRAM_FLAGS, *KERNEL_FLAGS),
        "machine": f"{platform.system()} {platform.machine()}",
        "libc": platform.libc_ver()[1],
        "instructions": _instructions(),
    }


def unusable(target: Mapping[str, Any]) -> str:
    """Returns why a library for another `binary_target` cannot be used here; "" where it can."""
    here = binary_target()
    for name in ("torch", "python", "bridge", "machine"):
        if target.get(name) != here[name]:
            return f"it is for {name} {target.get(name)!r}, and here is {here[name]!r}"
    if _version(target.get("libc", "")) > _version(here["libc"]):
        return f"it is for the C library {target.get('libc')}, and here is {here['libc']}"
    missing = set(target.get("instructions", [])) - set(here["instructions"])
    if missing:
        return f"it uses instructions that this processor lacks: {', '.join(sorted(missing))}"
    return ""


def _version(text: str) -> tuple[int, ...]:
    return tuple([int(part) for part in re.findall(r"\d+", str(text))])


def _instructions() -> list[str]:
    """Returns the instruction sets of this machine's processor, by the names that its system has for them."""
    line = next((s for s in _processor().splitlines() if s.startswith(("flags", "Features"))), "")
    return sorted(set(line.partition(":")[2].split()))
