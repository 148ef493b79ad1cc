"""Timing kernels on a GPU, at the first call too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.export import Dim
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap.lowering import lower_with_coverage
from fxwrap.options import EMITTERS
from fxwrap.runtime.cache_folder import cache_folder
from fxwrap.tuning import TuningTask, time_on_gpu
from fxwrap.tuning.tuner import _can_time
from tests.tuning.fake_timer import fail_timing, tuner

pytestmark = pytest.mark.gpu

AT_FIRST_CALL = fxwrap.Options(autotune="first_call")


@pytest.fixture(autouse=True)
def own_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache folder, with the tuning records, for this test alone."""
    monkeypatch.setenv("FXWRAP_CACHE_DIR", str(tmp_path))


class Scaled(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x * 2, -1)


class Selected(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (torch.nonzero(x) * 3).sin()


def records() -> list[Path]:
    folder = cache_folder() / "tuning"
    return list(folder.iterdir()) if folder.is_dir() else []


@pytest.mark.parametrize("emitter", EMITTERS)
def test_first_call_sizes_are_timed(emitter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = ({0: Dim("batch", min=2, max=65536)},)
    exported = torch.export.export(Scaled(), (torch.randn(16, 1024, device="cuda"),), dynamic_shapes=shapes)
    x, other = torch.randn(6000, 1024, device="cuda"), torch.randn(77, 1024, device="cuda")
    compiled = fxwrap.compile_graph(exported, options=AT_FIRST_CALL.replace(emitter=emitter))
    assert not records()
    entry = compiled.flat
    for operand in (x, other, x):
        torch.testing.assert_close(entry(operand)[0], Scaled()(operand))
    assert records() and "hint=6000" in str(compiled.program)
    monkeypatch.setattr("fxwrap.tuning.tuner.time_on_gpu", fail_timing)
    again = fxwrap.compile_graph(exported, options=AT_FIRST_CALL.replace(emitter=emitter))
    again(x)
    assert str(again.program) == str(compiled.program)


@pytest.mark.parametrize("emitter", EMITTERS)
def test_a_computed_size_is_timed_with_its_value(emitter: str) -> None:
    exported = torch.export.export(Selected(), (torch.ones(64, device="cuda"),))
    compiled = fxwrap.compile_graph(exported, options=AT_FIRST_CALL.replace(emitter=emitter))
    few, many = (torch.arange(64, device="cuda") % 4 == 0).float(), torch.ones(64, device="cuda")
    for operand in (few, many):
        torch.testing.assert_close(compiled(operand), Selected()(operand))
    assert "hint=16" in str(compiled.program)


def test_torch_compile_with_dynamic_sizes() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(x.masked_select(x > 0)) * 2

    compiled = torch.compile(
        function, backend="fxwrap", options={"autotune": "first_call"}, dynamic=True, fullgraph=True
    )
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        for size in (3_000_000, 4_000_000, 500):
            x = torch.randn(size, device="cuda")
            torch.testing.assert_close(compiled(x), function(x))
    assert records()


def test_nothing_is_timed_during_graph_capture() -> None:
    x = torch.zeros(4, device="cuda")
    assert _can_time()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        x += 1
        assert not _can_time()


def test_small_kernels_are_not_timed() -> None:
    x = torch.randn(64, 64, device="cuda")
    compiled = fxwrap.compile_graph(make_fx(torch.sigmoid)(x), [x], options=fxwrap.Options(autotune=True))
    torch.testing.assert_close(compiled(x)[0], torch.sigmoid(x))
    assert not records()


def _columns(x: torch.Tensor) -> torch.Tensor:
    return x.sum(0)


def _rows(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1)


def _transposed(x: torch.Tensor) -> torch.Tensor:
    return x.t().contiguous() * 2


def _scanned(x: torch.Tensor) -> torch.Tensor:
    return x.cumsum(-1)


@pytest.mark.parametrize("function", [_columns, _rows, _transposed, _scanned, torch.sigmoid])
def test_every_configuration_has_samples(function: Callable[[torch.Tensor], torch.Tensor], tmp_path: Path) -> None:
    """Slow configurations are timed once, those that cannot be launched never; most can."""
    works: list[TuningTask] = []

    def keep(tasks: Any) -> list[list[list[float]]]:
        works.extend(tasks)
        return [[[] for _ in work.candidates] for work in tasks]

    x = torch.randn(4096, 3000, device="cuda")
    chosen = tuner(keep, tmp_path / "none")
    lower_with_coverage(make_fx(function)(x), [x], print_kernel=chosen.print_kernel)
    chosen.tune()
    for work, samples in zip(works, time_on_gpu(works), strict=True):
        assert all(len(seconds) in (0, 1, 9) for seconds in samples), samples
        assert sum(map(bool, samples)) * 2 > len(samples) and samples[0]
        fastest = min(min(seconds) for seconds in samples if seconds)
        assert work.bytes / 8e12 < fastest < 1e-3, (work.bytes, samples)
