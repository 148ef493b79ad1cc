"""The operators of frozen weights: the implementations in Python instead of the bridge's, and their conversions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fxwrap
from fxwrap.lines import ExternCall, Mutate
from fxwrap.runtime import library

_CONVERSIONS = frozenset(
    {"mkldnn::_reorder_linear_weight", "mkl::_mkl_reorder_linear_weight", "aten::mkldnn_reorder_conv2d_weight"}
)


def use_python_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets all emitters but C++ run the implementations in Python, as in a process without the bridge."""
    for operator in library._IMPLEMENTATIONS.values():
        if isinstance(operator, library._NativeFirst):
            monkeypatch.setattr(operator, "_run", operator._operator.run)


def count_conversions(call: Callable[[], object]) -> int:
    """Returns how often a call converts a weight to the layout of a library."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    return sum(event.count for event in profile.key_averages() if event.key in _CONVERSIONS)


def extern_targets(program: fxwrap.Program) -> list[str]:
    """Returns the operators that a program calls."""
    return [line.target for line in program.body.lines if isinstance(line, ExternCall | Mutate)]


def compiled_programs(function: Callable[..., Any], *inputs: Tensor, **options: Any) -> tuple[list[Any], Any]:
    """Returns the programs of a function through torch.compile, and the compiled function, called once."""
    programs: list[Any] = []

    def record(program: fxwrap.Program) -> fxwrap.Program:
        programs.append(program)
        return program

    torch.compiler.reset()
    compiled = torch.compile(function, backend="fxwrap", options={"freeze": True, "passes": (record,), **options})
    compiled(*inputs)
    return programs, compiled
