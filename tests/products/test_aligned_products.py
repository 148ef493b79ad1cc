"""Products of matrices get rows of aligned lengths, and nobody can tell.

A CPU with a GPU's facts, which pays for nothing, shows what a GPU's programs are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
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
from fxwrap.device_spec import CPU
from fxwrap.lines import Alloc, Call, Launch, Return
from fxwrap.lowering import aligned_products, in_place
from fxwrap.torch_compat import FakeTensorMode
from fxwrap.wrapper_ir import live_bytes

aten = torch.ops.aten
ALIKE = dataclasses.replace(CPU, aligned_products=frozenset({torch.float32, torch.bfloat16}))
OPTIONS = Options(devices=(ALIKE,))


_NOTHING = {"_LEAST": 1, "_COPY": 0, "_SAVED": 1e3}
VOCABULARY = [(4096, 6144)] * 8 + [(4096, 1112)]
"""Products of 4096 x 768 by 768 x 50257 that is copied: the columns that are computed at a time."""


@pytest.fixture
def for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of any size are worth a copy."""
    for name, value in _NOTHING.items():
        monkeypatch.setattr(aligned_products, name, value)


@pytest.fixture(scope="module")
def for_nothing_at_all() -> Iterator[None]:
    """The same for a test of many examples."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in _NOTHING.items():
            patch.setattr(aligned_products, name, value)
        yield


def lowered(function: Callable[..., Any], *inputs: Tensor) -> fxwrap.Program:
    return fxwrap.lower(make_fx(function, tracing_mode="fake")(*inputs), options=OPTIONS)


_TARGETS = ("aten.mm.default", "aten.addmm.default", "aten.mm.out", "aten.addmm.out")


def products(program: fxwrap.Program) -> list[tuple[Any, ...]]:
    """The sizes of the products of matrices that a program calls, in order."""
    calls = [line for line in program.body.lines if isinstance(line, Call) and line.target in _TARGETS]
    given = [line.outs[0] if line.outs else line.results[0] for line in calls]
    return [value.type.sizes for value in given]


def operands(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Of 6 x 8 and 9 x 8: rows of 8 are aligned, rows of 9 are not."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*size, generator=generator).to(dtype) for size in ((6, 8), (9, 8))]


def product(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w.t()).sin()


def seen_otherwise(x: Tensor, w: Tensor) -> Tensor:
    return torch.softmax((x @ w.t()).view(2, 3, 9), -1)


def given_back(x: Tensor, w: Tensor) -> Tensor:
    return x @ w.t()


def view_given_back(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
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


def operand_given(x: Tensor, w: Tensor) -> Tensor:
    return w.view(8, 9) @ torch.cat([x, x[:3]])


def operand_given_turned(x: Tensor, w: Tensor) -> Tensor:
    return w.view(8, 9).t() @ w[:8]


def by_itself(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return w.view(8, 9).t() @ w.view(8, 9), x @ x.t()


LARGER: dict[Callable[..., Any], list[tuple[int, ...]]] = {
    product: [(6, 12)], seen_otherwise: [(6, 12)], given_back: [(6, 12)], view_given_back: [(6, 12)],
    computed: [(9, 8), (8, 8)], gradients: [(6, 8), (12, 8)], a_chain: [(6, 12), (6, 8)], with_bias: [(6, 12)],
    operand_given: [(8, 8)], operand_given_turned: [(12, 8)], by_itself: [(12, 12), (6, 8)],
}  # fmt: skip
"""Functions, and the sizes of the products that their programs compute: 9 columns of float32 become 12, 6 become 8."""


@pytest.mark.parametrize("function", LARGER, ids=lambda item: item.__name__)
def test_products_are_larger(function: Callable[..., Any], for_nothing: None) -> None:
    assert products(lowered(function, *operands())) == LARGER[function]


def test_what_a_kernel_computes_for_products_has_the_zeros(for_nothing: None) -> None:
    """One kernel, which two products read, and none that copies it."""
    program = lowered(gradients, *operands())
    made = [line.result.tensor_type.sizes for line in program.body.lines if isinstance(line, Alloc)]
    assert sorted(made) == [(6, 12), (12, 8)], "it, and a copy of the weight"


@pytest.mark.parametrize("emitter", ["interpreter", "python", "cpp", "fx"])
def test_nobody_can_tell(emitter: str, for_nothing: None) -> None:
    def function(x: Tensor, w: Tensor) -> tuple[Any, ...]:
        return tuple([item(x, w) for item in LARGER])

    graph = make_fx(function, tracing_mode="fake")(*operands())
    found = fxwrap.compile_graph(graph, options=OPTIONS.replace(emitter=emitter))(*operands())
    wanted = tree_leaves(function(*operands()))
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want)
        assert got.stride() == want.stride()


OTHERWISE: dict[str, Callable[..., Any]] = {
    "aligned": lambda x, w: (x[:4] @ w[:8].t()).sin(),
    "one column": lambda x, w: (x @ w[:1].t()).sin(),
    "read by strides": lambda x, w: (x @ w.t()).as_strided((3, 9), (18, 1)).sin(),
    "written": lambda x, w: (x @ w.t()).add_(1.0).sin_(),
    "read by another operator": lambda x, w: torch.linalg.svdvals(x @ w.t()),
    "one dimension": lambda x, w: (x @ w.t()).view(-1).sin(),
    "another dtype": lambda x, w: (x.double() @ w.double().t()).sin(),
    "a factor": lambda x, w: aten.addmm(w[:, 0], x, w.t(), beta=2).sin(),
}


@pytest.mark.parametrize("reason", OTHERWISE)
def test_products_stay(reason: str, for_nothing: None) -> None:
    function = OTHERWISE[reason]
    program = lowered(function, *operands())
    assert (6, 12) not in products(program) and (6, 12) not in [
        line.result.tensor_type.sizes for line in program.body.lines if isinstance(line, Alloc)
    ]


def test_what_is_called_as_it_is_stays(for_nothing: None) -> None:
    graph = make_fx(product, tracing_mode="fake")(*operands())
    for options in (OPTIONS.replace(keep=frozenset({"aten.mm.default"})), OPTIONS.replace(fuse=False)):
        assert (6, 12) not in products(fxwrap.lower(graph, options=options))


def test_only_large_products_pay() -> None:
    """4096 x 768 by 768 x 50257 does, also for copies of weight and result; 64 rows and 257 columns do not."""
    with FakeTensorMode():
        found = [
            lowered(given_back, *[torch.empty(size, 768, dtype=torch.bfloat16) for size in sizes])
            for sizes in ((4096, 50257), (64, 257))
        ]
    assert [products(program) for program in found] == [VOCABULARY, [(64, 257)]]


def test_there_are_never_two_of_a_product_that_is_copied() -> None:
    with FakeTensorMode():
        x, w = [torch.empty(size, 768, dtype=torch.bfloat16) for size in (4096, 50257)]
        program = lowered(given_back, x, w)
    result, part, weight = [2 * rows * columns for rows, columns in ((4096, 50257), (4096, 6144), (1112, 768))]
    assert live_bytes(program).peak - sum(2 * item.numel() for item in (x, w)) <= result + max(part, weight) * 1.01
    copies = [line for line in program.body.lines if isinstance(line, Launch) and "copy" in line.kernel]
    assert len(copies) == len(VOCABULARY) and len({line.kernel for line in copies}) == 2


@pytest.mark.parametrize("emitter", ["interpreter", "python", "cpp", "fx"])
@pytest.mark.parametrize("turned", [False, True])
def test_columns_after_columns(
    turned: bool, emitter: str, for_nothing: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def function(x: Tensor, w: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        y = aten.addmm(bias, x.t() if turned else x, w.t())
        return y.view(2, 3, 21), y.exp()

    monkeypatch.setattr(aligned_products, "_PART_COLUMNS", 8)
    monkeypatch.setattr(in_place, "_LEAST_FILLED", 1)
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(*size, generator=generator) for size in ((7, 6) if turned else (6, 7), (21, 7), (21,))]
    graph = make_fx(function, tracing_mode="fake")(*given)
    compiled = fxwrap.compile_graph(graph, options=OPTIONS.replace(emitter=emitter))
    rows = 8 if turned else 6
    assert products(compiled.program) == [(rows, 8), (rows, 8), (rows, 8)]
    for got, want in zip(compiled(*given), function(*given), strict=True):
        torch.testing.assert_close(got, want)
        assert got.stride() == want.stride()


def compiled_programs(function: Callable[..., Any], **options: Any) -> tuple[Any, list[fxwrap.Program]]:
    """A compiled function, and the programs that it will consist of."""
    programs: list[fxwrap.Program] = []

    def keep(program: fxwrap.Program) -> fxwrap.Program:
        programs.append(program)
        return program

    given = {"devices": (ALIKE,), "passes": (keep,), **options}
    return torch.compile(function, backend="fxwrap", options=given), programs


def test_any_number_of_rows(for_nothing: None, fresh_dynamo: None) -> None:
    compiled, programs = compiled_programs(product)
    w = operands()[1]
    for rows in (6, 11):
        x = torch.randn(rows, 8)
        torch._dynamo.mark_dynamic(x, 0)
        torch.testing.assert_close(compiled(x, w), product(x, w))
    ((size,),) = [products(program) for program in programs]
    assert size[1] == 12


def test_what_a_forward_saves_is_not_copied(for_nothing: None, fresh_dynamo: None) -> None:
    def loss(x: Tensor, w: Tensor) -> Tensor:
        return product(x, w).sum()

    x, w = [item.requires_grad_() for item in operands()]
    wanted = torch.autograd.grad(loss(x, w), (x, w))
    compiled, programs = compiled_programs(loss)
    torch.testing.assert_close(torch.autograd.grad(compiled(x, w), (x, w)), wanted)
    forward, backward = programs
    (saved,) = [item for item in cast(Return, forward.body.lines[-1]).values if item.tensor_type.sizes == (6, 9)]
    assert saved.tensor_type.strides == (12, 1), "a slice of the product"
    assert products(backward) == [(12, 8), (6, 8)], "its gradient, with zeros, is read by both"


def test_outputs_of_any_strides(for_nothing: None, fresh_dynamo: None) -> None:
    options = OPTIONS.replace(output_strides="any")
    graph = make_fx(view_given_back, tracing_mode="fake")(*operands())
    for emitter in ("python", "cpp", "fx"):
        found = fxwrap.compile_graph(graph, options=options.replace(emitter=emitter))(*operands())
        assert [item.stride() for item in found] == [(36, 12, 1), (9, 1)]
        torch.testing.assert_close(tuple(found), view_given_back(*operands()))
    x, w = [item.requires_grad_() for item in operands()]
    compiled, _ = compiled_programs(given_back, output_strides="any")
    with torch.no_grad():
        assert compiled(x, w).stride() == (12, 1)
    result = compiled(x, w)
    assert result.stride() == (12, 1)
    gradients = torch.autograd.grad(result.sin().sum(), (x, w))
    torch.testing.assert_close(gradients, torch.autograd.grad(given_back(x, w).sin().sum(), (x, w)))


@st.composite
def graphs(draw: st.DrawFn) -> tuple[Callable[..., Any], list[Tensor]]:
    """Products of matrices with any number of columns, with views and pointwise operators between, some given back."""
    sizes = [draw(st.integers(1, 13)) for _ in range(4)]
    steps = [draw(st.sampled_from(["mm", "addmm", "relu", "softmax", "double"])) for _ in range(4)]
    shown = draw(st.lists(st.booleans(), min_size=4, max_size=4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 100)))
    weights = [torch.randn(13, 13, generator=generator) for _ in range(2)]

    def function(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        given = []
        for step, (kind, is_shown) in enumerate(zip(steps, shown, strict=True)):
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
            if is_shown:
                given.append(x)
        return (*given, x.t() @ x)

    return function, [torch.randn(4, 7, generator=generator), *weights]


@settings(max_examples=8)
@given(graphs())
def test_any_graph(for_nothing_at_all: None, found: tuple[Callable[..., Any], list[Tensor]]) -> None:
    function, inputs = found
    graph = make_fx(function, tracing_mode="fake")(*inputs)
    results = fxwrap.compile_graph(graph, options=OPTIONS.replace(emitter="interpreter"))(*inputs)
    for got, want in zip(results, function(*inputs), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
        assert got.stride() == want.stride()


@pytest.mark.gpu
@pytest.mark.parametrize("emitter", ["python", "cpp", "fx"])
def test_a_vocabulary_on_a_gpu(emitter: str) -> None:
    """Products in which each size is the vocabulary's."""
    x, w = torch.randn(512, 768, device="cuda").bfloat16(), torch.randn(50257, 768, device="cuda").bfloat16()

    def function(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = x @ w.t()
        gradient = torch.softmax(y, -1)
        return y, gradient @ w, gradient.t() @ x

    graph = make_fx(function, tracing_mode="fake")(x, w)
    compiled = fxwrap.compile_graph(graph, options=Options(emitter=emitter))
    columns = [(512, columns) for _, columns in VOCABULARY]
    assert products(compiled.program) == [*columns, (512, 768), (50264, 768)]
    for got, want in zip(compiled(x, w), function(x, w), strict=True):
        assert got.stride() == want.stride()
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
