"""The sizes that kernels are timed for: hints of the options, of torch, and guesses; and which kernels are timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.export import Dim
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap.devices import CPU
from fxwrap.lowering import lower_with_coverage
from fxwrap.tuning import TuningTask, argument_set_count, remaining_candidates
from fxwrap.tuning.tuner import MIN_SECONDS
from tests.tuning.fake_timer import OPTIONS, FakeTimer, tuner


class Selected(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nonzero(x) * 3 + 1


def timed(graph: Any, folder: Path, options: fxwrap.Options = OPTIONS, min_seconds: float = 0) -> list[TuningTask]:
    """What is timed of an exported program or graph."""
    timer = FakeTimer(fast=1)
    chosen = tuner(timer, folder, min_seconds=min_seconds)
    lower_with_coverage(graph, options=options, print_kernel=chosen.print_kernel)
    chosen.tune()
    return timer.works


@cache
def selected() -> torch.export.ExportedProgram:
    return torch.export.export(Selected(), (torch.ones(50),))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("bounds", "hint", "count"),
    [
        ((0, 10**6), None, 8192),
        ((0, 10**6), 700, 700),
        ((0, 300), 700, 300),
        ((900, 10**6), 700, 900),
        ((0, 300), None, 300),
        ((9000, 10**6), None, 9000),
    ],
)
def test_an_unbacked_size_uses_the_hint_option_or_the_default(
    bounds: tuple[int, int], hint: int | None, count: int, tmp_path: Path
) -> None:
    hints = {} if hint is None else {"u0": hint}
    options = OPTIONS.replace(symbol_ranges={"u0": bounds}, symbol_hints=hints)
    (work,) = timed(selected(), tmp_path, options)
    assert [item.count for item in work.buffers] == [count]
    assert (f"hint={count}" in str(fxwrap.lower(selected(), options=options))) == (hint is not None)


def test_the_hint_option_overrides_the_traced_size(tmp_path: Path) -> None:
    shapes = ({0: Dim("batch", min=2, max=4096)},)
    exported = torch.export.export(torch.nn.ReLU(), (torch.randn(600, 32),), dynamic_shapes=shapes)
    name = fxwrap.lower(exported).body.lines[0].symbol.name  # type: ignore[attr-defined]
    (work,) = timed(exported, tmp_path, OPTIONS.replace(symbol_hints={name: 60}))
    assert [item.count for item in work.buffers] == [60 * 32] * 2


@pytest.mark.parametrize("mark", [torch._dynamo.decorators.mark_unbacked, torch._dynamo.mark_dynamic])
def test_torchs_hint_override_is_used(
    mark: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timer = FakeTimer(fast=1)
    monkeypatch.setattr("fxwrap.compile.compiler.gpu_tuner", lambda: tuner(timer, tmp_path))
    x = torch.randn(40, 8)
    mark(x, 0, hint_override=333)
    options = {"cpu_kernels": "triton", "autotune": True}
    compiled = torch.compile(lambda x: x.relu() + 1, backend="fxwrap", options=options, fullgraph=True)
    torch.testing.assert_close(compiled(x), x.relu() + 1)
    (work,) = timer.works
    assert [item.count for item in work.buffers] == [333 * 8] * 2


@pytest.mark.parametrize(("rows", "columns", "worth"), [(64, 64, False), (8192, 512, True), (1, 40000, True)])
def test_kernels_cheaper_than_a_launch_are_not_timed(rows: int, columns: int, worth: bool, tmp_path: Path) -> None:
    """Few bytes are soon moved, but by one program of long rows they are not."""
    x = torch.empty(rows, columns)
    traced = make_fx(lambda x: torch.softmax(x, -1), tracing_mode="fake")(x)
    assert bool(timed(traced, tmp_path, min_seconds=MIN_SECONDS)) == worth


def test_kernels_of_slower_memory_are_timed_from_fewer_bytes_on(tmp_path: Path) -> None:
    traced = make_fx(lambda x: x.relu() + 1, tracing_mode="fake")(torch.empty(512, 512))
    slow = replace(OPTIONS, devices=(replace(CPU, memory_bytes_per_s=1e11),))
    assert not timed(traced, tmp_path, min_seconds=MIN_SECONDS)
    assert timed(traced, tmp_path, slow, min_seconds=MIN_SECONDS)


@pytest.mark.parametrize(
    ("set_bytes", "free_bytes", "count"),
    [
        (200, 10**6, 2),  # even where one set fills the cache four times, two take turns
        (40, 10**6, 4),
        (1, 10**6, 32),
        (40, 200, 2),
        (40, 10, 1),
        (0, 10, 5),
    ],
)
def test_benchmark_buffers_rotate_beyond_the_cache_size(set_bytes: int, free_bytes: int, count: int) -> None:
    assert argument_set_count(set_bytes, 50, free_bytes) == count


def test_slow_configurations_are_not_retimed() -> None:
    assert remaining_candidates({0: 1.0, 2: 1.9, 3: 2.5, 5: 2.0}) == [0, 2, 5]
    assert remaining_candidates({}) == []
