"""`fxwrap.profile`, and the bytes and operations of lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap import Options
from fxwrap.artifact import parse
from fxwrap.errors import ProfileError
from fxwrap.lines import Launch
from fxwrap.options import EMITTERS
from fxwrap.profiling.limits import DeviceLimits
from fxwrap.profiling.work import line_work

PLAIN = {"fuse": False}


@pytest.fixture(autouse=True)
def fast_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits that are not measured: 1 GB/s, 1 TFLOP/s."""
    monkeypatch.setattr(DeviceLimits, "_measured_bandwidth", lambda self: 1e9)
    monkeypatch.setattr(DeviceLimits, "_measured_flops", lambda self, dtype: 1e12)
    monkeypatch.setattr("fxwrap.profiling.limits._limits", {})


def test_work_of_matmuls_and_of_strided_inputs() -> None:
    program = parse(
        "program @p(%x: borrowed f32[s0, 8]@cpu, %w: borrowed f32[8, 16]@cpu, %b: borrowed f32[s0, 16 | 0, 1]@cpu) {\n"
        "  s0 = symbol.size(%x) dim=0 range=(2, 100)\n"
        "  %y = extern.call @aten.mm.default(%x, %w) : f32[s0, 16]@cpu\n"
        "  %z = extern.call @aten.add.Tensor(%y, %b) : f32[s0, 16]@cpu\n"
        "  memory.free(%y)\n"
        "  control.return(%z)\n}\n"
    )
    mm, add = program.body.lines[1:3]
    assert line_work(mm, program, {"s0": 4}).flops == 2 * 4 * 8 * 16
    assert line_work(mm, program, {"s0": 4}).bytes == 4 * (4 * 8 + 8 * 16 + 4 * 16)
    assert line_work(add, program, {"s0": 4}).bytes == 4 * (4 * 16 + 16 + 4 * 16)
    assert line_work(add, program, {"s0": 4}).flops == 0


def test_work_of_kernels_counts_elements_once_and_rows_of_tables_as_often_as_they_are_read() -> None:
    def function(table: torch.Tensor, indices: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(torch.nn.functional.embedding(indices, table) + x, -1)

    table, indices, x = torch.randn(1000, 16), torch.randint(0, 1000, (4,)), torch.randn(4, 16)
    graph = make_fx(function, tracing_mode="fake")(table, indices, x)
    program = fxwrap.compile_graph(graph, options=Options(compile_cache=False)).program
    works = [line_work(line, program, {}) for line in program.body.lines if type(line).__name__ == "Launch"]
    assert sum([work.bytes for work in works]) == 4 * 16 * 4 * 3 + 4 * 8  # rows, x, result; indices
    assert 4 * 4 * 16 <= sum([work.flops for work in works]) <= 12 * 4 * 16


def test_work_of_attention_is_the_same_in_all_kernel_languages() -> None:
    """That of both matmuls, and of scores."""
    x = torch.randn(1, 1, 32, 16)

    def attention(x: torch.Tensor) -> torch.Tensor:
        operator = torch.ops.higher_order.flex_attention
        result: torch.Tensor = operator(x, x, x, lambda score, *_: score, every_block(32), 0.25, {})[0]
        return result

    flops = []
    for language in ("cpp", "triton"):
        program = fxwrap.lower(make_fx(attention)(x), [x], options=Options(cpu_kernels=language))
        (launch,) = [line for line in program.body.lines if isinstance(line, Launch)]
        flops.append(line_work(launch, program, {}).flops)
    assert flops[0] == flops[1] and 2 * 2 * 32 * 32 * 16 <= flops[0] <= 3 * 2 * 32 * 32 * 16


def every_block(length: int) -> tuple[object, ...]:
    """The block mask of FlexAttention that visits all keys."""
    return (1, 1, *[None] * 8, 1 << 30, 1 << 30, lambda b, h, q, k: q >= 0)


@pytest.mark.parametrize("emitter", EMITTERS)
def test_every_emitter_is_profiled_by_the_same_ranges(emitter: str, tmp_path: Path) -> None:
    compiled = torch.compile(lambda x, w: torch.mm(x, w).relu(), backend="fxwrap", options={"emitter": emitter})
    x, w = torch.randn(8, 16), torch.randn(16, 4)
    compiled(x, w)
    profile = fxwrap.profile(compiled, (x, w), repeats=2)
    assert sorted([line.handle for line in profile.lines]) == ["aten.mm:1", "relu_0:1"]
    assert profile.graphs == ("inference",)
    mm = next(line for line in profile.lines if line.handle == "aten.mm:1")
    assert (mm.calls, mm.flops, mm.operators, mm.is_kernel) == (1, 2 * 8 * 16 * 4, ("aten.mm",), False)
    assert mm.locations[0].startswith("test_profile.py:")
    assert mm.limit_seconds == mm.bytes / 1e9
    assert 0 < mm.seconds < 10 and mm.bytes_per_s == mm.bytes / mm.seconds and mm.flops_per_s == mm.flops / mm.seconds
    assert [line.gain_seconds for line in profile.lines] == sorted([line.gain_seconds for line in profile.lines])[::-1]
    (record,) = fxwrap.inspect(compiled)  # the function itself did not change
    record.write_report(tmp_path / "report.html", profile.times(0))
    page = (tmp_path / "report.html").read_text()
    assert page.startswith("<!DOCTYPE html>") and '"times"' in page and str(mm.bytes) in page
    assert not any("range" in str(line) for line in record.program.body.lines)


def test_forward_and_backward_of_a_module_keep_its_gradients() -> None:
    model = torch.nn.Linear(4, 3)
    model.weight.grad = gradient = torch.ones(3, 4)
    profile = fxwrap.profile(model, torch.randn(2, 4), training=True, options=PLAIN, repeats=1)
    assert profile.graphs == ("forward", "backward")
    assert {line.graph for line in profile.lines} == {0, 1}
    assert model.weight.grad is gradient and bool((gradient == 1).all()) and model.bias.grad is None
    (addmm,) = profile.times(0).values()
    assert (addmm.bytes, addmm.flops) == (4 * (8 + 12 + 3 + 6), 2 * 2 * 4 * 3) and addmm.seconds > 0


def test_compiled_and_loaded_programs(tmp_path: Any) -> None:
    class Named(torch.nn.Module):
        def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"y": torch.mm(x, scale)}

    example = {"x": torch.randn(4, 4), "scale": torch.randn(4, 4)}
    compiled = fxwrap.compile_graph(Named(), (), example_kwargs=example, options=Options(fuse=False))
    compiled.save(tmp_path / "p.fxw")
    for item in (compiled, fxwrap.load(tmp_path / "p.fxw")):
        profile = fxwrap.profile(item, example, repeats=1)
        assert [line.handle for line in profile.lines] == ["aten.mm:1"]


def test_lines_of_loops_count_each_iteration() -> None:
    from torch._higher_order_ops.while_loop import while_loop

    def function(x: torch.Tensor) -> torch.Tensor:
        step = torch.zeros((), dtype=torch.int64)
        return while_loop(lambda n, y: n < 5, lambda n, y: (n + 1, torch.mm(y, y)), (step, x))[1]

    profile = fxwrap.profile(function, torch.eye(3), options=PLAIN, repeats=1)
    mm = next(line for line in profile.lines if line.operators == ("aten.mm",))
    assert mm.calls == 5 and mm.flops == 5 * 2 * 27


def test_the_table_and_json() -> None:
    profile = fxwrap.profile(lambda x: torch.mm(x, x), torch.eye(3), options=PLAIN, repeats=1)
    text = str(profile)
    assert "limits of cpu: 1.0 GB/s, 1,000 GFLOP/s in float32" in text
    assert "aten.mm:1  aten.mm  test_profile.py:" in text
    rows = json.loads(profile.to_json())
    assert rows["lines"][0]["handle"] == "aten.mm:1" and rows["limits"]["cpu"] == [1e9, {"float32": 1e12}]


@pytest.mark.parametrize(
    ("function", "keywords", "text"),
    [
        (3, {}, "an object of type int cannot be profiled; pass a compiled function"),
        (lambda x: 3, {}, "fxwrap compiled no graph of it; TORCH_LOGS=graph_breaks shows why"),
        (torch.sin, {"repeats": 0}, "repeats is at least 1, not 0"),
    ],
)
def test_functions_that_cannot_be_profiled(function: Any, keywords: Any, text: str) -> None:
    with pytest.raises(ProfileError) as caught:
        fxwrap.profile(function, torch.ones(2), **keywords)
    assert text in str(caught.value)


@pytest.mark.gpu
@pytest.mark.parametrize("emitter", ["python", "cpp", "fx"])
def test_lines_on_a_gpu_are_timed_by_its_events(emitter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the limits of this GPU
    x, w = torch.randn(4096, 4096, device="cuda"), torch.randn(4096, 4096, device="cuda")
    profile = fxwrap.profile(
        lambda x, w: torch.softmax(torch.mm(x, w), -1), (x, w), options={"emitter": emitter}, repeats=5
    )
    by_operator = {line.operators: line for line in profile.lines}
    mm = next(line for operators, line in by_operator.items() if "aten.mm" in operators)
    softmax = next(line for operators, line in by_operator.items() if "aten._softmax" in operators)
    # other processes may use the GPU, and then a line takes longer: there are only bounds that no GPU reaches
    assert 0 < softmax.bytes_per_s < 40e12
    assert 0 < mm.flops_per_s < 1e15
    assert profile.seconds > 0 and set(profile.limits) == {"cuda:0"}


@pytest.mark.gpu
@pytest.mark.parametrize("emitter", ["python", "cpp", "fx"])
def test_ranges_are_those_of_nvtx(emitter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under `emit_nvtx` the ranges are NVTX's: nothing fails, and results are those without."""
    compiled = torch.compile(
        lambda x: torch.mm(x, x).relu(), backend="fxwrap", options={"emitter": emitter, "profile_ranges": True}
    )
    x = torch.randn(64, 64, device="cuda")
    expected = compiled(x)
    with torch.autograd.profiler.emit_nvtx():
        assert torch.equal(compiled(x), expected)
    with torch.profiler.profile(acc_events=True) as traced:
        compiled(x)
    assert {"aten.mm:1", "relu_0:1"} <= {event.name.partition("  ")[0] for event in traced.events()}
