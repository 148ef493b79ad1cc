"""User-defined Triton kernels in files for hosts without Python: as ordinary kernels, or refused with the reason."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import wrap_triton

import fxwrap
from fxwrap.artifact import saving
from fxwrap.artifact.archive import Archive
from fxwrap.artifact.user_kernels import with_ordinary_kernels
from fxwrap.comparison import capture
from fxwrap.converters.emitted_program import kernel_uses
from fxwrap.errors import ArtifactError
from fxwrap.runtime.triton.compile import LAUNCH_OPTIONS, split_launch_options, triton_jit_function, warmup_arguments
from fxwrap.runtime.triton.user_kernels import load_user_kernel
from fxwrap.runtime.triton.variants import make_source
from fxwrap.torch_compat import FakeTensorMode
from fxwrap.user_kernels import base_function
from tests.conftest import HAS_CUDA
from tests.user_kernels import kernels
from tests.user_kernels.triton_on_cpu import triton_on_cpu


@pytest.fixture(autouse=True)
def _triton_on_cpu() -> Iterator[None]:
    with triton_on_cpu():
        yield


one_configuration = triton.autotune(configs=[triton.Config({"BLOCK": 64}, num_warps=2)], key=["n"])(kernels.tuned.fn)


@triton.jit
def typed(x_ptr, n: tl.int64, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(x_ptr + offsets, tl.load(x_ptr + offsets, mask=offsets < n) * 2, mask=offsets < n)


@triton.jit(do_not_specialize=["n"])
def not_specialized(x_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(x_ptr + offsets, tl.load(x_ptr + offsets, mask=offsets < n) * 2, mask=offsets < n)


def add(x: Tensor) -> Tensor:
    """A helper, global constants, two launches, one with None for a tensor, and two launch options."""
    y, z, n = torch.empty_like(x), torch.empty_like(x), x.numel()
    kernels.add[(4,)](x, None, y, n, BLOCK=64, num_warps=2, num_stages=1)
    kernels.add[(4,)](y, x, z, n, BLOCK=64)
    return z


def strided_rows(x: Tensor) -> Tensor:
    """Integers of several classes, 1 among them, and a float."""
    out = x.new_empty(x.shape[0])
    kernels.strided_rows[(x.shape[0],)](x, out, *x.shape, *x.stride(), 0.75, BLOCK=32)
    return out


def tuned_once(x: Tensor) -> Tensor:
    """One configuration for autotuning."""
    out = torch.empty_like(x)
    one_configuration[(4,)](x, out, x.numel())
    return out


def minimum_and_maximum(x: Tensor) -> Tensor:
    """A dtype as a constant, and two results."""
    low, high = x.new_empty(x.shape[0]), x.new_empty(x.shape[0])
    kernels.minimum_and_maximum[(x.shape[0],)](x, low, high, x.shape[1], BLOCK=32, DTYPE=tl.float32)
    return high - low


def through_module(x: Tensor) -> Tensor:
    """A function and a constant of another module, and a library function."""
    out = torch.empty_like(x)
    kernels.through_module[(4,)](x, out, x.numel(), BLOCK=64)
    return out


FUNCTIONS = (add, strided_rows, tuned_once, minimum_and_maximum, through_module)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_ordinary_kernels_compute_the_same(function: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(8, 24)
    (graph,) = capture(function, (x,))
    program = graph.compiled.program
    ordinary = with_ordinary_kernels(program)
    assert "user_triton" in {kernel.language for kernel in program.kernels}
    assert "user_triton" not in {kernel.language for kernel in ordinary.kernels}
    assert with_ordinary_kernels(ordinary) == ordinary
    for _ in range(2):
        x = torch.randn(8, 24)
        results = fxwrap.run(ordinary, [x])
        torch.testing.assert_close(results, fxwrap.run(program, [x]), rtol=0, atol=0)
        torch.testing.assert_close(results[0], function(x))


@pytest.mark.parametrize("function", (add, tuned_once), ids=lambda function: function.__name__)
def test_ordinary_kernels_compile_to_the_same_code(function: Callable[[Tensor], Tensor]) -> None:
    """Triton inlines the user's function, with what it knows of the arguments."""
    (graph,) = capture(function, (torch.randn(8, 24),))
    uses = kernel_uses(with_ordinary_kernels(graph.compiled.program))
    for kernel in graph.compiled.program.kernels:
        if kernel.language != "user_triton":
            continue
        use, loaded = uses[kernel.name], load_user_kernel(kernel.source, kernel.signature, kernel.options)
        tuned, (constants, options) = loaded.on_gpu.kernel, split_launch_options(use.kernel.options)
        arguments = dict(zip(loaded.names, warmup_arguments(use), strict=True))
        ordinary = triton_jit_function(use.kernel.source, use.kernel.signature, use.kernel.options)
        compiled = ptx(ordinary, arguments, constants, options)
        config = tuned.configs[0].kwargs if tuned is not base_function(tuned) else {}
        passed = {name: item for name, item in loaded.constants.items() if name not in LAUNCH_OPTIONS}
        assert compiled == ptx(base_function(tuned), arguments, {**passed, **config}, options)
        assert len(compiled) > 10


def ptx(function: Any, arguments: dict[str, Any], constants: dict[str, Any], options: dict[str, Any]) -> list[str]:
    """Returns the instructions of a compiled kernel, without its name and the positions in its source."""
    ordered = [arguments[name] for name in function.arg_names if name in arguments]
    target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
    compiled = triton.compile(make_source(function, ordered, constants), target=target, options=options)
    body = compiled.asm["ptx"].partition("{")[2].replace(f"{compiled.metadata.name}_param", "param")
    return [line for line in body.splitlines() if re.match(r"\s+(@|[a-z])", line)]


def gpu_program(launch: Callable[[Tensor], None], size: int = 200) -> fxwrap.Compiled:
    """A function that launches a kernel on a tensor of a GPU, compiled on a machine without one."""

    def function(x: Tensor) -> tuple[Tensor]:
        y = x + 1
        launch(y)
        return (y.exp(),)

    with FakeTensorMode():
        x = torch.empty(size, device="cuda")
        graph = make_fx(function)(x)
    return fxwrap.compile_graph(graph, [x], options=fxwrap.Options(emitter="cpp"))


def doubled(y: Tensor) -> None:
    wrap_triton(kernels.double_in_place)[(4,)](y, y.numel(), BLOCK=64, num_warps=2)


def compiled_kernels(path: Path) -> list[tuple[str, int, int]]:
    """Returns name, capability and threads of the kernels' compiled code."""
    with Archive(path) as archive:
        rows = [item["variant"] for item in archive.manifest["binaries"]["triton"]]
    return [(row["name"], row["capability"], row["threads"]) for row in rows]


def test_a_native_file_has_compiled_code_of_the_kernel(tmp_path: Path) -> None:
    subject = gpu_program(doubled)
    subject.save(tmp_path / "named.fxw", target="native", architectures=("sm_80", "sm_90"))
    kernels = compiled_kernels(tmp_path / "named.fxw")
    assert [item[1:] for item in kernels if "double_in_place" in item[0]] == [(80, 64), (90, 64)]
    loaded = fxwrap.artifact.read_saved(tmp_path / "named.fxw")
    assert "fxwrap_runtime_launch" not in loaded.source and "launch(f, double_in_place_0, " in loaded.source
    subject.save(tmp_path / "python.fxw")
    languages = [kernel.language for kernel in fxwrap.artifact.read_saved(tmp_path / "python.fxw").program.kernels]
    assert languages == ["triton", "user_triton", "triton"]


@pytest.mark.skipif(torch.cuda.is_available(), reason=HAS_CUDA)  # it compiles the others too
def test_a_native_file_compiles_the_kernel_for_the_gpus_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "architectures_of_this_machine", lambda: ("sm_86",))
    with pytest.raises(ArtifactError) as raised:  # calls compile the others
        gpu_program(launched(kernels.double_in_place, BLOCK=128), 300).save(tmp_path / "here.fxw", target="native")
    assert "fxwrap_add_" in str(raised.value) and "double_in_place" not in str(raised.value)


def launched(kernel: Any, **constants: Any) -> Callable[[Tensor], None]:
    return lambda y: wrap_triton(kernel)[(4,)](y, y.numel(), **constants)


@pytest.mark.parametrize(
    ("launch", "reason"),
    (
        (launched(kernels.tuned_in_place), "it is autotuned: give it one configuration"),
        (launched(typed, BLOCK=64), "a parameter has a declared type, or is not specialized"),
        (launched(not_specialized, BLOCK=64), "a parameter has a declared type, or is not specialized"),
        (launched(kernels.double_in_place, BLOCK=64, waves_per_eu=2), "it has launch options of other devices"),
    ),
    ids=("autotuned", "typed", "not_specialized", "options"),
)
def test_other_kernels_are_refused_by_name(launch: Callable[[Tensor], None], reason: str, tmp_path: Path) -> None:
    subject = gpu_program(launch)
    (name,) = [kernel.name for kernel in subject.program.kernels if kernel.language == "user_triton"]
    words = f"the model's own Triton kernel @{name} is launched by Python: {reason}"
    with pytest.raises(ArtifactError, match=words) as raised:
        subject.save(tmp_path / "model.fxw", target="native", architectures=("sm_90",))
    assert "fxwrap_runtime::launch" not in str(raised.value)
