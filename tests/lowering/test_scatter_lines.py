"""Scatter and index_put calls that no kernel computes: dedicated lines between kernels, in every emitter.

A kernel computes the base before the line, and kernels read its result, so that the order of lines depends on the
declared reads and writes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap import Options
from fxwrap.comparison.measure import peak_bytes
from fxwrap.compile import emit
from fxwrap.errors import GraphError
from fxwrap.lines import Alloc, ExternCall, IndexPut, Launch, Mutate, Scatter
from fxwrap.options import EMITTERS
from fxwrap.testing import assert_emitters_agree
from fxwrap.wrapper_ir import Ownership, live_bytes
from tests.lowering.emitter_agreement import agreed_program
from tests.support.long_form import sampled

aten = torch.ops.aten

ON_EACH_DEVICE = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])

WRITERS = frozenset({
    "aten.scatter.src", "aten.scatter.value", "aten.scatter.reduce", "aten.scatter.value_reduce",
    "aten.scatter_reduce.two", "aten.scatter_add.default", "aten.index_put.default",
    "aten.index_put.hacked_twin", "aten._unsafe_index_put.default",
})  # fmt: skip
"""What kernels can do, on some device or for some dtype, and here is to be called."""

OPTIONS = Options(preserve_ops=WRITERS, fallback="error")


def lines_of(program: fxwrap.Program, *classes: type) -> list[Any]:
    """The lines of a program that are of one of these classes, in order."""
    return [line for line in program.body.lines if isinstance(line, classes)]


def shape_of(program: fxwrap.Program) -> list[str]:
    """The lines that compute, in order: opcodes, with the operators of calls."""
    kinds = (ExternCall, Mutate, Scatter, IndexPut, Launch)
    return [
        f"{line.opcode} {getattr(line, 'target', '')}".strip() if isinstance(line, ExternCall | Mutate) else line.opcode
        for line in lines_of(program, *kinds)
    ]


def whole_numbers(*sizes: int, device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """Small whole numbers without zero, whose sums and products are exact in any order."""
    return (torch.randint(1, 5, sizes) * torch.tensor([-1, 1])[torch.randint(0, 2, sizes)]).to(device, dtype)


# --- scatter ----------------------------------------------------------------------------------------------------------

SCATTERS: dict[str, tuple[Any, str]] = {
    "set": (lambda x, i, s: aten.scatter(x, 0, i, s), ""),
    "set_number": (lambda x, i, s: aten.scatter(x, 1, i, 2.5), ""),
    "add": (lambda x, i, s: aten.scatter(x, 0, i, s, reduce="add"), "add"),
    "add_number": (lambda x, i, s: aten.scatter(x, 0, i, 2, reduce="add"), "add"),
    "multiply": (lambda x, i, s: aten.scatter(x, -2, i, s, reduce="multiply"), "multiply"),
    "multiply_number": (lambda x, i, s: aten.scatter(x, 0, i, -3, reduce="multiply"), "multiply"),
    "sum": (lambda x, i, s: aten.scatter_reduce(x, 0, i, s, "sum"), "sum"),
    "sum_without_self": (lambda x, i, s: aten.scatter_reduce(x, 0, i, s, "sum", include_self=False), "sum"),
    "prod": (lambda x, i, s: aten.scatter_reduce(x, 1, i, s, "prod"), "prod"),
    "prod_without_self": (lambda x, i, s: aten.scatter_reduce(x, 0, i, s, "prod", include_self=False), "prod"),
    "mean": (lambda x, i, s: aten.scatter_reduce(x, 0, i, s, "mean"), "mean"),
    "mean_without_self": (lambda x, i, s: aten.scatter_reduce(x, -1, i, s, "mean", include_self=False), "mean"),
    "amax": (lambda x, i, s: aten.scatter_reduce(x, 0, i, s, "amax"), "amax"),
    "amax_without_self": (lambda x, i, s: aten.scatter_reduce(x, 0, i, s, "amax", include_self=False), "amax"),
    "amin": (lambda x, i, s: aten.scatter_reduce(x, 1, i, s, "amin"), "amin"),
    "amin_without_self": (lambda x, i, s: aten.scatter_reduce(x, 0, i, s, "amin", include_self=False), "amin"),
}
"""Each form of scatter, of a base of 4 x 8, positions and a source of 3 x 8; and the reduction that its line has."""


def scatter_inputs(device: str, dtype: torch.dtype = torch.float32, distinct: bool = False) -> tuple[Tensor, ...]:
    """A base, positions below 4, all different along dimension 0 where asked for, and a source."""
    index = torch.rand(4, 8).argsort(0)[:3] if distinct else torch.randint(0, 4, (3, 8))
    base, source = [whole_numbers(rows, 8, device=device, dtype=dtype) for rows in (4, 3)]
    return base, index.to(device), source


@ON_EACH_DEVICE
@pytest.mark.parametrize("name", sampled([*SCATTERS], 0, 2))
def test_a_functional_scatter_reuses_a_dead_base(name: str, device: str) -> None:
    scatter, reduce = SCATTERS[name]

    def function(x: Tensor, i: Tensor, s: Tensor) -> Tensor:
        return scatter(x * 2, i, s + 1) * 3

    program = agreed_program(function, scatter_inputs(device, distinct=name == "set"), OPTIONS)
    (line,) = lines_of(program, Scatter)
    assert (line.reduce, line.include_self) == (reduce, "without_self" not in name)
    assert shape_of(program)[-2:] == ["extern.scatter", "kernel.launch"]
    assert not lines_of(program, Mutate)  # no copy of the base
    allocated = {item.result.name for item in lines_of(program, Alloc)}
    assert line.target.name in allocated and allocated >= {item.outs[0].name for item in lines_of(program, Launch)}


@pytest.mark.sampled(2)
@ON_EACH_DEVICE
@pytest.mark.parametrize("name", sampled([*SCATTERS], 1, 2))
def test_a_functional_scatter_copies_a_live_base(name: str, device: str) -> None:
    scatter, _ = SCATTERS[name]

    def function(x: Tensor, i: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        base = x * 2
        return scatter(base, i, s) * 3, scatter(x, i, s) + base

    program = agreed_program(function, scatter_inputs(device, distinct=name == "set"), OPTIONS)
    assert [line.target for line in lines_of(program, Mutate)] == ["aten.copy_.default"] * 2


IN_PLACE: dict[str, Any] = {
    "set": lambda x, i, s: x.scatter_(0, i, s),
    "set_number": lambda x, i, s: x.scatter_(0, i, 2.5),
    "add": lambda x, i, s: x.scatter_(0, i, s, reduce="add"),
    "multiply_number": lambda x, i, s: x.scatter_(0, i, -3, reduce="multiply"),
    **{
        f"{reduce}_{includes_self}": lambda x, i, s, reduce=reduce, includes_self=includes_self: x.scatter_reduce_(
            0, i, s, reduce, include_self=includes_self
        )
        for reduce in ("sum", "prod", "mean", "amax", "amin") for includes_self in (True, False)
    },
}  # fmt: skip


@pytest.mark.sampled(2)
@ON_EACH_DEVICE
@pytest.mark.parametrize("name", sampled([*IN_PLACE], 0, 2))
def test_an_in_place_scatter_is_ordered_with_its_readers(name: str, device: str) -> None:
    """The input is read before and after, and a view of it shows the writes."""

    def function(x: Tensor, i: Tensor, s: Tensor) -> tuple[Tensor, ...]:
        before, rows = x.exp(), x[1:]
        result = IN_PLACE[name](x, i, s.abs())
        return before + x, rows.sin(), result * 2

    program = agreed_program(function, scatter_inputs(device, distinct=name == "set"), OPTIONS)
    assert program.inputs[0].ownership is Ownership.MUTABLE
    assert len(lines_of(program, Scatter)) == 1
    kinds = shape_of(program)
    assert "kernel.launch" in kinds[: kinds.index("extern.scatter")]
    assert "kernel.launch" in kinds[kinds.index("extern.scatter") :]


DTYPES = (torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scatter_accepts_eagers_dtypes(dtype: torch.dtype) -> None:
    """Where eager refuses a dtype, every emitter refuses it too, with eager's words."""
    arguments = scatter_inputs("cpu", dtype)
    names = ("set_number", "add", "multiply_number", "sum", "prod_without_self", "mean", "amax")
    refusals = {name: eager_error(SCATTERS[name][0], arguments) for name in names}
    accepted = [SCATTERS[name][0] for name, refusal in refusals.items() if refusal is None]
    program = agreed_program(lambda x, i, s: [scatter(x, i, s) for scatter in accepted], arguments, OPTIONS)
    assert len(lines_of(program, Scatter)) == len(accepted) >= 5
    for name, refusal in refusals.items():
        if refusal is not None:
            assert_all_raise(SCATTERS[name][0], arguments, *refusal)


def eager_error(function: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[type[Exception], str] | None:
    """The class and first line of what eager raises, or None."""
    try:
        function(*arguments)
    except Exception as error:  # noqa: BLE001  whichever it is, it is what is asked for
        return type(error), str(error).splitlines()[0]
    return None


def assert_all_raise(
    function: Callable[..., Any], arguments: tuple[Any, ...], error: type[Exception], message: str
) -> None:
    """Asserts that every emitter raises eager's error; tracing, which checks less, must let the call pass."""
    graph = make_fx(function, tracing_mode="fake")(*arguments)
    for emitter in EMITTERS:
        compiled = fxwrap.compile_graph(graph, arguments, options=OPTIONS.replace(emitter=emitter))
        with pytest.raises(error) as caught:
            compiled(*arguments)
        assert type(caught.value) is error and message in str(caught.value), (emitter, caught.value)


# --- index_put --------------------------------------------------------------------------------------------------------

INDEX_PUTS: dict[str, Any] = {
    "rows": lambda x, i, v: aten.index_put(x, [i], v[:3]),
    "columns_after_none": lambda x, i, v: aten.index_put(x, [None, i], v[:, :3]),
    "rows_then_none": lambda x, i, v: aten.index_put(x, [i, None], v[:3], False),
    "elements": lambda x, i, v: aten.index_put(x, [i, i - 4], v[0, :3]),
    "broadcast_indices": lambda x, i, v: aten.index_put(x, [i[:, None], i], v[:3, :3]),
    "broadcast_values": lambda x, i, v: aten.index_put(x, [i], v[:1]),
    "one_value": lambda x, i, v: aten.index_put(x, [None, i], v[0, 0]),
    "added": lambda x, i, v: aten.index_put(x, [i % 2], v[:3], True),
    "added_at_elements": lambda x, i, v: aten.index_put(x, [i % 2, i * 0], v[0, :3], accumulate=True),
    "rows_by_mask": lambda x, i, v: aten.index_put(x, [v[:, 0] > 0], v[:1]),
    "elements_by_mask": lambda x, i, v: aten.index_put(x, [v > 0], v[0, 0]),
    "columns_by_mask": lambda x, i, v: aten.index_put(x, [None, v[0] > 0], v[0, 0], True),
    "unsafe": lambda x, i, v: aten._unsafe_index_put(x, [i], v[:3]),
    "hacked_twin": lambda x, i, v: aten.index_put.hacked_twin(x, [i], v[:3]),
}
"""Each way to say places, in a base of 4 x 8 by 3 different positions below 4, with values of 4 x 8."""


def index_inputs(device: str) -> tuple[Tensor, ...]:
    """A base, different positions, and values."""
    base, values = [whole_numbers(4, 8, device=device) for _ in range(2)]
    return base, torch.tensor([3, 0, 2], device=device), values


@pytest.mark.sampled(2)
@ON_EACH_DEVICE
@pytest.mark.parametrize("name", INDEX_PUTS)
def test_a_functional_index_put_copies_only_a_live_base(name: str, device: str) -> None:
    put = INDEX_PUTS[name]

    def function(x: Tensor, i: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        dying, living = x * 2, v * 3
        return put(dying, i, v + 1) * 3, living.sin() * put(living, i, v)

    program = agreed_program(function, index_inputs(device), OPTIONS)
    lines = lines_of(program, IndexPut)
    assert len(lines) == 2 and {line.accumulate for line in lines} == {"added" in name or name == "columns_by_mask"}
    (copy,) = lines_of(program, Mutate)
    assert copy.target == "aten.copy_.default"
    assert copy.writes[0] in {line.target for line in lines}
    assert shape_of(program)[-1] == "kernel.launch"


@ON_EACH_DEVICE
def test_an_in_place_index_put_is_ordered_among_kernels(device: str) -> None:
    def function(x: Tensor, i: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        before, rows = x.exp(), x[1:]
        x[i] = v[:3] * 2
        between = rows.sin()
        aten.index_put_(x, [None, i], v[0, 0], accumulate=True)
        aten.index_put_(x, [v > 0], v[0, 1])
        return before + x, between, rows * 2

    program = agreed_program(
        function, index_inputs(device), OPTIONS.replace(preserve_ops=WRITERS | {"aten.index_put_.default"})
    )
    assert [line.accumulate for line in lines_of(program, IndexPut)] == [False, True, False]


# --- whose memory it is -----------------------------------------------------------------------------------------------


def other_writes(x: Tensor, i: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Operators without a line of their own, each on a base that dies."""
    return (
        aten.scatter_add(x * 1, 0, i[:, None].expand(3, 8), v[:3]), aten.index_add(x * 2, 0, i, v[:3], alpha=2),
        aten.index_copy(x * 3, 0, i, v[:3]), aten.index_fill(x * 4, 1, i, 2.0),
        aten.masked_scatter(x * 5, v > 0, v), aten.put(x * 6, i, v[0, :3], True),
        aten.index_reduce(x * 7, 0, i, v[:3], "prod"),
    )  # fmt: skip


@ON_EACH_DEVICE
def test_extern_calls_are_reinplaced_where_possible(device: str) -> None:
    names = ("index_add", "index_copy", "put", "masked_scatter", "index_reduce", "scatter_add")
    preserve_ops = WRITERS | {f"aten.{name}.default" for name in names} | {"aten.index_fill.int_Scalar"}
    program = agreed_program(other_writes, index_inputs(device), OPTIONS.replace(preserve_ops=preserve_ops))
    assert not lines_of(program, ExternCall)
    assert [line.target.partition("_.")[0] for line in lines_of(program, Mutate)] == [
        "aten.scatter_add", "aten.index_add", "aten.index_copy", "aten.index_fill", "aten.masked_scatter", "aten.put",
        "aten.index_reduce",
    ]  # fmt: skip


UNCHANGED_BASES: dict[str, Any] = {
    "an_input": lambda x, i, v: aten.index_put(x, [i], v[:3]),
    "a_result": lambda x, i, v: (y := x * 2, aten.index_put(y, [i], v[:3])),
    "a_view_is_returned": lambda x, i, v: ((y := x * 2)[1:], aten.index_put(y, [i], v[:3])),
    "a_base_that_is_also_the_source": lambda x, i, v: aten.index_put((y := x * 2), [i], y[:3]),
    "a_slice": lambda x, i, v: aten.index_put((x * 2)[:, 1:5], [i], v[:3, :4]),
    "an_expanded_row": lambda x, i, v: aten.index_put((x[:1] * 2).expand(4, 8), [i], v[:3]),
    "two_writers": lambda x, i, v: (aten.index_put((y := x * 2), [i], v[:3]), aten.index_put(y, [i], v[:1])),
}


@pytest.mark.parametrize(("name", "fuse"), [(name, number % 2 == 0) for number, name in enumerate(UNCHANGED_BASES)])
def test_a_live_base_is_copied(name: str, fuse: bool) -> None:
    program = agreed_program(UNCHANGED_BASES[name], index_inputs("cpu"), OPTIONS.replace(fuse=fuse))
    puts = lines_of(program, IndexPut)
    copies = [line for line in lines_of(program, Mutate) if line.target == "aten.copy_.default"]
    assert copies and len(puts) - len(copies) == (name == "two_writers")  # the last writer may have the memory


def test_a_donated_input_is_written_in_place() -> None:
    arguments = index_inputs("cpu")
    graph = make_fx(INDEX_PUTS["rows"])(*arguments)
    program = fxwrap.lower(graph, arguments, options=OPTIONS, ownership={0: Ownership.OWNED})
    assert shape_of(program) == ["extern.index_put"]
    copies = [item.clone() for item in arguments]
    torch.testing.assert_close(fxwrap.run(program, copies)[0], graph(*arguments))


def test_a_chain_of_writes_shares_one_buffer() -> None:
    def function(x: Tensor, i: Tensor, v: Tensor) -> Tensor:
        result = aten.index_put(x * 2, [i], v[:3])
        result = aten.scatter_reduce(result, 0, i[:, None], v[:3, :1], "mean")
        return aten.index_put(result.view(-1), [i], v[0, 0], True).view(4, 8)

    program = agreed_program(function, index_inputs("cpu"), OPTIONS)
    assert len(lines_of(program, Alloc)) == 1 and not lines_of(program, Mutate)


@pytest.mark.parametrize("name", ["called", "fused"])
def test_peak_memory_has_no_copy_of_a_dead_base(name: str) -> None:
    """A base of 1 MiB that an operator makes, and next to nothing else: twice that while it was copied."""

    def function(x: Tensor, i: Tensor, v: Tensor) -> Tensor:
        return aten.index_put(x @ x, [i], v).relu()

    arguments = (torch.randn(512, 512), torch.tensor([3, 0, 2]), torch.randn(3, 512))
    options = OPTIONS if name == "called" else Options(fallback="error")
    program = agreed_program(function, arguments, options)
    assert len(lines_of(program, IndexPut)) == (name == "called")
    peak = live_bytes(program, include_inputs=False).peak
    assert peak == 512 * 512 * 4
    for emitter in ("python", "cpp"):
        call = emit(program, emitter)
        assert peak <= peak_bytes(lambda: arguments, lambda inputs, call=call: call(*inputs)) < 1.1 * peak


# --- deterministic algorithms -----------------------------------------------------------------------------------------


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Eager and compiled code run with deterministic algorithms, or an error where there is none."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def all_writes(x: Tensor, i: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """What deterministic algorithms treat apart, each beside a kernel, with positions that are equal."""
    rows = i[:, None].expand(3, 8)
    return (
        aten.index_put(x * 2, [i % 2], v[:3], True) + 1, aten.index_put(x * 3, [i % 2], v[:1]) + 1,
        aten.scatter(x * 4, 0, rows, v[:3]) + 1, aten.scatter_add(x * 5, 0, rows, v[:3]) + 1,
        aten.scatter_reduce(x * 6, 0, rows, v[:3], "amax") + 1,
    )  # fmt: skip


def all_writes_on_cpu(x: Tensor, i: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """With the operator that CUDA has no deterministic algorithm for."""
    return (*all_writes(x, i, v), aten.put(x * 7, i % 2, v[0, :3], True) + 1)


@ON_EACH_DEVICE
def test_deterministic_algorithms_match_eager(device: str, deterministic: None) -> None:
    """A call that may write an element twice stays an extern call, without an option."""
    on_cpu = device == "cpu"
    writes = all_writes_on_cpu if on_cpu else all_writes
    program = agreed_program(writes, index_inputs(device), Options(fallback="error"))
    assert len(lines_of(program, IndexPut)) == 2 and len(lines_of(program, Scatter)) == 2
    assert len(lines_of(program, Mutate)) == 1 + on_cpu and lines_of(program, Launch)


def put_without_order(x: Tensor, i: Tensor, v: Tensor) -> Tensor:
    """Which has no deterministic algorithm on any device."""
    return aten.put(x * 2, i, v[0, :3]).sin()


def test_missing_deterministic_algorithms_raise_eagers_error(deterministic: None) -> None:
    arguments = index_inputs("cpu")
    refused = eager_error(put_without_order, arguments)
    assert refused is not None and "put_ does not have a deterministic implementation" in refused[1]
    assert_all_raise(put_without_order, arguments, *refused)


@pytest.mark.parametrize("emitter", EMITTERS)
def test_missing_deterministic_algorithms_warn_like_eager(emitter: str, capfd: pytest.CaptureFixture[str]) -> None:
    """A Python warning, or on stderr where an overload is called, which torch itself does without Python's warnings."""
    arguments = index_inputs("cpu")
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        graph = make_fx(put_without_order, tracing_mode="fake")(*arguments)
        compiled = fxwrap.compile_graph(graph, arguments, options=Options(emitter=emitter, fallback="error"))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            (result,) = compiled(*arguments)
    finally:
        torch.use_deterministic_algorithms(False)
    messages = [str(item.message) for item in caught] + [capfd.readouterr().err]
    assert any("put_ does not have a deterministic implementation" in text for text in messages)
    torch.testing.assert_close(result, put_without_order(*arguments))


# --- bad input --------------------------------------------------------------------------------------------------------

OUT_OF_RANGE: dict[str, Any] = {
    "scatter": lambda x, i, v: aten.scatter(x * 2, 0, i[:, None], v[:3, :1]) + 1,
    "scatter_number": lambda x, i, v: aten.scatter(x * 2, 0, i[:, None], 1.0) + 1,
    "scatter_add": lambda x, i, v: aten.scatter_add(x * 2, 0, i[:, None], v[:3, :1]) + 1,
    "scatter_reduce": lambda x, i, v: aten.scatter_reduce(x * 2, 0, i[:, None], v[:3, :1], "amax") + 1,
    "gather": lambda x, i, v: aten.gather(x * 2, 0, i[:, None]) + 1,
    "index_put": lambda x, i, v: aten.index_put(x * 2, [i], v[:3]) + 1,
    "index_put_added": lambda x, i, v: aten.index_put(x * 2, [None, i * 2], v[0, 0], True) + 1,
    "index_fill": lambda x, i, v: aten.index_fill(x * 2, 0, i, 2) + 1,
    "index": lambda x, i, v: aten.index(x * 2, [i]) + 1,
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("place", [4, -5])
@pytest.mark.parametrize("called", [True, False], ids=["called", "fused"])
@pytest.mark.parametrize("name", OUT_OF_RANGE)
def test_an_index_out_of_range_raises_eagers_error_class(name: str, called: bool, place: int) -> None:
    x, _, v = index_inputs("cpu")
    arguments = x, torch.tensor([1, place, 0]), v
    refused = eager_error(OUT_OF_RANGE[name], arguments)
    assert refused is not None
    graph = make_fx(OUT_OF_RANGE[name], tracing_mode="fake")(*arguments)
    preserve_ops = WRITERS | {"aten.gather.default", "aten.index.Tensor", "aten.index_fill.int_Scalar"}
    for emitter in EMITTERS:
        options = Options(emitter=emitter, fallback="error", preserve_ops=preserve_ops if called else frozenset())
        error = eager_error(fxwrap.compile_graph(graph, arguments, options=options), arguments)
        assert error is not None and error[0] is refused[0], emitter
        assert (refused[1] if called else "out of bounds") in error[1], emitter


I64, F64 = torch.int64, torch.float64
WRONG: dict[str, tuple[Any, Any, Any, str]] = {
    "scatter_dtype": (aten.scatter.src, lambda x, i, s: (x, 0, i, s), F64, "Expected self.dtype to be equal"),
    "scatter_reduce_dtype": (
        aten.scatter_reduce.two, lambda x, i, s: (x, 0, i, s, "sum"), I64, "Expected self.dtype to be equal"
    ),
    "scatter_index_dtype": (aten.scatter.value, lambda x, i, s: (x, 0, s, 1.0), None, "Expected dtype int32/int64"),
    "scatter_reduction": (
        aten.scatter.reduce, lambda x, i, s: (x, 0, i, s, {"reduce": "sum"}), None, "must be either add or multiply"
    ),
    "scatter_reduce_reduction": (
        aten.scatter_reduce.two, lambda x, i, s: (x, 0, i, s, "add"), None, "must be either sum, prod, mean"
    ),
    "in_place_scatter_dtype": (
        aten.scatter_.src, lambda x, i, s: (x, 0, i, s), F64, "Expected self.dtype to be equal"
    ),
    "index_put_dtype": (aten.index_put.default, lambda x, i, s: (x, [i, i], s), F64, "destination dtypes match"),
    "index_put_sizes": (aten.index_put.default, lambda x, i, s: (x, [i, None, i], s), None, "too many indices"),
}  # fmt: skip
"""Calls that eager rejects: operator, arguments (keywords last), the source's dtype, eager's message."""


@pytest.mark.parametrize("name", WRONG)
def test_every_emitter_rejects_calls_that_eager_rejects(name: str) -> None:
    """Without metadata a graph fails when it is lowered, and the error names the node. Where fake tensors check less
    than eager, it fails when it runs, with eager's class and words."""
    target, operands, dtype, message = WRONG[name]
    arguments = [torch.randn(4, 8), torch.tensor([[3], [0]]), torch.randn(2, 1).to(dtype)]
    graph = Graph()
    *positional, last = operands(*[graph.placeholder(letter) for letter in "xis"])
    keywords = last if isinstance(last, dict) else {}
    graph.output(graph.call_function(target, (*positional, *([] if keywords else [last])), keywords))
    module = GraphModule(nn.Module(), graph)
    refused = eager_error(module, tuple(arguments))
    assert refused is not None and message in refused[1]
    for emitter in EMITTERS:
        try:
            compiled = fxwrap.compile_graph(module, arguments, options=OPTIONS.replace(emitter=emitter))
        except GraphError as error:
            assert message in str(error) and target.overloadpacket.__name__ in str(error)
        else:
            raised = eager_error(compiled, tuple(arguments))
            assert raised is not None and raised[0] is refused[0] and message in raised[1], emitter


def test_the_copy_of_a_computed_tensor_that_a_scatter_starts_from_computes_no_operator() -> None:
    """The launch of the copy has no calls by which patterns could match it."""
    graph = Graph()
    x = graph.placeholder("x")
    base = graph.call_function(aten._to_copy.default, (x,), {"dtype": torch.int64})
    index = graph.call_function(aten.remainder.Scalar, (base, 3))
    added = graph.call_function(aten.index_put.default, (base, [index], base, True))
    graph.output((graph.call_function(aten.copy_.default, (base, added)),))
    graph_module, x_value = GraphModule({}, graph), torch.tensor([4.0, -2.0, 7.0])
    compiled = fxwrap.compile_graph(graph_module, [x_value], options=Options(fallback="error"))
    launches = [line for line in compiled.program.body.lines if isinstance(line, Launch)]
    assert None in [line.origin.calls for line in launches if line.origin is not None]
    assert torch.equal(compiled(x_value)[0], graph_module(x_value)[0])


@pytest.mark.parametrize("accumulate", [False, True])
def test_an_empty_scatter_writes_nothing(accumulate: bool) -> None:
    """Its values have other readers, of one of which they are a part."""

    def function(x: Tensor, rows: Tensor) -> tuple[Tensor, ...]:
        total = x[:, 2:].sum(0, keepdim=True)
        return total * x[:, 2:], x[:, :2].index_put([rows], total, accumulate), total.double()

    inputs = (torch.arange(4).view(1, 4), torch.zeros(0, dtype=torch.int64))
    assert_emitters_agree(make_fx(function, tracing_mode="fake")(*inputs), inputs)
