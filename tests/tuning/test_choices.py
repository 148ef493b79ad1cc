"""Autotuning: timing, choices and their records. A fake timer on the CPU, a real one on a GPU."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap.lowering import lower_with_coverage
from fxwrap.options import EMITTERS
from fxwrap.printers import KernelRequest, candidate_kernels
from fxwrap.runtime.cache_folder import cache_folder
from fxwrap.tuning import TuningRecord, TuningRecords, fastest, fingerprint
from tests.tuning.fake_timer import FAST, OPTIONS, SLOW, FakeTimer, fail_timing, tuner


def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x + y.t()).relu()


INPUTS = [torch.randn(128, 64), torch.randn(64, 128)]


def graph() -> GraphModule:
    return make_fx(function)(*INPUTS)


def tuned(timer: Callable[..., Any], folder: Path, name: str = "fake device") -> fxwrap.Program:
    """The program after tuning, lowered as `compile_graph` does it."""
    chosen = tuner(timer, folder, name)
    program = lower_with_coverage(graph(), INPUTS, options=OPTIONS, print_kernel=chosen.print_kernel).program
    if chosen.tune():
        program = lower_with_coverage(graph(), INPUTS, options=OPTIONS, print_kernel=chosen.print_kernel).program
    return chosen.add_tuning_header(program)


def test_the_fastest_configuration_sets_kernel_and_grid(tmp_path: Path) -> None:
    untuned = fxwrap.lower(graph(), INPUTS, options=OPTIONS)
    timer = FakeTimer(fast=2)
    program = tuned(timer, tmp_path)
    (work,) = timer.works
    (kernel,) = program.kernels
    assert len(work.candidates) >= 3
    assert (kernel.source, kernel.options) == (work.candidates[2].source, work.candidates[2].options)
    assert kernel.options != untuned.kernels[0].options
    (launch,) = [line for line in program.body.lines if line.opcode == "kernel.launch"]
    assert launch.grid == work.candidates[2].grid
    torch.testing.assert_close(fxwrap.run(program, INPUTS)[0], function(*INPUTS))


def test_the_number_of_timed_configurations_is_limited(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    timer = FakeTimer(fast=0)
    chosen = tuner(timer, tmp_path, max_configurations=2)
    lower_with_coverage(graph(), INPUTS, options=OPTIONS, print_kernel=chosen.print_kernel)
    with caplog.at_level("INFO", "fxwrap.tuning"):
        chosen.tune()
    (work,) = timer.works
    assert (len(work.candidates), len(work.grids)) == (2, 2)
    assert "times 2 configurations of 1 kernels" in caplog.text and "the first 2 of each kernel" in caplog.text


def test_kernels_are_timed_with_the_graphs_sizes(tmp_path: Path) -> None:
    timer = FakeTimer(fast=0)
    tuned(timer, tmp_path)
    (work,) = timer.works
    assert [(item.dtype, item.count) for item in work.buffers] == [(torch.float32, 8192)] * 3
    assert work.bytes == 3 * 4 * 8192
    assert work.grids[0] == work.candidates[0].grid


def test_benchmark_indices_are_in_bounds(tmp_path: Path) -> None:
    table, positions = torch.randn(1000, 8), torch.randint(0, 1000, (30,))
    traced = make_fx(lambda table, positions: table[positions] * 2)(table, positions)
    timer = FakeTimer(fast=0)
    chosen = tuner(timer, tmp_path)
    lower_with_coverage(traced, [table, positions], options=OPTIONS, print_kernel=chosen.print_kernel)
    chosen.tune()
    (work,) = timer.works
    assert {item.upper_bound for item in work.buffers if item.dtype is torch.int64} == {1000}


def test_a_symbolic_size_is_timed_at_its_hint(tmp_path: Path) -> None:
    batch = torch.export.Dim("batch", min=2, max=4096)
    module = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Sigmoid())
    exported = torch.export.export(module, (torch.randn(600, 32),), dynamic_shapes=({0: batch},))
    timer = FakeTimer(fast=1)
    chosen = tuner(timer, tmp_path)
    lower_with_coverage(exported, options=OPTIONS, print_kernel=chosen.print_kernel)
    assert chosen.tune()
    (work,) = timer.works
    assert [item.count for item in work.buffers] == [600 * 32] * 2
    assert all(isinstance(size, int) for grid in work.grids for size in grid)


class Counted(torch.nn.Module):
    """Sizes that are read from a tensor, of which the second has a range."""

    def forward(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        first, second = counts.tolist()
        torch._check(first >= 0)
        torch._check(second >= 0)
        torch._check(second <= 48)
        return torch.ones(first, second, x.shape[0]) + x


@pytest.mark.parametrize(("width", "count"), [(4, 8192 * 48 * 4), (1000, 4096 * 48 * 1000), (100000, 32 * 32 * 100000)])
def test_unbacked_sizes_are_estimated_within_range_and_memory(width: int, count: int, tmp_path: Path) -> None:
    exported = torch.export.export(Counted(), (torch.randn(width), torch.tensor([3, 4])))
    timer = FakeTimer(fast=1)
    chosen = tuner(timer, tmp_path)
    program = lower_with_coverage(exported, options=OPTIONS, print_kernel=chosen.print_kernel).program
    assert chosen.tune()
    (work,) = timer.works
    assert [item.count for item in work.buffers] == [width, count]
    assert work.bytes <= 2**30
    assert len(program.kernels) == 1 and all(type(size) is int for grid in work.grids for size in grid)
    repeated = lower_with_coverage(exported, options=OPTIONS, print_kernel=chosen.print_kernel).program
    assert repeated.kernels[0].options == work.candidates[1].options


@pytest.mark.parametrize(
    ("samples", "chosen"),
    [
        ([SLOW, FAST, SLOW], 1),
        ([FAST, SLOW, SLOW], 0),
        ([[1.0, 1.0, 1.0], [0.99, 0.99, 0.99]], 0),  # faster, by too little
        ([[1.0, 1.0, 1.0], [0.97, 0.97, 0.97]], 1),
        ([[0.7, 1.0, 1.3], [0.6, 0.9, 1.2]], 0),  # faster, by less than the samples vary
        ([[], SLOW, FAST], 2),  # the best guess cannot be launched
        ([SLOW, [], FAST], 2),
        ([[], []], 0),
        ([[1.0], [0.5]], 1),
    ],
)
def test_a_configuration_must_be_faster_than_noise(samples: list[list[float]], chosen: int) -> None:
    assert fastest(samples) == chosen


def test_a_tuning_record_is_reused(tmp_path: Path) -> None:
    first = tuned(FakeTimer(fast=2), tmp_path)
    assert str(tuned(fail_timing, tmp_path)) == str(first)
    guess = tuned(FakeTimer(fast=0), tmp_path / "other")
    assert str(tuned(fail_timing, tmp_path / "other")) == str(guess)


def test_tuning_records_are_per_device(tmp_path: Path) -> None:
    tuned(FakeTimer(fast=2), tmp_path)
    timer = FakeTimer(fast=0)
    tuned(timer, tmp_path, name="another device")
    assert timer.works


def test_the_header_names_the_tuning_record(tmp_path: Path) -> None:
    programs = [tuned(FakeTimer(fast), tmp_path / str(number)) for number, fast in enumerate((0, 2, 2))]
    names = [dict(program.header)["tuning"] for program in programs]
    assert names[1] == names[2] != names[0]
    assert str(programs[1]) == str(programs[2])
    assert "tuning" not in dict(fxwrap.lower(graph(), INPUTS, options=OPTIONS).header)
    assert f'tuning="{names[1]}"' in str(programs[1]).splitlines()[0]
    assert fxwrap.parse(str(programs[1])) == programs[1]


def corrupt_empty(path: Path) -> None:
    path.write_text("")


def corrupt_truncated(path: Path) -> None:
    path.write_text(path.read_text()[:-5])


def corrupt_other_content(path: Path) -> None:
    path.write_text("[1, 2]")


def corrupt_wrong_class(path: Path) -> None:
    path.write_text(json.dumps({"way": 3, "seconds": 1.0, "default_seconds": 1.0}))


def corrupt_unknown_bytes(path: Path) -> None:
    path.write_bytes(b"\xff\xfe\x00")


def corrupt_stale(path: Path) -> None:
    path.write_text(json.dumps({"way": "of another version", "seconds": 1.0, "default_seconds": 1.0}))


@pytest.mark.parametrize(
    "damage",
    [
        corrupt_empty,
        corrupt_truncated,
        corrupt_other_content,
        corrupt_wrong_class,
        corrupt_unknown_bytes,
        corrupt_stale,
    ],
)
def test_a_corrupt_tuning_record_is_rebuilt(damage: Callable[[Path], None], tmp_path: Path) -> None:
    first = tuned(FakeTimer(fast=2), tmp_path)
    (path,) = tmp_path.iterdir()
    whole = path.read_text()
    damage(path)
    timer = FakeTimer(fast=2)
    assert str(tuned(timer, tmp_path)) == str(first)
    assert timer.works
    assert path.read_text() == whole
    assert list(tmp_path.iterdir()) == [path]


def test_concurrent_writers_agree_on_one_tuning_record(tmp_path: Path) -> None:
    records = TuningRecords(tmp_path)
    choices = [TuningRecord(f"way {number}", 1.0, 2.0) for number in range(16)]
    with ThreadPoolExecutor(16) as pool:
        settled = list(pool.map(lambda choice: records.commit("key", choice), choices))
    assert len(set(settled)) == 1
    assert records.read("key") == settled[0]
    assert [path.name for path in tmp_path.iterdir()] == ["key.json"]


def test_a_record_is_read_whatever_the_umask_and_the_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The umask of many systems lets the group write new folders; some file systems have no hard links."""
    record = TuningRecord("kernel", 1.0, 2.0)

    def no_links(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    before = os.umask(0o002)
    try:
        for name in ("links", "none"):
            records = TuningRecords(tmp_path / name / "tuning")
            assert records.commit("key", record) == record == records.read("key")
            monkeypatch.setattr(os, "link", no_links)
    finally:
        os.umask(before)


def test_a_folder_in_a_records_place_is_replaced(tmp_path: Path) -> None:
    records, record = TuningRecords(tmp_path), TuningRecord("kernel", 1.0, 2.0)
    (tmp_path / "key.json").mkdir()
    assert records.commit("key", record) == record == records.read("key")


def test_another_processs_choice_is_used(tmp_path: Path) -> None:
    """Two concurrent compiles that time the same kernel return the same program, whatever each has measured."""
    chosen = tuner(FakeTimer(fast=2), tmp_path)
    lower_with_coverage(graph(), INPUTS, options=OPTIONS, print_kernel=chosen.print_kernel)
    other = tuned(FakeTimer(fast=1), tmp_path)
    assert chosen.tune()
    program = lower_with_coverage(graph(), INPUTS, options=OPTIONS, print_kernel=chosen.print_kernel).program
    assert str(chosen.add_tuning_header(program)) == str(other)


def test_without_a_writable_folder_the_choice_is_still_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    program = tuned(FakeTimer(fast=2), tmp_path / "file" / "folder")
    assert program.kernels[0].options != fxwrap.lower(graph(), INPUTS, options=OPTIONS).kernels[0].options


def test_kernels_that_cannot_be_timed_leave_no_record(tmp_path: Path) -> None:
    untuned = fxwrap.lower(graph(), INPUTS, options=OPTIONS)
    program = tuned(lambda works: [[[] for _ in work.candidates] for work in works], tmp_path)
    assert program.kernels == untuned.kernels
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("emitter", EMITTERS)
def test_every_emitter_uses_the_chosen_configuration(
    emitter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timer = FakeTimer(fast=2)
    monkeypatch.setattr("fxwrap.compile.compiler.gpu_tuner", lambda: tuner(timer, tmp_path))
    compiled = fxwrap.compile_graph(graph(), INPUTS, options=OPTIONS.replace(emitter=emitter))
    (work,) = timer.works
    assert compiled.program.kernels[0].options == work.candidates[2].options
    torch.testing.assert_close(compiled(*INPUTS)[0], function(*INPUTS))


def test_kernels_on_the_cpu_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxwrap.tuning.tuner.time_on_gpu", fail_timing)
    for language in ("cpp", "triton"):
        plain = fxwrap.Options(cpu_kernels=language)
        compiled = fxwrap.compile_graph(graph(), INPUTS, options=plain.replace(autotune=True))
        assert compiled.program.kernels == fxwrap.lower(graph(), INPUTS, options=plain).kernels
        assert "tuning" not in dict(compiled.program.header)


def test_fingerprints_distinguish_configurations(tmp_path: Path) -> None:
    requests: list[KernelRequest] = []
    chosen = tuner(FakeTimer(fast=0), tmp_path)

    def keep(request: KernelRequest) -> Any:
        requests.append(request)
        return chosen.print_kernel(request)

    lower_with_coverage(graph(), INPUTS, options=OPTIONS, print_kernel=keep)
    candidates = [way() for way in candidate_kernels(requests[0])]
    assert len({fingerprint(way) for way in candidates}) == len(set(candidates))


# --- on a GPU -------------------------------------------------------------------------------------------------------


def gpu_functions() -> dict[str, tuple[Callable[..., Any], list[torch.Tensor]]]:
    x, y = torch.randn(2048, 1024, device="cuda"), torch.randn(2048, 1024, device="cuda")
    positions = torch.randint(0, 2048, (512,), device="cuda")
    return {
        "pointwise": (lambda x, y: (x * y).relu(), [x, y]),
        "softmax": (lambda x: torch.softmax(x, -1), [x]),
        "columns": (lambda x: x.sum(0), [x]),
        "transposed": (lambda x, y: x + y.t(), [x, y.view(1024, 2048)]),
        "gather": (lambda x, positions: x[positions] + 1, [x, positions]),
    }


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["pointwise", "softmax", "columns", "transposed", "gather"])
def test_kernels_are_timed_on_a_gpu_once(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXWRAP_CACHE_DIR", str(tmp_path))
    called, inputs = gpu_functions()[name]
    traced, options = make_fx(called)(*inputs), fxwrap.Options(autotune=True)
    compiled = fxwrap.compile_graph(traced, inputs, options=options)
    torch.testing.assert_close(compiled(*inputs)[0], called(*inputs), rtol=1e-4, atol=1e-4)
    records = [json.loads(path.read_text()) for path in (cache_folder() / "tuning").iterdir()]
    times = [(record["seconds"], record["default_seconds"]) for record in records]
    timed = [pair for pair in times if pair != (0.0, 0.0)]  # of a program that tuning does not change
    assert timed and all(0 < seconds <= default < 1e-3 for seconds, default in timed)
    monkeypatch.setattr("fxwrap.tuning.tuner.time_on_gpu", fail_timing)
    assert str(fxwrap.compile_graph(traced, inputs, options=options).program) == str(compiled.program)


@pytest.mark.gpu
def test_torch_compile_tunes_without_consuming_random_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXWRAP_CACHE_DIR", str(tmp_path))
    torch.compiler.reset()
    x = torch.randn(4096, 999, device="cuda", requires_grad=True)
    before = torch.cuda.get_rng_state(), torch.get_rng_state()

    def loss(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(torch.softmax(x * 3, -1)).sum(0).square().sum()

    compiled = torch.compile(loss, backend="fxwrap", mode="max-autotune-no-cudagraphs", fullgraph=True)
    (gradient,) = torch.autograd.grad(compiled(x), x)
    assert all(torch.equal(*pair) for pair in zip(before, (torch.cuda.get_rng_state(), torch.get_rng_state())))
    assert list((cache_folder() / "tuning").iterdir())
    torch.testing.assert_close(gradient, torch.autograd.grad(loss(x), x)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("emitter", EMITTERS)
def test_a_compiled_kernel_is_found_by_its_first_launch(emitter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.randn(64, 1001 + EMITTERS.index(emitter), device="cuda")  # another kernel for each emitter
    compiled = fxwrap.compile_graph(
        make_fx(lambda x: torch.softmax(x, -1))(rows), [rows], options=fxwrap.Options(emitter=emitter)
    )
    assert compiled.program.kernels
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda **_facts: pytest.fail("it is compiled again"))
    torch.testing.assert_close(compiled(rows)[0], torch.softmax(rows, -1))
