"""Elements of biases and masks of attention as functions of a score's indices: graphs of ATen operators on scalars.

An element is read at the indices of the score: as it lies in memory, or computed from smaller tensors and from the
indices themselves. A causal mask made of two `arange` is a comparison then, and reads nothing; so is one of `arange`
and a position in memory, which a kernel knows before it reads keys.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from fxwrap.fx_passes.attention.mask_bounds import uniform_value
from fxwrap.fx_passes.attention.nodes import CONSTANTS, ELEMENTWISE, folded_number, sizes_of
from fxwrap.fx_passes.effects import name_of
from fxwrap.fx_passes.graph_copy import GraphCopy, bytes_of, fake_call, run_on_fakes, storages_of
from fxwrap.fx_passes.prepared_graph import NodeValues, Target
from fxwrap.torch_compat import FakeTensor, FakeTensorMode, LazyGraphModule, OpOverload, in_fake_mode

_aten = torch.ops.aten

FREE_VIEWS = frozenset({"alias", "detach", "expand", "lift_fresh_copy", "squeeze", "unsqueeze"})
"""Views whose elements have indices without arithmetic."""

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


class ScalarGraph:
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

    def finish_graph(self, result: Node) -> tuple[GraphModule, GraphModule]:
        """Returns the graph, and that of a mask that is all true."""
        self.graph.output(result)
        return LazyGraphModule({}, self.graph), self.all_true()

    def part(self, results: Sequence[Node | None], without: Sequence[Node] = ()) -> GraphModule:
        """Returns the graph of some values, without some of the operands."""
        graph, copies = Graph(), dict[Node, Node]()
        needed = {item for item in results if item is not None}
        for node in reversed(self.graph.nodes):
            if node in needed:
                needed.update(node.all_input_nodes)
        for node in self.graph.nodes:
            if node in needed or (node.op == "placeholder" and node not in without):
                copies[node] = graph.node_copy(node, copies.__getitem__)
        values = tuple([None if item is None else copies[item] for item in results])
        graph.output(values if len(values) > 1 else values[0])
        return LazyGraphModule({}, graph)

    def optional_part(self, result: Node | None, without: Sequence[Node]) -> GraphModule | None:
        """Returns the graph of a value, without some of the operands; None for no value."""
        return None if result is None else self.part([result], without)

    def all_true(self) -> GraphModule:
        """Returns the graph of a mask that is all true."""
        graph = Graph()
        for name in self.indices:
            graph.placeholder(name).meta["val"] = self.scalars[self.indices[name]]
        keywords: dict[str, Any] = {"dtype": torch.bool, "device": self.device}
        node = graph.call_function(_aten.full.default, ([], True), keywords)
        node.meta["val"] = self._empty(torch.bool)
        graph.output(node)
        return LazyGraphModule({}, graph)

    def _empty(self, dtype: torch.dtype) -> FakeTensor:
        keywords = {"dtype": dtype, "device": self.device}
        result: FakeTensor = fake_call(_aten.empty.memory_format, ([],), keywords, self.like)
        return result

    def true(self) -> Node:
        """Returns a constant."""
        return self.call(_aten.full.default, [], True, dtype=torch.bool, device=self.device)

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


class ElementGraph(ScalarGraph):
    """A graph of scalars that computes elements of tensors of another graph, which writes the storages `written`.

    `reads` are the tensors that it reads, and `heads` the number of heads, of which pairs of batch and head consist.
    `numbers` replace the values of constants.
    """

    def __init__(self, query: FakeTensor, fakes: NodeValues, written: Set[int], heads: Any) -> None:
        super().__init__(query)
        self.fakes = fakes
        self.written = written
        self.heads = heads
        self.numbers: dict[Node, float] = {}
        self.reads: dict[tuple[Node, Coordinates], Node] = {}
        self._memo: dict[tuple[Node, Coordinates], Node] = {}

    @property
    def read_tensors(self) -> tuple[ReadTensor, ...]:
        """The tensors that the graph reads, in the order of its buffers."""
        return tuple([ReadTensor(*key) for key in self.reads])

    def statistic(self, node: Node, coordinates: Coordinates) -> Node:
        """Returns the element of the next buffer: a tensor's statistic, without dimensions that have no coordinate."""
        return self._element_of(self._buffer(node, coordinates), coordinates)

    def _is_tensor(self, node: Node) -> bool:
        return isinstance(self.fakes.get(node), torch.Tensor)

    def _keywords(self, node: Node) -> dict[str, Any]:
        if any(isinstance(item, Node) for item in node.kwargs.values()):
            raise UnsupportedScoresError(f"'{node.name}' has a computed keyword")
        return {key: item for key, item in node.kwargs.items() if key not in ("device", "layout", "pin_memory")}

    def _cast(self, value: Node, dtype: torch.dtype) -> Node:
        is_same = self.scalars[value].dtype == dtype
        return value if is_same else self.call(_aten._to_copy.default, value, dtype=dtype)

    def _argument(self, item: Any, node: Node, coordinates: Coordinates) -> Any:
        if not isinstance(item, Node):
            if isinstance(item, list | tuple):
                raise UnsupportedScoresError(f"'{node.name}' has a list of operands")
            return item
        if not isinstance(self.fakes.get(item), torch.Tensor):
            raise UnsupportedScoresError(f"'{node.name}' has a computed number")
        rank = self.fakes[item].ndim
        return self.element(item, self._broadcast(item, coordinates[len(coordinates) - rank :]))

    def _broadcast(self, node: Node, coordinates: Coordinates) -> Coordinates:
        sizes = sizes_of(node, self.fakes)
        return tuple([None if size == 1 else item for size, item in zip(sizes, coordinates, strict=True)])

    def element(self, node: Node, coordinates: Coordinates) -> Node:
        """Returns the element of a tensor at the coordinates."""
        key = (node, coordinates)
        if key not in self._memo:
            self._memo[key] = self._inlined(node, coordinates) or self._read(node, coordinates)
        return self._memo[key]

    def _inlined(self, node: Node, coordinates: Coordinates) -> Node | None:
        """Returns an element computed from others; None for tensors that are read."""
        source = self._viewed(node, coordinates)
        if source is not None:
            return self.element(*source)
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
        if name not in FREE_VIEWS or not isinstance(node.target, OpOverload) or not isinstance(node.args[0], Node):
            return None
        source = node.args[0]
        rank = self.fakes[source].ndim
        if name == "unsqueeze":
            dim = node.args[1] % self.fakes[node].ndim
            return source, (*coordinates[:dim], *coordinates[dim + 1 :])
        if name == "squeeze":
            sizes = sizes_of(source, self.fakes)
            remaining = [dim for dim in range(rank) if dim not in _squeezed(node, sizes)]
            place = dict(zip(remaining, coordinates, strict=True))
            return source, tuple([place.get(dim) for dim in range(rank)])
        return source, self._broadcast(source, coordinates[len(coordinates) - rank :])

    def _constant(self, node: Node) -> bool | int | float | None:
        """Returns the value of each element of a constant tensor, None for other tensors."""
        if node in self.numbers:
            return self.numbers[node]
        if name_of(node) in CONSTANTS:
            return filled_value(node)
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
        if not isinstance(node.target, OpOverload) or name_of(node) not in ELEMENTWISE:
            return own
        is_mask = not fake.dtype.is_floating_point or name_of(node) in ("masked_fill", "where")
        if fake.ndim < 2 and not is_mask:  # few numbers; masks and positions bound the loop over keys
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
        return self._element_of(buffer, coordinates)

    def _element_of(self, buffer: Node, coordinates: Coordinates) -> Node:
        """Returns the element of a buffer, which has the dimensions of the coordinates that are not None."""
        indices: list[Node] = []
        for item in coordinates:
            if item is not None:
                parts = ("batch", "head") if item.part == "product" and self.heads != 1 else (item.part,)
                indices.extend([self._index(_replace_part(item, part)) for part in parts])
        return self.call(_aten.index.Tensor, buffer, indices) if indices else buffer

    def _buffer(self, node: Node, coordinates: Coordinates) -> Node:
        fake = self.fakes[node]
        if not isinstance(fake, FakeTensor):
            fake = self.mode.from_tensor(fake, static_shapes=True)
        for dim in reversed(range(fake.ndim)):
            if coordinates[dim] is None:
                with in_fake_mode(self.mode):
                    fake = fake.select(dim, 0)
            elif coordinates[dim].part == "product" and self.heads != 1:  # type: ignore[union-attr]
                with in_fake_mode(self.mode):
                    split = _product_split(fake.shape[dim], self.heads)
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


def _replace_part(coordinate: Coordinate, part: str) -> Coordinate:
    """Returns the same coordinate of another part."""
    return Coordinate("batch" if part == "product" else part, coordinate.step, coordinate.size)


def read_buffer(copy: GraphCopy, before: Node, read: ReadTensor, heads: Any, name: str) -> Node:
    """Returns a tensor that scores read, with a dimension for each index that it is read at.

    A tensor whose keys are not neighbours in memory is copied once: kernels of each head and batch read it.
    """
    node = copy.node_map[read.node]
    stride = next((stride for stride, item in zip(copy.fakes[node].stride(), read.coordinates, strict=True)
                   if item == Coordinate("key")), 1)  # fmt: skip
    if type(stride) is int and stride > 1:
        node = copy.call(before, _aten.clone.default, (node,), name, {"memory_format": torch.contiguous_format})
    for dim in reversed(range(len(read.coordinates))):
        coordinate = read.coordinates[dim]
        if coordinate is None:
            node = copy.call(before, _aten.select.int, (node, dim, 0), name)
        elif coordinate.part == "product" and heads != 1:
            sizes = copy.fakes[node].shape
            split = [*sizes[:dim], *_product_split(sizes[dim], heads), *sizes[dim + 1 :]]
            node = copy.call(before, _aten.view.default, (node, copy.size_arguments(before, split)), name)
    return node


def _product_split(size: Any, heads: Any) -> tuple[Any, Any]:
    """Returns batch and heads as the sizes into which a dimension of their product is split."""
    return size // heads, heads


def filled_value(node: Node) -> bool | int | float | None:
    """Returns the value of each element of a constant tensor; None for other tensors."""
    name = name_of(node)
    if name not in CONSTANTS:
        return None
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
