"""The compiler driver and its cache."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from fxwrap.errors import NativeBuildError, OptionError
from fxwrap.runtime.cache_folder import UNFINISHED_ENTRIES, cache_folder
from fxwrap.runtime.native import (
    KERNEL_FLAGS,
    KERNEL_FLAGS_ENV,
    PROGRAM_FLAGS,
    NativeSource,
    build_bridge,
    compile_cpp,
    load_program,
)
from fxwrap.runtime.native import compiler as driver
from fxwrap.runtime.native.precompiled_headers import precompile_program_headers
from tests.runtime.native.native_programs import names, source

DOUBLE = source(
    "  CALL(f, add, (x, x), (y));",
    slots=("x", "y"),
    operators={"add": "aten::add.Tensor"},
    inputs=names("x"),
    outputs="y",
)


def program_files() -> set[Path]:
    return {path for name in ("programs", UNFINISHED_ENTRIES) for path in (cache_folder() / name).rglob("*")}


def test_equal_sources_are_compiled_once_and_stay_readable() -> None:
    first = compile_cpp(DOUBLE, name="double")
    modified = first.stat().st_mtime_ns
    assert compile_cpp(DOUBLE, name="double") == first and first.stat().st_mtime_ns == modified
    assert first.with_suffix(".cpp").read_text() == DOUBLE
    assert compile_cpp(DOUBLE + "// other\n", name="double") != first
    assert torch.equal(load_program(first)(torch.ones(2))[0], torch.full((2,), 2.0))


def test_the_bridge_is_built_once() -> None:
    build_bridge()
    assert build_bridge().seconds == 0.0


def test_kernels_are_linked_with_the_program() -> None:
    kernel = """extern "C" void twice(const float* x, float* y, long n) {
  for (long i = 0; i < n; ++i) y[i] = 2 * x[i];
}
"""
    text = source(
        """
  empty_strided(f, y, {size(f, x, 0)}, {1}, DType::float32, cpu);
  twice((const float*)data_ptr(f, x), (float*)data_ptr(f, y), size(f, x, 0));
  bump_version(f, y);
""",
        slots=("x", "y"),
        inputs=names("x"),
        outputs="y",
    ).replace("namespace program {", 'extern "C" void twice(const float*, float*, long);\nnamespace program {', 1)
    x = torch.arange(100.0)
    program = load_program(compile_cpp(text, name="kernel", extra_sources=(NativeSource(kernel),)))
    (y,) = program(x)
    assert torch.equal(y, 2 * x) and y._version == 1


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache folder that no other process writes to, with the bridge of the common one."""
    bridge = build_bridge().folder
    (tmp_path / bridge.name).symlink_to(bridge)
    monkeypatch.setenv("FXWRAP_CACHE_DIR", str(tmp_path))


def test_flags_of_the_environment_follow_those_of_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = [
        NativeSource('extern "C" __attribute__((visibility("default"))) int value() { return VALUE; }\n'),
        NativeSource("#ifdef VALUE\n#error flags of its own\n#endif\n", PROGRAM_FLAGS),
    ]

    def value(flags: str) -> int:
        monkeypatch.setenv(KERNEL_FLAGS_ENV, flags)
        return int(ctypes.CDLL(str(compile_cpp("", name="value", extra_sources=kernels))).value())

    assert value("-DVALUE=3 -O1") == 3 and value("-DVALUE=4 -O1") == 4 and value("-DVALUE=3 -O1") == 3
    with pytest.raises(NativeBuildError, match=r"command: .* -O3 .* -O0 (?s:.*)VALUE"):
        value("-O0")


COPYING = """
#include "kernel.h"
extern "C" __attribute__((visibility("default"))) void copy(char* to, const char* from, long n) {
  char* memory = (char*)__builtin_malloc(n);
  if (memory == nullptr) fxwrap_index_error("there is no memory");
  __builtin_memcpy(memory, from, n);
  __builtin_memcpy(to, memory, n);
  __builtin_free(memory);
}
"""


def test_programs_name_the_standard_libraries_whose_symbols_the_linker_has_not_read(own_cache: None) -> None:
    generated = compile_cpp(DOUBLE, name="double", extra_sources=(NativeSource(COPYING),))
    content = generated.read_bytes()
    assert b"__cxa_throw\0" in content and b"libstdc++.so.6\0" in content
    if driver.find_compiler().runtime or platform.libc_ver()[0] != "glibc":
        return
    # A linker that reads a library writes the versions of its symbols, here that of memcpy.
    assert b"CXXABI_" not in content and b"GLIBC_2.2.5\0" not in content
    assert (b"GLIBC_2.14\0" in content) == (platform.machine() == "x86_64")
    own_flags = NativeSource(COPYING, (*KERNEL_FLAGS, "-DVALUE"))
    kernels_of_users = compile_cpp(DOUBLE, name="double", extra_sources=(own_flags,))
    assert b"GLIBC_2." in kernels_of_users.read_bytes()
    for library in (generated, kernels_of_users):
        to = ctypes.create_string_buffer(6)
        ctypes.CDLL(str(library)).copy(to, b"copied", 6)
        assert to.raw == b"copied"


def test_gcc_reads_precompiled_headers_where_the_flags_are_theirs(own_cache: None) -> None:
    kernel = '#include "kernel.h"\nextern "C" void raise(long n) { if (n) fxwrap_index_error("n is not 0"); }\n'
    plain = compile_cpp(DOUBLE, name="double", extra_sources=(NativeSource(kernel),)).read_bytes()
    precompile_program_headers(driver.find_compiler())
    entries = list(cache_folder().glob("headers-*"))
    if "Free Software Foundation" not in driver.find_compiler().version:
        assert entries == []
        return
    for header in ("bridge.h", "kernel.h"):
        (entries[0] / header).write_text("#error this text is read\n")
    for folder in ("programs", "units"):
        shutil.rmtree(cache_folder() / folder)
    assert compile_cpp(DOUBLE, name="double", extra_sources=(NativeSource(kernel),)).read_bytes() == plain
    with pytest.raises(NativeBuildError, match="this text is read"):
        compile_cpp(DOUBLE, name="double", extra_sources=(NativeSource(kernel, ("-O1",)),))


def test_a_failed_build_shows_the_command_and_is_cleaned_up(own_cache: None) -> None:
    compile_cpp(DOUBLE, name="double")
    before = program_files()
    with pytest.raises(NativeBuildError) as caught:
        compile_cpp(DOUBLE + "this is no C++;\n", name="broken")
    assert "broken.cpp" in str(caught.value) and "command: " in str(caught.value) and "error: " in str(caught.value)
    assert program_files() == before


def test_a_command_is_searched_again_when_it_is_gone_or_path_changes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first, second = tmp_path / "first" / "tool", tmp_path / "second" / "tool"
    for path in (first, second):
        path.parent.mkdir()
        path.write_text("#!/bin/sh\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{first.parent}{os.pathsep}{second.parent}")
    assert driver.find_executable("tool") == driver.find_executable("tool") == str(first)
    first.unlink()
    assert driver.find_executable("tool") == str(second)
    monkeypatch.setenv("PATH", str(first.parent))
    assert driver.find_executable("tool") == ""
    first.write_text("#!/bin/sh\n")
    first.chmod(0o755)
    assert driver.find_executable("tool") == str(first)


def test_a_compiler_is_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search looks into each folder of PATH."""
    command = driver.find_compiler().command
    driver.run_compiler([*command, "--version"])
    monkeypatch.setattr(driver.shutil, "which", None)
    assert driver.run_compiler([*command, "--version"])


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler --flag")
    with pytest.raises(NativeBuildError, match=r"cannot run the C\+\+ compiler 'no-such-compiler'.*Python emitter"):
        compile_cpp(DOUBLE, name="double")
    monkeypatch.setenv("PATH", "")
    for nothing in ("", " "):
        monkeypatch.setenv("CXX", nothing)
        with pytest.raises(NativeBuildError, match=r"no C\+\+ compiler found"):
            compile_cpp(DOUBLE, name="double")


@pytest.mark.parametrize("name", ["CXX", KERNEL_FLAGS_ENV])
def test_a_variable_with_an_open_quote_is_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "g++ '-DX")
    with pytest.raises(OptionError, match=f"{name}=.*No closing quotation; correct its quotes"):
        driver.compiler_identity()


def test_a_program_is_loaded_from_a_path_that_is_no_text(tmp_path: Path, own_cache: None) -> None:
    folder = tmp_path / os.fsdecode(b"\xff\xe4 '\n")
    folder.mkdir()
    library = shutil.copy(compile_cpp(DOUBLE, name="double"), folder)
    program = load_program(library)
    x = torch.rand(3)
    torch.testing.assert_close(program(x)[0], x + x)
    assert program.path == library


def test_a_hanging_compiler_is_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, own_cache: None) -> None:
    """With the processes that it has started, as g++ starts the compiler itself."""
    compiler = tmp_path / "endless"
    endless = "sleep 77 & echo $! > $0.pid; wait"
    compiler.write_text(f"#!/bin/sh\ncase $1 in --version|-print*) echo 1;; *) {endless};; esac\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(driver, "COMPILER_TIMEOUT_SECONDS", 1)
    before = set(cache_folder().iterdir())
    with pytest.raises(NativeBuildError, match=r"did not finish within 1 s(.|\n)*CXX(.|\n)*endless"):
        build_bridge()
    started = int((tmp_path / "endless.pid").read_text())
    status = Path(f"/proc/{started}/status")
    assert not status.exists() or "zombie" in status.read_text()
    assert {path.name for path in set(cache_folder().iterdir()) - before} <= {
        *("locks", "units", UNFINISHED_ENTRIES, "endless.pid")
    }
    assert [path for name in ("units", UNFINISHED_ENTRIES) for path in (cache_folder() / name).iterdir()] == []


def test_a_non_program_library_is_rejected(tmp_path: Path) -> None:
    stranger = tmp_path / "stranger.so"
    stranger.write_bytes(b"not a library")
    with pytest.raises(ImportError, match="cannot load the program"):
        load_program(stranger)
    with pytest.raises(ImportError, match="is not a program of this version"):
        load_program(build_bridge().folder / "libfxwrap_bridge.so")


def test_concurrent_builds_of_one_source() -> None:
    text = DOUBLE + f"// {os.getpid()}\n"
    with ThreadPoolExecutor(4) as pool:
        paths = set(pool.map(lambda _: compile_cpp(text, name="double"), range(8)))
    assert len(paths) == 1 and torch.equal(load_program(paths.pop())(torch.ones(1))[0], torch.full((1,), 2.0))
