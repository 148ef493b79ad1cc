"""What needs a GPU: programs that were saved with compiled kernels and constants on it, loaded by another process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import fxwrap
from fxwrap.options import EMITTERS

pytestmark = pytest.mark.gpu

SCRIPT = """
import json, os, sys, time
import torch, fxwrap
folder = sys.argv[1]
x = torch.load(f"{folder}/x.pt")
torch.zeros(1, device="cuda")  # CUDA starts in seconds, whatever is loaded
start = time.perf_counter()
loaded = fxwrap.load(f"{folder}/model.fxw")
(result,) = loaded(x)
torch.cuda.synchronize()
seconds = time.perf_counter() - start
torch.save(result, f"{folder}/result.pt")
stages = [name for _, _, names in os.walk(os.environ["TRITON_CACHE_DIR"]) for name in names if name.endswith(".ttir")]
own = os.listdir(os.environ["FXWRAP_CACHE_DIR"])
print(json.dumps({"seconds": seconds, "compiled": stages, "own": own, "tracing": "torch._dynamo" in sys.modules}))
"""


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 8)).cuda().eval()


@pytest.mark.parametrize(("emitter", "graphs"), [*[(emitter, False) for emitter in EMITTERS], ("cpp", True)])
def test_another_process_compiles_no_kernel(emitter: str, graphs: bool, tmp_path: Path) -> None:
    subject, x = nn.Sequential(model(), nn.Linear(8, 64).cuda(), model()), torch.randn(32, 64, device="cuda")
    graph = torch.export.export(subject, (x,))
    options = fxwrap.Options(emitter=emitter, fallback="error", cuda_graphs=graphs)
    compiled = fxwrap.compile_graph(graph, options=options)
    assert bool(compiled.program.functions) == graphs
    assert any(kernel.language == "triton" for kernel in compiled.program.kernels)
    (wanted,) = compiled(x)
    compiled.save(tmp_path / "model.fxw")
    torch.save(x, tmp_path / "x.pt")
    folders = {"TRITON_CACHE_DIR": str(tmp_path / "triton"), "FXWRAP_CACHE_DIR": str(tmp_path / "own")}
    environment = {**os.environ, **folders, "PYTHONPATH": str(Path(fxwrap.__file__).parents[1])}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["compiled"] == [] and not found["tracing"], found
    assert emitter != "cpp" or "programs" not in found["own"], "C++ was compiled"
    torch.testing.assert_close(torch.load(tmp_path / "result.pt"), wanted, rtol=0, atol=0)


@pytest.mark.parametrize("mmap", [True, False])
def test_constants_come_back_to_the_gpu(mmap: bool, tmp_path: Path) -> None:
    subject, x = model(), torch.randn(32, 64, device="cuda")
    compiled = fxwrap.compile_graph(torch.export.export(subject, (x,)))
    compiled.save(tmp_path / "model.fxw")
    loaded = fxwrap.load(tmp_path / "model.fxw", mmap=mmap)
    assert {tensor.device for tensor in loaded.program.store.tensors.values()} == {x.device}
    torch.testing.assert_close(loaded(x), compiled(x), rtol=0, atol=0)
    loaded.update_constants({name: tensor.cpu() * 0 for name, tensor in subject.state_dict().items()})
    torch.testing.assert_close(loaded(x)[0], torch.zeros(32, 8, device="cuda"))


def test_a_program_moves_to_another_gpu(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs a CUDA device")
    subject, x = model(), torch.randn(32, 64, device="cuda:0")
    compiled = fxwrap.compile_graph(torch.export.export(subject, (x,)))
    compiled.save(tmp_path / "model.fxw")
    loaded = fxwrap.load(tmp_path / "model.fxw", device="cuda:1")
    with torch.cuda.device(1):
        torch.testing.assert_close(loaded(x.to("cuda:1"))[0].cpu(), compiled(x)[0].cpu())
