"""Reads and writes at indices from tensors: every rule against eager, and indices out of bounds."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap.devices import CPU
from fxwrap.lines import Alloc
from fxwrap.loop_ir import Axis, Buffer, DeviceAssert, Kernel, evaluate_kernel
from fxwrap.lowering.fusion.definitions import Scattered, Stored, pointwise
from fxwrap.lowering.fusion.tracing import BodyBuilder
from fxwrap.lowering.rules import RULES, OperatorCall, embedding_gradients, indexing
from fxwrap.lowering.rules.indexing_common import checked_indirect_index
from fxwrap.options import Options
from fxwrap.torch_compat import operator_overload
from tests.lowering import evaluate_definitions
from tests.lowering.rules.check_rules import (
    DTYPES,
    Sample,
    check_sample,
    define,
    maker,
    registered_names,
    run_rule,
    same_samples,
    without_requirements,
)


def at(*values: Any, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Returns an index tensor."""
    return torch.tensor(list(values), dtype=dtype)


EMPTY = torch.empty(0, dtype=torch.int64)

READS: dict[str, list[Sample]] = {
    **same_samples(
        "gather.default", lambda t: (t(3, 4), 1, at([0, 3, 1], [2, 2, 0])), lambda t: (t(3, 4), -2, at([2, 0])),
        lambda t: (t(), 0, torch.tensor(0)), lambda t: (t(5), 0, EMPTY), lambda t: (t(2, 3, 2), 0, at([[1], [0]])),
        lambda t: (t(3), 0, torch.tensor(2)),
    ),
    **same_samples(
        "index_select.default", lambda t: (t(3, 4), 0, at(2, 0, 2)), lambda t: (t(3, 4), -1, at(1)),
        lambda t: (t(3), 0, torch.tensor(1)), lambda t: (t(3, 2), 1, EMPTY), lambda t: (t(), 0, at(0)),
        lambda t: (t(3, 4), 0, at(2, 0, dtype=torch.int32)),
    ),
    **same_samples(
        "embedding.default", lambda t: (t(5, 3), at([0, 4], [2, 2])), lambda t: (t(5, 1), torch.tensor(3), 3),
        lambda t: (t(5, 3), EMPTY), lambda t: (t(4, 2), at(1, 0, dtype=torch.int32)),
    ),
    **same_samples("take.default", lambda t: (t(3, 4), at([0, -1], [11, -12])), lambda t: (t(3), torch.tensor(1))),
    **same_samples(
        "index.Tensor _unsafe_index.Tensor", lambda t: (t(3, 4), [at(2, -1)]),
        lambda t: (t(3, 4, 5), [None, at(-4, 3), None]),
        lambda t: (t(3, 4, 5), [at([0], [2]), None, at(1, -5)]), lambda t: (t(3, 4, 5), [None, at(0, 1), at([1], [2])]),
        lambda t: (t(3, 4), [at(1), torch.tensor(-1)]), lambda t: (t(3, 4), [None, EMPTY]),
        lambda t: (t(3, 4), [at(0, 2, dtype=torch.int32)]),
    ),
    **same_samples(
        "index.Tensor_hacked_twin _unsafe_index.Tensor_hacked_twin", lambda t: (t(3, 4), [at(2, -1), at(0, 3)]),
    ),
}  # fmt: skip

WRITES: dict[str, list[Sample]] = {
    **same_samples(
        "scatter.src scatter_add.default", lambda t: (t(3, 4), 1, at([0, 3, 1], [2, 1, 0]), t(3, 5)),
        lambda t: (t(3, 4), -2, at([2, 0]), t(1, 2)), lambda t: (t(), 0, torch.tensor(0), t()),
        lambda t: (t(3), 0, EMPTY, t(0)),
    ),
    **same_samples("scatter.value", lambda t: (t(3, 4), 0, at([2, 0], [1, 1]), 1), lambda t: (t(3), 0, at(1, 1), 0)),
    **same_samples(
        "scatter.reduce", lambda t: (t(3, 2), 0, at([2, 2], [0, 2]), t(2, 2), {"reduce": "add"}),
        lambda t: (t(3), 0, at(1, 1), t(2), {"reduce": "multiply"}),
    ),
    **same_samples(
        "scatter.value_reduce", lambda t: (t(3, 2), 0, at([2, 2]), 2, {"reduce": "add"}),
        lambda t: (t(3), 0, at(1, 1), 3, {"reduce": "multiply"}),
    ),
    **same_samples(
        "scatter_reduce.two", lambda t: (t(3, 2), 0, at([2, 2], [0, 2]), t(2, 2), "sum"),
        lambda t: (t(3), 0, at(1, 1, 0), t(3), "prod"), lambda t: (t(2, 3), 1, at([1, 1]), t(2, 2), "amax"),
        lambda t: (t(3), 0, at(1, 1), t(2), "amin", {"include_self": True}),
    ),
    **same_samples(
        "index_put.default _unsafe_index_put.default", lambda t: (t(3, 4), [at(2, -3)], t(2, 4)),
        lambda t: (t(3, 4), [None, at(-1)], t(1)), lambda t: (t(3, 4, 2), [at([0], [2]), None, at(1, -2)], t(2, 2, 4)),
        lambda t: (t(3, 4), [at(1, 1), at(0, 0)], t(2), True), lambda t: (t(3), [EMPTY], t(0)),
    ),
    **same_samples(
        "index_put.hacked_twin _unsafe_index_put.hacked_twin", lambda t: (t(3, 4), [at(2, 0)], t(4)),
        lambda t: (t(3), [at(2, 2)], t(2), True),
    ),
    **same_samples(
        "index_add.default", lambda t: (t(3, 2), 0, at(2, 2, 0), t(3, 2)),
        lambda t: (t(2, 3), -1, at(1), t(2, 1), {"alpha": 2}),
        lambda t: (t(), 0, at(0), t()),
    ),
    **same_samples("index_copy.default", lambda t: (t(3, 2), 0, at(2, 0), t(2, 2)),
        lambda t: (t(3), 0, torch.tensor(1), t())),
    **same_samples("index_fill.int_Scalar", lambda t: (t(3, 2), 1, at(0), 1), lambda t: (t(3), 0, EMPTY, 1),
        lambda t: (t(), 0, at(0), 1)),
    **same_samples("index_fill.int_Tensor", lambda t: (t(3, 2), 0, at(0, 2), t())),
    **same_samples("put.default", lambda t: (t(3, 2), at([0, -1]), t(1, 2)), lambda t: (t(3), at(1, 1), t(2), True)),
    **same_samples(
        "embedding_dense_backward.default", lambda t: (t(2, 3, 2), at([0, 4, 4], [1, 0, 4]), 5, -1, False),
        lambda t: (t(3, 2), at(0, 1, 1), 3, 1, False),
    ),
}  # fmt: skip

DECLINED: dict[str, Sample] = {
    "aten.masked_scatter.default": lambda t: (t(2), torch.tensor([True, False]), t(1)),
    "aten.index_reduce.default": lambda t: (t(3), 0, at(1), t(1), "mean"),
}

SAMPLES = READS | WRITES


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", SAMPLES)
def test_rules_match_eager(name: str) -> None:
    for number, sample in enumerate(SAMPLES[name]):
        ran = 0
        for dtype in DTYPES:
            for transposed in (False, True):
                t = maker(dtype, number, transposed)
                ran += sum(check_sample(name, sample, t, device, name in READS) for device in ("cuda", "cpu"))
        assert ran, f"no dtype of sample {number} ran"


def test_every_rule_has_a_sample() -> None:
    named = registered_names(indexing) | registered_names(embedding_gradients)
    assert named == set(SAMPLES) | set(DECLINED)
    assert named <= set(RULES)


@pytest.mark.parametrize("name", DECLINED)
def test_decline_reasons(name: str) -> None:
    assert "elements before it" in run_rule(name, DECLINED[name](maker(torch.float32)))


# --- indices out of bounds -------------------------------------------------------------------------------------------

WRONG: dict[str, list[Sample]] = {
    **same_samples("gather.default", lambda t: (t(3), 0, at(3)), lambda t: (t(3), 0, at(-1))),
    **same_samples("index_select.default", lambda t: (t(3), 0, at(3)), lambda t: (t(3), 0, at(-1))),
    **same_samples("embedding.default", lambda t: (t(3, 2), at(3)), lambda t: (t(3, 2), at(-1))),
    **same_samples("index.Tensor", lambda t: (t(2, 3), [None, at(3)]), lambda t: (t(2, 3), [None, at(-4)])),
    **same_samples("take.default", lambda t: (t(2, 2), at(4)), lambda t: (t(2, 2), at(-5))),
    **same_samples("scatter.src", lambda t: (t(3), 0, at(3), t(1)), lambda t: (t(3), 0, at(-1), t(1))),
    **same_samples("index_put.default", lambda t: (t(3), [at(3)], t(1)), lambda t: (t(3), [at(-4)], t(1))),
    **same_samples("index_copy.default", lambda t: (t(3), 0, at(3), t(1))),
}


RIGHT: dict[str, Sample] = {
    "aten.gather.default": lambda t: (t(3), 0, at(0)),
    "aten.index_select.default": lambda t: (t(3), 0, at(0)),
    "aten.embedding.default": lambda t: (t(3, 2), at(0)),
    "aten.index.Tensor": lambda t: (t(2, 3), [None, at(0)]),
    "aten.take.default": lambda t: (t(2, 2), at(0)),
    "aten.scatter.src": lambda t: (t(3), 0, at(0), t(1)),
    "aten.index_put.default": lambda t: (t(3), [at(0)], t(1)),
    "aten.index_copy.default": lambda t: (t(3), 0, at(0), t(1)),
}
"""Valid calls with the result sizes of the calls in WRONG."""


@pytest.mark.parametrize("name", WRONG)
def test_an_index_out_of_bounds_raises(name: str) -> None:
    for sample in WRONG[name]:
        arguments = sample(maker(torch.float32))
        with pytest.raises((IndexError, RuntimeError)) as eager:
            operator_overload(name)(*arguments)
        with pytest.raises(eager.type, match="an index is out of bounds for a dimension of size") as caught:
            run_rule(name, arguments, "cuda", fake=operator_overload(name)(*RIGHT[name](maker(torch.float32))))
        assert caught.type is eager.type


@pytest.mark.parametrize("language", ["cpp", "triton"])
def test_the_error_of_an_index_out_of_bounds_names_the_kernel(language: Literal["cpp", "triton"]) -> None:
    x, position = torch.randn(10, 4), torch.tensor([3, 9])
    graph = make_fx(lambda x, position: x.sin()[position])(x, position)
    compiled = fxwrap.compile_graph(graph, [x, position], options=Options(cpu_kernels=language))
    torch.testing.assert_close(compiled(x, position), (x[position].sin(),))
    with pytest.raises(IndexError, match=r"of size 10, in aten.index.Tensor, in kernel fxwrap_sin_index\w*"):
        compiled(x, position + 1)


class Rows(torch.nn.Module):
    def forward(self, x: Tensor, rows: Tensor, others: Tensor) -> Tensor:
        first = x.sin()[rows]
        return first + x.index_select(0, others)


@pytest.mark.parametrize("options", [{}, {"emitter": "cpp"}, {"emitter": "fx"}, {"cpu_kernels": "triton"}], ids=str)
def test_the_error_of_an_index_out_of_bounds_names_the_line_of_the_model(options: dict[str, Any]) -> None:
    """The model's line of the operator whose index it is, and no other line of the fused kernel."""
    lines, start = inspect.getsourcelines(Rows)
    places = [f"{__file__}:{start + number}" for number, line in enumerate(lines) if "x." in line]
    x, inside, outside = torch.randn(10, 4), torch.tensor([3, 9]), torch.tensor([4, 10])
    exported = fxwrap.compile_graph(torch.export.export(Rows(), (x, inside, outside)), options=Options(**options))
    for call in (exported, torch.compile(Rows(), backend="fxwrap", options=options)):
        for place, positions in zip(places, ((outside, inside), (inside, outside)), strict=True):
            with pytest.raises(IndexError, match=f", which computes {re.escape(place)}: check the values"):
                call(x, *positions)


@pytest.mark.parametrize("name", WRONG)
def test_an_out_of_bounds_kernel_accesses_nothing_outside(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The evaluator raises for accesses out of bounds; here the kernel has no device assertions that raise first."""

    def run(kernel: Kernel, buffers: Any) -> None:
        ran.append(kernel)
        evaluate_kernel(without_requirements(kernel), buffers)

    ran: list[Kernel] = []
    monkeypatch.setattr(evaluate_definitions, "evaluate_kernel", run)
    for sample in WRONG[name]:
        fake = operator_overload(name)(*RIGHT[name](maker(torch.float32)))
        assert run_rule(name, sample(maker(torch.float32)), "cuda", fake=fake).shape == fake.shape
    assert any(isinstance(operation, DeviceAssert) for kernel in ran for operation in kernel.operations)


def _call(name: str, arguments: Any, sizes: Any) -> OperatorCall:
    return OperatorCall(
        name, arguments, {}, torch.empty(sizes), torch.device("cpu"), lambda fake: tuple(fake.shape), CPU
    )


def test_masked_indices_need_not_be_in_bounds() -> None:
    """A gather inlined into a pad also computes indices outside the index tensor, which a mask excludes."""
    device = torch.device("cpu")
    x, index = Stored((5,), torch.float32, device), Stored((2,), torch.int64, device)
    before = pointwise((2,), torch.int64, device, lambda reader, indices: reader.load(index, indices) - 1)
    gathered = RULES["aten.gather.default"](_call("aten.gather.default", (x, 0, before), (2,)))
    padded = RULES["aten.constant_pad_nd.default"](_call("aten.constant_pad_nd.default", (gathered, [1, 1], 7), (4,)))
    names = {x: "x", index: "index"}

    def fetch(definition: Any, at: Any, other: Any) -> Any:
        return reader.body.load(names[definition], at[0], definition.dtype, other)

    reader = BodyBuilder(lambda definition: "inlined", fetch)
    axis = Axis("p", 4)
    reader.body.store("out", axis, reader.load(padded, (axis,)))
    buffers = [Buffer("x", torch.float32, 5), Buffer("index", torch.int64, 2)]
    kernel = reader.body.finish([axis], [], buffers, [Buffer("out", torch.float32, 4)])
    out = torch.empty(4)
    evaluate_kernel(kernel, {"x": torch.arange(5.0), "index": torch.tensor([5, 1]), "out": out})
    assert out.tolist() == [7, 4, 0, 7]
    with pytest.raises(RuntimeError, match="out of bounds"):
        evaluate_kernel(kernel, {"x": torch.arange(5.0), "index": torch.tensor([5, 0]), "out": out})


def test_indices_known_in_bounds_are_affine() -> None:
    """`x[arange(3) + 1]` is a slice: no index is loaded or checked."""

    reader = evaluate_definitions._DefinitionKernel(evaluate_definitions.Computed({}))
    position = reader.body.index(Axis("i", 3)) * 2 + 1
    assert str(checked_indirect_index(reader, position, 6)) == "2*i + 1"
    assert str(checked_indirect_index(reader, position - 6, 6, wrap_negative=True)) == "2*i + 1"
    assert str(checked_indirect_index(reader, position.to(torch.int32), 6)) == "2*i + 1"
    for wrong, wrap_negative in ((position - 6, False), (position + 1, False), (position - 8, True)):
        assert not checked_indirect_index(reader, wrong, 6, wrap_negative=wrap_negative).axes()
    assert len([item for item in reader.body.operations if isinstance(item, DeviceAssert)]) == 3


def test_indices_that_a_formula_bounds_are_not_checked() -> None:
    reader = evaluate_definitions._DefinitionKernel(evaluate_definitions.Computed({}))
    index = reader.body.load("index", Axis("i", 3), torch.int64)
    halves = (reader.body.index(Axis("i", 12)).to(torch.float32) + 0.5) * 0.5 - 0.5  # as of an upsampled image
    for bounded in (index.maximum(0).minimum(5), index.maximum(-6).minimum(-1), halves.maximum(0.0).to(torch.int64)):
        checked_indirect_index(reader, bounded, 6, wrap_negative=True)
    assert not any(isinstance(item, DeviceAssert) for item in reader.body.operations)
    for wrong in (index.maximum(0).minimum(6), index.minimum(5), halves.to(torch.int64) - 7):
        checked_indirect_index(reader, wrong, 6, wrap_negative=True)
    assert len([item for item in reader.body.operations if isinstance(item, DeviceAssert)]) == 3


# --- declined calls --------------------------------------------------------------------------------------------------


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", list(WRITES))
def test_deterministic_mode_disables_scatter_kernels(name: str, deterministic: None) -> None:
    sample = WRITES[name][0](maker(torch.float32))
    assert "deterministic" in run_rule(name, sample, "cuda", fake=torch.empty(0))


def test_numbers_are_added_in_kernels_on_the_cpu() -> None:
    for name in ("aten.scatter_add.default", "aten.index_add.default", "aten.put.default"):
        for dtype in (torch.float32, torch.float64, torch.int64):
            result, _ = define(name, WRITES[name][-1 if "put" in name else 0](maker(dtype)), "cpu")
            assert isinstance(result, Scattered)
    for size, columns in ((2, ()), (3, ()), (9, (4,))):
        zeros = torch.zeros(size, *columns, dtype=torch.bfloat16)
        half = (zeros, 0, at(1, 1), torch.zeros(2, *columns, dtype=torch.bfloat16))
        is_declined = isinstance(run_rule("aten.index_add.default", half, "cpu"), str)
        assert is_declined == (size > 2 and not columns), "the library may round the sums of a larger tensor once"
    for small in (torch.int8, torch.bool):
        sample = (torch.zeros(3, dtype=small), 0, at(1), torch.zeros(1, dtype=small))
        assert "no atomic" in run_rule("aten.scatter_add.default", sample, "cuda")


def test_half_precision_is_summed_in_float32_where_the_tensor_is_small_or_eager_rounds_once() -> None:
    """512 times 2^-9 is 1, but 1 + 2^-9 is 1 in bfloat16."""
    zeros, values = torch.zeros(512, dtype=torch.int64), torch.full((512,), 2.0**-9, dtype=torch.bfloat16)
    small, large = torch.ones(3, dtype=torch.bfloat16), torch.ones(513, dtype=torch.bfloat16)
    calls: list[tuple[str, tuple[object, ...], float]] = [
        ("aten.scatter_add.default", (small, 0, zeros, values), 2),
        ("aten.embedding_dense_backward.default", (values[:, None], zeros, 513, -1, False), 1),
        ("aten.scatter_reduce.two", (large, 0, zeros, values * 1024, "amax"), 2),
    ]
    for name, sample, wanted in calls:
        assert run_rule(name, sample, "cuda").flatten()[0].item() == wanted
        assert not isinstance(define(name, sample, "cuda")[0], Scattered)  # a cast of the sum
    result, _ = define("aten.scatter_add.default", (large, 0, zeros, values), "cuda")
    assert isinstance(result, Scattered) and result.dtype is torch.bfloat16
    table = (values[:, None], zeros, 8 * 512 + 1, -1, False)
    assert "two passes" in run_rule("aten.embedding_dense_backward.default", table, "cuda")


@pytest.mark.parametrize("padding", [-1, 3])
@pytest.mark.parametrize("shape", [(7,), (3, 4), (5, 1)])
def test_embedding_gradients_of_large_tables_are_summed_in_slots(
    shape: tuple[int, ...], padding: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums of float32 have a row for each gradient; the table is written once, in half precision."""
    name = "aten.embedding_dense_backward.default"
    grad = torch.randn(*shape, 8, dtype=torch.bfloat16)
    sample = (grad, torch.randint(9, shape), 40, padding, False)
    exact = operator_overload(name)(grad.double(), *sample[1:]).bfloat16()
    scattered = run_rule(name, sample, "cuda")
    monkeypatch.setattr(embedding_gradients, "_COMPACT_LAUNCHES", 0)
    compact = run_rule(name, sample, "cuda")
    for result in (scattered, compact):
        torch.testing.assert_close(result, exact, rtol=2**-7, atol=0)
    assert torch.equal(compact == 0, exact == 0)


@pytest.mark.parametrize(
    ("dtype", "rows", "device", "is_compact"),
    [
        (torch.bfloat16, 4096, "cuda", True),
        (torch.bfloat16, 128, "cuda", False),  # the launches cost more
        (torch.float32, 4096, "cuda", False),  # the sums are the result
        (torch.bfloat16, 4096, "cpu", False),
    ],
)
def test_compact_sums_are_chosen_by_the_bytes_that_they_save(
    dtype: torch.dtype, rows: int, device: str, is_compact: bool
) -> None:
    with FakeTensorMode():
        fakes = torch.empty(16, 1024, dtype=dtype, device=device), torch.empty(16, dtype=torch.int64, device=device)
        graph = make_fx(lambda grad, index: torch.ops.aten.embedding_dense_backward(grad, index, rows, -1, False))(
            *fakes
        )
    program = fxwrap.lower(graph, fakes)
    types = [line.result.tensor_type for line in program.lines() if isinstance(line, Alloc)]
    allocated = {(item.dtype, item.sizes) for item in types}
    assert ((torch.int32, (rows,)) in allocated) == is_compact, str(program)
    assert (torch.float32, (rows, 1024)) not in allocated or not is_compact
    assert "evict_last" not in str(program), "gradients are loaded once, wherever masks of slots select them"


@pytest.mark.parametrize("padding", [-1, 5])
def test_compact_sums_in_triton(padding: int) -> None:
    """Gradients of few rows of a table, many of one row, in Triton's interpreter."""
    spec = dataclasses.replace(CPU, massively_parallel=True, cpu_rounding=False)
    options = fxwrap.Options(devices=(spec,), cpu_kernels="triton")
    index = torch.cat((torch.randint(90, (3, 9)), torch.full((3, 2), 5), torch.full((3, 2), 7)), 1)
    grad = torch.randn(*index.shape, 24, dtype=torch.bfloat16)
    call = lambda grad, index: torch.ops.aten.embedding_dense_backward(grad, index, 90, padding, False)  # noqa: E731
    compiled = fxwrap.compile_graph(make_fx(call)(grad, index), [grad, index], options=options)
    assert "i32[90]" in str(compiled.program)
    (result,) = compiled(grad, index)
    torch.testing.assert_close(result, call(grad.double(), index).bfloat16(), rtol=2**-7, atol=0)


def test_sums_of_scatters_in_half_precision_are_one_scatter_in_float32() -> None:
    """Gradients of the nodes at both ends of edges; their sum is rounded once."""
    spec = dataclasses.replace(CPU, massively_parallel=True, cpu_rounding=False)
    options = fxwrap.Options(devices=(spec,), cpu_kernels="triton")
    ends = [torch.randint(9, (40,)) for _ in range(2)]
    values = [torch.randn(40, 24, dtype=torch.bfloat16) for _ in range(2)]

    def call(left: torch.Tensor, right: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        zeros = x.new_zeros(9, 24)
        return zeros.index_put((left,), x, accumulate=True) + zeros.index_put((right,), y, accumulate=True)

    compiled = fxwrap.compile_graph(make_fx(call)(*ends, *values), [*ends, *values], options=options)
    types = [line.result.tensor_type for line in compiled.program.lines() if isinstance(line, Alloc)]
    assert sorted([str(item.dtype) for item in types]) == ["torch.bfloat16", "torch.float32"], str(compiled.program)
    expected = call(*ends, *[item.double() for item in values])
    torch.testing.assert_close(compiled(*ends, *values)[0], expected.bfloat16(), rtol=2**-7, atol=2**-6)


def test_gpus_have_no_atomic_multiply() -> None:
    for dtype in (torch.float32, torch.int64):
        for name in ("aten.scatter.reduce", "aten.scatter.value_reduce", "aten.scatter_reduce.two"):
            assert "no atomic multiplication" in run_rule(name, WRITES[name][1](maker(dtype)), "cuda")


def test_other_decline_reasons() -> None:
    ones, mask = torch.ones(3), torch.tensor([True, False, True])
    assert "a mask selects" in run_rule("aten.index.Tensor", (ones, [mask]))
    rows = (torch.ones(5, 3), at(1, dtype=torch.int16))
    assert "its indices are torch.int16" in run_rule("aten.embedding.default", rows, fake=torch.ones(1, 3))
    assert "a mask selects" in run_rule("aten.index_put.default", (ones, [mask], torch.ones(1)))
    reduce = (ones, 0, at(1), torch.ones(1))
    assert "number of values that are written" in run_rule("aten.scatter_reduce.two", (*reduce, "mean"), "cuda")
    assert "elements that keep their value" in run_rule(
        "aten.scatter_reduce.two", (*reduce, "sum", {"include_self": False}), "cuda"
    )
    counted = (torch.ones(2, 2), at(0, 1), 3, -1, True)
    assert "counted first" in run_rule("aten.embedding_dense_backward.default", counted, "cuda")
