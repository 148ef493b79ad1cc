"""`fxwrap.compare` reports differences and costs, and restores all state."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap import Program
from fxwrap.comparison import COMPARED_EMITTERS, CompiledFunction, Report, compare, peak_bytes, subjects, tensor_error
from fxwrap.converters import emission
from fxwrap.converters.emitted_program import EmittedProgram
from fxwrap.debugging import copy_inputs
from fxwrap.errors import CompareError, OptionError
from fxwrap.lines import ExternCall, Mutate, Return
from fxwrap.options import EMITTERS, Options
from fxwrap.runtime.native import BridgeBuild, build_bridge
from fxwrap.testing import assert_emitters_agree, assert_programs_agree
from fxwrap.wrapper_ir import Block

ONE = ("interpreter",)


def product(x: Tensor, y: Tensor) -> tuple[Any, ...]:
    """Mutates an input; returns a view of a result, an input, None and a number."""
    x.add_(1)
    z = x @ y
    return z.t(), x, None, 3, {"soft": torch.softmax(z, -1)}


def graph_of(function: Callable[..., Any], *inputs: Tensor) -> GraphModule:
    """Traces on copies, because tracing runs the function."""
    return make_fx(function)(*copy_inputs(inputs))


# --- reports --------------------------------------------------------------------------------------------------------


def test_emitters_are_compared() -> None:
    report = compare(product, (torch.randn(8, 8), torch.randn(8, 8)), repeats=2)
    assert report.agrees and report.reasons == ()
    assert [outcome.name for outcome in report.outcomes] == ["eager", "float64", *COMPARED_EMITTERS]
    assert set(COMPARED_EMITTERS) == set(EMITTERS) and report.graphs == 1
    assert 0 < report["eager"].float64_error.relative < 1e-5  # type: ignore[union-attr]
    for outcome in report.emitters:
        assert outcome.eager_error is not None and outcome.eager_error.relative < 1e-6
        assert outcome.float64_error is not None and outcome.float64_error.relative < 1e-5
        assert outcome.compile_seconds is not None and outcome.compile_seconds > 0
        assert outcome.run_seconds is not None and outcome.run_seconds > 0
        assert outcome.peak_bytes is not None and outcome.peak_bytes >= 2 * 256
        assert outcome.lines is not None and outcome.lines > report.program_lines // 2


def test_the_build_of_the_bridge_is_no_part_of_compile_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()
    monkeypatch.setattr(subjects.time, "perf_counter", lambda: next(clock) * 1e-6)

    def build_for_long() -> BridgeBuild:
        nonlocal clock
        clock = itertools.count(next(clock) + 10**9)
        return build_bridge()

    monkeypatch.setattr(subjects, "build_bridge", build_for_long)
    report = compare(product, (torch.randn(2, 2), torch.randn(2, 2)), emitters=("python", "cpp"), repeats=0)
    assert next(clock) > 10**9
    for outcome in report.emitters:
        assert outcome.compile_seconds is not None and outcome.compile_seconds < 100


def test_a_report_prints_as_a_table() -> None:
    text = str(compare(product, (torch.randn(8, 8), torch.randn(8, 8)), repeats=1))
    head, columns, rule, *rows = text.splitlines()
    assert head.startswith("product: 1 graph, ")
    assert columns.split()[:2] == ["abs", "err"] and set(rule) == {"-"}
    assert [row.split()[0] for row in rows] == ["eager", "float64", *COMPARED_EMITTERS, "all"]
    assert all(row.count("same") == 6 and " ms " in row for row in rows[2:-1])
    assert len({len(row) for row in (columns, rule, *rows[:-1])}) == 1


def test_only_requested_emitters_run_and_timing_needs_repeats() -> None:
    report = compare(product, (torch.randn(2, 2), torch.randn(2, 2)), emitters=("python",), repeats=0)
    assert [outcome.name for outcome in report.emitters] == ["python"]
    assert all(outcome.run_seconds is None and outcome.peak_bytes is None for outcome in report.outcomes)
    with pytest.raises(KeyError):
        report["cpp"]


def test_training_compares_gradients_and_buffers() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).train()
    report = compare(model, (torch.randn(3, 4, requires_grad=True),), training=True, repeats=0)
    assert report.agrees, report
    assert report.graphs == 2
    assert report["float64"].failure == ""


def test_keyword_inputs_exported_programs_and_programs() -> None:
    model = nn.Linear(4, 3)
    x = torch.randn(2, 4)
    assert compare(model, {"input": x}, emitters=ONE, repeats=0).agrees
    exported = torch.export.export(model, (x,))
    assert compare(exported, (x,), emitters=ONE, repeats=0).agrees
    program = fxwrap.lower(exported)
    report = compare(program, (x,), emitters=("python",), repeats=0)
    assert report.agrees and "fixed dtypes" in report["float64"].failure


def test_each_comparison_recaptures_the_function() -> None:
    for _ in range(10):  # more often than torch.compile compiles one function
        assert compare(product, (torch.randn(2, 2), torch.randn(2, 2)), emitters=ONE, repeats=0).agrees


def test_a_function_that_breaks_into_graphs_is_compared_whole() -> None:
    def function(x: Tensor) -> Tensor:
        y = torch.relu(x)
        torch._dynamo.graph_break()
        return y * 2

    report = compare(function, (torch.randn(4),), repeats=0)
    assert report.agrees and report.graphs == 2


class Expanded(nn.Module):
    """A module with a buffer that cannot be written, and one that is."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ones", torch.ones(1).expand(3))
        self.register_buffer("count", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(self.ones)
        return x + self.count


def test_buffers_are_restored_between_runs() -> None:
    model = Expanded()
    assert_emitters_agree(model, (torch.randn(3),))
    assert not model.count.any()


def test_a_comparison_has_no_side_effects() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).train()
    x = torch.randn(3, 4, requires_grad=True)
    model(x).sum().backward()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    gradients = [parameter.grad for parameter in model.parameters()]
    preserved, gradient, random_state = x.detach().clone(), x.grad, torch.get_rng_state()
    assert compare(model, (x,), training=True, emitters=ONE, repeats=1).agrees
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is grad for parameter, grad in zip(model.parameters(), gradients))
    assert torch.equal(x, preserved) and x.grad is gradient
    assert torch.equal(torch.get_rng_state(), random_state)


def test_the_reference_replaces_float32_by_float64() -> None:
    weight = torch.randn(64, 64)

    def function(x: Tensor) -> Tensor:
        narrow = (x.to(torch.float32) @ weight).to(torch.float32)
        return narrow + torch.ones(64, dtype=torch.float32) / 3 + torch.randn(64)

    subject = compare(function, (torch.randn(64, 64),), emitters=ONE, repeats=0)
    assert subject["float64"].failure == ""
    assert 0 < subject["eager"].float64_error.relative < 1e-6  # type: ignore[union-attr]


def test_functions_without_float64_support_have_no_reference() -> None:
    def function(x: Tensor) -> Tensor:
        if x.dtype is not torch.float32:
            raise TypeError("float32 only")
        return x + 1

    report = compare(function, (torch.randn(3),), emitters=ONE, repeats=0)
    assert report.agrees
    assert report["float64"].failure == "TypeError: float32 only" and report["eager"].float64_error is None
    assert "there is no float64 reference: TypeError: float32 only" in str(report)


# --- disagreements --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Replace:
    """A pass that replaces each line of a program by the result of `change`."""

    change: Callable[[Any], tuple[Any, ...]]

    def __call__(self, program: Program) -> Program:
        lines = tuple(new for line in program.body.lines for new in self.change(line))
        return program.replace(body=Block(program.body.arguments, lines))


def _swap(target: str, replacement: str) -> Callable[[Any], tuple[Any, ...]]:
    def change(line: Any) -> tuple[Any, ...]:
        if isinstance(line, ExternCall) and line.target == target:
            return (dataclasses.replace(line, target=replacement),)
        return (line,)

    return change


def compile_with_broken_emitter(
    function: Callable[..., Any], *inputs: Tensor, change: Callable[[Any], tuple[Any, ...]]
) -> Report:
    options = Options(passes=(Replace(change),), verify=False, fuse=False)
    return compare(graph_of(function, *inputs), inputs, options=options, emitters=ONE, repeats=0)


def kinds(report: Report) -> set[str]:
    assert not report.agrees
    return {item.kind for item in report["interpreter"].disagreements}


def test_wrong_values_are_detected() -> None:
    change = _swap("aten.add.Tensor", "aten.sub.Tensor")
    report = compile_with_broken_emitter(lambda x, y: x + y, torch.randn(4), torch.randn(4), change=change)
    assert kinds(report) == {"values"}
    assert report.reasons[0].startswith("interpreter: values of output 0: relative error ")
    assert "DIFFER" in str(report) and "the emitters do not agree with eager:" in str(report)


def test_a_wrong_kernel_is_detected() -> None:
    def change(program: Program) -> Program:
        (kernel,) = program.kernels
        assert " + " in kernel.source
        wrong = dataclasses.replace(kernel, source=kernel.source.replace(" + ", " - "))
        return program.replace(kernels=(wrong,))

    inputs = torch.randn(4), torch.randn(4)
    report = compare(
        graph_of(torch.add, *inputs), inputs, options=Options(passes=(change,)), emitters=("python", "fx"), repeats=0
    )
    for emitter in ("python", "fx"):
        assert {item.kind for item in report[emitter].disagreements} == {"values"}


def test_a_lost_mutation_is_detected() -> None:
    def change(line: Any) -> tuple[Any, ...]:
        return () if isinstance(line, Mutate) else (line,)

    report = compile_with_broken_emitter(
        lambda x, y: (x.copy_(y), y + 1)[1], torch.randn(4), torch.randn(4), change=change
    )
    assert kinds(report) == {"mutations"}
    assert not report["interpreter"].agrees_in("mutations") and report["interpreter"].agrees_in("values", "aliasing")


def test_a_lost_alias_is_detected() -> None:
    def change(line: Any) -> tuple[Any, ...]:
        if not isinstance(line, Return):
            return (line,)
        view, copy = line.values[0], dataclasses.replace(line.values[0], name="copied")
        return ExternCall((copy,), "aten.clone.default", (view,)), Return((copy,))

    report = compile_with_broken_emitter(lambda x: x[1:], torch.randn(4), change=change)
    assert kinds(report) == {"aliasing"}
    assert "it shares memory with nothing, eager's shares memory with input[0], from element 1" in report.reasons[0]


def test_a_wrong_number_of_outputs_is_detected() -> None:
    def change(line: Any) -> tuple[Any, ...]:
        return (Return(line.values[:1]),) if isinstance(line, Return) else (line,)

    assert kinds(compile_with_broken_emitter(lambda x: (x + 1, x + 2), torch.randn(4), change=change)) == {"structure"}


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        (lambda x: x.double(), "dtypes"),
        (lambda x: x.t().contiguous().t(), "strides"),
        (lambda x: x[:1], "shapes"),
        (lambda x: None, "values"),
        (lambda x: torch.full_like(x, float("nan")), "values"),
        (lambda x: x.to("meta"), "devices"),
    ],
)
def test_wrong_results_of_an_emitter_are_detected(
    monkeypatch: pytest.MonkeyPatch, wrong: Callable[[Tensor], Any], kind: str
) -> None:
    def emit(program: Program, handlers: Any = None) -> EmittedProgram:
        right = fxwrap.to_python(program)
        return EmittedProgram(right.source, lambda: lambda inputs: tuple(wrong(item) for item in right.boxed(inputs)))

    monkeypatch.setitem(emission.EMITTER_FUNCTIONS, "python", emit)
    report = compare(graph_of(lambda x: x * 2, torch.randn(3, 4)), (torch.randn(3, 4),), repeats=0)
    assert kind in {item.kind for item in report["python"].disagreements}
    assert report["interpreter"].agrees_in()
    with pytest.raises(AssertionError, match=rf"python: {kind} of output 0"):
        assert_programs_agree(fxwrap.lower(graph_of(lambda x: x * 2, torch.randn(3, 4))), [torch.randn(3, 4)])


def test_a_wrong_gradient_is_detected() -> None:
    def change(line: Any) -> tuple[Any, ...]:
        return _swap("aten.cos.default", "aten.sin.default")(line)

    options = Options(passes=(Replace(change),), verify=False, fuse=False)
    with pytest.raises(AssertionError, match=r"gradients of input\[0\]: relative error"):
        assert_emitters_agree(torch.sin, (torch.randn(4, requires_grad=True),), training=True, options=options)


def test_emitter_errors_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def emit(program: Program, handlers: Any = None) -> EmittedProgram:
        raise ValueError("no such thing")

    monkeypatch.setitem(emission.EMITTER_FUNCTIONS, "python", emit)
    report = compare(torch.sin, (torch.randn(4),), repeats=1)
    assert report["python"].failure == "ValueError: no such thing"
    assert report.reasons == ("python failed: ValueError: no such thing",)
    assert report["python"].run_seconds is None and report["fx"].run_seconds is not None
    assert "python (failed)" in str(report)


def test_capturing_no_graph_is_not_agreement() -> None:
    report = compare(lambda x: 3, (torch.randn(4),), emitters=ONE, repeats=0)
    assert report.reasons == ("interpreter failed: torch.compile captured no graph, so nothing was compiled",)


def test_rounding_error_within_eagers_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    """A result that differs from eager's by more than the tolerance, but is nearer to the truth, is right."""

    def exact(program: Program, handlers: Any = None) -> EmittedProgram:
        return EmittedProgram("", lambda: lambda inputs: ((inputs[0].double() + 3e-7).float() * 1,))

    monkeypatch.setitem(emission.EMITTER_FUNCTIONS, "python", exact)
    graph = graph_of(lambda x: (x + 3000.0) - 3000.0, torch.randn(8))
    x = torch.rand(8)
    near = compare(graph, (x,), emitters=("python",), repeats=0, tolerance=2e-5)
    assert near.agrees and near["python"].eager_error.relative > 2e-5  # type: ignore[union-attr]


# --- requests that make no sense ------------------------------------------------------------------------------------


def test_invalid_arguments_are_rejected() -> None:
    x = torch.randn(2)
    with pytest.raises(OptionError, match="unknown emitter 'fortran'; known emitters: python, cpp, fx"):
        compare(torch.sin, (x,), emitters=("fortran",))
    with pytest.raises(CompareError, match="an object of type int cannot be compared; pass a function"):
        compare(3, (x,))
    with pytest.raises(CompareError, match="has no gradients"):
        compare(graph_of(torch.sin, x), (x,), training=True)
    with pytest.raises(CompareError, match="fails in eager mode: RuntimeError: The size of tensor"):
        compare(torch.add, (x, torch.randn(3)))


# --- the parts ------------------------------------------------------------------------------------------------------


def test_copies_preserve_strides_offsets_and_sharing() -> None:
    base = torch.randn(6, 8)
    inputs = {"base": base, "view": base[1:, ::2].t(), "again": base, "bits": base.view(torch.int32), "number": 3}
    result = copy_inputs(inputs)
    assert result["number"] == 3 and result["again"] is result["base"] and result["base"] is not base
    for name in ("base", "view", "bits"):
        assert torch.equal(result[name], inputs[name])
        assert (
            result[name].stride() == inputs[name].stride()
            and result[name].storage_offset() == inputs[name].storage_offset()
        )
        assert result[name].untyped_storage().data_ptr() == result["base"].untyped_storage().data_ptr()
    result["base"].zero_()
    assert not result["view"].any() and base.any()


def test_copies_preserve_conj_parameters_and_requires_grad() -> None:
    number = torch.randn(3, dtype=torch.complex64)
    parameter = nn.Parameter(torch.randn(2))
    result = copy_inputs([number.conj(), number.conj().imag, parameter, (parameter * 2)])
    assert result[0].is_conj() and torch.equal(result[0], number.conj())
    assert result[1].is_neg() and torch.equal(result[1], number.conj().imag)
    assert isinstance(result[2], nn.Parameter) and result[2].requires_grad
    assert result[3].is_leaf and result[3].requires_grad


def test_wide_copies_are_the_same_numbers_in_float64() -> None:
    base = torch.randn(4, 4)
    to_float64, view, number = copy_inputs([base, base[1:, 2], torch.ones(2, dtype=torch.complex64)], to_float64=True)
    assert to_float64.dtype == torch.float64 and torch.equal(to_float64, base.double())
    assert torch.equal(view, base[1:, 2].double()) and view.stride() == (4,)
    assert number.dtype == torch.complex128
    view.zero_()
    assert torch.equal(to_float64[1:, 2], torch.zeros(3, dtype=torch.float64))


def test_errors_of_tensors() -> None:
    infinity, nan = float("inf"), float("nan")
    special = torch.tensor([1.0, infinity, nan])
    assert tensor_error(special, special.clone()).absolute == 0.0
    assert tensor_error(torch.tensor([infinity]), torch.tensor([-infinity])).relative == infinity
    assert tensor_error(torch.tensor([nan]), torch.tensor([1.0])).relative == infinity
    assert tensor_error(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0])).absolute == 0.5
    assert tensor_error(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0])).relative == 0.1
    assert tensor_error(torch.tensor([1e-9]), torch.tensor([0.0])).relative == infinity
    assert tensor_error(torch.tensor([1e-9]), torch.tensor([0.0]), floor=1.0).relative == pytest.approx(1e-9)
    assert tensor_error(torch.tensor([2**60]), torch.tensor([2**60])).relative == 0.0
    assert tensor_error(torch.empty(0, 3), torch.empty(0, 3)).absolute == 0.0


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_peak_bytes_counts_live_allocations(device: str) -> None:
    """On CUDA too each allocation counts once. Sizes are multiples of the smallest block there."""
    empty = functools.partial(torch.empty, dtype=torch.uint8, device=device)

    def run(_: Tensor) -> Tensor:
        first = empty(1024)
        second = empty(512)
        del first
        third = empty(1024)
        del second, third
        return empty(512)

    assert peak_bytes(lambda: empty(10**6), run) == 1536


def test_one_capture_runs_by_any_emitter() -> None:
    subject = CompiledFunction(torch.sin, Options(), dynamic=False)
    x = torch.randn(3)
    torch.compiler.reset()
    for emitter in EMITTERS:
        torch.testing.assert_close(subject.call(emitter)(x), torch.sin(x))
    assert len(subject.graphs) == 1 and set(subject.graphs[0].emitted_programs) == set(EMITTERS)


def test_programs_with_owned_inputs_and_mutable_constants_agree() -> None:
    program = fxwrap.parse("""
    program @count(%x: owned f32[4]@cpu, %y: mutable f32[4]@cpu) {
      extern.mutate @aten.add_.Tensor(%n, %y) writes=(%n)
      extern.mutate @aten.add_.Tensor(%y, %n) writes=(%y)
      %z = memory.reuse(%x) : f32[4]@cpu
      extern.call @aten.mul.out(%y, %n) outs=(%z)
      control.return(%z, %y)
    }
    constant %n: mutable f32[4]@cpu
    """)
    constant = torch.ones(4)
    program = program.replace(store=fxwrap.wrapper_ir.ConstantStore({"n": constant}))
    report = assert_programs_agree(program, [torch.randn(4), torch.randn(4)])
    assert [outcome.name for outcome in report.emitters] == list(COMPARED_EMITTERS[1:])
    assert torch.equal(constant, torch.ones(4))


# --- defects of eager -------------------------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_batch_norm_that_eager_differentiates_wrongly_is_corrected(dtype: torch.dtype) -> None:
    """On a CPU, for a batch of one whose channels are contiguous, and a contiguous gradient (CvT and LeViT)."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 4, 6, generator=generator, dtype=dtype, requires_grad=True)
    weight = torch.randn(6, generator=generator, dtype=dtype, requires_grad=True)

    def function(hidden: Tensor, weight: Tensor) -> Tensor:
        x = hidden.permute(0, 2, 1).view(1, 6, 2, 2)
        return torch.nn.functional.batch_norm(x, None, None, weight, None, training=True).contiguous() * 1

    def formula(hidden: Tensor, weight: Tensor) -> Tensor:
        x = hidden.permute(0, 2, 1).reshape(1, 6, 2, 2).contiguous()
        centred = x - x.mean((2, 3), keepdim=True)
        rstd = (centred.square().mean((2, 3), keepdim=True) + 1e-5).rsqrt()
        return centred * rstd * weight[:, None, None]

    report = compare(function, (hidden, weight), training=True, repeats=0)
    assert report.agrees, report
    assert report.eager_defects and "native_batch_norm_backward" in report.eager_defects[0]
    assert "eager is wrong, and was corrected: aten.native_batch_norm_backward" in str(report)

    cotangent = torch.randn(1, 6, 2, 2, generator=generator, dtype=torch.float64)
    wide = [item.detach().double().requires_grad_() for item in (hidden, weight)]
    expected = torch.autograd.grad(formula(*wide), wide, cotangent)
    compiled = torch.compile(function, backend="fxwrap")
    actual = torch.autograd.grad(compiled(hidden, weight), (hidden, weight), cotangent.to(dtype))
    eager = torch.autograd.grad(function(hidden, weight), (hidden, weight), cotangent.to(dtype))
    assert tensor_error(actual[0], expected[0]).relative < 1e-5
    assert tensor_error(eager[0], expected[0]).relative > 0.1, "eager is right now: CorrectedEager can go"
