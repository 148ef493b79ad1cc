"""GPU tests: another process loads programs saved with compiled kernels and constants on the GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import fxwrap
from fxwrap.options import EMITTERS
from tests.artifact.fresh_process import run_in_fresh_process
from tests.conftest import NO_CUDA

pytestmark = pytest.mark.gpu


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
    wanted = compiled(x)
    compiled.save(tmp_path / "model.fxw")
    report = run_in_fresh_process(tmp_path, {"model": [x]}, compiler=True, binaries="auto")
    assert report.by_triton == [] and report.tracing == {"model": []}, report
    assert emitter != "cpp" or "programs" not in report.own, "C++ was compiled"
    torch.testing.assert_close(report.results["model"], wanted, rtol=0, atol=0)


@pytest.mark.parametrize("mmap", [True, False])
def test_constants_are_restored_on_the_gpu(mmap: bool, tmp_path: Path) -> None:
    subject, x = model(), torch.randn(32, 64, device="cuda")
    compiled = fxwrap.compile_graph(torch.export.export(subject, (x,)))
    compiled.save(tmp_path / "model.fxw")
    loaded = fxwrap.load(tmp_path / "model.fxw", mmap=mmap)
    assert {tensor.device for tensor in loaded.program.store.tensors.values()} == {x.device}
    torch.testing.assert_close(loaded(x), compiled(x), rtol=0, atol=0)
    loaded.update_constants({name: tensor.cpu() * 0 for name, tensor in subject.state_dict().items()})
    torch.testing.assert_close(loaded(x), torch.zeros(32, 8, device="cuda"))


def test_a_program_moves_to_another_gpu(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip(NO_CUDA)
    subject, x = model(), torch.randn(32, 64, device="cuda:0")
    compiled = fxwrap.compile_graph(torch.export.export(subject, (x,)))
    compiled.save(tmp_path / "model.fxw")
    loaded = fxwrap.load(tmp_path / "model.fxw", device="cuda:1")
    with torch.cuda.device(1):
        torch.testing.assert_close(loaded(x.to("cuda:1")).cpu(), compiled(x).cpu())
