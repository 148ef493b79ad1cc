"""Attention in emitted C++: the calls of the library; GPU tests compare its results."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fxwrap
from fxwrap.converters.cpp import to_cpp
from fxwrap.runtime.native import NativeProgram, compile_cpp, load_program
from tests.runtime.launch.fake_driver import FakeDriver
from tests.runtime.launch.test_matmuls import expect_operator_fallback

BATCH, HEADS, LENGTH, SIZE = 2, 3, 8, 16
COUNT = BATCH * HEADS * LENGTH * SIZE
HEAD = f"{BATCH}, {HEADS}, {LENGTH}, {SIZE}"
RESULT = f"{HEAD} | {LENGTH * HEADS * SIZE}, {SIZE}, {HEADS * SIZE}, 1"

_SCORES = "multiply apply1{changed} reduce3 apply9 apply13 reduce0 apply15 apply0 apply6 multiply"
_TRIANGLE = " apply501 along 2 apply501 along 3 apply303 apply601"
PLAIN, BIASED, CAUSAL = [f"ask about {_SCORES.format(changed=it)}" for it in ("", " apply0", f" apply0{_TRIANGLE}")]


def program(
    arguments: str = "none, false", name: str = "attention", logsumexp: str = "_", bias: int = 1
) -> NativeProgram:
    """A program of attention on flat tensors; a new name starts without cached plans."""
    parameters = ", ".join(f"%{item}_memory: borrowed bf16[{COUNT}]@cuda:0" for item in ("q", "k", "v", "b"))
    views = [f"  %{item} = memory.view(%{item}_memory) : bf16[{RESULT}]@cuda:0" for item in ("q", "k", "v")]
    views.append(f"  %b = memory.view(%b_memory) : bf16[{BATCH}, 1, {bias}, {LENGTH}]@cuda:0")
    kind = "none" if logsumexp == "_" else f"f32[{BATCH}, {HEADS}, {LENGTH}, 1]@cuda:0"
    call = f"extern.call @aten._scaled_dot_product_cudnn_attention.default(%q, %k, %v, {arguments})"
    results = ", ".join([f"bf16[{RESULT}]@cuda:0", kind, *["none"] * 7])
    text = "\n".join([
        f"program @{name}({parameters}) {{", *views,
        f"  %out, {logsumexp}, _, _, _, _, _, _, _ = {call} : {results}",
        "  control.return(%out)", "}\n",
    ])  # fmt: skip
    return load_program(compile_cpp(to_cpp(fxwrap.parse(text)).source, name="attention"))


def operands(driver: FakeDriver, *, skipped: int = 0) -> list[Tensor]:
    return [driver.tensor(COUNT, torch.bfloat16, skipped=skipped) for _ in range(4)]


def library_calls(driver: FakeDriver, run: NativeProgram, *, skipped: int = 0) -> list[str]:
    """The library calls of a program, which ends at an allocation on a missing device."""
    with expect_operator_fallback():
        run(*operands(driver, skipped=skipped))
    return [line for line in driver.log() if line.startswith(("ask", "plan"))]


def test_the_library_receives_the_full_attention_problem(driver: FakeDriver) -> None:
    run = program(name="told")
    assert library_calls(driver, run) == [PLAIN, "plan 0"]
    assert library_calls(driver, run) == []


@pytest.mark.parametrize("rows", [1, LENGTH])
def test_a_bias_is_added(rows: int, driver: FakeDriver) -> None:
    assert library_calls(driver, program("%b, false, 0.0, false, false, scale=0.5", f"biased_{rows}", bias=rows)) == [
        BIASED, "plan 0",
    ]  # fmt: skip


def test_a_causal_mask_is_passed(driver: FakeDriver) -> None:
    assert library_calls(driver, program("%b, false, 0.0, true", "causal")) == [CAUSAL, "plan 0"]


_OTHERS = {"dropout": "none, false, 0.5", "a mask to debug": "none, false, 0.0, false, true"}


@pytest.mark.parametrize("name", _OTHERS)
def test_unsupported_attention_calls_the_operator(name: str, driver: FakeDriver) -> None:
    assert library_calls(driver, program(_OTHERS[name], f"left_{len(name)}")) == []


def test_attention_with_saved_state_calls_the_operator(driver: FakeDriver) -> None:
    assert library_calls(driver, program("none, true", "backward", logsumexp="%logarithms")) == []


def test_misaligned_addresses_call_the_operator(driver: FakeDriver) -> None:
    assert library_calls(driver, program(name="skipped"), skipped=1) == []


def test_problems_the_library_rejects_call_the_operator(driver: FakeDriver) -> None:
    run = program(name="refused")
    driver.set("heuristics", 3000)
    try:
        assert library_calls(driver, run) == [PLAIN]
        assert library_calls(driver, run) == []
    finally:
        driver.set("heuristics", 0)


def test_deterministic_mode_calls_the_operator(driver: FakeDriver, deterministic_algorithms: None) -> None:
    assert library_calls(driver, program(name="deterministic")) == []
