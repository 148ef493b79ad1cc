"""A program moves to another device of the same type, together with its compiled Triton kernels."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table
from torch.fx.experimental.proxy_tensor import make_fx
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import fxwrap
from fxwrap.artifact.devices import device_map, move_program, program_devices
from fxwrap.converters.emitted_program import kernel_texts
from fxwrap.errors import ArtifactError
from fxwrap.runtime.triton.binaries import collect_triton_binaries
from fxwrap.runtime.triton.compile import triton_jit_function
from fxwrap.torch_compat import triton_kernel_at
from tests.support.samples import EXTENSIONS, SAMPLES

CUDA = torch.device("cuda", 0)


MOVED = ("devices_and_streams", "random_state", "triton_kernel", "mlp", "types", "cond_nested", "collectives")


@pytest.mark.parametrize("name", MOVED)
def test_every_device_reference_is_remapped(name: str) -> None:
    """After the move, the program text names cuda:5 wherever it named cuda:0."""
    text = SAMPLES[name].full_text()
    for word in ("@cpu", '"cpu"', "cuda:1"):
        text = text.replace(word, word.replace("cpu", "cuda:0").replace("cuda:1", "cuda:0"))
    program = fxwrap.parse(text, EXTENSIONS)
    assert CUDA in program_devices(program)
    moved = str(move_program(program, device_map(program_devices(program), "cuda:5")))
    assert moved == str(program).replace("cuda:0", "cuda:5") and "cuda:5" in moved


def test_unsupported_device_moves_are_rejected(tmp_path: Path) -> None:
    x = torch.randn(3)
    fxwrap.save(fxwrap.lower(make_fx(lambda x: (x + 1,))(x), [x]), tmp_path / "f.fxw")
    with pytest.raises(ArtifactError, match="compiled for cpu, not for cuda"):
        fxwrap.load(tmp_path / "f.fxw", device="cuda:0")
    assert fxwrap.load(tmp_path / "f.fxw", device="cpu")(x)[0].equal(x + 1)
    both = [torch.device("cuda:0"), torch.device("cuda:1")]
    for wanted, reason in (
        ("cuda:2", "pass a mapping of devices"),
        ({"cuda:7": "cuda:0"}, "does not use cuda:7"),
        ({"cuda:0": "cpu"}, "do not run on cpu"),
        ({"cuda:0": "cuda"}, "use 'cuda:0'"),
    ):
        with pytest.raises(ValueError, match=reason):
            device_map(both, wanted)
    assert device_map(both, {"cuda:0": "cuda:1", "cuda:1": "cuda:0"}) == {both[0]: both[1], both[1]: both[0]}


def compiled_for_h100(program: fxwrap.Program) -> Any:
    """The program's kernel as Triton compiles it for a GPU that this machine lacks."""
    (kernel,) = kernel_texts(program)
    function = triton_jit_function(kernel.source, kernel.signature, kernel.options)
    names, constants = function.arg_names, {name: item for name, item in kernel.options if name.isupper()}
    types = [kind.replace("*f32", "*fp32") for kind in kernel.signature]
    kinds = dict(zip(names, [*types, *["constexpr"] * len(names)]))
    source = ASTSource(function, kinds, {(names.index(name),): item for name, item in constants.items()})
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": False})


def test_saved_triton_binaries_are_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the launch needs a GPU; the cache hit for the file's binaries does not."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "first"))
    x = torch.randn(1000)
    options = fxwrap.Options(cpu_kernels="triton")
    program = fxwrap.compile_graph(make_fx(lambda x: (x.exp() + 3,))(x), [x], options=options).program
    compiled = compiled_for_h100(program)
    (kernel,) = kernel_texts(program)
    function = triton_jit_function(kernel.source, kernel.signature, kernel.options)
    cache: Any = {0: ({"like a launch": compiled}, {}, None, None, None)}
    monkeypatch.setattr(function, "device_caches", cache)
    fxwrap.save(program, tmp_path / "f.fxw", emitters=["python"])
    written = collect_triton_binaries(kernel)

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "second"))
    torch.testing.assert_close(fxwrap.load(tmp_path / "f.fxw")(x)[0], x.exp() + 3)
    stages = importlib.import_module("triton.backends.nvidia.compiler").CUDABackend
    monkeypatch.setattr(stages, "make_cubin", None)
    monkeypatch.setattr(stages, "make_ttir", None)
    again = compiled_for_h100(program)
    assert again.hash == compiled.hash and again.asm["cubin"] == compiled.asm["cubin"]
    cache[0][0]["like a launch"] = again
    assert collect_triton_binaries(kernel) == written


def test_loading_registers_kernels_in_torchs_table(tmp_path: Path) -> None:
    """Table positions follow from the content: kernels that are in use keep theirs after a reset."""
    x = torch.randn(1000)
    options = fxwrap.Options(cpu_kernels="triton", emitter="fx")
    saved = fxwrap.compile_graph(make_fx(lambda x: (x.exp() + 3,))(x), [x], options=options)
    saved.save(tmp_path / "f.fxw")
    (node,) = [node for node in saved.graph_module.graph.nodes if "kernel_idx" in node.kwargs]
    place = node.kwargs["kernel_idx"]
    kernel_side_table.reset_table()  # as torch.compiler.reset() does since torch 2.13
    assert triton_kernel_at(place).fxwrap_hash == saved.program.kernels[0].hash
    others = make_fx(lambda x: (x.sin() - 3,))(x)
    fxwrap.compile_graph(others, [x], options=options)
    assert triton_kernel_at(place).fxwrap_hash == saved.program.kernels[0].hash
    loaded = fxwrap.load(tmp_path / "f.fxw")
    (again,) = [node for node in loaded.graph_module.graph.nodes if "kernel_idx" in node.kwargs]
    assert again.kwargs["kernel_idx"] == place
    assert triton_kernel_at(place).fxwrap_hash == saved.program.kernels[0].hash
    for graph in (saved.graph_module, loaded.graph_module):
        torch.testing.assert_close(torch.fx.Interpreter(graph).run(x)[0], x.exp() + 3)


def test_a_process_local_kernel_is_rejected(tmp_path: Path) -> None:
    sample = SAMPLES["triton_kernel"].program()
    options = (("live", "0" * 64), ("reason", "it has hooks"))
    kernels = tuple([fxwrap.wrapper_ir.KernelDefinition(kernel.name, "user_triton", "", (), options)
                     for kernel in sample.kernels])  # fmt: skip
    with pytest.raises(ArtifactError, match="only in this process: it has hooks"):
        fxwrap.save(sample.replace(kernels=kernels), tmp_path / "f.fxw")
    assert not list(tmp_path.iterdir())
