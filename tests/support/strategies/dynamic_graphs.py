"""Random graphs whose sizes are symbols: of inputs, of operators' results, and numbers that are read from tensors.

They are traced while they are drawn, so that torch itself says what the sizes are. A step that torch cannot trace,
since it would have to know a size that only a run brings, is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
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

from tests.support.strategies import graphs, layers
from tests.support.strategies.graphs import Entry, GraphDraw, NoCandidate, Step, aten

LETTERS = {"a": 5, "b": 7, "c": 4, "d": 3}
"""The symbolic sizes of inputs, and their values while a graph is traced."""
FEW_SIZES = ((6, 9, 4, 3), (12, 3, 4, 3), (3, 2, 4, 3), (9, 64, 4, 3))
OTHER_SIZES = (
    *FEW_SIZES, (6, 9, 5, 2), (12, 3, 3, 12), (2, 2, 2, 2), (16, 16, 16, 16), (17, 15, 2, 33), (33, 5, 64, 2),
    (1, 7, 4, 3), (5, 1, 4, 3), (5, 7, 1, 1), (1, 1, 1, 1), (0, 7, 4, 3), (5, 0, 4, 3), (5, 7, 0, 0), (0, 0, 0, 0),
    (513, 2, 2, 3), (2, 1025, 3, 2), (3, 2, 514, 1), (1, 3, 2, 511), (0, 1, 65, 2),
)  # fmt: skip
"""Sizes of "a" to "d": beyond those that are traced, none, one, and one more or less than kernels have in a block."""
MOST_ELEMENTS = 5000
"""Inputs with more elements are left out: an outer product of them would take long."""


@dataclass(frozen=True)
class InputSpec:
    """How inputs are made: shapes of letters and numbers, which are transposed, and dtypes."""

    shapes: tuple[tuple[Any, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    transposed: tuple[bool, ...]

    def elements(self, sizes: Mapping[str, int]) -> int:
        """Returns how many elements the largest input has."""
        return max([math.prod([sizes.get(size, size) for size in shape]) for shape in self.shapes])

    def inputs(self, sizes: Mapping[str, int], seed: int, nothing: bool = False) -> tuple[Tensor, ...]:
        """Returns inputs of these sizes; with `nothing` no number in them is positive and no truth value is true."""
        generator = torch.Generator().manual_seed(seed)
        values = []
        for shape, dtype, transposed in zip(self.shapes, self.dtypes, self.transposed, strict=True):
            value = _random([sizes.get(size, size) for size in shape], dtype, generator)
            if nothing:
                value = torch.zeros_like(value) if dtype in (torch.bool, torch.int64) else -value.abs()
            values.append(value.t().contiguous().t() if transposed else value)
        return tuple(values)


@dataclass(frozen=True)
class Run:
    """The sizes of the letters, and inputs of these sizes."""

    sizes: Mapping[str, int]
    inputs: tuple[Tensor, ...]


class DynamicGraph:
    """A graph, and how inputs for it are made; `from_zero` if it was traced for sizes from 0 on.

    No guard then says which order of dimensions of equal strides fake tensors assumed.
    """

    def __init__(
        self, module: GraphModule, spec: InputSpec, shape_env: ShapeEnv | None, from_zero: bool = False
    ) -> None:
        self.from_zero = from_zero
        self.module = module
        self.spec = spec
        self.shape_env = shape_env

    def runs(self, others: Sequence[tuple[int, ...]] = OTHER_SIZES) -> list[Run]:
        """Returns runs of the traced sizes, two, and of those others for which the inputs are small."""
        named = [dict(zip(LETTERS, sizes, strict=True)) for sizes in others]
        small = [sizes for sizes in named if self.spec.elements(sizes) <= MOST_ELEMENTS]
        return [
            Run(LETTERS, self.spec.inputs(LETTERS, 1)), Run(LETTERS, self.spec.inputs(LETTERS, 2, nothing=True)),
            *[Run(sizes, self.spec.inputs(sizes, 3 + number)) for number, sizes in enumerate(small)],
        ]  # fmt: skip

    def inputs(self) -> list[tuple[Tensor, ...]]:
        """Returns inputs of the traced sizes, twice, and of a few other sizes, if they hold."""
        return [run.inputs for run in self.runs(FEW_SIZES) if self.holds(run.sizes)]

    def symbols(self) -> Mapping[Any, sympy.Symbol]:
        """Returns the symbol of each letter, or number, among the inputs' sizes."""
        nodes = self.module.graph.find_nodes(op="placeholder")
        pairs = [
            (letter, number.node.expr)
            for node, shape in zip(nodes, self.spec.shapes, strict=True)
            for letter, number in zip(shape, node.meta["val"].shape, strict=True)
            if isinstance(number, torch.SymInt)
        ]
        return {letter: symbol for letter, symbol in pairs if isinstance(symbol, sympy.Symbol)}

    def in_range(self, sizes: Mapping[str, int], ranges: Mapping[str, tuple[int, int]]) -> bool:
        """Whether sizes are in the ranges of their symbols, and in these by letter, which replace those."""
        if self.shape_env is None:
            return True
        known = {name: self.shape_env.var_to_range[symbol] for name, symbol in self.symbols().items()}
        bounds = {name: ranges.get(name, (known.lower, known.upper)) for name, known in known.items()}
        return all(lower <= sizes.get(name, name) <= upper for name, (lower, upper) in bounds.items())

    def holds(self, sizes: Mapping[str, int]) -> bool:
        """Whether sizes are in the ranges of their symbols, and the guards and sizes of tracing hold for them.

        torch infers a size of -1 for a diagonal below that of an empty matrix where it assumes nothing of sizes.
        """
        if self.shape_env is None:
            return True
        numbers = {symbol: sympy.Integer(sizes.get(name, name)) for name, symbol in self.symbols().items()}
        try:
            guarded = all(guard.expr.xreplace(numbers) == sympy.true for guard in self.shape_env.guards)
            traced = [size.xreplace(numbers) for size in self._traced_sizes]
        except ZeroDivisionError:  # a guard or a traced size has a quotient by a size that is 0 now
            return False
        return guarded and self.in_range(sizes, {}) and not any(size.is_negative for size in traced)

    @cached_property
    def _traced_sizes(self) -> set[sympy.Basic]:
        """The symbolic sizes of all nodes."""
        fakes = [node.meta.get("val") for node in self.module.graph.nodes]
        sizes = [size for fake in fakes if isinstance(fake, Tensor) for size in fake.shape]
        return {size.node.expr for size in sizes if isinstance(size, torch.SymInt)}

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

    def parameter(self, shape: Sequence[Any], dtype: torch.dtype) -> Entry:
        """Computes numbers that look random; their shape may have symbols."""
        numbers = (torch.arange(math.prod(shape), device=torch.device("cpu")) * 37 % 251).reshape(shape)
        return self._entry(None, (numbers / 128 - 1 if dtype.is_floating_point else numbers).to(dtype), True)

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

    def step(self) -> None:
        """Adds a step. Raises NoCandidate if torch does not broadcast a size from 0 on that only happens to be 1."""
        try:
            self.choice(self.choice(FAMILIES))(self)
        except RuntimeError as error:
            if "Attempting to broadcast a dimension" not in str(error):
                raise
            raise NoCandidate from None


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
    UNBACKED, UNBACKED, layers.SEQUENCES, layers.IMAGES, layers.MATMULS,
)  # fmt: skip


_NO_BROADCAST = ("non-broadcasting semantics", "must match the size of tensor")
"""Texts of errors of torch's fake operators, which find no broadcast of a floor division's result (torch 2.13)."""


@st.composite
def dynamic_graphs(draw: Any, steps: int = 14) -> DynamicGraph:
    """Draws a graph of at most so many steps."""
    count = draw(st.integers(2, 4))
    letters = draw(st.lists(st.sampled_from([*"aabbcd", 1]), min_size=1, max_size=3))
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
                b.step()
        computed = b.entries[len(inputs) :] or b.entries
        outputs = [b.choice(computed).value for _ in range(b.integer(1, 4))]
        return (*outputs, computed[-1].value)

    from_zero = draw(st.booleans())  # as with `torch.export`; Dynamo traces for sizes from 2 on
    with torch.fx.experimental._config.patch(backed_size_oblivious=from_zero):
        try:
            module = make_fx(traced, tracing_mode="symbolic")(*spec.inputs(LETTERS, 0))
        except RuntimeError as error:
            assume(not any(text in str(error) for text in _NO_BROADCAST))
            raise
    module.graph.eliminate_dead_code()
    module.recompile()
    values = [node.meta.get("val") for node in module.graph.find_nodes(op="placeholder")]
    shape_env = next((value.fake_mode.shape_env for value in values if value is not None), None)
    if shape_env is not None:  # as Dynamo does: sizes depend on assertions whose operators are dead or were left out
        assume(not any(str(symbol).startswith("u") for symbol in shape_env.replacements))  # torch 2.11: solved to be 1
        insert_deferred_runtime_asserts(module, shape_env, "graph")
        module.recompile()
    return DynamicGraph(module, spec, shape_env, from_zero)
