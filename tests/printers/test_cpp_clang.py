"""C++ kernels compiled with clang++: the printer's own tests, run again in a process that it is the compiler of."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fxwrap.runtime.native import compiler as driver
from tests.conftest import NO_CLANG

ROOT = Path(__file__).parent.parent.parent
KERNEL_TESTS = (
    "tests/printers/test_cpp_printer_vectors.py",
    "tests/printers/test_cpp_printer_scans.py",
    "tests/printers/test_cpp_printer_operations.py::test_a_function_is_accurate_everywhere",
)


def clang_command() -> str:
    """The command in FXWRAP_CLANG, arguments included, else clang++ if it exists and can link OpenMP's runtime."""
    if chosen := os.environ.get("FXWRAP_CLANG"):
        return chosen
    if not shutil.which("clang++"):
        return ""
    command = ["clang++", "-fopenmp", "-x", "c++", "-", "-o", os.devnull]
    linked = subprocess.run(command, input="int main() {}", text=True, capture_output=True, check=False)
    return "" if linked.returncode else "clang++"


def test_kernels_are_the_same_with_clang() -> None:
    if not (command := clang_command()):
        pytest.skip(NO_CLANG)
    version = subprocess.run([*shlex.split(command), "--version"], capture_output=True, text=True, check=True)
    assert "clang" in version.stdout
    run = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *KERNEL_TESTS]
    environment = os.environ | {"CXX": command}
    done = subprocess.run(run, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-4000:]


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_clang_links_the_vector_math_library(machine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, library = tmp_path / "clang++", tmp_path / "libmvec.so.1"
    library.touch()
    cases = f"*mvec*) echo {library};; *stdc*) echo libstdc++.so.6;; *) echo clang version 1;;"
    compiler.write_text(f'#!/bin/sh\ncase "$2" in {cases} esac\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", f"{compiler} {machine}")  # an argument of the command, which is asked with it
    monkeypatch.setattr(driver.platform, "machine", lambda: machine)
    compiler_settings = driver.find_compiler()
    assert compiler_settings.command == (str(compiler), machine)
    expected = (("-fveclib=libmvec",), (str(library),)) if machine == "x86_64" else ((), ())
    assert (compiler_settings.kernel_flags, compiler_settings.runtime) == expected
