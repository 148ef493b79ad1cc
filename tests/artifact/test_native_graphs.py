"""Graph capture and replay in processes without Python, with a graph capturer for the CPU."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap.artifact import SavedContent, save_program
from fxwrap.artifact.cmake_export import export_cmake
from fxwrap.errors import ArtifactError
from fxwrap.lines import ExternCall
from fxwrap.passes.partition import partition
from fxwrap.runtime.native import build_runtime
from fxwrap.wrapper_ir import LineBase, Program
from tests.artifact.native_host import built_program, drive, read_result, tensor_commands

SOURCE = Path(__file__).with_name("graph_host.cpp")
TORCH = Path(torch.__path__[0])
NATIVE = Path(fxwrap.__path__[0]) / "runtime" / "native"


@cache
def host() -> Path:
    """Returns the compiled host, which is linked with the runtime, the bridge and libtorch."""
    runtime = build_runtime()
    includes = [f"-I{runtime / 'include'}", f"-I{NATIVE}", "-isystem", str(TORCH / "include")]
    flags = ["-std=c++20", "-O0", "-DAT_PER_OPERATOR_HEADERS", *includes]
    folders = [f"-L{runtime}", f"-L{TORCH / 'lib'}", f"-Wl,-rpath,{runtime}:{TORCH / 'lib'}"]
    links = [*folders, "-lfxwrap_runtime", "-lfxwrap_bridge", "-ltorch_cpu", "-lc10"]
    return built_program(SOURCE, flags, links)


PROGRAM = """
program @graphs(%x: borrowed f32[s0, 4]@cpu, %state: mutable f32[4]@cpu) {
  s0 = symbol.size(%x) range=(0, 64) hint=4 dim=0 rank=2
  check.layout(%x) name="x" : f32[s0, 4]@cpu
  check.layout(%state) name="state" : f32[4]@cpu
  %sum = extern.call @aten.sum.dim_IntList(%x, [0]) : f32[4]@cpu
  %after = extern.call @aten.add.Tensor(%state, %sum) : f32[4]@cpu
  memory.free(%sum)
  %mm = extern.call @aten.mm.default(%x, %w) : f32[s0, 4]@cpu
  extern.mutate @aten.copy_.default(%state, %after) writes=(%state)
  %sin = extern.call @aten.sin.default(%mm) : f32[s0, 4]@cpu
  memory.free(%mm)
  %y = extern.call @aten.mm.default(%sin, %w) : f32[s0, 4]@cpu
  %z = extern.call @aten.add.Tensor(%sin, %after) : f32[s0, 4]@cpu
  memory.free(%sin)
  memory.free(%after)
  control.return(%y, %z)
}
constant %w: f32[4, 4]@cpu
"""


def graphs(limit: int = 8) -> Program:
    """Returns the program with two captured functions, the lines before and after its sine."""

    def can_capture(line: LineBase) -> torch.device | str:
        is_sine = isinstance(line, ExternCall) and line.target == "aten.sin.default"
        return "it is chosen" if is_sine else torch.device("cpu")

    program = fxwrap.parse(PROGRAM)
    program.store.tensors["w"] = torch.full((4, 4), 0.5)
    return partition(program, can_capture, min_calls=1, max_captures=limit)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("graphs") / "graphs.fxw"
    save_program(SavedContent(graphs(), "cpp"), path, target="native")
    return path


def expected(rows: int, seed: float, weight: float = 0.5) -> torch.Tensor:
    """Returns the results of a call and the state behind them, as the host writes them."""
    x, state, program = torch.arange(4.0 * rows).reshape(rows, 4) * seed, torch.full((4,), seed), graphs()
    program.store.tensors["w"] = torch.full((4, 4), weight)
    results = fxwrap.run(program, [x, state])
    return torch.cat([item.flatten() for item in (*results, state)])


def run_host(model: Path, folder: Path, words: str) -> tuple[list[tuple[int, int]], str]:
    """Runs the host; returns the numbers of captures and replays after each call, and its warnings."""
    done = subprocess.run(
        [host(), model, folder / "out", *words.split()], capture_output=True, text=True, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    return [(int(captured), int(replayed)) for captured, replayed in lines], done.stderr


def check_results(folder: Path, calls: Sequence[tuple[int, float]], name: str = "out", weight: float = 0.5) -> None:
    for index, (rows, seed) in enumerate(calls):
        wanted = expected(rows, seed, weight)
        torch.testing.assert_close(read_result(folder / f"{name}.{index}", wanted), wanted)


def test_first_calls_run_second_ones_capture_later_ones_replay(saved: Path, tmp_path: Path) -> None:
    calls = [(4, 1.0), (4, 2.0), (4, 3.0), (8, 1.0), (8, 0.5), (4, 0.5), (8, 2.0)]
    counts, warnings = run_host(saved, tmp_path, " ".join([f"call {rows} {seed}" for rows, seed in calls]))
    assert counts == [(0, 0), (2, 2), (2, 4), (2, 4), (4, 6), (4, 8), (4, 10)]
    check_results(tmp_path, calls)
    assert warnings == ""


def test_results_in_use_are_not_overwritten(saved: Path, tmp_path: Path) -> None:
    calls = [(4, float(seed)) for seed in range(1, 8)]
    counts, _ = run_host(saved, tmp_path, " ".join([f"hold call {rows} {seed}" for rows, seed in calls]))
    assert counts[-1][0] > 2
    check_results(tmp_path, calls)
    check_results(tmp_path, calls, "out.held")


def test_the_number_of_graphs_is_limited(tmp_path: Path) -> None:
    save_program(SavedContent(graphs(limit=2), "cpp"), tmp_path / "few.fxw", target="native")
    calls = [(rows, float(seed)) for seed, rows in enumerate([4, 4, 8, 8, 12, 12, 4, 4, 8])]
    counts, warnings = run_host(tmp_path / "few.fxw", tmp_path, " ".join([f"call {r} {s}" for r, s in calls]))
    assert counts[-1] == (8, 8)  # both functions: four rounds, of which the third evicts the first
    check_results(tmp_path, calls)
    assert "partition_0 has 2 captured graphs, and a call needs another" in warnings
    assert "raise the option 'cuda_graph_limit'" in warnings


def test_graphs_read_the_constants_of_their_instance(saved: Path, tmp_path: Path) -> None:
    calls = [(4, 1.0), (4, 2.0), (4, 3.0)]
    words = " ".join([f"call {rows} {seed}" for rows, seed in calls])
    (tmp_path / "first").mkdir()
    run_host(saved, tmp_path / "first", f"{words} share swap 0.25 {words}")
    check_results(tmp_path / "first", calls)
    for index in range(3):
        (tmp_path / "first" / f"out.{index + 3}").rename(tmp_path / f"out.{index}")
    check_results(tmp_path, calls, weight=0.25)


def test_constants_of_captured_functions_are_replaced(saved: Path, tmp_path: Path) -> None:
    words = "call 4 1 call 4 1 call 4 1"
    counts, _ = run_host(saved, tmp_path, f"{words} swap 0.25 {words}")
    assert counts[2:] == [(2, 4), (4, 6), (4, 8), (4, 10)]  # captured anew at the new addresses
    for index in range(3):
        wanted = expected(4, 1.0, 0.25)
        torch.testing.assert_close(read_result(tmp_path / f"out.{index + 3}", wanted), wanted)


def test_a_function_that_cannot_be_captured_runs(saved: Path, tmp_path: Path) -> None:
    calls = [(4, 1.0), (4, 2.0), (4, 3.0)]
    counts, warnings = run_host(saved, tmp_path, "fail " + " ".join([f"call {rows} {seed}" for rows, seed in calls]))
    assert counts == [(0, 0)] * 3
    check_results(tmp_path, calls)
    for function in ("partition_0", "partition_1"):
        assert warnings.count(f"{function} cannot be captured, and runs eagerly: this device cannot") == 1


def test_a_device_without_capture_runs_the_functions(saved: Path, tmp_path: Path) -> None:
    x, state = torch.arange(16.0).reshape(4, 4), torch.ones(4)
    words = tensor_commands(tmp_path, [x, state])
    done = drive("open", saved, *words, "lines")
    assert done.code == 0 and "begin aten::mm" in done.lines, (done.lines, done.errors)
    done = drive("open", saved, *words, "run", tmp_path / "out")
    wanted = expected(4, 1.0)[:16].reshape(4, 4)
    torch.testing.assert_close(read_result(tmp_path / "out.0", wanted), wanted)


def test_lines_end_in_order_if_a_kernel_of_a_captured_function_fails(tmp_path: Path) -> None:
    """The kernel ends before the function that contains it."""

    def gathered(x: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x[index] * 2,)

    x, index = torch.arange(8.0), torch.tensor([1, 7])
    graph = make_fx(gathered)(x, index)
    program = fxwrap.compile_graph(graph, [x, index], options=fxwrap.Options(emitter="cpp")).program
    parts = partition(program, lambda line: torch.device("cpu"), min_calls=1)
    (kernel,) = parts.kernels
    assert parts.functions
    save_program(SavedContent(parts, "cpp"), tmp_path / "gathered.fxw", target="native")
    for last, code in ((7, 0), (8, 3)):
        words = tensor_commands(tmp_path, [x, torch.tensor([1, last])])
        done = drive("open", tmp_path / "gathered.fxw", *words, "lines")
        assert done.code == code and done.lines[:4] == (
            "begin partition_0", f"begin {kernel.name}", f"end {kernel.name}", "end partition_0"
        ), done  # fmt: skip


def test_captured_functions_are_not_exported_as_a_project(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="@partition_0 is captured and replayed, which a linked program cannot"):
        export_cmake(fxwrap.load(saved, emitter="cpp"), tmp_path / "project")
