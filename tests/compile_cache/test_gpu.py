"""The compile cache and the workers on a GPU: the work of a process that never lowers a graph, and who compiles."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import fxwrap
from fxwrap import Compiled, Options
from fxwrap.devices import TRITON
from fxwrap.errors import KernelBuildError
from fxwrap.runtime.cpp_kernels import KernelText
from fxwrap.runtime.triton import compile as triton_compile
from fxwrap.runtime.triton.compile import KernelUse, compile_triton_kernels
from fxwrap.runtime.triton.workers import WORKERS_ENV, WorkerPool
from tests.compile_cache.graphs import graph
from tests.support.processes import child_environment

pytestmark = pytest.mark.gpu


def softmax_chain(x: Tensor) -> Tensor:
    """Two kernels of rows, with something pointwise before and after."""
    return torch.softmax(torch.softmax(x * 2, -1).t() + 1, -1) * x.t()


def on_gpu(emitter: str) -> tuple[Compiled, Tensor, Tensor]:
    """The chain compiled for a GPU, an input, and eager's result."""
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(0)).cuda()
    compiled = fxwrap.compile_graph(graph(softmax_chain, (x,)), options=Options(emitter=emitter))
    return compiled, x, softmax_chain(x)


SCRIPT = """
import json, os, sys, torch, triton
from tests.compile_cache.test_gpu import on_gpu
triton.JITFunction.run = triton.JITFunction.warmup = None  # neither compiles nor launches
found = {}
for emitter in ("python", "cpp", "fx"):
    compiled, x, wanted = on_gpu(emitter)
    torch.testing.assert_close(compiled(x)[0], wanted)
    found[emitter] = compiled.cached
folder = os.environ["TRITON_CACHE_DIR"]
compiled_here = [name for _, _, names in os.walk(folder) for name in names if name.endswith(".ttir")]
print(json.dumps([found, compiled_here]))
"""


def test_another_process_loads_cached_kernels(
    cache_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "first"))
    for emitter in ("python", "cpp", "fx"):
        compiled, x, wanted = on_gpu(emitter)
        assert not compiled.cached and compiled.program.kernels
        torch.testing.assert_close(compiled(x)[0], wanted)
    root = str(Path(__file__).parents[2])
    environment = child_environment(TRITON_CACHE_DIR=str(tmp_path / "second"))
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    cached, compiled_there = json.loads(done.stdout.splitlines()[-1])
    assert cached == {"python": True, "cpp": True, "fx": True}
    assert compiled_there == [], "Triton compiled what the cache should have brought along"


def _uses(count: int, body: str) -> list[KernelUse]:
    head = "import triton\nimport triton.language as tl\n\n\n@triton.jit\ndef kernel(in0_ptr, out0_ptr, n0):\n"
    lines = "    p0 = tl.program_id(0) * 64 + tl.arange(0, 64)\n    x = tl.load(in0_ptr + p0, p0 < n0)\n"
    text = f"    tl.store(out0_ptr + p0, {body}, p0 < n0)\n"
    texts = [head + lines + text.replace("NUMBER", str(number)) for number in range(count)]
    device = torch.device("cuda", torch.cuda.current_device())
    return [KernelUse(KernelText(TRITON.name, item, ("*f32", "*f32", "i64"), ()), device, (1000,)) for item in texts]


def test_compile_workers_and_the_process_compile_concurrently(
    cache_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setenv(WORKERS_ENV, "2")
    pool = WorkerPool()
    monkeypatch.setattr(triton_compile, "WORKER_POOL", pool)
    pool.start()
    try:
        assert pool.wait(120)
        good, bad = _uses(24, "x + NUMBER"), _uses(2, "tl.nothing(x, NUMBER)")
        with caplog.at_level("INFO", "fxwrap.kernels"):
            errors = compile_triton_kernels([*good, *bad], threads=1)
    finally:
        pool.shutdown()
    assert errors[:24] == [None] * 24
    assert all(isinstance(error, KernelBuildError) and "nothing" in str(error) for error in errors[24:])
    (text,) = [record.getMessage() for record in caplog.records if "Triton kernels compiled" in record.getMessage()]
    assert int(text.partition(" s, ")[2].split()[0]) > 0, text
