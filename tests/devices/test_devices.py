"""Devices that vendors register: an imaginary one runs the models of the suite; invalid registrations are rejected."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

import fxwrap
from fxwrap import devices
from fxwrap.converters.emission import emit
from fxwrap.devices import (
    CPU,
    CUDA,
    AttentionTraits,
    CollectiveTraits,
    ConvolutionTraits,
    DeviceRuntime,
    DeviceSpec,
    KernelLanguage,
    KernelRuntime,
    MatmulTraits,
)
from fxwrap.errors import DeviceError, FusionWarning, FxwrapError, OptionError
from fxwrap.lines import Launch, PoolSlice
from fxwrap.options import EMITTERS, Options, Pass
from fxwrap.runtime import library, tensors
from fxwrap.runtime.devices import CPU_RUNTIME, CUDA_RUNTIME, device_context, guard
from fxwrap.runtime.kernels import load_gridless_kernel, load_kernel
from tests.devices import abacus, abacus_runtime, copy_engine
from tests.devices.abacus_runtime import RUNTIME, WORK
from tests.devices.copy_engine import AbacusCopy, stage_inputs
from tests.devices.registration import on_abacus
from tests.support.documents import ROOT, check_printed
from tests.support.models import MODELS, ModelCase, representative

STAGING = Pass(stage_inputs, key="abacus.stage_inputs 1")


@pytest.fixture
def with_abacus() -> Iterator[None]:
    with on_abacus():
        yield


def graph_of(function: Callable[..., Any], *inputs: torch.Tensor) -> GraphModule:
    """A function as a graph of ATen operators, as fxwrap decomposes them."""
    with torch.no_grad():
        return make_fx(function, decomposition_table=fxwrap.default_decompositions())(*inputs)


# --- a device that is not fxwrap's ----------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", representative([name for name in MODELS if name != "gpt2_eager_attention"]))
def test_models_run_on_a_custom_device(name: str, with_abacus: None) -> None:
    case: ModelCase = MODELS[name]
    model, inputs = case.build(seed=0, layers=1), case.inputs(seed=1)
    with torch.no_grad():
        expected = tree_leaves(model(**inputs))
        exported = torch.export.export(model, (), inputs, strict=False).module(check_guards=False)
    flat = tuple(inputs.values())
    graph = graph_of(lambda *flat: tree_leaves(exported(**dict(zip(inputs, flat, strict=True)))), *flat)
    compiled = fxwrap.compile_graph(graph, flat, options=Options(emitter="interpreter", passes=(STAGING,)))
    program = compiled.program
    launches = sum(isinstance(line, Launch) for line in program.lines())
    copies = sum(isinstance(line, AbacusCopy) for line in program.lines())
    assert copies and {kernel.language for kernel in program.kernels} == {"abacus"}
    assert all(outcome.reason != "its kernel could not be generated" for outcome in compiled.coverage)
    for emitter in ("interpreter", "python", "fx"):
        form = compiled if emitter == "interpreter" else emit(program, emitter)
        WORK.clear()
        results = form(*flat)
        assert WORK["launch"] == launches, emitter
        assert WORK["copy"] == (0 if emitter == "fx" else copies), emitter  # a graph has the line's expansion
        assert WORK["allocate"] > 0 or emitter == "interpreter", emitter
        for result, wanted in zip(results, expected, strict=True):
            torch.testing.assert_close(result, wanted, rtol=1e-4, atol=1e-5)


def _small(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x.exp() @ w + 1, -1).cumsum(0)


@pytest.mark.parametrize("emitter", EMITTERS)
def test_every_emitter_launches_custom_kernels(emitter: str, with_abacus: None) -> None:
    x, w = torch.rand(6, 8), torch.rand(8, 8)
    options = Options(emitter=emitter, passes=(STAGING,), memory_planning="auto", fallback="error")
    compiled = fxwrap.compile_graph(graph_of(_small, x, w), (x, w), options=options)
    slices = [line.offset for line in compiled.program.lines() if isinstance(line, PoolSlice)]
    assert all(offset % abacus.SPEC.alignment == 0 for offset in slices)
    assert fxwrap.parse(str(compiled.program)) == compiled.program  # knows the vendor's line
    WORK.clear()
    torch.testing.assert_close(compiled(x, w)[0], _small(x, w))
    assert WORK["launch"] == sum(isinstance(line, Launch) for line in compiled.program.lines()) > 0


def test_torch_compile_accepts_a_registered_device(with_abacus: None) -> None:
    x, w = torch.rand(6, 8, requires_grad=True), torch.rand(8, 8)
    WORK.clear()
    torch.compile(_small, backend="fxwrap")(x, w).sum().backward()
    gradient, x.grad = x.grad, None
    _small(x, w).sum().backward()
    torch.testing.assert_close(gradient, x.grad)
    assert WORK["launch"] >= 2


def test_a_device_is_part_of_the_cache_key() -> None:
    x = torch.rand(4)
    graph = graph_of(torch.sin, x)
    before = fxwrap.compile_graph(graph, (x,)), fxwrap.environment_key()
    with on_abacus():
        within = fxwrap.compile_graph(graph, (x,)), fxwrap.environment_key()
        assert "devices=(DeviceSpec(device_type='cpu', kernel_language='abacus'" in within[0].options.text()
    after = fxwrap.compile_graph(graph, (x,)), fxwrap.environment_key()
    assert str(before[0].program) == str(after[0].program) and before[0].options.text() == after[0].options.text() == ""
    assert before[0].key == after[0].key != within[0].key and before[1] == after[1] != within[1]
    assert [line.kernel for line in within[0].program.lines() if isinstance(line, Launch)]


def test_the_text_of_a_spec_names_the_traits_that_differ() -> None:
    assert CUDA.text() == "cuda"
    never_packed = replace(CUDA, multiprocessors=108, matmuls=replace(CUDA.matmuls, packed_bytes=0))
    assert never_packed.text() == "cuda(multiprocessors=108, matmuls.packed_bytes=0)"
    vendor = DeviceSpec("npu", "npu_c", attention=AttentionTraits(zeroes_fully_masked_rows=True))
    named = "device_type='npu', kernel_language='npu_c', attention.zeroes_fully_masked_rows=True"
    assert vendor.text() == f"DeviceSpec({named})"


@pytest.mark.parametrize("traits", [MatmulTraits, ConvolutionTraits, AttentionTraits, CollectiveTraits])
def test_traits_are_documented(traits: type) -> None:
    documentation = inspect.getdoc(traits) or ""
    assert all(f"\n    {field.name}: " in documentation for field in dataclasses.fields(traits))


def test_a_compile_reads_the_limits_of_its_device() -> None:
    """A device of the machine has them; a compile for another one names a spec with them."""
    x = torch.rand(1 << 16)
    graph = graph_of(lambda x: x.exp() * 2, x)
    triton = DeviceSpec("cpu", "triton", supports_multiple_devices=False)
    runtime = replace(CPU_RUNTIME, read_limits=lambda device: {"multiprocessors": 16})
    with devices.scoped_registration(triton, runtime=runtime):
        read = fxwrap.compile_graph(graph, (x,))
    assert read.options.text() == f"devices=({replace(triton, multiprocessors=16).text()}, cuda)"
    specs = [replace(CPU, multiprocessors=number) for number in (16, CPU.multiprocessors)]
    options = [Options(devices=(spec,), cpu_kernels="triton") for spec in specs]
    named = [fxwrap.compile_graph(graph, (x,), options=item) for item in options]
    assert named[0].options.text() == "cpu_kernels=triton devices=(cpu(multiprocessors=16))"
    blocks = [dict(item.program.kernels[0].options)["X_BLOCK"] for item in (read, *named)]
    assert blocks[0] == blocks[1] > blocks[2], "more programs for more processors"


def test_a_custom_device_program_is_saved_and_loaded(tmp_path: Path, with_abacus: None) -> None:
    x, w = torch.rand(6, 8), torch.rand(8, 8)
    options = Options(passes=(STAGING,), fallback="error")
    compiled = fxwrap.compile_graph(graph_of(_small, x, w), (x, w), options=options)
    compiled.save(tmp_path / "small.fxw")
    loaded = fxwrap.load(tmp_path / "small.fxw")  # the line's class is known, since its device is registered
    assert loaded.program == compiled.program
    with zipfile.ZipFile(tmp_path / "small.fxw") as archive:
        texts = [name for name in archive.namelist() if name.startswith("kernels/")]
    assert texts and all(name.endswith(f".{abacus.LANGUAGE.file_extension}") for name in texts)
    WORK.clear()
    torch.testing.assert_close(loaded(x, w)[0], _small(x, w))
    assert WORK["launch"] and WORK["copy"]


def test_devices_may_share_a_language_with_different_capabilities() -> None:
    x = torch.rand(4, 4)
    spec = replace(CPU, prefer_extern_ops=frozenset({"aten.exp.default"}))
    with devices.scoped_registration(spec, runtime=CPU_RUNTIME):
        compiled = fxwrap.compile_graph(graph_of(lambda x: x.sin().exp() + 1, x), (x,))
    (reason,) = [outcome.reason for outcome in compiled.coverage if outcome.kind == "call"]
    assert reason == "the device has no kernels for it"
    assert {kernel.language for kernel in compiled.program.kernels} == {"cpp"}


def test_a_language_without_a_grid() -> None:
    def load(source: str, signature: tuple[str, ...], options: Any) -> Any:
        launcher = abacus_runtime.load(source, signature, options)
        return lambda *arguments: launcher((1, 1, 1), *arguments)

    x, w = torch.rand(6, 8), torch.rand(8, 8)
    language, runtime = replace(abacus.LANGUAGE, gridless=True), DeviceRuntime(kernels=KernelRuntime(load))
    with on_abacus(language=language, runtime=runtime):
        compiled = fxwrap.compile_graph(graph_of(_small, x, w), (x, w), options=Options(fallback="error"))
        assert "kernels.load_gridless_kernel('abacus', " in compiled.source
        for emitter in ("python", "fx", "interpreter"):
            torch.testing.assert_close(emit(compiled.program, emitter)(x, w)[0], _small(x, w))
        (kernel, *_) = compiled.program.kernels
        with pytest.raises(FxwrapError, match=r"kernels in 'abacus' are called once: the grid must be \(1, 1, 1\)"):
            load_kernel(kernel.language, kernel.source, kernel.signature, kernel.options)((2, 1, 1))


def test_the_guide_matches_the_device(with_abacus: None, update_golden: bool) -> None:
    x, w = torch.rand(6, 8), torch.rand(8, 8)
    program = fxwrap.lower(graph_of(lambda x, w: torch.softmax(x @ w + 1, -1), x, w), (x, w))
    texts = {
        "print_abacus": inspect.getsource(abacus.print_abacus),
        "kernel": program.kernels[0].source,
        "line": inspect.getsource(AbacusCopy),
        "handler": inspect.getsource(copy_engine._in_python),
    }
    check_printed("docs/devices.md", texts, update_golden)
    guide = (ROOT / "docs" / "devices.md").read_text()
    rows = [line.split("|")[1] for line in guide.splitlines() if line.startswith("| `")]
    assert all(any(f"`{field.name}`" in row for row in rows) for field in dataclasses.fields(DeviceSpec))


# --- unregistered devices -------------------------------------------------------------------------------------------


def test_operators_on_an_unknown_device_are_called() -> None:
    x, w = torch.rand(6, 8, device="meta"), torch.rand(8, 8, device="meta")
    graph = graph_of(_small, x, w)
    for emitter in ("python", "fx", "interpreter"):
        compiled = fxwrap.compile_graph(graph, (x, w), options=Options(emitter=emitter))
        assert not compiled.program.kernels
        reasons = {outcome.reason for outcome in compiled.coverage}
        assert reasons == {"the device has no kernels for it", "a library call, by design: matmul"}  # of aten.mm
        assert compiled(x, w)[0].shape == (6, 8) and compiled(x, w)[0].is_meta


def test_a_device_without_kernels_calls_operators() -> None:
    x, w = torch.rand(6, 8), torch.rand(8, 8)
    graph = graph_of(_small, x, w)
    with on_abacus(spec=replace(abacus.SPEC, kernel_language=""), printer=None, language=None):
        registered = fxwrap.compile_graph(graph, (x, w))
    for compiled in (registered, fxwrap.compile_graph(graph, (x, w), options=Options(devices=(CUDA,)))):
        assert not compiled.program.kernels
        torch.testing.assert_close(compiled(x, w)[0], _small(x, w))


# --- errors ---------------------------------------------------------------------------------------------------------


KERNELS = KernelRuntime(abacus_runtime.load)


@pytest.mark.parametrize(
    ("spec", "keywords", "message"),
    [
        (CPU, {}, "device 'cpu': it is registered already. To replace it temporarily, use `with fxwrap.devices"),
        (DeviceSpec("npu", "npu_c"), {},
         r"'npu': there is no kernel language 'npu_c'. Use a registered one \('cpp', 'triton', 'fx'\), or "),
        (DeviceSpec("npu", "user_triton"), {"printer": abacus.print_abacus, "runtime": DeviceRuntime(KERNELS)},
         "device 'npu': the kernel language 'user_triton' is registered already. Omit `printer` to share it"),
        (DeviceSpec("npu", "cpp"), {"printer": abacus.print_abacus, "runtime": DeviceRuntime(KERNELS)},
         "device 'npu': the kernel language 'cpp' is registered already. Omit `printer` to share it"),
        (DeviceSpec("npu", "npu_c"), {"printer": abacus.print_abacus},
         "device 'npu': it has a printer, but no launcher for kernels in 'npu_c'. Pass `runtime=DeviceRuntime"),
        (DeviceSpec("npu", ""), {"printer": abacus.print_abacus, "runtime": DeviceRuntime(KERNELS)},
         "device 'npu': it has a printer, but its spec has no kernel language. Set"),
        (DeviceSpec("npu", "npu_c"), {"language": KernelLanguage("npu")},
         "device 'npu': its spec has the kernel language 'npu_c', and `language` is 'npu'"),
    ],
)  # fmt: skip
def test_invalid_registrations_are_rejected(spec: DeviceSpec, keywords: dict[str, Any], message: str) -> None:
    before = devices.registered_specs()
    with pytest.raises(DeviceError, match=message):
        devices.register(spec, **keywords)
    assert devices.registered_specs() == before == (CPU, CUDA)


def test_a_language_is_registered_once() -> None:
    with pytest.raises(FxwrapError, match="the kernel language 'cpp' is registered; give yours another name"):
        devices.register_language(KernelLanguage("cpp"), KERNELS)


def test_devices_of_the_options_are_specs() -> None:
    with pytest.raises(OptionError, match=r"option 'devices' takes DeviceSpecs, not \('cpu',\)"):
        Options(devices=("cpu",))  # type: ignore[arg-type]
    assert Options(devices=[CPU]).devices == (CPU,)  # type: ignore[arg-type]


@pytest.mark.parametrize("language", ["npu_c", "user_triton"])
def test_options_with_an_unknown_language(language: str) -> None:
    x = torch.rand(4)
    with pytest.raises(DeviceError, match=f"device 'cpu': there is no kernel language '{language}'"):
        fxwrap.lower(graph_of(torch.sin, x), (x,), options=Options(devices=(replace(CPU, kernel_language=language),)))


def test_a_printer_that_declines_falls_back_to_operators() -> None:
    x, w = torch.rand(6, 8), torch.rand(8, 8)
    graph = graph_of(_small, x, w)

    def without_scans(request: fxwrap.printers.KernelRequest) -> Sequence[Any]:
        return () if request.kernel.scans else abacus.print_abacus(request)

    with on_abacus(printer=without_scans):
        with pytest.warns(FusionWarning, match="the printer for 'abacus' on device 'cpu' declines the kernel"):
            compiled = fxwrap.compile_graph(graph, (x, w))
        with pytest.raises(FxwrapError, match="declines the kernel"):
            fxwrap.compile_graph(graph, (x, w), options=Options(fallback="error"))
        torch.testing.assert_close(compiled(x, w)[0], _small(x, w))


def test_a_kernel_compile_failure_falls_back_to_operators() -> None:
    x = torch.rand(4)

    def damaged(request: fxwrap.printers.KernelRequest) -> Sequence[Any]:
        return [lambda: replace(abacus.print_abacus(request)[0](), source="def kernel(")]

    with on_abacus(printer=damaged):
        with pytest.warns(FusionWarning, match="cannot be compiled.*the Abacus cannot read it"):
            compiled = fxwrap.compile_graph(graph_of(torch.sin, x), (x,))
        torch.testing.assert_close(compiled(x)[0], x.sin())


def test_an_incomplete_runtime_names_the_missing_function() -> None:
    meta = torch.device("meta")
    with devices.scoped_registration(DeviceSpec("meta", "")):
        for name, call in {
            "guard": lambda: library.implementation(torch.ops.fxwrap.enter_device.default)(meta),
            "random_state": lambda: tensors.random_state("meta"),
            "set_random_state": lambda: tensors.set_random_state("meta", torch.get_rng_state()),
        }.items():
            wanted = rf"device 'meta': its runtime has no function '{name}'.*runtime=DeviceRuntime\({name}=\.\.\.\)"
            with pytest.raises(DeviceError, match=wanted):
                call()


def test_a_program_for_an_unavailable_device_raises() -> None:
    x = torch.rand(4)
    with on_abacus():
        compiled = fxwrap.compile_graph(graph_of(torch.sin, x), (x,), options=Options(emitter="interpreter"))
        torch.testing.assert_close(compiled(x)[0], x.sin())
    with pytest.raises(FxwrapError, match=r"no launcher for kernels in 'abacus'.*Import the package that registers"):
        compiled(x)
    with pytest.raises(FxwrapError, match="no launcher for kernels in 'abacus'"):
        load_gridless_kernel("abacus", "", (), ())


# --- the runtime halves ---------------------------------------------------------------------------------------------


def test_guards_and_random_numbers_use_the_registered_runtime() -> None:
    states: list[torch.Tensor] = []
    runtime = replace(RUNTIME, set_random_state=lambda _device, state: states.append(state))
    with on_abacus(runtime=runtime):
        WORK.clear()
        torch.ops.fxwrap.enter_device(torch.device("cpu"))
        torch.ops.fxwrap.exit_device(torch.device("cpu"))
        assert WORK["guard"] == 1
        state = torch.ops.fxwrap.random_state(torch.device("cpu"))
        torch.ops.fxwrap.set_random_state(state, torch.device("cpu"))
        assert len(states) == 1 and torch.equal(states[0], torch.get_rng_state())
        assert state.numel() == abacus.SPEC.random_state_bytes


def _has_all(runtime: DeviceRuntime, device: torch.device) -> None:
    """Checks every function of a runtime half."""
    assert runtime.allocator and runtime.current_stream
    assert runtime.random_state and runtime.set_random_state
    tensor = runtime.allocator(device)((2, 3), (1, 2), torch.float16)
    assert (tensor.shape, tensor.stride()) == ((2, 3), (1, 2))
    assert (tensor.dtype, tensor.device.type) == (torch.float16, device.type)
    current = runtime.current_stream(device)
    with guard(device), device_context(device, 0)():
        assert runtime.current_stream(device) == current
    state = runtime.random_state(device)
    first = torch.rand(4, device=device)
    runtime.set_random_state(device, state)
    assert torch.equal(torch.rand(4, device=device), first)
    spec = devices.registered_spec(device.type)
    assert spec is not None and state.numel() == spec.random_state_bytes


def test_cpu_runtime() -> None:
    _has_all(CPU_RUNTIME, torch.device("cpu"))


@pytest.mark.gpu
def test_cuda_runtime() -> None:
    device = torch.device("cuda", 0)
    _has_all(CUDA_RUNTIME, device)
    assert CUDA_RUNTIME.current_stream
    before = CUDA_RUNTIME.current_stream(device)
    with device_context(device, 1)():
        first = CUDA_RUNTIME.current_stream(device)
    with device_context(device, 1)():
        assert CUDA_RUNTIME.current_stream(device) == first != before
    assert CUDA_RUNTIME.current_stream(device) == before


# --- no code compares names -----------------------------------------------------------------------------------------

ABOUT_TORCH = {
    "artifact.cmake_export": "the main function that it writes makes example tensors on the CPU",
    "compile.backend": "tensors of the host may come with those of any device",
    "converters.fx.kernels": "on the CPU nothing but Triton's interpreter runs Triton's kernels",
    "debugging.dispatch_modes": "the kernels of eager mode on the CPU have these defects",
    "fused_communication.support": "torch's fused operators need symmetric memory, which CUDA devices have",
    "fx_passes.attention.calls": "torch draws the mask of a dropout in another way on the CPU",
    "fx_passes.convolutions.operands": "one of the convolutions of torch's library on the CPU corrupts memory",
    "fx_passes.dropout_masks": "torch draws the mask of a dropout in another way on the CPU",
    "lowering.symbols.cpu_scalars": "torch mixes tensors of rank 0 on the CPU with those of any device",
    "lowering.rules.norms": "eager mode takes parameters in float32 on the CPU only",
    "lowering.rules.pooling": "eager mode lacks this dtype on the CPU",
    "lowering.rules.softmax": "eager mode lacks these dtypes on the CPU",
    "lowering.rules.pointwise": "torch mixes tensors of rank 0 on the CPU with those of any device",
    "runtime.group_speeds": "torch names the models of CUDA devices, and waits for all devices but the CPU",
    "runtime.symmetric_memory": "torch has symmetric memory on CUDA devices",
    "printers.languages": "Triton's interpreter, which runs kernels of CPU tensors, multiplies bfloat16 wrongly",
    "runtime.unusual_inputs": "meta tensors have no generator",
    "torch_compat.allocation": "torch has two private allocators",
    "torch_compat.data_parallel": "FSDP2 moves inputs to all devices but the CPU",
    "torch_compat.prepacked": "MKL and oneDNN have their own layouts of weights on CPUs",
    "torch_compat.processor": "one generation of CUDA devices has a defect in torch's grouped matmul",
    "training.trace": "torch's optimizers count steps on the CPU or on the device of the parameters",
}
"""Where the name of a device type is compared, since it is torch's own CPU, CUDA or meta that is meant."""

_NAMED = ("type", "device_type", "language", "kernel_language")


def _compares_names(source: str) -> bool:
    """Whether a text compares a device's type or a kernel's language with a literal."""
    if not any(f".{name}" in source for name in _NAMED):  # to parse all takes seconds
        return False
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            if any(isinstance(side, ast.Attribute) and side.attr in _NAMED for side in sides):
                literals = [item for side in sides for item in ast.walk(side) if isinstance(item, ast.Constant)]
                if any(isinstance(item.value, str) for item in literals):
                    return True
    return False


def test_no_code_compares_device_or_language_names() -> None:
    folder = Path(fxwrap.__file__).parent
    paths = [path for path in sorted(folder.rglob("*.py")) if _compares_names(path.read_text())]
    names = [".".join(path.relative_to(folder).with_suffix("").parts) for path in paths]
    assert names == sorted(ABOUT_TORCH), "ask DeviceSpec or KernelLanguage for the fact that is meant"
    assert _compares_names("if kernel.language in ('cpp', 'triton'): pass") and _compares_names("a.type != 'cpu'")
    assert not _compares_names("emitter == 'cpp' and a.type == b.type")
