"""Triton's interpreter leaves out work that no kernel needs."""

from __future__ import annotations

import importlib
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from fxwrap.runtime.kernels import load_kernel

SOURCE = """
import triton
import triton.language as tl

@triton.jit
def kernel(x, out, step):
    i = tl.program_id(0) * 4 + tl.arange(0, 4)
    last = i[:, None] * step + 1
    tl.store(out + tl.program_id(0), tl.sum(tl.load(x + i), 0) + tl.max(tl.sum(last, 1), 0))
"""
SIGNATURE = ("*i32", "*i32", "i32")


def launch(programs: int, step: int = 1) -> torch.Tensor:
    """Returns a sum and the largest of some products for each program."""
    x, out = torch.arange(4 * programs, dtype=torch.int32), torch.empty(programs, dtype=torch.int32)
    load_kernel("triton", SOURCE, SIGNATURE, ())((programs, 1, 1), x, out, step)
    return out


def test_the_language_is_patched_once_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not again by each function of its library that a program calls."""
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    counts: Counter[int] = Counter()
    patch_builtins = interpreter._patch_builtin

    def counted(*arguments: Any) -> None:
        counts[programs] += 1
        patch_builtins(*arguments)

    monkeypatch.setattr(interpreter, "_patch_builtin", counted)
    for programs in (1, 2, 8):
        first = torch.arange(programs) * 4
        assert launch(programs).tolist() == (4 * first + 6 + first + 4).tolist()
    assert counts[8] == counts[2] > 0  # the first launch rewrites functions


@pytest.mark.parametrize("debug", [False, True])
def test_overflow_is_looked_for_in_debug_mode(debug: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    semantic: Any = importlib.import_module("triton.language.semantic").TritonSemantic
    comparisons: list[object] = []
    less_equal = semantic.less_equal

    def counted(*arguments: Any) -> Any:
        comparisons.append(arguments)
        return less_equal(*arguments)

    monkeypatch.setattr(semantic, "less_equal", counted)
    builder = interpreter.interpreter_builder
    monkeypatch.setattr(builder, "options", replace(builder.options, debug=debug))
    assert launch(1).tolist() == [10]
    assert bool(comparisons) == debug
    if debug:
        with pytest.raises(interpreter.InterpreterError, match="int32 overflow detected for operation mul"):
            launch(1, step=2**30)
