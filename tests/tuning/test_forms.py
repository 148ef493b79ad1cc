"""A choice is data of the kernel definition, so that every form of a program carries it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap.cli.command import main
from fxwrap.compile import Compiled, emit
from tests.tuning.fake_timer import OPTIONS, FakeTimer, tuner

X = torch.randn(96, 64)


def function(x: torch.Tensor) -> torch.Tensor:
    return (x * 2).relu() + x


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiled:
    """A program whose kernel is not the best guess."""
    timer = FakeTimer(fast=2)
    monkeypatch.setattr("fxwrap.compile.compiler.gpu_tuner", lambda: tuner(timer, tmp_path / "records"))
    tuned = fxwrap.compile_graph(make_fx(function)(X), [X], options=OPTIONS)
    (work,) = timer.works
    assert tuned.program.kernels[0].options == work.candidates[2].options != work.candidates[0].options
    return tuned


def chosen(program: fxwrap.Program) -> Any:
    (kernel,) = program.kernels
    return kernel.hash, kernel.options, dict(program.header)["tuning"]


def test_program_text(compiled: Compiled) -> None:
    assert chosen(fxwrap.parse(str(compiled.program))) == chosen(compiled.program)


@pytest.mark.parametrize("emitter", ["python", "cpp", "fx"])
def test_a_saved_program(emitter: str, compiled: Compiled, tmp_path: Path) -> None:
    fxwrap.save(compiled, tmp_path / "saved", emitters=[])
    loaded = fxwrap.load(tmp_path / "saved", emitter=emitter)
    assert chosen(loaded.program) == chosen(compiled.program)
    torch.testing.assert_close(loaded(X)[0], function(X))


def test_a_graph_round_trip(compiled: Compiled) -> None:
    again = fxwrap.from_fx(compiled.graph_module)
    assert [(kernel.hash, kernel.options) for kernel in again.kernels] == [chosen(compiled.program)[:2]]


@pytest.mark.parametrize(
    ("emitter", "text"),
    [("python", "(('X_BLOCK', 256), ('num_warps', 8))"), ("cpp", r"[[\"X_BLOCK\", 256], [\"num_warps\", 8]]")],
)
def test_emitted_text(emitter: str, text: str, compiled: Compiled) -> None:
    assert compiled.program.kernels[0].options == (("X_BLOCK", 256), ("num_warps", 8))
    assert text in emit(compiled.program, emitter).source


def test_show_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("fxwrap.compile.compiler.gpu_tuner", lambda: tuner(FakeTimer(fast=2), tmp_path / "records"))
    options = ["--option", "autotune=true", "--option", "cpu_kernels=triton"]
    assert main(["show", f"{__file__}:function", "--inputs", "f32[96, 64]", *options]) == 0
    printed = capsys.readouterr().out
    assert " X_BLOCK=256 num_warps=8 " in printed and ' tuning="' in printed.splitlines()[0]


@pytest.mark.parametrize(
    ("option", "text"),
    [("autotune", "--option takes NAME=VALUE, not 'autotune'"), ("autotun=true", "did you mean 'autotune'?"),
     ("autotune=soon", "option 'autotune' takes a bool or 'first_call', not 'soon'")],
)  # fmt: skip
def test_a_command_line_with_a_wrong_option(option: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", f"{__file__}:function", "--inputs", "f32[2, 2]", "--option", option]) == 2
    assert text in capsys.readouterr().err
