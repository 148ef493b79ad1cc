"""The Python converter: its text, the lifetimes of tensors, and its errors."""

from __future__ import annotations

import gc
import linecache
import traceback
import weakref
from pathlib import Path

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap.compile import emit
from fxwrap.errors import InputError
from fxwrap.options import EMITTERS
from fxwrap.torch_compat import allocator, strided_view, strided_view_fallback
from tests.devices.copy_engine import AbacusCopy
from tests.support.garbage import freeze_heap
from tests.support.golden import check_golden, read_section, sections
from tests.support.sample import contents
from tests.support.samples import SAMPLES

GOLDENS = Path(__file__).parent / "golden"
RULES = sorted(path.stem for path in GOLDENS.glob("python_*.txt"))


@pytest.mark.parametrize("rule", RULES)
def test_golden_text(rule: str, update_golden: bool) -> None:
    path = GOLDENS / f"{rule}.txt"
    text = read_section(path, "input")
    program = fxwrap.verify(fxwrap.parse(text))
    check_golden(path, sections([("input", text), ("python", fxwrap.to_python(program).source)]), update_golden)


def test_golden_files_exist() -> None:
    assert len(RULES) >= 8


@pytest.mark.parametrize("name", [name for name, sample in SAMPLES.items() if sample.cpu_runnable])
def test_samples_match_the_interpreter(name: str) -> None:
    sample = SAMPLES[name]
    program = sample.program()
    ours, theirs = sample.inputs(3), sample.inputs(3)
    torch.manual_seed(1)
    wanted = fxwrap.run(program, theirs)
    torch.manual_seed(1)
    result = fxwrap.to_python(program)(*ours)
    torch.testing.assert_close(contents(result), contents(wanted), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(contents(ours), contents(theirs), rtol=0, atol=0, equal_nan=True)


def test_the_text_is_the_same_on_every_run() -> None:
    graph = make_fx(lambda x: (x.softmax(0), x.sort()))(torch.randn(4))
    texts = {fxwrap.to_python(fxwrap.lower(graph, [torch.randn(4)])).source for _ in range(3)}
    assert len(texts) == 1


def test_intermediates_are_released_at_their_free() -> None:
    alive: list[int] = []
    results: list[weakref.ref[torch.Tensor]] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            results.append(weakref.ref(result))
            alive.append(sum(reference() is not None for reference in results))
            return result

    graph, calls = make_fx(lambda x: x.exp().sin().cos().tan().neg())(torch.randn(3)), fxwrap.Options(fuse=False)
    program = fxwrap.lower(graph, [torch.randn(3)], options=calls)
    boxed = fxwrap.to_python(program).boxed
    inputs = [torch.randn(3)]
    with Watch():
        boxed(inputs)
    assert max(alive) == 2  # the operand and the result


def test_a_donated_input_is_released_at_its_last_use() -> None:
    freeze_heap()
    text = """program @p(%x: owned f32[3]@cpu) {
  %a = extern.call @aten.exp.default(%x) : f32[3]@cpu
  memory.free(%x)
  %b = extern.call @test_python.probe.default(%a) effect_set=(unknown()) : f32[3]@cpu
  memory.free(%a)
  control.return(%b)
}
"""
    arguments = [torch.randn(3)]
    reference = weakref.ref(arguments[0])
    seen: list[bool] = []
    with torch.library._scoped_library("test_python", "FRAGMENT") as library:
        library.define("probe(Tensor x) -> Tensor")

        def probe(x: torch.Tensor) -> torch.Tensor:
            gc.collect()
            seen.append(reference() is None)
            return x.clone()

        library.impl("probe", probe, "CPU")
        fxwrap.to_python(fxwrap.parse(text)).boxed(arguments)
    assert seen == [True]
    assert arguments == []


def test_observable_view_properties_match_eager() -> None:
    text = read_section(GOLDENS / "python_unobservable_views_are_storage_views.txt", "input")
    x, m = torch.randn(4, 6), torch.randn(4)
    transposed, shown, both, row = fxwrap.to_python(fxwrap.parse(text))(x, m)
    assert m._version == 1
    assert shown._base is x
    both.zero_()
    assert row._version == 1
    assert transposed._version == 0


def test_a_storage_view_equals_as_strided(monkeypatch: pytest.MonkeyPatch) -> None:
    base = torch.randn(4, 6)[1:]
    mine, theirs = strided_view(base, (2, 3), (1, 4), 5), strided_view_fallback(base, (2, 3), (1, 4), 5)
    assert mine.tolist() == theirs.tolist()
    assert mine.stride() == theirs.stride() and mine.storage_offset() == theirs.storage_offset()
    theirs.zero_()
    assert mine.sum() == 0 and mine._version == base._version == 0
    monkeypatch.delattr(torch._C._dynamo.guards, "_empty_strided_cpu")
    for device in ("cpu", "meta"):
        tensor = allocator(device)((2, 3), (1, 2), torch.bfloat16)
        assert (tensor.stride(), tensor.dtype, tensor.device.type) == ((1, 2), torch.bfloat16, device)


def test_a_debugger_finds_the_source() -> None:
    graph = make_fx(lambda x, y: torch.mm(x, y))(torch.randn(2, 2), torch.randn(2, 2))
    compiled = fxwrap.compile_graph(graph, [torch.randn(2, 2)] * 2, options=fxwrap.Options(check_inputs=False))
    with pytest.raises(RuntimeError) as caught:
        compiled(torch.randn(2, 3), torch.randn(2, 3))
    frame = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert Path(frame.filename).read_text() == compiled.source
    assert "torch.mm" in linecache.getline(frame.filename, frame.lineno)


@pytest.mark.parametrize("emitter", EMITTERS)
def test_a_misaligned_input_is_rejected(emitter: str) -> None:
    text = """program @p(%x: borrowed f32[4]@cpu) {
  check.layout(%x) name="x" alignment=16 : f32[4]@cpu
  %y = extern.call @aten.exp.default(%x) : f32[4]@cpu
  control.return(%y)
}
"""
    emitted = emit(fxwrap.parse(text), emitter)
    memory = torch.randn(8)
    torch.testing.assert_close(emitted(memory[:4]), (memory[:4].exp(),))
    with pytest.raises(InputError, match=r"input 'x': its address 0x[0-9a-f]+ is no multiple of 16 bytes"):
        emitted(memory[1:5])


@pytest.mark.parametrize("emitter", EMITTERS)
def test_reuse_respects_the_storage_offset(emitter: str) -> None:
    text = """program @p(%x: owned f32[4]@cpu) {
  %y = memory.reuse(%x) : f32[2, 2]@cpu
  extern.mutate @aten.fill_.Scalar(%y, 7.0) writes=(%y)
  control.return(%y)
}
"""
    memory = torch.zeros(12)
    (result,) = emit(fxwrap.parse(text), emitter).boxed([memory[4:8]])
    torch.testing.assert_close(result, torch.full((2, 2), 7.0))
    assert memory.tolist() == [0.0] * 4 + [7.0] * 4 + [0.0] * 4


def test_autocast_is_off() -> None:
    graph = make_fx(lambda x: x @ x)(torch.randn(2, 2))
    compiled = fxwrap.compile_graph(graph, [torch.randn(2, 2)])
    with torch.autocast("cpu", torch.bfloat16):
        (result,) = compiled(torch.randn(2, 2))
    assert result.dtype is torch.float32


def test_extension_lines_use_their_handler_or_expansion() -> None:
    sample = SAMPLES["extension"]
    plain = fxwrap.to_python(sample.program()).source
    assert "copy_" in plain

    def handler(converter, line):
        converter.convert(line.expand()[0])
        converter.statements.append(f"vendor_copy({line.result.name}, {line.source.name})")

    assert "vendor_copy(" in fxwrap.to_python(sample.program(), {AbacusCopy: handler}).source
