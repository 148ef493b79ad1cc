"""GPU tests: a C++ host runs saved programs with Triton kernels from the file, on its own stream, as Python does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import wrap_triton

import fxwrap
from fxwrap.artifact import SavedContent, save_program
from fxwrap.passes.device_guards import insert_device_guards
from fxwrap.runtime import cache_folder
from fxwrap.runtime.native import build_runtime, find_compiler, native_entry_key, run_compiler
from tests.artifact.cross_compile import SHAPE, function
from tests.artifact.native_host import described, read_result
from tests.artifact.test_native_host import STREAMS
from tests.user_kernels import kernels

pytestmark = pytest.mark.gpu

SOURCE = Path(__file__).with_name("gpu_host.cpp")
TORCH = Path(torch.__path__[0])


def host() -> Path:
    """Returns the compiled host, which is linked with the runtime and libtorch."""
    runtime, compiler = build_runtime(), find_compiler()
    flags = ["-std=c++20", "-O1", f"-I{runtime / 'include'}", "-isystem", str(TORCH / "include")]
    folders = [f"-L{runtime}", f"-L{TORCH / 'lib'}", f"-Wl,-rpath,{runtime}:{TORCH / 'lib'}"]
    links = [*folders, "-lfxwrap_runtime", "-ltorch_cpu", "-lc10", "-ldl"]

    def build(folder: Path) -> None:
        run_compiler([*compiler.command, *flags, str(SOURCE), *links, "-o", "host.so"], folder)

    key = native_entry_key(compiler, str(runtime), SOURCE.read_text())
    return cache_folder.find_or_build_entry(f"test-gpu-host-{key}", build) / "host.so"


def run_host(
    path: Path, folder: Path, inputs: list[torch.Tensor], calls: int, own_stream: bool
) -> tuple[list[str], int]:
    """Runs the host; returns the calls whose results differ from the first ones, and the number of operators that the
    last call called. Results are in `folder / "out.0"` and so on."""
    words = [word for tensor in inputs for word in described(folder, tensor.cpu())]
    libraries = f"{TORCH / 'lib'}:{TORCH.parent / 'nvidia' / 'cu13' / 'lib'}"
    done = subprocess.run(
        [host(), path, str(calls), str(int(own_stream)), folder / "out", *words],
        capture_output=True, text=True, check=False, env={"LD_LIBRARY_PATH": libraries},
    )  # fmt: skip
    assert done.returncode == 0 and not done.stderr, done.stdout + done.stderr
    *differing, last = done.stdout.splitlines()
    return differing, int(last.removesuffix(" operators"))


class Block(nn.Module):
    """Fused kernels, matmuls, a reduction, and attention."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.mlp = nn.LayerNorm(64), nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x + self.mlp(self.norm(x))
        return torch.softmax(y, -1), y.sum(0)


def save(path: Path, inputs: tuple[torch.Tensor, ...], module: nn.Module, **options: object) -> fxwrap.Compiled:
    exported = torch.export.export(module.cuda().eval(), inputs)
    compiled = fxwrap.compile_graph(exported, name="block", options=fxwrap.Options(emitter="cpp", **options))
    assert any(kernel.language == "triton" for kernel in compiled.program.kernels)
    with torch.no_grad():
        compiled(*inputs)  # Triton compiles the kernels, which the file then has
    compiled.save(path, target="native")
    return compiled


@pytest.mark.parametrize("own_stream", (False, True), ids=("current", "own"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=("f32", "bf16"))
def test_a_host_runs_triton_kernels_of_the_file(tmp_path: Path, dtype: torch.dtype, own_stream: bool) -> None:
    x = torch.randn(32, 64, device="cuda", dtype=dtype)
    compiled = save(tmp_path / "block.fxw", (x,), Block().to(dtype))
    (tmp_path / "data").mkdir()
    assert run_host(tmp_path / "block.fxw", tmp_path / "data", [x], 5, own_stream)[0] == []
    with torch.no_grad():
        wanted = compiled.flat(x)
    for index, tensor in enumerate(wanted):
        torch.testing.assert_close(
            read_result(tmp_path / "data" / f"out.{index}", tensor.cpu()), tensor.cpu(), rtol=0, atol=0
        )


@pytest.mark.parametrize("architectures", (("sm_80",), ("sm_80", "sm_90", "sm_100")), ids=("ptx", "all"))
def test_a_host_runs_a_file_that_was_compiled_without_a_gpu(tmp_path: Path, architectures: tuple[str, ...]) -> None:
    """The file has code for other GPUs, and PTX for this one if it has no own code."""
    command = [sys.executable, "-m", "tests.artifact.cross_compile", tmp_path / "f.fxw", *architectures]
    subprocess.run(command, check=True, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})
    x = torch.randn(SHAPE, device="cuda", dtype=torch.bfloat16)
    (tmp_path / "data").mkdir()
    assert run_host(tmp_path / "f.fxw", tmp_path / "data", [x], 3, False)[0] == []
    for index, wanted in enumerate(function(x)):
        result = read_result(tmp_path / "data" / f"out.{index}", wanted.cpu())
        torch.testing.assert_close(result, wanted.cpu(), rtol=2e-2, atol=2e-2)
    loaded = fxwrap.load(tmp_path / "f.fxw")
    torch.testing.assert_close(loaded.flat(x), function(x), rtol=2e-2, atol=2e-2)


def with_own_kernels(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Kernels of the model's own between fused ones: with None and launch options, a float, a bool, and in place."""
    y, z, n = torch.empty_like(x), torch.empty_like(x), x.numel()
    grid = (triton.cdiv(n, 64), 1, 1)
    wrap_triton(kernels.add)[grid](x, None, y, n, BLOCK=64, num_warps=2)
    wrap_triton(kernels.scaled_where)[grid](y.exp(), z, n, 1.5, True, BLOCK=64)
    w = z + 1
    wrap_triton(kernels.double_in_place)[grid](w, n, BLOCK=64)
    return w.sin(), y


@pytest.mark.parametrize("size", (1, 32, 33))
def test_a_host_runs_kernels_of_the_model(tmp_path: Path, size: int) -> None:
    """Saving compiles them for this GPU. Sizes are 1, divisible by 16, and neither."""
    x = torch.randn(size, device="cuda")
    compiled = fxwrap.compile_graph(make_fx(with_own_kernels)(x), [x], options=fxwrap.Options(emitter="cpp"))
    assert [kernel.language for kernel in compiled.program.kernels].count("user_triton") == 3
    wanted = compiled.flat(x)
    torch.testing.assert_close(wanted, with_own_kernels(x), rtol=1e-5, atol=1e-5)
    compiled.save(tmp_path / "own.fxw", target="native")
    (tmp_path / "data").mkdir()
    assert run_host(tmp_path / "own.fxw", tmp_path / "data", [x], 5, False)[0] == []
    for index, tensor in enumerate(wanted):
        result = read_result(tmp_path / "data" / f"out.{index}", tensor.cpu())
        torch.testing.assert_close(result, tensor.cpu(), rtol=0, atol=0)
    torch.testing.assert_close(fxwrap.load(tmp_path / "own.fxw").flat(x), wanted, rtol=0, atol=0)


@pytest.mark.parametrize("own_stream", (False, True), ids=("current", "own"))
def test_a_host_runs_streams_and_events_of_a_program(tmp_path: Path, own_stream: bool) -> None:
    program = insert_device_guards(
        fxwrap.parse(STREAMS.replace("4]@cpu", "100000]@cuda:0").replace('"cpu"', '"cuda:0"'))
    )
    save_program(SavedContent(program, "cpp"), tmp_path / "streams.fxw", target="native")
    x = torch.randn(100000, device="cuda")
    (tmp_path / "data").mkdir()
    assert run_host(tmp_path / "streams.fxw", tmp_path / "data", [x], 20, own_stream)[0] == []
    wanted = (x + -x.sin().exp()).cpu()
    torch.testing.assert_close(read_result(tmp_path / "data" / "out.0", wanted), wanted, rtol=0, atol=0)


@pytest.mark.parametrize("own_stream", (False, True), ids=("current", "own"))
def test_a_host_captures_and_replays_cuda_graphs(tmp_path: Path, own_stream: bool) -> None:
    """Later calls replay: they call no operator, and their results are those of Python."""
    x = torch.randn(32, 64, device="cuda")
    compiled = save(tmp_path / "graphs.fxw", (x,), Block(), cuda_graphs=True)
    (tmp_path / "data").mkdir()
    for calls, replays in ((1, False), (6, True)):
        differing, operators = run_host(tmp_path / "graphs.fxw", tmp_path / "data", [x], calls, own_stream)
        assert differing == [] and (operators == 0) == replays, (calls, operators)
        with torch.no_grad():
            wanted = compiled.flat(x)
        for index, tensor in enumerate(wanted):
            torch.testing.assert_close(
                read_result(tmp_path / "data" / f"out.{index}", tensor.cpu()), tensor.cpu(), rtol=0, atol=0
            )


def test_replays_continue_the_random_sequence(tmp_path: Path) -> None:
    class Noise(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.rand(x.shape, device=x.device).mm(x).sin() + x

    x = torch.eye(64, device="cuda")
    options = {"cuda_graphs": True, "fuse": False}
    exported = torch.export.export(Noise(), (x,))
    compiled = fxwrap.compile_graph(exported, name="noise", options=fxwrap.Options(emitter="cpp", **options))
    compiled.save(tmp_path / "noise.fxw", target="native")
    (tmp_path / "data").mkdir()
    differing, operators = run_host(tmp_path / "noise.fxw", tmp_path / "data", [x], 6, False)
    assert differing == [f"call {index} differs" for index in range(1, 6)] and operators == 0
