"""Padded matmuls: which are padded, and that padding is unobservable. A CPU with a GPU's capabilities runs them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

import fxwrap
from fxwrap import Options
from fxwrap.devices import CPU, DeviceSpec, GemmPaddingCosts
from fxwrap.lines import Alloc, ExternCall, Launch, Return
from fxwrap.lowering.calls import reinplace
from fxwrap.torch_compat import FakeTensorMode
from fxwrap.wrapper_ir import live_bytes

aten = torch.ops.aten
ALIKE = dataclasses.replace(
    CPU,
    matmuls=dataclasses.replace(
        CPU.matmuls, padding_dtypes=frozenset({torch.float32, torch.bfloat16}), generated_dequantised_rows=()
    ),
)
"""It multiplies padded matrices of 9 rows by a library, which a CPU does by a kernel that reads their 3/4 alone."""
FREE_COPIES = GemmPaddingCosts(saved_bytes_per_operation=1e3, copy_overhead_bytes=0, min_saved_bytes=1)
"""Costs with which matmuls of any size are padded."""
ANY_SIZE = dataclasses.replace(ALIKE, matmuls=dataclasses.replace(ALIKE.matmuls, padding_costs=FREE_COPIES))
CHUNKED = dataclasses.replace(
    ALIKE,
    matmuls=dataclasses.replace(ALIKE.matmuls, padding_costs=dataclasses.replace(FREE_COPIES, chunk_column_multiple=8)),
)
OPTIONS = Options(devices=(ANY_SIZE,))
VOCABULARY = [(4096, 6144)] * 8 + [(4096, 1112)]
"""The chunks of a matmul of 4096 x 768 by 768 x 50257 whose result is returned."""


def lowered(function: Callable[..., Any], *inputs: Tensor, spec: DeviceSpec = ANY_SIZE) -> fxwrap.Program:
    return fxwrap.lower(make_fx(function, tracing_mode="fake")(*inputs), options=Options(devices=(spec,)))


_TARGETS = ("aten.mm.default", "aten.addmm.default", "aten.mm.out", "aten.addmm.out")


def matmul_sizes(program: fxwrap.Program) -> list[tuple[Any, ...]]:
    """The sizes of the matmuls that a program calls, in order."""
    calls = [line for line in program.body.lines if isinstance(line, ExternCall) and line.target in _TARGETS]
    results = [line.outs[0] if line.outs else line.results[0] for line in calls]
    return [value.type.sizes for value in results]


def operands(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Matrices of 6 x 8 and 9 x 8: rows of 8 are aligned, rows of 9 are not."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*size, generator=generator).to(dtype) for size in ((6, 8), (9, 8))]


def matmul(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w.t()).sin()


def viewed(x: Tensor, w: Tensor) -> Tensor:
    return torch.softmax((x @ w.t()).view(2, 3, 9), -1)


def returned(x: Tensor, w: Tensor) -> Tensor:
    return x @ w.t()


def view_returned(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = x @ w.t()
    return y.view(2, 3, 9), y.exp()


def computed(x: Tensor, w: Tensor) -> Tensor:
    return torch.softmax(w @ x.t(), 0).t() @ w


def gradients(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    gradient = torch.sigmoid((x[:, None, :1] * w[None, :, 0]).view(-1, 9)).view(2, 3, 9).view(6, 9)
    return gradient @ w, gradient.t() @ x


def a_chain(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w.t()) @ w


def with_bias(x: Tensor, w: Tensor) -> Tensor:
    return aten.addmm(w[:, 0], x, w.t()).cos()


def input_operand(x: Tensor, w: Tensor) -> Tensor:
    return w.view(8, 9) @ torch.cat([x, x[:3]])


def transposed_input_operand(x: Tensor, w: Tensor) -> Tensor:
    return w.view(8, 9).t() @ w[:8]


def with_itself(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return w.view(8, 9).t() @ w.view(8, 9), x @ x.t()


PADDED: dict[Callable[..., Any], list[tuple[int, ...]]] = {
    matmul: [(6, 12)], viewed: [(6, 12)], returned: [(6, 12)], view_returned: [(6, 12)],
    computed: [(9, 8), (8, 8)], gradients: [(6, 8), (12, 8)], a_chain: [(6, 12), (6, 8)], with_bias: [(6, 12)],
    input_operand: [(8, 8)], transposed_input_operand: [(12, 8)], with_itself: [(12, 12), (6, 8)],
}  # fmt: skip
"""Functions, and the sizes of the matmuls in their programs: 9 columns of float32 become 12, 6 become 8."""


@pytest.mark.parametrize("function", PADDED, ids=lambda item: item.__name__)
def test_matmuls_are_padded(function: Callable[..., Any]) -> None:
    assert matmul_sizes(lowered(function, *operands())) == PADDED[function]


def test_producing_kernels_write_the_padding() -> None:
    """Two matmuls read the result of one kernel, which nothing copies."""
    program = lowered(gradients, *operands())
    allocated = [line.result.tensor_type.sizes for line in program.body.lines if isinstance(line, Alloc)]
    assert sorted(allocated) == [(6, 12), (12, 8)], "the gradient, and a copy of the weight"


@pytest.mark.parametrize("products", [7, 8])
def test_unaligned_results_of_short_sums_are_kernels(products: int) -> None:
    """A kernel replaces a padded matmul and the copy of its rows, up to so many products; nothing else is a kernel."""
    spec = dataclasses.replace(
        ANY_SIZE,
        matmuls=dataclasses.replace(ANY_SIZE.matmuls, generated_unaligned_products=((torch.float32, products),)),
    )
    inputs = operands()
    for function in (matmul, a_chain):
        assert matmul_sizes(lowered(function, *inputs, spec=spec)) == PADDED[function], "padded rows are not copied"
    for function in (returned, lambda x, w: aten.addmm(w[:, 0], x, w.t())):
        graph = make_fx(function, tracing_mode="fake")(*inputs)
        compiled = fxwrap.compile_graph(graph, options=Options(devices=(spec,)))
        assert matmul_sizes(compiled.program) == ([] if products == 8 else [(6, 12)])
        (result,) = compiled(*inputs)
        torch.testing.assert_close(result, function(*inputs))


def test_unaligned_results_with_any_number_of_rows_are_kernels() -> None:
    programs: list[fxwrap.Program] = []

    def collect(program: fxwrap.Program) -> fxwrap.Program:
        programs.append(program)
        return program

    spec = dataclasses.replace(
        ANY_SIZE, matmuls=dataclasses.replace(ANY_SIZE.matmuls, generated_unaligned_products=((torch.float32, 8),))
    )
    options = {"devices": [spec], "passes": (collect,)}
    compiled = torch.compile(returned, backend="fxwrap", fullgraph=True, dynamic=False, options=options)
    for rows in (6, 1, 5):
        x, w = torch.randn(rows, 8), torch.randn(9, 8)
        torch._dynamo.maybe_mark_dynamic(x, 0)
        torch.testing.assert_close(compiled(x, w), returned(x, w))
    assert [matmul_sizes(program) for program in programs[:1]] == [[]]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("emitter", ["interpreter", "python", "cpp", "fx"])
def test_padding_is_unobservable(emitter: str) -> None:
    def function(x: Tensor, w: Tensor) -> tuple[Any, ...]:
        return tuple([item(x, w) for item in PADDED])

    graph = make_fx(function, tracing_mode="fake")(*operands())
    results = fxwrap.compile_graph(graph, options=OPTIONS.replace(emitter=emitter))(*operands())
    for got, want in zip(results, tree_leaves(function(*operands())), strict=True):
        torch.testing.assert_close(got, want)
        assert got.stride() == want.stride()


INELIGIBLE: dict[str, Callable[..., Any]] = {
    "aligned": lambda x, w: (x[:4] @ w[:8].t()).sin(),
    "one column": lambda x, w: (x @ w[:1].t()).sin(),
    "read by strides": lambda x, w: (x @ w.t()).as_strided((3, 9), (18, 1)).sin(),
    "written": lambda x, w: torch.ops.aten.bernoulli_.float((x @ w.t()), 1.0).sin(),
    "read by another operator": lambda x, w: torch.linalg.svdvals(x @ w.t()),
    "one dimension": lambda x, w: (x @ w.t()).view(-1).sin(),
    "another dtype": lambda x, w: (x.double() @ w.double().t()).sin(),
    "a factor": lambda x, w: aten.addmm(w[:, 0], x, w.t(), beta=2).sin(),
}


@pytest.mark.parametrize("reason", INELIGIBLE)
def test_ineligible_matmuls_are_not_padded(reason: str) -> None:
    function = INELIGIBLE[reason]
    program = lowered(function, *operands())
    assert (6, 12) not in matmul_sizes(program) and (6, 12) not in [
        line.result.tensor_type.sizes for line in program.body.lines if isinstance(line, Alloc)
    ]


def test_operands_of_extern_calls_are_not_padded() -> None:
    graph = make_fx(matmul, tracing_mode="fake")(*operands())
    for options in (OPTIONS.replace(preserve_ops=frozenset({"aten.mm.default"})), OPTIONS.replace(fuse=False)):
        assert (6, 12) not in matmul_sizes(fxwrap.lower(graph, options=options))


def test_only_large_matmuls_are_padded() -> None:
    """4096 x 768 by 768 x 50257 is worth copies of weight and result; 64 rows and 257 columns are not."""
    with FakeTensorMode():
        programs = [
            lowered(returned, *[torch.empty(size, 768, dtype=torch.bfloat16) for size in sizes], spec=ALIKE)
            for sizes in ((4096, 50257), (64, 257))
        ]
    assert [matmul_sizes(program) for program in programs] == [VOCABULARY, [(64, 257)]]


def test_peak_memory_of_a_padded_matmul() -> None:
    with FakeTensorMode():
        x, w = [torch.empty(size, 768, dtype=torch.bfloat16) for size in (4096, 50257)]
        program = lowered(returned, x, w, spec=ALIKE)
    result, part, weight = [2 * rows * columns for rows, columns in ((4096, 50257), (4096, 6144), (1112, 768))]
    assert live_bytes(program).peak - sum(2 * item.numel() for item in (x, w)) <= result + max(part, weight) * 1.01
    copies = [line for line in program.body.lines if isinstance(line, Launch) and "copy" in line.kernel]
    assert len(copies) == len(VOCABULARY) and len({line.kernel for line in copies}) == 2


@pytest.mark.parametrize("emitter", ["interpreter", "python", "cpp", "fx"])
@pytest.mark.parametrize("transposed", [False, True])
def test_column_blocks(transposed: bool, emitter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def function(x: Tensor, w: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        y = aten.addmm(bias, x.t() if transposed else x, w.t())
        return y.view(2, 3, 21), y.exp()

    monkeypatch.setattr(reinplace, "MIN_FILLED_BYTES", 1)
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(*size, generator=generator) for size in ((7, 6) if transposed else (6, 7), (21, 7), (21,))]
    graph = make_fx(function, tracing_mode="fake")(*inputs)
    compiled = fxwrap.compile_graph(graph, options=Options(devices=(CHUNKED,), emitter=emitter))
    rows = 8 if transposed else 6
    assert matmul_sizes(compiled.program) == [(rows, 8), (rows, 8), (rows, 8)]
    for got, want in zip(compiled(*inputs), function(*inputs), strict=True):
        torch.testing.assert_close(got, want)
        assert got.stride() == want.stride()


def compiled_programs(function: Callable[..., Any], **options: Any) -> tuple[Any, list[fxwrap.Program]]:
    """A compiled function, and the list of its programs."""
    programs: list[fxwrap.Program] = []

    def record(program: fxwrap.Program) -> fxwrap.Program:
        programs.append(program)
        return program

    options = {"devices": (ANY_SIZE,), "passes": (record,), **options}
    return torch.compile(function, backend="fxwrap", options=options), programs


def test_any_number_of_rows() -> None:
    compiled, programs = compiled_programs(matmul)
    w = operands()[1]
    for rows in (6, 11):
        x = torch.randn(rows, 8)
        torch._dynamo.mark_dynamic(x, 0)
        torch.testing.assert_close(compiled(x, w), matmul(x, w))
    ((size,),) = [matmul_sizes(program) for program in programs]
    assert size[1] == 12


def test_saved_tensors_are_not_copied() -> None:
    def loss(x: Tensor, w: Tensor) -> Tensor:
        return matmul(x, w).sum()

    x, w = [item.requires_grad_() for item in operands()]
    expected = torch.autograd.grad(loss(x, w), (x, w))
    compiled, programs = compiled_programs(loss)
    torch.testing.assert_close(torch.autograd.grad(compiled(x, w), (x, w)), expected)
    forward, backward = programs
    (saved,) = [item for item in cast(Return, forward.body.lines[-1]).values if item.tensor_type.sizes == (6, 9)]
    assert saved.tensor_type.strides == (12, 1), "a slice of the padded result"
    assert matmul_sizes(backward) == [(12, 8), (6, 8)], "both matmuls read the padded gradient"


def test_outputs_of_any_strides() -> None:
    options = OPTIONS.replace(output_strides="any")
    graph = make_fx(view_returned, tracing_mode="fake")(*operands())
    for emitter in ("python", "cpp", "fx"):
        results = fxwrap.compile_graph(graph, options=options.replace(emitter=emitter))(*operands())
        assert [item.stride() for item in results] == [(36, 12, 1), (9, 1)]
        torch.testing.assert_close(tuple(results), view_returned(*operands()))
    x, w = [item.requires_grad_() for item in operands()]
    compiled, _ = compiled_programs(returned, output_strides="any")
    with torch.no_grad():
        assert compiled(x, w).stride() == (12, 1)
    result = compiled(x, w)
    assert result.stride() == (12, 1)
    gradients = torch.autograd.grad(result.sin().sum(), (x, w))
    torch.testing.assert_close(gradients, torch.autograd.grad(returned(x, w).sin().sum(), (x, w)))


@st.composite
def graphs(draw: st.DrawFn) -> tuple[Callable[..., Any], list[Tensor]]:
    """Matmuls of any number of columns, with views and pointwise operators between them; some results are returned."""
    sizes = [draw(st.integers(1, 13)) for _ in range(4)]
    steps = [draw(st.sampled_from(["mm", "addmm", "relu", "softmax", "double"])) for _ in range(4)]
    is_returned = draw(st.lists(st.booleans(), min_size=4, max_size=4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 100)))
    weights = [torch.randn(13, 13, generator=generator) for _ in range(2)]

    def function(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        returned = []
        for step, (kind, keep) in enumerate(zip(steps, is_returned, strict=True)):
            w = weights[step % 2]
            columns = sizes[step]
            match kind:
                case "mm":
                    x = x @ w[: x.shape[1], :columns]
                case "addmm":
                    x = aten.addmm(w[0, :columns], x, w.t()[: x.shape[1], :columns])
                case "relu":
                    x = torch.relu(x)
                case "softmax":
                    x = torch.softmax(x.view(2, -1, x.shape[1]), -1).view(-1, x.shape[1])
                case _:
                    x = torch.cat([x, x])
            if keep:
                returned.append(x)
        return (*returned, x.t() @ x)

    return function, [torch.randn(4, 7, generator=generator), *weights]


@settings(max_examples=8)
@given(graphs())
def test_random_graphs(graph_and_inputs: tuple[Callable[..., Any], list[Tensor]]) -> None:
    function, inputs = graph_and_inputs
    graph = make_fx(function, tracing_mode="fake")(*inputs)
    results = fxwrap.compile_graph(graph, options=OPTIONS.replace(emitter="interpreter"))(*inputs)
    for got, want in zip(results, function(*inputs), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
        assert got.stride() == want.stride()


@pytest.mark.gpu
@pytest.mark.parametrize("emitter", ["python", "cpp", "fx"])
def test_a_vocabulary_on_a_gpu(emitter: str) -> None:
    """Matmuls in which each size is the vocabulary's. The softmax of small elements does not amplify rounding."""
    x, w = (torch.randn(512, 768, device="cuda") / 28).bfloat16(), torch.randn(50257, 768, device="cuda").bfloat16()

    def function(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = x @ w.t()
        gradient = torch.softmax(y, -1)
        return y, gradient @ w, gradient.t() @ x

    graph = make_fx(function, tracing_mode="fake")(x, w)
    compiled = fxwrap.compile_graph(graph, options=Options(emitter=emitter))
    assert matmul_sizes(compiled.program) == [(512, 768), (50264, 768)], "a kernel stores the unaligned rows"
    for got, want in zip(compiled(x, w), function(x, w), strict=True):
        assert got.stride() == want.stride()
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
