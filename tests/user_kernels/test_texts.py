"""A user's kernel as self-contained text: its content, its compilation for a GPU, and unsupported kernels."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.language.extra import libdevice

from fxwrap.devices.in_process_kernels import InProcessKernel, register_in_process_kernel
from fxwrap.runtime.modules import load_module
from fxwrap.runtime.triton.user_kernels import load_user_kernel
from fxwrap.user_kernels import KernelNotSerializable, serialize_kernel
from tests.user_kernels import helpers, kernels

WIDTH = tl.constexpr(2)


def loaded(kernel: Any, **constants: Any) -> ModuleType:
    """The module that a kernel's text is."""
    return load_module(serialize_kernel(kernel, constants, {}, []), "user_kernel")


@pytest.mark.parametrize(
    ("kernel", "types"),
    [
        (kernels.add, "*fp32 *fp32 *fp32 i32"),
        (kernels.through_module, "*fp32 *fp32 i32"),
        (kernels.kernel_over(WIDTH), "*fp32 *fp32 i32"),
        (kernels.gaps, "*fp32 i32"),
    ],
    ids=lambda item: getattr(item, "__name__", ""),
)
def test_kernel_text_compiles_for_a_gpu(kernel: Any, types: str) -> None:
    function = loaded(kernel, BLOCK=64).kernel
    signature = dict(zip(function.arg_names, [*types.split(), "constexpr"], strict=True))
    compiled = triton.compile(
        ASTSource(function, signature, {"BLOCK": 64}),
        target=GPUTarget("cuda", 90, 32),
        options={"enable_fp_fusion": False},
    )
    assert f".entry {kernel.__name__}" in compiled.asm["ptx"]


def test_kernel_text_contains_referenced_globals() -> None:
    text = serialize_kernel(kernels.through_module, {"BLOCK": 64, "num_warps": 8}, {}, [])
    namespace = loaded(kernels.through_module, BLOCK=64, num_warps=8)
    assert namespace.CONSTANTS == {"BLOCK": 64, "num_warps": 8}
    assert namespace.kernel.fn.__name__ == "through_module"
    assert namespace.helpers is not helpers and namespace.helpers.OFFSET.value == 0.25
    assert namespace.libdevice is libdevice and "tests." not in text


def test_constants_of_every_kind() -> None:
    constants = {
        "none": None, "flag": True, "whole": -3, "part": 0.1, "endless": float("inf"), "name": "ieee",
        "type": tl.bfloat16, "torchs": torch.int8, "several": (1, (2.5,), None), "listed": [tl.float32],
        "function": tl.sum, "own": kernels.scaled, "fixed": tl.constexpr(4),
    }  # fmt: skip
    values = loaded(kernels.gaps, **constants).CONSTANTS
    assert values.pop("own").fn.__name__ == "scaled" and values.pop("fixed").value == 4
    assert values == {name: item for name, item in constants.items() if name not in ("own", "fixed")}


def test_options_of_the_function_and_of_its_tuner() -> None:
    @triton.jit(do_not_specialize=["n"], noinline=True)
    def function(x_ptr, n, BLOCK: tl.constexpr):
        tl.store(x_ptr + tl.arange(0, BLOCK), n)

    configs = [triton.Config({"BLOCK": 32}, num_warps=2, maxnreg=64), triton.Config({"BLOCK": 64}, num_ctas=2)]
    kernel = triton.autotune(configs=configs, key=["n"], reset_to_zero=["x_ptr"])(function)
    text = serialize_kernel(kernel, {}, {}, ["x_ptr"])
    restored = load_module(text, "user_kernel").kernel
    assert [str(config) for config in restored.configs] == [str(config) for config in configs]
    assert restored.keys == ["n"] and restored.reset_to_zero == ["x_ptr"] and restored.restore_value == []
    assert restored.fn.do_not_specialize == ["n"] and restored.fn.noinline


def test_equal_kernels_have_equal_texts() -> None:
    first, second = kernels.kernel_over(tl.constexpr(3)), kernels.kernel_over(tl.constexpr(3))
    other = kernels.kernel_over(tl.constexpr(4))
    texts = [serialize_kernel(kernel, {"BLOCK": 16}, {}, []) for kernel in (first, second, other)]
    assert first is not second and texts[0] == texts[1] != texts[2]


# --- kernels that text cannot represent -------------------------------------------------------------------------------


def of_an_object() -> Any:
    return kernels.kernel_over(object())


def of_nothing() -> Any:
    @triton.jit
    def function(x_ptr):
        tl.store(x_ptr, MISSING)  # noqa: F821 - which is the point

    return function


def of_one_name_for_two_things() -> Any:
    FACTOR = tl.constexpr(9.0)  # the helper has another one of this name

    @triton.jit
    def function(x_ptr):
        tl.store(x_ptr, kernels.scaled(FACTOR))

    return function


def of_a_default_that_changed() -> Any:
    width = 1

    @triton.jit
    def function(x_ptr, WIDTH: tl.constexpr = width):
        tl.store(x_ptr, WIDTH)

    width += 1
    function.fn.__globals__["width"] = width
    return function


def of_a_hook() -> Any:
    @triton.jit
    def function(x_ptr):
        tl.store(x_ptr, 1)

    function.add_pre_run_hook(lambda *_arguments, **_keywords: None)
    return function


def of_a_tuner_with_a_hook() -> Any:
    config = triton.Config({"BLOCK": 16}, pre_hook=lambda _arguments: None)
    return triton.autotune(configs=[config], key=[])(kernels.gaps)


def of_a_tuner_that_prunes() -> Any:
    configs = [triton.Config({"BLOCK": 16}), triton.Config({"BLOCK": 32})]
    prune = {"early_config_prune": lambda configs, *_arguments, **_keywords: configs[:1]}
    return triton.autotune(configs=configs, key=[], prune_configs_by=prune)(kernels.gaps)


def of_heuristics() -> Any:
    return kernels.with_heuristics


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (of_an_object, "an object of the class object, which has no text"),
        (of_nothing, "it uses 'MISSING', which is defined nowhere"),
        (of_one_name_for_two_things, "two things that it uses are called 'FACTOR'"),
        (of_a_default_that_changed, "the default of its parameter 'WIDTH' is no longer the value of 'width'"),
        (of_a_hook, "its 'pre_run_hooks' is a function that only this process has"),
        (of_a_tuner_with_a_hook, "one of its configurations has a pre_hook"),
        (of_a_tuner_that_prunes, "its tuning has a 'early_config_prune'"),
        (of_heuristics, "it is a Heuristics, not a function of"),
    ],
)
def test_unrepresentable_kernels_are_rejected(make: Callable[[], Any], reason: str) -> None:
    with pytest.raises(KernelNotSerializable, match=reason):
        serialize_kernel(make(), {}, {}, [])


def test_arguments_and_grids_of_a_launch() -> None:
    """The order of a launch is that of the signature, whatever the order of the kernel's parameters is."""
    text = serialize_kernel(kernels.tuned, {}, {}, [])
    signature = ("*f32 out_ptr", "*f32 x_ptr", "i64 n", *["i64 grid"] * 3)
    launch = load_user_kernel(text, signature, ())
    x, out = torch.randn(100), torch.zeros(100)
    launch((2, 1, 1), out, x, 100, 1, 1, 1)
    torch.testing.assert_close(out, x + 1)


class Recorder:
    """Fakes a kernel on a GPU: records its launch arguments."""

    def __init__(self, *configs: triton.Config) -> None:
        self.arg_names = ["x_ptr", "BLOCK", "y_ptr", "n", "other"]
        self.launches: list[Any] = []
        if configs:
            self.configs = list(configs)

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *arguments, **keywords: self.launches.append((grid, arguments, keywords))


def recorded(recorder: Recorder, key: str, constants: dict[str, Any], extra_grids: tuple[int, ...] = ()) -> Any:
    """The one launch of a kernel, with tensors that are on no CPU."""
    key = register_in_process_kernel(key, InProcessKernel(recorder, constants))
    signature = ("*f32 y_ptr", "*f32 x_ptr", "i64 n", *["i64 grid"] * len(extra_grids))
    launch = load_user_kernel("", signature, (("live", key), ("reason", "it is a test's")))
    y, x = torch.empty(1, device="meta"), torch.empty(2, device="meta")
    launch((7, 1, 1), y, x, 100, *extra_grids)
    ((grid, arguments, keywords),) = recorder.launches
    assert arguments[0] is x
    return grid, arguments[1:], {name: item for name, item in keywords.items() if item is not y}


def test_backend_options_reach_the_kernel() -> None:
    constants = {"BLOCK": 64, "other": None, "waves_per_eu": 2, "num_warps": 4}
    grid, arguments, keywords = recorded(Recorder(), "vendor", constants)
    assert grid == (7, 1, 1) and arguments[0] == 64 and arguments[2:] == (100, None)
    assert keywords == {"waves_per_eu": 2, "num_warps": 4}


def test_the_chosen_configuration_has_its_own_grid() -> None:
    """Arguments that the tuner chooses are passed by name, so only those before them are passed by position."""
    recorder = Recorder(triton.Config({"BLOCK": 32}), triton.Config({"BLOCK": 64}), triton.Config({"BLOCK": 64}, 8))
    grid, arguments, keywords = recorded(recorder, "tuned", {}, (5, 1, 1, 5, 1, 1))
    assert arguments == () and keywords == {"n": 100}
    assert [grid({"BLOCK": block, "n": 100}) for block in (32, 64)] == [(7, 1, 1), (5, 1, 1)]
