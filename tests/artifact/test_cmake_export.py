"""Saved programs as CMake projects: they build with libtorch alone, and return the results of Python."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fxwrap
from fxwrap.artifact.cmake_export import export_cmake
from fxwrap.cli import main
from fxwrap.errors import ArtifactError
from fxwrap.runtime.native import build_runtime
from tests.conftest import NO_CMAKE


class Scores(torch.nn.Module):
    """A matmul and fused kernels; a result is transposed, and one is broadcast."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = torch.nn.Parameter(torch.randn(8, 6, generator=generator))
        self.bias = torch.nn.Parameter(torch.randn(6, generator=generator))

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        scores = torch.softmax(torch.addmm(self.bias, x, self.weight), -1)
        best = scores.argmax(-1)
        return {"scores": scores, "rows": ids + best, "columns": scores.exp().t(), "best": best[:, None].expand(-1, 4)}


def examples(batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The inputs that main.cpp creates."""
    return torch.arange(batch * 8).remainder(5).float().reshape(batch, 8), torch.arange(batch).remainder(5)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("scores") / "scores.fxw"
    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(Scores(), examples(3), dynamic_shapes={"x": {0: batch}, "ids": {0: batch}})
    fxwrap.compile_graph(program, name="scores", options=fxwrap.Options(emitter="cpp")).save(path, target="native")
    return path


def build(project: Path, *definitions: str) -> Path:
    """Builds a project in an environment without fxwrap; returns its executable."""
    configure = [
        "cmake",
        "-S",
        project,
        "-B",
        project / "build",
        f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}",
        "-DCMAKE_UNITY_BUILD_BATCH_SIZE=0",  # all of the runtime in one unit, which compiles in less time on one core
        *definitions,
    ]
    for command in (configure, ["cmake", "--build", project / "build", "-j", "2"]):
        done = subprocess.run(command, capture_output=True, text=True, check=False, env={"PATH": "/usr/bin:/bin"})
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return project / "build" / "main"


def check(project: Path, saved: Path, *definitions: str) -> None:
    """Builds and runs a project, whose printed numbers are those of Python."""
    executable = build(project, *definitions)
    done = subprocess.run([executable, project / "weights.fxw"], capture_output=True, text=True, check=False, env={})
    assert done.returncode == 0, done.stdout + done.stderr
    printed = {name: [float(word) for word in words.split()] for name, words in
               (line.split(":") for line in done.stdout.splitlines())}  # fmt: skip
    with torch.no_grad():
        wanted = fxwrap.load(saved)(*examples(3))
    assert printed.keys() == wanted.keys() and not wanted["columns"].is_contiguous()
    for name, result in wanted.items():
        assert torch.equal(torch.tensor(printed[name]), result.flatten()[:8].float()), name
    linked = subprocess.run(["ldd", executable], capture_output=True, text=True, check=True).stdout
    assert "libtorch_cpu" in linked and "python" not in linked.replace("site-packages", "").replace("/python3", "")


@pytest.mark.skipif(shutil.which("cmake") is None, reason=NO_CMAKE)
def test_a_project_builds_and_returns_the_results_of_python(saved: Path, tmp_path: Path) -> None:
    assert main(["export-cmake", str(saved), str(tmp_path / "project")]) == 0
    project = tmp_path / "project"
    assert (
        "softmax" in (project / "kernels_1.cpp").read_text() and "aten_addmm" in (project / "program.cpp").read_text()
    )
    assert len((project / "README.md").read_text().splitlines()) <= 12
    assert str(Path(fxwrap.__file__).parent) not in (project / "CMakeLists.txt").read_text()
    # The bridge's own sources are compiled by `python -m tests.artifact.test_cmake_export`.
    check(project, saved, f"-DFXWRAP_BRIDGE={build_runtime() / 'libfxwrap_bridge.so'}")


@pytest.mark.skipif(shutil.which("cmake") is None, reason=NO_CMAKE)
def test_the_folder_of_libtorch_is_a_prefix_too(saved: Path, tmp_path: Path) -> None:
    export_cmake(fxwrap.load(saved), tmp_path)
    configure = ["cmake", "-S", tmp_path, "-B", tmp_path / "build", f"-DCMAKE_PREFIX_PATH={torch.__path__[0]}"]
    done = subprocess.run(configure, capture_output=True, text=True, check=False, env={"PATH": "/usr/bin:/bin"})
    assert done.returncode == 0, done.stderr


class Smoothed(torch.nn.Module):
    """Kernels alone, and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.arange(8.0))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"scores": torch.softmax(x * self.scale, -1)}


@pytest.mark.long  # it compiles the runtime; the other project has operators too
@pytest.mark.skipif(shutil.which("cmake") is None, reason=NO_CMAKE)
def test_a_project_without_operators_needs_no_libtorch(tmp_path: Path) -> None:
    x = examples(3)[0]
    compiled = fxwrap.compile_graph(
        torch.export.export(Smoothed(), (x,)), name="smoothed", options=fxwrap.Options(emitter="cpp")
    )
    compiled.save(tmp_path / "smoothed.fxw", target="native")
    project = tmp_path / "project"
    export_cmake(fxwrap.load(tmp_path / "smoothed.fxw"), project)
    executable = build(project, "-DCMAKE_PREFIX_PATH=")
    done = subprocess.run([executable, project / "weights.fxw"], capture_output=True, text=True, check=False, env={})
    assert done.returncode == 0, done.stdout + done.stderr
    with torch.no_grad():
        wanted = compiled(x)["scores"].flatten()[:8]
    assert torch.equal(torch.tensor([float(word) for word in done.stdout.split()[1:]]), wanted)
    assert "torch" not in subprocess.run(["ldd", executable], capture_output=True, text=True, check=True).stdout


def test_files_without_code_are_opened_by_their_own_host_only(saved: Path, tmp_path: Path) -> None:
    from tests.artifact.native_host import drive

    export_cmake(fxwrap.load(saved), tmp_path / "project")
    weights = tmp_path / "project" / "weights.fxw"
    assert drive("open", weights).lines[0] == (
        f"ArtifactError: {weights}: the file has no compiled code for the emitter 'cpp'. "
        "Open it with fxwrap_open_linked and the program that was exported with it"
    )


def test_bad_exports(saved: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    with pytest.raises(ArtifactError, match="full: it is not an empty folder"):
        export_cmake(fxwrap.load(saved), tmp_path / "full")
    with pytest.raises(ArtifactError, match="it is not an empty folder"):
        export_cmake(fxwrap.load(saved), tmp_path / "full" / "file")
    assert main(["export-cmake", str(tmp_path / "absent.fxw"), str(tmp_path / "x")]) == 2
    assert "absent.fxw' does not exist" in capsys.readouterr().err
    fxwrap.save(fxwrap.load(saved), tmp_path / "bare.fxw", constants=False)
    with pytest.raises(ArtifactError, match="saved without its 2 constants"):
        export_cmake(fxwrap.load(tmp_path / "bare.fxw"), tmp_path / "x")


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    batch = torch.export.Dim("batch", min=2, max=64)
    exported = torch.export.export(Scores(), examples(3), dynamic_shapes={"x": {0: batch}, "ids": {0: batch}})
    compiled = fxwrap.compile_graph(exported, name="scores", options=fxwrap.Options(emitter="cpp"))
    compiled.save(folder / "scores.fxw", target="native")
    export_cmake(fxwrap.load(folder / "scores.fxw"), folder / "project")
    check(folder / "project", folder / "scores.fxw")
