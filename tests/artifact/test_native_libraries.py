"""Libraries of a host beside the runtime: custom operators in C++, at::Tensor values, and a second runtime."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import fxwrap
from fxwrap.artifact.archive import Archive, ArchiveWriter
from fxwrap.converters.cpp import to_cpp
from fxwrap.runtime import cache_folder
from fxwrap.runtime.native import (
    build_runtime,
    find_compiler,
    native_entry_key,
    project_sources,
    run_compiler,
    runtime_sources,
)
from tests.artifact.native_host import described, drive, read_result, tensor_commands
from tests.artifact.test_native_host import compile_affine
from tests.conftest import NO_CMAKE

HERE = Path(__file__).parent
TORCH = Path(torch.__path__[0])


def built(source: Path, *flags: str) -> Path:
    """Returns a compiled library or program of the tests, from the cache."""
    compiler = find_compiler()

    def build(folder: Path) -> None:
        run_compiler([*compiler.command, "-std=c++20", str(source), *flags, "-o", "built.so"], folder)

    key = native_entry_key(compiler, *flags, source.read_text())
    return cache_folder.find_or_build_entry(f"test-{source.stem}-{key}", build) / "built.so"


@pytest.fixture(scope="module")
def affine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("affine") / "affine.fxw"
    compile_affine().save(path, target="native")
    return path


# --- custom operators -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def library() -> Path:
    """A library that registers `native_host_library::scale`, which this process loads too."""
    flags = ("-shared", "-fPIC", "-isystem", str(TORCH / "include"), f"-L{TORCH / 'lib'}", "-ltorch_cpu", "-lc10")
    path = built(HERE / "custom_operator.cpp", *flags)
    torch.ops.load_library(str(path))
    torch.library.register_fake("native_host_library::scale", lambda x, factor: torch.empty_like(x))
    return path


class Scaled(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.native_host_library.scale(x + 1, 2.5) * 2


@pytest.fixture(scope="module")
def scaled(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("scaled") / "scaled.fxw"
    program = torch.export.export(Scaled(), (torch.arange(6.0),))
    fxwrap.compile_graph(program, name="scaled", options=fxwrap.Options(emitter="cpp")).save(path, target="native")
    return path


def test_an_operator_of_a_library_runs_in_a_host(library: Path, scaled: Path, tmp_path: Path) -> None:
    x = torch.arange(6.0)
    done = drive("library", library, "open", scaled, *tensor_commands(tmp_path, [x]), "run", tmp_path / "out")
    assert done.code == 0, (done.lines, done.errors)
    assert torch.equal(read_result(tmp_path / "out.0", x), (x + 1) * 2.5 * 2)


def test_an_operator_whose_library_is_missing_is_named(scaled: Path) -> None:
    done = drive("open", scaled)
    assert done.code == 3 and done.lines[0] == (
        f"ArtifactError: {scaled}: its operator 'native_host_library::scale' is not registered in this process. "
        "Pass the library that registers it as an option, or load it first"
    )


def test_a_library_that_cannot_be_loaded(scaled: Path, tmp_path: Path) -> None:
    done = drive("library", tmp_path / "absent.so", "open", scaled)
    assert done.code == 3
    assert done.lines[0].startswith(f"ArtifactError: {scaled}: the library of custom operators cannot be loaded: ")
    assert "absent.so" in done.lines[0]


# --- options of open --------------------------------------------------------------------------------------------------


def test_a_file_for_another_device_than_the_host_expects(affine: Path) -> None:
    assert drive("device", "cpu", "open", affine).code == 0
    assert drive("device", "cuda:0", "open", affine).lines[0] == (
        f"ArtifactError: {affine}: it was compiled for cpu, not for cuda:0. "
        "Compile the model for that device, or open the file without the option"
    )


def test_constants_are_mapped_or_copied(affine: Path, tmp_path: Path) -> None:
    x = torch.randn(4, 16)
    with torch.no_grad():
        wanted = fxwrap.load(affine).flat(x)[0]
    for options in ([], ["copy"], ["threads", 1]):
        done = drive(*options, "open", affine, *tensor_commands(tmp_path, [x]), "run", tmp_path / "out")
        assert done.code == 0 and torch.equal(read_result(tmp_path / "out.0", wanted), wanted)


# --- at::Tensor -------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("cmake") is None, reason=NO_CMAKE)
def test_a_host_passes_and_receives_tensors_of_torch(affine: Path, tmp_path: Path) -> None:
    prefix = f"-DCMAKE_PREFIX_PATH={fxwrap.cmake_prefix_path}"
    for command in (["-S", HERE / "tensor_host", "-B", tmp_path, prefix], ["--build", tmp_path]):
        done = subprocess.run(["cmake", *command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    host = subprocess.run([tmp_path / "tensor_host", affine], capture_output=True, text=True, check=True)
    loaded, x = fxwrap.load(affine), torch.full((4, 16), 0.5)
    with torch.no_grad():
        first = float(loaded.flat(x)[0][0, 0])
        with pytest.raises(fxwrap.errors.InputError) as error:
            loaded.flat(torch.zeros(4, 17))
        loaded.load_constants({"bias": torch.zeros(16), "weight": loaded.program.store.tensors["p_weight"]})
        replaced = float(loaded.flat(x)[0][0, 0])
    lines = host.stdout.splitlines()
    assert lines[3:] == [f"InputError: {error.value}", "TypeError: the value is of another kind"]
    words = [line.split() for line in lines[:3]]
    assert words[0][:3] == ["tensor", "4", "16"] and words[0][4:] == ["uses", "1"] and words[1][:2] == ["dlpack", "1"]
    numbers = torch.tensor([float(words[0][3]), float(words[1][2]), float(words[2][1])])
    assert torch.equal(numbers, torch.tensor([first, first, replaced]))


# --- two runtimes -----------------------------------------------------------------------------------------------------


def test_two_runtimes_in_one_process(affine: Path, tmp_path: Path) -> None:
    runtime = build_runtime()
    for name in ("libfxwrap_runtime.so", "libfxwrap_runtime.target", "libfxwrap_bridge.so"):
        shutil.copy(runtime / name, tmp_path / name.replace("runtime.so", "runtime_of_another_package.so"))
    program = built(HERE / "two_runtimes.cpp", f"-I{runtime / 'include'}", "-ldl")
    libraries = (runtime / "libfxwrap_runtime.so", tmp_path / "libfxwrap_runtime_of_another_package.so")
    words = [word for library in libraries for word in (library, affine)]
    done = subprocess.run([program, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout == "equal\n", done.stdout + done.stderr


@pytest.mark.long  # it compiles the runtime again; others have two runtimes of one version
def test_two_versions_of_the_runtime_in_one_process(tmp_path: Path) -> None:
    """The other version has another table of functions, and its programs are compiled for that."""
    path = tmp_path / "pure.fxw"
    compiled = fxwrap.compile_graph(
        torch.export.export(Pure(), (torch.randn(4, 16),)), name="pure", options=fxwrap.Options(emitter="cpp")
    )
    compiled.save(path, target="native")
    runtime, other = build_runtime(), tmp_path / "other"
    for name, source in project_sources().items():
        (other / name).parent.mkdir(parents=True, exist_ok=True)
        text = source.read_text()
        if source.name == "bridge.h":
            call = "  void (*call)(Frame& f, CallSite& site);\n"
            assert call in text and text.count("abi_version = ") == 1
            # The number gets another first digit.
            text = text.replace(call, f"  void (*added)(Frame& f);\n{call}").replace(
                "abi_version = ", "abi_version = 1"
            )
        (other / name).write_text(text)
    sources = [other / path.relative_to(Path(fxwrap.__file__).parent) for path in runtime_sources()]
    native = other / "runtime" / "native"
    compiler = find_compiler().command
    flags = ["-std=c++20", "-O0", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden"]
    (other / "runtime.cpp").write_text("".join([f'#include "{source}"\n' for source in sources]))
    run_compiler([*compiler, *flags, f"-I{native}", "runtime.cpp", "-ldl", "-o", "libfxwrap_runtime.so"], other)
    lines = (runtime / "libfxwrap_runtime.target").read_text().splitlines()
    (other / "libfxwrap_runtime.target").write_text("\n".join(["other", *lines[1:], ""]))
    emitted = to_cpp(compiled.program)
    units = [("program.cpp", emitted.source, ()), *[
        (f"kernels_{index}.cpp", unit.text, unit.flags) for index, unit in enumerate(emitted.kernel_units())
    ]]  # fmt: skip
    for name, text, unit_flags in units:
        (other / name).write_text(text)
        run_compiler(
            [*compiler, "-std=c++20", "-fPIC", *unit_flags, f"-I{native / 'bridge'}", "-c", name, "-o", f"{name}.o"],
            other,
        )
    objects = [f"{name}.o" for name, _, _ in units]
    run_compiler([*compiler, "-shared", "-fopenmp", *objects, "-o", "program.so"], other)
    library = (other / "program.so").read_bytes()
    second = tmp_path / "second.fxw"
    with Archive(path) as archive, second.open("wb") as file, ArchiveWriter(file) as writer:
        manifest = json.loads(json.dumps(dict(archive.manifest)))
        for name in manifest.pop("entries"):
            writer.add_bytes(name, archive.read(name))
        writer.add_bytes("binaries/other.so", library)
        manifest["binaries"]["native"]["library"] = "binaries/other.so"
        manifest["binaries"]["target"]["interface"] = "other"
        writer.close({key: value for key, value in manifest.items() if key not in ("format", "format_version")})
    program = built(HERE / "two_runtimes.cpp", f"-I{runtime / 'include'}", "-ldl")
    done = subprocess.run(
        [program, runtime / "libfxwrap_runtime.so", path, other / "libfxwrap_runtime.so", second],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout == "equal\n", done.stdout + done.stderr
    mixed = subprocess.run(
        [program, runtime / "libfxwrap_runtime.so", path, other / "libfxwrap_runtime.so", path],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert mixed.returncode == 2 and f"{path}: it is for interface " in mixed.stdout and ", not 'other'" in mixed.stdout


class Pure(torch.nn.Module):
    """Kernels and temporary memory."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x.cumsum(0), -1).flip(0) + x.sum(0)


# --- constants --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ("type", "version", "unexpected"))
def test_a_replacement_that_fails_halfway_leaves_all_old_constants(affine: Path, tmp_path: Path, kind: str) -> None:
    x = torch.randn(4, 16)
    good = ["constant", "weight", *described(tmp_path, torch.randn(16, 16))]
    match kind:
        case "type":
            bad = ["constant", "bias", *described(tmp_path, torch.randn(17))]
        case "version":
            bad = ["constant2", "bias", *described(tmp_path, torch.randn(16))]
        case _:
            bad = ["constant", "other", *described(tmp_path, torch.randn(16))]
    done = drive(
        "open", affine, *tensor_commands(tmp_path, [x]), "run", tmp_path / "old", *good, *bad, "try_replace", "run",
        tmp_path / "new", "alive",
    )  # fmt: skip
    assert done.code == 0 and len(done.lines) == 2 and done.lines[1] == "alive 0", done.lines
    assert done.lines[0].split(": ")[0] in ("ArtifactError", "InputError")
    assert (tmp_path / "old.0").read_bytes() == (tmp_path / "new.0").read_bytes()
