"""Random graphs whose sizes are symbols: of inputs, of operators' results, and numbers that are read from tensors.

They are traced while they are drawn, so that torch itself says what the sizes are. A step that torch cannot trace,
since it would have to know a size that only a run brings, is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from hypothesis import assume
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv
from torch.fx.passes.runtime_assert import insert_deferred_runtime_asserts

from tests.support.strategies import graphs
from tests.support.strategies.graphs import Entry, GraphDraw, NoCandidate, Step, aten

LETTERS = {"a": 5, "b": 7}
"""The symbolic sizes of inputs, and their values while a graph is traced."""
OTHER_SIZES: tuple[dict[str, int], ...] = ({"a": 6, "b": 9}, {"a": 12, "b": 3}, {"a": 3, "b": 2}, {"a": 9, "b": 64})
CONSTANTS = (4, 3, 1)


@dataclass(frozen=True)
class InputSpec:
    """How inputs are made: shapes of letters and numbers, which are transposed, and dtypes."""

    shapes: tuple[tuple[Any, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    transposed: tuple[bool, ...]

    def inputs(self, sizes: dict[str, int], seed: int, nothing: bool = False) -> tuple[Tensor, ...]:
        """Returns inputs of these sizes; with `nothing` no number in them is positive and no truth value is true."""
        generator = torch.Generator().manual_seed(seed)
        values = []
        for shape, dtype, transposed in zip(self.shapes, self.dtypes, self.transposed, strict=True):
            value = _random([sizes.get(size, size) for size in shape], dtype, generator)
            if nothing:
                value = torch.zeros_like(value) if dtype in (torch.bool, torch.int64) else -value.abs()
            values.append(value.t().contiguous().t() if transposed else value)
        return tuple(values)


class DynamicGraph:
    """A graph, and how inputs for it are made; `guards` are what torch relied on while it traced it."""

    def __init__(self, module: GraphModule, spec: InputSpec, shape_env: ShapeEnv | None) -> None:
        self.module = module
        self.spec = spec
        self.shape_env = shape_env

    def inputs(self) -> list[tuple[Tensor, ...]]:
        """Returns inputs of the traced sizes, twice, and of those other sizes that the guards allow."""
        others = [sizes for sizes in OTHER_SIZES if self.allows(sizes)]
        return [
            self.spec.inputs(LETTERS, 1), self.spec.inputs(LETTERS, 2, nothing=True),
            *[self.spec.inputs(sizes, 3 + number) for number, sizes in enumerate(others)],
        ]  # fmt: skip

    def allows(self, sizes: dict[str, int]) -> bool:
        """Whether the guards hold for these sizes."""
        if self.shape_env is None:
            return True
        numbers: dict[Any, int] = {}
        for node, shape in zip(self.module.graph.find_nodes(op="placeholder"), self.spec.shapes, strict=True):
            for number, size in zip(node.meta["val"].shape, shape, strict=True):
                if isinstance(number, torch.SymInt) and isinstance(number.node.expr, sympy.Symbol):
                    numbers[number.node.expr] = sizes.get(size, size)
        return all(guard.expr.xreplace(numbers) == sympy.true for guard in self.shape_env.guards)

    def __repr__(self) -> str:
        return f"inputs {self.spec}\n{self.module.graph}"


def _random(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    if dtype is torch.bool:
        return torch.rand(tuple(shape), generator=generator) < 0.5
    if dtype.is_floating_point:
        return torch.randn(tuple(shape), generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(-4, 5, tuple(shape), generator=generator)


class Tracing(GraphDraw):
    """A graph that is drawn while it is traced: entries hold the tensors that are being traced."""

    def placeholder(self, value: Tensor) -> Entry:
        self.inputs.append(value)
        return self._entry(None, value, True)

    def pick(self, accepts: Callable[[Entry], bool] = lambda _: True) -> Entry:
        def asked(entry: Entry) -> bool:
            try:
                return accepts(entry)
            except GuardOnDataDependentSymNode:
                return False

        return super().pick(asked)

    def call(self, target: Any, *arguments: Any, exact: bool = True, **keywords: Any) -> list[Entry]:
        used = [entry for item in arguments for entry in (item if isinstance(item, list) else [item])]
        exact = exact and self.all_exact and all(entry.exact for entry in used if isinstance(entry, Entry))
        value = target(*graphs._part(arguments, "value"), **keywords)
        parts = value if isinstance(value, tuple | list) else (value,)
        return [self._entry(None, part, exact) for part in parts]


# --- steps over symbols -----------------------------------------------------------------------------------------------


def _flatten(b: GraphDraw) -> None:
    entry, _ = b.with_dims(lambda entry: len(entry.shape) > 1 and bool(entry.shape[-1] >= 1))
    b.call(aten.reshape.default, entry, [-1] if b.flag() else [-1, entry.shape[-1]])


def _halves(b: GraphDraw) -> None:
    entry, dim = b.with_dims()
    half = entry.shape[dim] // 2
    b.call(aten.slice.Tensor, entry, dim, *((0, half) if b.flag() else (half, 2**63 - 1)))


def _first(b: GraphDraw) -> None:
    entry, dim = b.with_dims()
    if entry.shape[dim] < 1:  # of a size that only a run brings there may be none
        raise NoCandidate
    b.call(aten.select.int, entry, dim, b.choice([0, -1]))


def _times_size(b: GraphDraw) -> None:
    entry, dim = b.with_dims(lambda entry: entry.value.dtype is not torch.bool)
    other = b.pick(lambda entry: entry.value.dtype is not torch.bool)
    b.call(b.choice([aten.add.Tensor, aten.mul.Tensor]), other, entry.shape[dim])


def _filled(b: GraphDraw) -> None:
    entry, dim = b.with_dims()
    size = entry.shape[dim]
    if b.flag():
        b.call(aten.arange.default, size, dtype=torch.int64, device=torch.device("cpu"))
    else:
        b.call(aten.full.default, [b.choice([size, 3]), size], 1.5, dtype=torch.float32, device=torch.device("cpu"))


# --- sizes that a run brings ------------------------------------------------------------------------------------------


def _mask(b: GraphDraw, entry: Entry) -> Entry:
    """Returns which elements of an entry are positive."""
    return entry if entry.value.dtype is torch.bool else b.call(aten.gt.Scalar, entry, 0)[0]


def _nonzero(b: GraphDraw) -> None:
    b.call(aten.nonzero.default, _mask(b, b.pick(lambda entry: entry.exact and bool(entry.shape))))


def _masked_select(b: GraphDraw) -> None:
    mask = _mask(b, b.pick(lambda entry: entry.exact))
    b.call(aten.masked_select.default, b.pick(lambda entry: graphs._broadcast(entry.shape, mask.shape)), mask)


def _chosen_rows(b: GraphDraw) -> None:
    entry, _ = b.with_dims(lambda entry: entry.exact)
    mask, rest = _mask(b, entry), list(range(1, len(entry.shape)))
    mask = b.call(aten.any.dims, mask, rest)[0] if rest else mask
    b.call(aten.index.Tensor, entry, [mask])


def _repeated(b: GraphDraw) -> None:
    entry, _ = b.with_dims()
    counts = b.pick(
        lambda other: other.value.dtype is torch.int64 and other.exact and len(other.shape) == 1
        and bool(other.shape[0] == entry.shape[0])
    )  # fmt: skip
    (counts,) = b.call(aten.remainder.Scalar, counts, 3)
    (rows,) = b.call(aten.repeat_interleave.Tensor, counts)
    b.call(aten.index_select.default, entry, 0, rows)


def _number(b: GraphDraw) -> Any:
    """Returns a number from 0 to 6 that is read from a tensor."""
    (count,) = b.call(aten.sum.default, _mask(b, b.pick(lambda entry: entry.exact)))
    (single,) = b.call(aten.remainder.Scalar, count, 7)
    size = single.value.item()
    torch._check(size >= 0)
    torch._check(size <= 6)
    return size


def _size_read(b: GraphDraw) -> None:
    number, device = _number(b), torch.device("cpu")
    if b.flag():
        b.call(aten.arange.default, number, dtype=torch.int64, device=device)
    else:
        b.call(aten.full.default, [number, b.choice([number, 3, 4])], 0.5, dtype=torch.float32, device=device)


def _number_read(b: GraphDraw) -> None:
    entry = b.pick(lambda entry: entry.value.dtype is not torch.bool)
    b.call(b.choice([aten.add.Tensor, aten.mul.Tensor]), entry, _number(b))


def _slice_read(b: GraphDraw) -> None:
    entry, dim = b.with_dims()
    b.call(aten.slice.Tensor, entry, dim, 0, _number(b))


SIZED: tuple[Step, ...] = (_flatten, _halves, _first, _times_size, _filled)
UNBACKED: tuple[Step, ...] = (
    _nonzero, _masked_select, _chosen_rows, _chosen_rows, _repeated, _size_read, _number_read, _slice_read,
)  # fmt: skip
VIEWS: tuple[Step, ...] = (
    graphs._permute, graphs._expand, graphs._unsqueeze, graphs._flip, graphs._roll, graphs._cat, graphs._stack,
    graphs._pad, graphs._diagonal, graphs._unfold, graphs._triangle, graphs._copy,
)  # fmt: skip
INDEXING: tuple[Step, ...] = (graphs._index_select, graphs._index, graphs._gather, graphs._scatter, graphs._index_put)
FAMILIES: tuple[tuple[Step, ...], ...] = (
    graphs.POINTWISE, graphs.POINTWISE, graphs.POINTWISE, VIEWS, SIZED, graphs.REDUCTIONS, INDEXING, graphs.CALLS,
    UNBACKED, UNBACKED,
)  # fmt: skip


@st.composite
def dynamic_graphs(draw: Any, steps: int = 14) -> DynamicGraph:
    """Draws a graph of at most so many steps."""
    count = draw(st.integers(2, 4))
    letters = draw(st.lists(st.sampled_from([*LETTERS, *LETTERS, *CONSTANTS]), min_size=1, max_size=3))
    shapes = [tuple(letters[draw(st.integers(0, len(letters) - 1)) :]) for _ in range(count)]
    dtypes = [draw(st.sampled_from([torch.float32, torch.float32, torch.int64, torch.bool])) for _ in range(count)]
    transposed = [len(shape) == 2 and draw(st.booleans()) for shape in shapes]
    spec = InputSpec(tuple(shapes), tuple(dtypes), tuple(transposed))

    def traced(*inputs: Tensor) -> tuple[Tensor, ...]:
        b = Tracing(draw)
        for value in inputs:
            b.placeholder(value)
        for _ in range(b.integer(steps // 3, steps)):
            with suppress(NoCandidate, GuardOnDataDependentSymNode):
                b.choice(b.choice(FAMILIES))(b)
        computed = b.entries[len(inputs) :] or b.entries
        outputs = [b.choice(computed).value for _ in range(b.integer(1, 4))]
        return (*outputs, computed[-1].value)

    module = make_fx(traced, tracing_mode="symbolic")(*spec.inputs(LETTERS, 0))
    module.graph.eliminate_dead_code()
    module.recompile()
    values = [node.meta.get("val") for node in module.graph.find_nodes(op="placeholder")]
    shape_env = next((value.fake_mode.shape_env for value in values if value is not None), None)
    if shape_env is not None:  # as Dynamo does: sizes depend on assertions whose operators are dead or were left out
        assume(not any(str(symbol).startswith("u") for symbol in shape_env.replacements))  # torch 2.11: solved to be 1
        insert_deferred_runtime_asserts(module, shape_env, "graph")
        module.recompile()
    return DynamicGraph(module, spec, shape_env)
