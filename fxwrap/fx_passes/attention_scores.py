"""The scores of attention formulas as functions of one score and its indices, as FlexAttention's kernels take them.

Each operator between the matmul and the softmax becomes the same operator on scalars. Biases and masks are read at the
indices of the score: as they lie in memory, or computed from smaller tensors and from the indices themselves. A causal
mask made of two `arange` is a comparison then, and reads nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from fxwrap.fx_passes.attention_formulas import AttentionFormula
from fxwrap.fx_passes.attention_nodes import ELEMENTWISE, folded_number, sizes_of
from fxwrap.fx_passes.attention_operands import AttentionOperands
from fxwrap.fx_passes.effects import name_of
from fxwrap.fx_passes.graph_copy import bytes_of, fake_call, run_on_fakes, storages_of
from fxwrap.fx_passes.mask_bounds import uniform_value
from fxwrap.fx_passes.prepared_graph import NodeValues, Target
from fxwrap.torch_compat import FakeTensor, FakeTensorMode, LazyGraphModule, OpOverload, in_fake_mode

_aten = torch.ops.aten

_FREE_VIEWS = frozenset({"alias", "detach", "expand", "lift_fresh_copy", "squeeze", "unsqueeze"})
_CONSTANTS = frozenset({"full", "full_like", "new_full", "new_ones", "new_zeros", "ones", "ones_like", "scalar_tensor",
                        "zeros", "zeros_like"})  # fmt: skip

_MAX_OPERATORS = 12
"""The largest number of operators with which a score's bias or mask is computed instead of read."""


class UnsupportedScoresError(Exception):
    """Scores that are no function of one score and its indices; the message is the reason."""


@dataclass(frozen=True)
class Coordinate:
    """The index of an element along one dimension: (index // step) % size of a part of the score's indices.

    Fields:
        part: "batch", "head", "row" or "key"; "product" is the pair of batch and head.
        step: the product of the later sizes of the part.
        size: the size of this dimension if it is not the first of its part.
    """

    part: str
    step: Any = 1
    size: Any = None


Coordinates = tuple["Coordinate | None", ...]
"""One coordinate for each dimension of a tensor; None where it has one element only."""


@dataclass(frozen=True)
class ReadTensor:
    """A tensor of the graph that the scores read, with the coordinates of its dimensions."""

    node: Node
    coordinates: Coordinates


@dataclass(frozen=True)
class ScoreFunctions:
    """`score_mod` and `mask_mod` of a formula as graphs on scalars, and what `score_mod` reads, in order."""

    score_mod: GraphModule
    mask_mod: GraphModule
    scale: float
    reads: tuple[ReadTensor, ...]

    @property
    def only_scale(self) -> bool:
        """Whether the scores are products times the scale, without bias and mask."""
        return all(node.op in ("placeholder", "output") for node in self.score_mod.graph.nodes)


def score_functions(
    formula: AttentionFormula, operands: AttentionOperands, fakes: NodeValues, written: Set[int]
) -> ScoreFunctions:
    """Returns the functions of a formula; the graph writes the storages `written`. Raises UnsupportedScoresError."""
    return ScoreFunctionBuilder(formula, operands, fakes, written).build()


def biased_score_functions(query: FakeTensor, bias: FakeTensor | None) -> tuple[GraphModule, GraphModule]:
    """Returns `score_mod` and `mask_mod` of scores to which a bias is added, which is the only buffer.

    The bias has one dimension for each of the last of the score's indices.
    """
    return BiasedScores(query).build(bias)


class _ScalarGraph:
    """A graph of ATen operators on the score of a query and a key, and on its indices."""

    def __init__(self, query: FakeTensor) -> None:
        self.graph = Graph()
        self.scalars: dict[Node, Any] = {}
        self.like = query
        self.mode: FakeTensorMode = query.fake_mode
        self.device = query.device
        self.dtype = torch.float64 if query.dtype is torch.float64 else torch.float32
        self.score = self.placeholder("score", self.dtype)
        self.indices = {name: self.placeholder(name, torch.int32) for name in ("batch", "head", "row", "key")}

    def _finish(self, result: Node) -> tuple[GraphModule, GraphModule]:
        """Returns the graph, and that of a mask that is all true."""
        self.graph.output((result,))
        return LazyGraphModule({}, self.graph), self.all_true()

    def all_true(self) -> GraphModule:
        """Returns the graph of a mask that is all true."""
        graph = Graph()
        for name in self.indices:
            graph.placeholder(name).meta["val"] = self.scalars[self.indices[name]]
        keywords: dict[str, Any] = {"dtype": torch.bool, "device": self.device}
        node = graph.call_function(_aten.full.default, ([], True), keywords)
        node.meta["val"] = self._empty(torch.bool)
        graph.output((node,))
        return LazyGraphModule({}, graph)

    def _empty(self, dtype: torch.dtype) -> FakeTensor:
        keywords = {"dtype": dtype, "device": self.device}
        result: FakeTensor = fake_call(_aten.empty.memory_format, ([],), keywords, self.like)
        return result

    def placeholder(self, name: str, fake: Any) -> Node:
        """Returns a new operand: a tensor, or a scalar of a dtype."""
        node = self.graph.placeholder(name)
        node.meta["val"] = self.scalars[node] = self._empty(fake) if isinstance(fake, torch.dtype) else fake
        return node

    def call(self, target: Target, *arguments: Any, **keywords: Any) -> Node:
        """Returns a new call."""
        node = self.graph.call_function(target, arguments, keywords)
        node.meta["val"] = self.scalars[node] = run_on_fakes(node, self.scalars, self.scalars[self.score])
        return node


class BiasedScores(_ScalarGraph):
    """A score to which a bias is added, whose dimensions with one element are read at 0."""

    def build(self, bias: FakeTensor | None) -> tuple[GraphModule, GraphModule]:
        """Returns `score_mod` and `mask_mod`."""
        return self._finish(self.score if bias is None else self.biased(bias))

    def biased(self, bias: FakeTensor) -> Node:
        """Returns the score with an element of a bias, which is the next operand."""
        buffer = self.placeholder("bias", bias)
        used = [*self.indices.values()][len(self.indices) - bias.ndim :]
        zero = self.call(_aten.full.default, [], 0, dtype=torch.int32, device=self.device)
        indices = [zero if size == 1 else index for size, index in zip(bias.shape, used, strict=True)]
        element = self.call(_aten.index.Tensor, buffer, indices)
        return self.call(_aten.add.Tensor, self.score, element)


class ScoreFunctionBuilder(_ScalarGraph):
    """Builds the functions of a formula.

    `reads` are the tensors that they read, `scale` what products are multiplied by before; 1 without `folds_scale`.
    """

    def __init__(
        self, formula: AttentionFormula, operands: AttentionOperands, fakes: NodeValues, written: Set[int]
    ) -> None:
        super().__init__(fakes[formula.query_key])
        self.written = written
        self.formula = formula
        self.operands = operands
        self.fakes = fakes
        self.reads: dict[tuple[Node, Coordinates], Node] = {}
        self._memo: dict[tuple[Node, Coordinates], Node] = {}
        self.scale = 1.0
        self.folds_scale = True

    def build(self) -> ScoreFunctions:
        value = self.modified_score()[self.formula.scores[-1]]
        reads = tuple([ReadTensor(*key) for key in self.reads])
        return ScoreFunctions(*self._finish(value), self.scale, reads)

    def modified_score(self) -> dict[Node, Node]:
        """Returns the score after each operator of the formula."""
        value = self.score
        for factor in self.operands.factors:
            value = self._multiplied(value, factor.value, factor.divides)
        query_key = self.formula.query_key
        if query_key.target is _aten.baddbmm.default:
            value = self._added(value, query_key)
        passed = {query_key: value}
        for node in self.formula.scores[1:]:
            passed[node] = value = self.step(node, value, passed)
        return passed

    # --- scalars ----------------------------------------------------------------------------------------------------

    def _cast(self, value: Node, dtype: torch.dtype) -> Node:
        is_same = self.scalars[value].dtype == dtype
        return value if is_same else self.call(_aten._to_copy.default, value, dtype=dtype)

    def _multiplied(self, value: Node, factor: Any, divides: bool) -> Node:
        number = self._constant(factor) if isinstance(factor, Node) else factor
        if number is not None and self.folds_scale and math.isfinite(number) and number != 0:
            factor = number
        if isinstance(factor, Node):
            target = _aten.div.Tensor if divides else _aten.mul.Tensor
            return self.call(target, value, self._element(factor, ()))
        self.scale = self.scale / factor if divides else self.scale * factor
        return value

    def _added(self, value: Node, product: Node) -> Node:
        """Returns the score of `baddbmm`: alpha * score + beta * bias."""
        alpha, beta = product.kwargs.get("alpha", 1), product.kwargs.get("beta", 1)
        if alpha != 1:
            value = self.call(_aten.mul.Tensor, value, alpha)
        if beta == 0:
            return value
        bias = self._argument(product.args[0], product, self._coordinates(product))
        return self.call(_aten.add.Tensor, value, bias, **({} if beta == 1 else {"alpha": beta}))

    # --- the path of the scores -------------------------------------------------------------------------------------

    def step(self, node: Node, value: Node, passed: dict[Node, Node]) -> Node:
        """Returns the score, or another value that is computed from it, after one operator."""
        name = name_of(node)
        if name not in ELEMENTWISE:
            return value  # a view
        if name == "to_copy":
            if not self.fakes[node].dtype.is_floating_point:
                raise UnsupportedScoresError("its scores are cast to integers")
            return value  # kernels compute in float32 or float64
        if value is self.score and self.folds_scale:
            number: Any = node.args[1] if name in ("mul", "div") and len(node.args) == 2 and not node.kwargs else None
            if type(number) in (int, float) and math.isfinite(number) and number != 0:
                return self._multiplied(value, number, name == "div")
        if self._changes_nothing(node, passed):
            return value
        coordinates = self._coordinates(node) if len(node.all_input_nodes) > 1 else ()
        operands: Any = node.args
        arguments = [passed[item] if item in passed else self._argument(item, node, coordinates) for item in operands]
        return self.call(node.target, *arguments, **self._keywords(node))

    def _changes_nothing(self, node: Node, passed: dict[Node, Node]) -> bool:
        """Whether an operator returns the score: it adds zeros, or its mask has one value."""
        numbers = [
            self._constant(item) if isinstance(item, Node) and item not in passed and self._is_tensor(item) else None
            for item in node.args
        ]
        match name_of(node), numbers:
            case "where", [True, None, _]:
                return node.args[1] in passed
            case "where", [False, _, None]:
                return node.args[2] in passed
            case "masked_fill", [None, False, *_]:
                return True
            case "add" | "sub", [None, 0] | [None, 0.0]:
                return True
            case "add", [0, None] | [0.0, None]:
                return not node.kwargs
            case _:
                return False

    def _is_tensor(self, node: Node) -> bool:
        return isinstance(self.fakes.get(node), torch.Tensor)

    def _keywords(self, node: Node) -> dict[str, Any]:
        if any(isinstance(item, Node) for item in node.kwargs.values()):
            raise UnsupportedScoresError(f"'{node.name}' has a computed keyword")
        return {key: item for key, item in node.kwargs.items() if key not in ("device", "layout", "pin_memory")}

    def _coordinates(self, node: Node) -> Coordinates:
        """Returns the coordinates of the elements of a node of the scores."""
        sizes = sizes_of(node, self.fakes)
        leading = self._leading(sizes[:-2])
        coordinates = (*leading, Coordinate("row"), Coordinate("key"))
        return tuple([None if size == 1 else item for size, item in zip(sizes, coordinates, strict=True)])

    def _leading(self, sizes: Sequence[Any]) -> list[Coordinate | None]:
        batch, heads = self.operands.batch, self.operands.heads
        for split in range(len(sizes) + 1):
            if _product(sizes[:split]) == batch and _product(sizes[split:]) == heads:
                return [*_parts("batch", sizes[:split]), *_parts("head", sizes[split:])]
        if len(sizes) == 1:
            return [Coordinate("product")]
        raise UnsupportedScoresError("its scores have other dimensions than batch and heads")

    # --- biases and masks -------------------------------------------------------------------------------------------

    def _argument(self, item: Any, node: Node, coordinates: Coordinates) -> Any:
        if not isinstance(item, Node):
            if isinstance(item, list | tuple):
                raise UnsupportedScoresError(f"'{node.name}' has a list of operands")
            return item
        if not isinstance(self.fakes.get(item), torch.Tensor):
            raise UnsupportedScoresError(f"'{node.name}' has a computed number")
        rank = self.fakes[item].ndim
        return self._element(item, self._broadcast(item, coordinates[len(coordinates) - rank :]))

    def _broadcast(self, node: Node, coordinates: Coordinates) -> Coordinates:
        sizes = sizes_of(node, self.fakes)
        return tuple([None if size == 1 else item for size, item in zip(sizes, coordinates, strict=True)])

    def _element(self, node: Node, coordinates: Coordinates) -> Node:
        """Returns the element of a tensor at the coordinates."""
        key = (node, coordinates)
        if key not in self._memo:
            self._memo[key] = self._inlined(node, coordinates) or self._read(node, coordinates)
        return self._memo[key]

    def _inlined(self, node: Node, coordinates: Coordinates) -> Node | None:
        """Returns an element computed from others; None for tensors that are read."""
        source = self._viewed(node, coordinates)
        if source is not None:
            return self._element(*source)
        fake = self.fakes[node]
        number = self._constant(node)
        if number is not None:
            return self.call(_aten.full.default, [], number, dtype=fake.dtype, device=self.device)
        if self._is_position(node, coordinates):
            (coordinate,) = coordinates
            assert coordinate is not None
            return self._cast(self._index(coordinate), fake.dtype)
        if not self._saves_reads(node, coordinates):
            return None
        arguments = [self._argument(item, node, coordinates) for item in node.args]
        return self.call(node.target, *arguments, **self._keywords(node))

    def _viewed(self, node: Node, coordinates: Coordinates) -> tuple[Node, Coordinates] | None:
        """Returns the tensor and coordinates of an element of a view."""
        name = name_of(node)
        if name not in _FREE_VIEWS or not isinstance(node.target, OpOverload) or not isinstance(node.args[0], Node):
            return None
        source = node.args[0]
        rank = self.fakes[source].ndim
        if name == "unsqueeze":
            dim = node.args[1] % self.fakes[node].ndim
            return source, (*coordinates[:dim], *coordinates[dim + 1 :])
        if name == "squeeze":
            sizes = sizes_of(source, self.fakes)
            kept = [dim for dim in range(rank) if dim not in _squeezed(node, sizes)]
            place = dict(zip(kept, coordinates, strict=True))
            return source, tuple([place.get(dim) for dim in range(rank)])
        return source, self._broadcast(source, coordinates[len(coordinates) - rank :])

    def _constant(self, node: Node) -> bool | int | float | None:
        """Returns the value of each element of a constant tensor, None for other tensors."""
        if name_of(node) in _CONSTANTS:
            return _filled_value(node)
        uniform = uniform_value(node, self.fakes.get, self._is_written)
        if uniform is not None:
            return uniform
        return folded_number(node, self.fakes, self._is_written)

    def _is_written(self, node: Node) -> bool:
        return bool(self.written & storages_of(self.fakes[node]))

    def _is_position(self, node: Node, coordinates: Coordinates) -> bool:
        """Whether the elements of an `arange` are their own indices."""
        if name_of(node) != "arange" or self.fakes[node].ndim != 1 or coordinates[0] is None:
            return False
        start = 0 if node.target is _aten.arange.default else node.args[0]
        step = node.args[2] if node.target is _aten.arange.start_step and len(node.args) > 2 else 1
        return coordinates[0].part != "product" and (start, step) == (0, 1)

    def _saves_reads(self, node: Node, coordinates: Coordinates) -> bool:
        """Whether an element is computed from no more memory than it takes itself."""
        count, size = self._cost(node, coordinates)
        return 0 < count <= _MAX_OPERATORS and size <= bytes_of(self.fakes[node])

    def _cost(self, node: Node, coordinates: Coordinates) -> tuple[int, int]:
        """Returns the operators that compute a tensor from others, and the bytes of these."""
        source = self._viewed(node, coordinates)
        if source is not None:
            return self._cost(*source)
        fake = self.fakes[node]
        if self._constant(node) is not None or self._is_position(node, coordinates):
            return 0, 0
        own = (0, bytes_of(fake))
        if not isinstance(node.target, OpOverload) or name_of(node) not in ELEMENTWISE or fake.ndim < 2:
            return own
        count, size = 1, 0
        for item in node.args:
            if isinstance(item, Node):
                operand = self.fakes.get(item)
                if not isinstance(operand, torch.Tensor) or count > _MAX_OPERATORS:
                    return own
                if operand.device != self.device and self._constant(item) is None:
                    return own
                rank = operand.ndim
                added = self._cost(item, self._broadcast(item, coordinates[len(coordinates) - rank :]))
                count, size = count + added[0], size + added[1]
            elif isinstance(item, list | tuple):
                return own
        return (count, size) if count <= _MAX_OPERATORS and size <= own[1] else own

    def _read(self, node: Node, coordinates: Coordinates) -> Node:
        """Returns an element in memory."""
        if self.fakes[node].is_complex() or self.fakes[node].device != self.device:
            raise UnsupportedScoresError(f"'{node.name}' is on another device or complex")
        if self._is_written(node):
            raise UnsupportedScoresError("the graph overwrites its bias or mask")
        buffer = self.reads[node, coordinates] = self._buffer(node, coordinates)
        indices: list[Node] = []
        for item in coordinates:
            if item is not None:
                parts = ("batch", "head") if item.part == "product" and self.operands.heads != 1 else (item.part,)
                indices.extend([self._index(replace_part(item, part)) for part in parts])
        return self.call(_aten.index.Tensor, buffer, indices) if indices else buffer

    def _buffer(self, node: Node, coordinates: Coordinates) -> Node:
        fake = self.fakes[node]
        if not isinstance(fake, FakeTensor):
            fake = self.mode.from_tensor(fake, static_shapes=True)
        for dim in reversed(range(fake.ndim)):
            if coordinates[dim] is None:
                with in_fake_mode(self.mode):
                    fake = fake.select(dim, 0)
            elif coordinates[dim].part == "product" and self.operands.heads != 1:  # type: ignore[union-attr]
                with in_fake_mode(self.mode):
                    split = product_split(fake.shape[dim], self.operands.heads)
                    fake = fake.view([*fake.shape[:dim], *split, *fake.shape[dim + 1 :]])
        call = next((item for item in self.graph.nodes if item.op != "placeholder"), None)
        with nullcontext() if call is None else self.graph.inserting_before(call):
            return self.placeholder(f"buffer{len(self.reads)}", fake)

    def _index(self, coordinate: Coordinate) -> Node:
        value = self.indices["batch" if coordinate.part == "product" else coordinate.part]
        if coordinate.step != 1:
            value = self.call(_aten.div.Tensor_mode, value, coordinate.step, rounding_mode="floor")
        if coordinate.size is not None:
            value = self.call(_aten.remainder.Scalar, value, coordinate.size)
        return value


def replace_part(coordinate: Coordinate, part: str) -> Coordinate:
    """Returns the same coordinate of another part."""
    return Coordinate("batch" if part == "product" else part, coordinate.step, coordinate.size)


def product_split(size: Any, heads: Any) -> tuple[Any, Any]:
    """Returns batch and heads as the sizes into which a dimension of their product is split."""
    return size // heads, heads


def _parts(part: str, sizes: Sequence[Any]) -> list[Coordinate | None]:
    """Returns the coordinates of the dimensions into which a part is split."""
    result: list[Coordinate | None] = []
    step: Any = 1
    meaningful = [dim for dim, size in enumerate(sizes) if size != 1]
    for dim, size in reversed(list(enumerate(sizes))):
        is_first = not meaningful or dim == meaningful[0]
        if size == 1:
            result.append(None)
            continue
        if not isinstance(step, int) or (not is_first and type(size) is not int):
            raise UnsupportedScoresError("its scores split batch or heads into symbolic sizes")
        result.append(Coordinate(part, step, None if is_first else size))
        step = step * size
    return result[::-1]


def _product(sizes: Sequence[Any]) -> Any:
    product: Any = 1
    for size in sizes:
        product = product * size
    return product


def _filled_value(node: Node) -> bool | int | float | None:
    """Returns the value of each element of a constant tensor."""
    name = name_of(node)
    if name in ("ones", "ones_like", "new_ones", "zeros", "zeros_like", "new_zeros"):
        return 1 if "ones" in name else 0
    value = node.args[0] if name == "scalar_tensor" else node.args[2] if name == "new_full" else node.args[1]
    return value if type(value) in (bool, int, float) else None  # type: ignore[return-value]


def _squeezed(node: Node, sizes: Sequence[Any]) -> list[int]:
    """Returns the dimensions that a squeeze removes."""
    if len(node.args) < 2:
        return [dim for dim, size in enumerate(sizes) if size == 1]
    dims: Any = node.args[1] if isinstance(node.args[1], list | tuple) else [node.args[1]]
    return [dim % len(sizes) for dim in dims if sizes[dim] == 1]
