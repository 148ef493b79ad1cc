"""Emitted C++ has the interpreter's results, fails as eager fails, and frees memory where the program does."""

from __future__ import annotations

import copy
import math
import re
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import fxwrap
from benchmarks.recorded_calls import Recorder, replay
from fxwrap import parse, run, to_cpp, to_python
from fxwrap.comparison import GRADIENT_NORM_FLOOR
from fxwrap.converters.cpp.text import RESERVED, comment_text, sanitize_identifier, string_text
from fxwrap.errors import InputError, NativeBuildError, UnsupportedError
from fxwrap.runtime import native
from fxwrap.wrapper_ir import KernelDefinition, print_kernel
from tests.devices.copy_engine import AbacusCopy
from tests.support.capture import CapturedGraph, capture_graphs, random_like
from tests.support.jobs import single_rank_job
from tests.support.long_form import LONG
from tests.support.models import MODELS, SHALLOW, train_step
from tests.support.resident_memory import resident_bytes
from tests.support.sample import contents
from tests.support.samples import SAMPLES

RUNNABLE = [name for name, sample in SAMPLES.items() if sample.cpu_runnable]


def assert_same(got: Any, wanted: Any) -> None:
    """Equal numbers, and tensors equal to the last bit in one layout."""
    assert type(got) is type(wanted)
    if not isinstance(wanted, torch.Tensor):
        assert got == wanted
        return
    assert (got.dtype, got.shape, got.stride()) == (wanted.dtype, wanted.shape, wanted.stride())
    torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)


def relative_error(got: torch.Tensor, wanted: torch.Tensor, floor: float = 1e-30) -> float:
    """The norm of the difference over that of the expected value, which counts as at least `floor`."""
    difference = (got.double() - wanted.double()).norm()
    return float(difference / wanted.double().norm().clamp_min(floor))


# --- meaning ---------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", RUNNABLE)
def test_samples_match_the_interpreter(name: str) -> None:
    sample = SAMPLES[name]
    program = sample.program()
    copies = {key: copy.deepcopy(payload) for key, payload in program.store.tensors.items()}
    own = program.replace(store=replace(program.store, tensors=copies))
    emitted = to_cpp(own)
    for seed in (1, 2):
        inputs, copied_inputs = sample.inputs(seed), sample.inputs(seed)
        flat_inputs, flat_copies = list(inputs), list(copied_inputs)
        torch.manual_seed(seed)
        expected = run(program, flat_inputs)
        torch.manual_seed(seed)
        actual = emitted.boxed(flat_copies)
        assert flat_copies == []
        assert len(actual) == len(expected)
        for mine, reference in zip(actual, expected):
            assert_same(mine, reference)
        stored = program.store.tensors.values()
        for mine, reference in zip([*contents(copied_inputs), *copies.values()], [*contents(inputs), *stored]):
            assert_same(mine, reference)  # mutated alike


@pytest.mark.long  # `tests/models` has each emitter
def test_model_inference_and_training_match_eager() -> None:
    """Through the backend itself, guards and all; `tests/models/test_models.py` runs all models by every emitter."""
    case = MODELS["resnet"]
    options = {"emitter": "cpp"}
    model, inputs = case.build(seed=0), case.inputs(seed=1)
    with torch.no_grad():
        expected = model(**inputs)
        actual = torch.compile(model, backend="fxwrap", options=options, fullgraph=True)(**inputs)
    for key, tensor in expected.items():
        if isinstance(tensor, torch.Tensor):
            assert relative_error(actual[key], tensor) < 1e-5
    eager, trained = (case.build(seed=0, dropout=case.has_dropout) for _ in range(2))
    step = train_step(eager, eager, case.inputs(seed=2, training=True), seed=3)
    compiled = torch.compile(trained, backend="fxwrap", options=options)
    own = train_step(trained, compiled, case.inputs(seed=2, training=True), seed=3)
    assert relative_error(own.loss, step.loss) < 1e-6
    # The bias of attention keys has no gradient in exact arithmetic: what it has is rounding.
    floor = GRADIENT_NORM_FLOOR * math.hypot(*[float(gradient.norm()) for gradient in step.gradients.values()])
    for key, gradient in step.gradients.items():
        assert relative_error(own.gradients[key], gradient, floor) < 1e-5, key
    for key, buffer in step.buffers.items():
        assert relative_error(own.buffers[key], buffer) < 1e-6, key


def _run_traced(graph: CapturedGraph, recorder: Recorder) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = [random_like(fake, generator) for fake in graph.example_inputs]
    with recorder, torch.no_grad():
        graph.graph_module(*inputs)


@pytest.mark.long  # `tests/models` calls them in their programs
def test_every_operator_call_of_the_models_matches_eager() -> None:
    recorder = Recorder()
    for name in ("gpt2", "llama", "t5", "vit", "resnet") if LONG else ("gpt2", "llama", "resnet"):
        case = SHALLOW[name]
        for training in (False, True) if name in ("gpt2", "resnet") else (True,):  # inference adds few calls
            for graph in capture_graphs(case, training, dropout=training and case.has_dropout):
                _run_traced(graph, recorder)
    calls = list(recorder.calls.values())
    assert len({call.target for call in calls}) > (60 if LONG else 50)
    failures = {calls[position].target: reason for position, reason in replay(calls, to_cpp).items()}
    assert failures == {}


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    with torch.library._scoped_library("fxwrap_cpp_test", "FRAGMENT") as library:
        yield library


def test_custom_operators_in_python_run(library: torch.library.Library) -> None:
    library.define("parts(Tensor x, int[] sizes, *, str how='plain', float? scale=None) -> (Tensor[], int, bool)")
    library.define("bump(Tensor(a!) x, Scalar by) -> ()")

    def parts(x: torch.Tensor, sizes: list[int], *, how: str, scale: float | None) -> tuple[Any, int, bool]:
        return [part.clone() for part in (x * (scale or 1.0)).split(sizes)], len(how), scale is None

    def bump(x: torch.Tensor, by: int) -> None:
        x.add_(by)

    library.impl("parts", parts, "CompositeExplicitAutograd")
    library.impl("bump", bump, "CPU")
    program = parse("""program @custom(%x: mutable f32[5]@cpu) {
  extern.mutate @fxwrap_cpp_test.bump.default(%x, 2) writes=(%x)
  [%a, %b], %n, %plain = extern.call @fxwrap_cpp_test.parts.default(%x, [2, 3], how="ab\\"c", scale=0.5) \
: [f32[2]@cpu, f32[3]@cpu], int, bool
  control.return(%b, %n, %plain, %a)
}
""")
    x = torch.arange(5.0)
    b, n, plain, a = to_cpp(program)(x)
    assert torch.equal(x, torch.arange(5.0) + 2)
    assert torch.equal(torch.cat([a, b]), x * 0.5) and n == 4 and plain is False


@pytest.fixture
def single_process_group() -> Iterator[str]:
    with single_rank_job() as name:
        yield name


def test_collectives_run(single_process_group: str) -> None:
    reduce = f'@_c10d_functional.all_reduce.default(%x, "sum", "{single_process_group}")'
    program = parse(f"""program @reduce(%x: borrowed f32[8]@cpu) {{
  %sum = collective.start {reduce} group="{single_process_group}" : f32[8]@cpu
  %own = extern.call @aten.exp.default(%x) : f32[8]@cpu
  %ready = collective.wait(%sum) group="{single_process_group}" : f32[8]@cpu
  %y = extern.call @aten.add.Tensor(%own, %ready) : f32[8]@cpu
  memory.free(%sum)
  memory.free(%own)
  control.return(%y)
}}
""")
    x = torch.rand(8)
    assert torch.equal(to_cpp(program)(x)[0], x.exp() + x)


def test_an_unknown_operator_is_named_in_the_error() -> None:
    program = parse("""program @unknown(%x: borrowed f32[5]@cpu) {
  %y = extern.call @fxwrap_nowhere.missing.default(%x) : f32[5]@cpu
  control.return(%y)
}
""")
    with pytest.raises(RuntimeError, match="fxwrap_nowhere::missing"):
        to_cpp(program)(torch.rand(5))


def test_arithmetic_that_fails_raises_pythons_error() -> None:
    program = parse("""program @divide(s0: int, s1: int, f0: float) {
  control.return(floordiv(s0, s1), floor_to_int(f0))
}
""")
    for emitted in (to_python(program), to_cpp(program)):
        assert emitted(-7, 2, 2.5) == (-4, 2)
        with pytest.raises(ZeroDivisionError, match="division or modulo by zero"):
            emitted(-7, 0, 2.5)
        with pytest.raises(OverflowError, match="cannot convert"):
            emitted(-7, 2, math.inf)
    # Headers of the standard library take a compiler several times as long as the program does.
    assert {*re.findall("#include (.*)", to_cpp(program).source)} == {'"bridge.h"', '"kernel_failure.h"', "<cstdint>"}


def test_a_registered_handler_emits_an_extension_line() -> None:
    program = SAMPLES["extension"].program()

    def write(converter: Any, line: AbacusCopy) -> None:
        converter.unit.operator("aten.clone.default")
        windows = converter.writer.scope.slots_by_root.pop(line.staging.name)
        converter.writer.drop(list(windows.values()))
        source, result = converter.writer.name_of(line.source), converter.writer.define(line.result)
        converter.writer.call("aten.clone.default", [source], [result])

    emitted = to_cpp(program, handlers={AbacusCopy: write})
    assert "copy(f, " not in emitted.source and "copy(f, " in to_cpp(program).source
    x = torch.rand(4, 8)
    assert all(torch.equal(result, x) for result in emitted(x))


def test_profile_ranges_appear_in_the_profiler() -> None:
    with torch.profiler.profile() as profile:
        to_cpp(SAMPLES["notes"].program())(torch.rand(0, 4))
    events = {event.name: event for event in profile.events()}
    assert {"outer", "inner", "aten::exp"} <= events.keys()
    assert events["outer"].time_range.start <= events["inner"].time_range.start
    assert events["inner"].time_range.end <= events["outer"].time_range.end


def test_one_program_runs_in_several_threads_at_once() -> None:
    emitted = to_cpp(SAMPLES["while_loops"].program())

    def last(start: int) -> int:
        return max(int(emitted(torch.tensor(first), torch.ones(4), torch.ones(4))[0]) for first in [start] * 50)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(last, [5, 50, -3, 70])) == [11, 50, 11, 70]


# --- text ------------------------------------------------------------------------------------------------------------


def test_the_source_is_readable() -> None:
    program = parse("""program @layer(%x: owned f32[s0, 8]@cpu, %w: borrowed f32[8, 4]@cpu) options="emitter=cpp" {
  s0 = symbol.size(%x) dim=0
  check.layout(%x) name="x" : f32[s0, 8]@cpu
  %h = extern.call @aten.mm.default(%x, %w) : f32[s0, 4]@cpu
  memory.free(%x)
  %t = memory.view(%h) : f32[4, s0 | 1, 4]@cpu
  %y = extern.call @aten.clamp.default(%t, none, 1.5) : f32[4, s0 | 1, 4]@cpu
  memory.free(%h)
  control.return(%y, 4*s0)
}
""")
    assert (
        to_cpp(program).source
        == """\
// Program layer, emitted by fxwrap.
// options: emitter=cpp
#include "bridge.h"
namespace program {
using namespace fxwrap;

constexpr Slot x{0}, w{1}, h{2}, t{3}, y{4};
constexpr IntSymbol s0{0}, number_0{1};
static Device cpu{"cpu"};
static Operator aten_mm{"aten::mm", ""};
static Operator aten_clamp{"aten::clamp", ""};

static void run(Frame& f) {
  f.ints[s0] = size(f, x, 0);
  check_layout(f, x, "x", {f.ints[s0], 8}, {8, 1}, DType::float32, cpu);
  CALL(f, aten_mm, (x, w), (h));
  drop(f, x);
  view(f, t, h, {4, f.ints[s0]}, {1, 4}, 0);
  CALL(f, aten_clamp, (t, none, 1.5), (y));
  drop(f, h); drop(f, t);
  f.ints[number_0] = 4*f.ints[s0];
}

static constexpr Input inputs[] = {{"x", owned(x)}, {"w", w}};
static constexpr Arg outputs[] = {y, number_0};
}  // namespace program

FXWRAP_EXPORT const fxwrap::Program fxwrap_program = {
    .name = "layer", .slots = 5, .ints = 2, .inputs = program::inputs, .outputs = program::outputs,
    .run = program::run};
"""
    )


def test_origins_are_comments() -> None:
    graph = capture_graphs(SHALLOW["bert"], training=False)[0]
    options = fxwrap.Options(emitter="cpp")
    source = fxwrap.compile_graph(graph.graph_module, graph.example_inputs, options=options).source
    assert re.search(r"  // \w+: aten\.addmm  \S*\.py:\d+\n  CALL\(f, aten_addmm,", source)
    operators = r"aten\.add\.Tensor, aten\.native_layer_norm"
    launch = rf"  // [^:]+: {operators}  \S*\.py:\d+  add_layer_norm_\d+:\d+\n  KERNEL\(f, add_layer_norm_\d+, \("
    assert re.search(launch, source)


def test_reserved_names_are_renamed() -> None:
    wishes = ["float", "size", "f", "run", "NULL", "aten_exp", "a.b", "a_b", "__x", "s0", "std", "v_f", "x__y", "7up"]
    inputs = ", ".join([f"%{name}: borrowed f32[2]@cpu" for name in wishes if name.isidentifier() or "." in name])
    program = parse(f"""program @names({inputs}) {{
  s0 = symbol.size(%float) dim=0
  %y = extern.call @aten.exp.default(%aten_exp) : f32[2]@cpu
  control.return(%y, %f, s0, %v_f, %a.b, %a_b)
}}
""")
    inputs = [torch.rand(2) for _ in program.inputs]
    y, f, s0, v_f, dotted, plain = to_cpp(program)(*inputs)
    by_name = {item.name: tensor for item, tensor in zip(program.inputs, inputs)}
    assert torch.equal(y, by_name["aten_exp"].exp()) and s0 == 2
    assert f is by_name["f"] and v_f is by_name["v_f"] and dotted is by_name["a.b"] and plain is by_name["a_b"]
    assert sanitize_identifier("7up") == "v_7up" and sanitize_identifier("x__y") == "x_y"


def test_every_name_that_the_bridge_declares_is_reserved() -> None:
    header = (Path(native.__file__).parent / "bridge" / "bridge.h").read_text()
    kinds = r"struct|enum class|enum|union|using|constexpr \w+|inline \w+\*?"
    declared = set(re.findall(rf"^(?:{kinds}) (\w+)", header, re.MULTILINE))
    assert {"Slot", "call", "size", "none", "fail_assert", "Ints", "data_ptr"} <= declared
    assert declared <= RESERVED


def test_comments_and_strings_are_escaped() -> None:
    assert comment_text("one\ntwo\\") == "// one\n// two\\|"
    assert comment_text("") == "//"
    assert string_text('a"b\\c\n??/é') == '"a\\"b\\\\c\\n\\?\\?/\\303\\251"'
    program = parse("""program @strings(%x: borrowed f32[2]@cpu) {
  note.comment() text="ends in \\\\"
  check.layout(%x) name="a \\"quoted\\" ??/ näme" : f32[2]@cpu
  control.return(%x)
}
""")
    emitted = to_cpp(program)
    assert torch.equal(emitted(torch.ones(2))[0], torch.ones(2))
    with pytest.raises(InputError, match=re.escape("input 'a \"quoted\" ??/ näme'")):
        emitted(torch.ones(3))


def chain_text(count: int) -> str:
    lines = ["program @chain(%v0: borrowed f32[4]@cpu) {"]
    for index in range(count):
        lines.append(f"  %v{index + 1} = extern.call @aten.add.Scalar(%v{index}, 1) : f32[4]@cpu")
        if index:
            lines.append(f"  memory.free(%v{index})")
    return "\n".join([*lines, f"  control.return(%v{count})", "}", ""])


def test_long_programs_and_long_blocks_are_split_into_functions() -> None:
    emitted = to_cpp(parse(chain_text(500)))
    assert "part_4(f);" in emitted.source
    longest = max(len(text.splitlines()) for text in re.findall(r"static void .*?\n}", emitted.source, re.DOTALL))
    assert longest < 210
    assert torch.equal(emitted(torch.zeros(4))[0], torch.full((4,), 500.0))
    body = chain_text(300).replace("%v", "%t").splitlines()[1:-2]
    nested = "\n".join(
        ["program @nested(%flag: borrowed bool[]@cpu, %x: borrowed f32[4]@cpu) {",
         "  %y = control.cond(%flag, %x) : f32[4]@cpu {", "  ^then(%t0: f32[4]@cpu):", *body,
         "    control.yield(%t300)", "  ^else(%e: f32[4]@cpu):",
         "    %e1 = extern.call @aten.neg.default(%e) : f32[4]@cpu", "    control.yield(%e1)", "  }",
         "  control.return(%y)", "}", ""]
    )  # fmt: skip
    emitted = to_cpp(parse(nested))
    longest = max(len(text.splitlines()) for text in re.findall(r"static void .*?\n}", emitted.source, re.DOTALL))
    assert longest < 210
    assert torch.equal(emitted(torch.tensor(True), torch.zeros(4))[0], torch.full((4,), 300.0))
    assert torch.equal(emitted(torch.tensor(False), torch.ones(4))[0], -torch.ones(4))


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ("  %y = control.call @again(%x) : f32[4]@cpu\n", "recursive"),
        ("  kernel.launch @k(%x) outs=(%x) grid=(2, 1, 1)\n", "grid"),
        ("  %e = extern.call @aten.empty.memory_format([2], dtype=dtype(i4)) : i4[2]@cpu\n", "torch.int4"),
    ],
)
def test_unsupported_lines_are_rejected_with_a_reason(lines: str, reason: str) -> None:
    text = f"""program @refused(%x: mutable f32[4]@cpu) {{
{lines}  control.return()
}}
function @again(%a: f32[4]@cpu) {{
  %b = control.call @again(%a) : f32[4]@cpu
  control.yield(%b)
}}
""" + print_kernel(KernelDefinition("k", "cpp", "", ("*f32", "*f32")))
    with pytest.raises(UnsupportedError, match=reason) as caught:
        to_cpp(parse(text))
    assert caught.value.converter == "cpp" and caught.value.line.strip()


# --- errors ----------------------------------------------------------------------------------------------------------

INDEX = """program @pick(%x: borrowed f32[65536]@cpu, %i: borrowed i64[1]@cpu) {
  %big = extern.call @aten.exp.default(%x) : f32[65536]@cpu
  %y = extern.call @aten.index_select.default(%big, 0, %i) : f32[1]@cpu
  memory.free(%big)
  control.return(%y)
}
"""


def test_a_failing_operator_raises_eagers_error_without_leaks() -> None:
    emitted = to_cpp(parse(INDEX))
    x, bad = torch.rand(65536), torch.tensor([70000])
    with pytest.raises(Exception) as eager:
        torch.index_select(x.exp(), 0, bad)
    before = resident_bytes()
    for _ in range(1000):
        with pytest.raises(type(eager.value)) as caught:
            emitted(x, bad)
        assert str(caught.value) == str(eager.value)
    assert resident_bytes() - before < 64 * 2**20  # a leak would be 250 MiB
    assert torch.equal(emitted(x, torch.tensor([5]))[0], x[5:6].exp())


def test_an_error_of_a_class_of_its_own_keeps_its_class() -> None:
    program = parse("""program @inverse(%x: borrowed f32[2, 2]@cpu) {
  %y, %info = extern.call @aten.linalg_inv_ex.default(%x, check_errors=true) : f32[2, 2]@cpu, i32[]@cpu
  control.return(%y)
}
""")
    with pytest.raises(torch.linalg.LinAlgError) as eager:
        torch.linalg.inv_ex(torch.zeros(2, 2), check_errors=True)
    with pytest.raises(torch.linalg.LinAlgError) as caught:
        to_cpp(program)(torch.zeros(2, 2))
    assert str(caught.value) == str(eager.value)


CHECKED = """program @checked(%x: borrowed f32[2, 3]@cpu, n0: int) {
  check.layout(%x) name="x" alignment=64 : f32[2, 3]@cpu
  symbol.assert() condition=n0 > 0 message="n0 is positive"
  control.return(%x)
}
"""


class Marked(torch.Tensor):
    """A subclass that was not desugared."""

    __torch_function__ = classmethod(lambda cls, *_arguments: None)  # type: ignore[assignment]


@pytest.mark.parametrize(
    "inputs",
    [
        (),
        (torch.rand(2, 3), 1, 2),
        (torch.rand(3, 2), 1),
        (torch.rand(2, 3).double(), 1),
        (torch.rand(3, 2).t(), 1),
        (torch.rand(2, 3).to_sparse(), 1),
        (torch.rand(2, 3, device="meta"), 1),
        (None, 1),
        (3, 1),
        (torch.rand(2, 3).as_subclass(Marked), 1),
        (torch.rand(7)[1:].view(2, 3), 1),
        (torch.rand(2, 3), 0),
    ],
)
def test_wrong_inputs_raise_the_python_emitters_error(inputs: tuple[Any, ...]) -> None:
    program = parse(CHECKED)
    with pytest.raises((InputError, RuntimeError)) as wanted:
        to_python(program)(*inputs)
    with pytest.raises(type(wanted.value)) as got:
        to_cpp(program)(*inputs)
    assert str(got.value) == str(wanted.value)


def test_a_missing_compiler_is_a_clear_error_and_python_still_works(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = parse(chain_text(3))
    emitted = to_cpp(program)
    monkeypatch.setenv("FXWRAP_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "/nonexistent/compiler")
    with pytest.raises(NativeBuildError, match="command: /nonexistent/compiler --version"):
        emitted(torch.zeros(4))
    assert list(tmp_path.iterdir()) == []
    assert torch.equal(to_python(program)(torch.zeros(4))[0], torch.full((4,), 3.0))
    monkeypatch.undo()
    assert torch.equal(emitted(torch.zeros(4))[0], torch.full((4,), 3.0))


def test_a_failing_compiler_is_reported_with_its_output_and_cleaned_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text(
        '#!/bin/sh\ncase "$1" in --version | -print*) exit 0 ;; esac\necho "no space left on the moon" >&2\nexit 3\n'
    )
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    cache = tmp_path / "cache"
    monkeypatch.setenv("FXWRAP_CACHE_DIR", str(cache))
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(NativeBuildError) as caught:
        to_cpp(parse(chain_text(3)))(torch.zeros(4))
    message = str(caught.value)
    assert "exit status 3" in message and "no space left on the moon" in message
    assert f"command: {compiler} -std=c++20" in message
    assert {path.parent.name for path in cache.rglob("*") if path.is_file()} == {"locks"}


# --- memory ----------------------------------------------------------------------------------------------------------


def test_memory_is_released_at_the_programs_frees(library: torch.library.Library) -> None:
    tracked: list[StorageWeakRef] = []

    def grow(x: torch.Tensor) -> torch.Tensor:
        result = x + 1
        tracked.append(StorageWeakRef(result.untyped_storage()))
        return result

    library.define("grow(Tensor x) -> Tensor")
    library.define("alive() -> int")
    library.impl("grow", grow, "CPU")
    library.impl("alive", lambda: sum(not item.expired() for item in tracked), "CompositeExplicitAutograd")
    count = "extern.call @fxwrap_cpp_test.alive.default() effect_set=(unknown()) : int"
    program = parse(f"""program @live(%x: owned f32[64]@cpu, %s: shared f32[64]@cpu) {{
  %n0 = {count}
  %a = extern.call @fxwrap_cpp_test.grow.default(%x) : f32[64]@cpu
  %v = memory.view(%a) : f32[8, 8]@cpu
  memory.free(%x)
  %n1 = {count}
  %b = extern.call @fxwrap_cpp_test.grow.default(%v) : f32[8, 8]@cpu
  memory.free(%a)
  memory.free(%s)
  %n2 = {count}
  %c = memory.reuse(%b) : f32[64]@cpu
  extern.mutate @aten.fill_.Scalar(%c, 2.0) writes=(%c)
  %n3 = {count}
  memory.free(%c)
  %n4 = {count}
  control.return(%n0, %n1, %n2, %n3, %n4)
}}
""")
    emitted = to_cpp(program)
    inputs = [torch.rand(64), torch.rand(64)]
    tracked.extend(StorageWeakRef(tensor.untyped_storage()) for tensor in inputs)
    assert emitted.boxed(inputs) == (2, 2, 1, 1, 0)


def test_a_loop_holds_memory_for_one_iteration(library: torch.library.Library) -> None:
    tracked: list[StorageWeakRef] = []
    most: list[int] = []

    def step(x: torch.Tensor) -> torch.Tensor:
        result = x + 1
        tracked.append(StorageWeakRef(result.untyped_storage()))
        most.append(sum(not item.expired() for item in tracked))
        return result

    library.define("step(Tensor x) -> Tensor")
    library.impl("step", step, "CPU")
    program = parse("""program @loop(%x: borrowed f32[]@cpu) {
  %y = control.while(%x) : f32[]@cpu {
  ^cond(%c: f32[]@cpu):
    %go = extern.call @aten.lt.Scalar(%c, 9.0) : bool[]@cpu
    control.yield(%go)
  ^body(%b: f32[]@cpu):
    %half = extern.call @fxwrap_cpp_test.step.default(%b) : f32[]@cpu
    %next = extern.call @fxwrap_cpp_test.step.default(%half) : f32[]@cpu
    memory.free(%half)
    control.yield(%next)
  }
  control.return(%y)
}
""")
    x = torch.tensor(0.0)
    (y,) = to_cpp(program)(x)
    assert y.item() == 10 and x.item() == 0 and max(most) == 3
    del y
    assert all(item.expired() for item in tracked)
    (same,) = to_cpp(program)(torch.tensor(20.0))
    assert same.item() == 20


def test_a_loop_with_zero_iterations_returns_copies() -> None:
    program = SAMPLES["while_loops"].program()
    end, *_ = to_cpp(SAMPLES["scan_and_map"].program())(torch.ones(4), torch.rand(5, 4), torch.rand(4))
    assert end.shape == (4,)
    i, x, w = torch.tensor(50), torch.rand(4), torch.rand(4)
    last, y, rows, stacked = to_cpp(program)(i, x, w)
    assert last.item() == 50 and last.data_ptr() != i.data_ptr() and y.data_ptr() != x.data_ptr()
    assert rows.shape == (0,) and stacked.shape == (0, 4)
