"""Graph capture and replay of a program's functions: which captured graph serves a call, and when to capture.

A call runs the function eagerly when its scalars are new, captures when they occur for the second time (everything is
then loaded and tuned), and replays afterwards. Whenever a replay is impossible, the function runs eagerly, which is
always correct.

**Inputs.** A captured graph reads and writes fixed addresses. Operands that are static, and memory of other captured
graphs, are used in place: the graph only serves calls with the same addresses. Other operands are copied into memory of
the graph, and mutated operands are copied back.

**Outputs** are the graph's own memory, returned without a copy. The graph keeps each output's storage and sees by its
reference count whether a view or autograd still uses it. While it is used, no replay may overwrite it: another graph is
captured, up to the limit, or the function runs eagerly.

**Pools.** Graphs share memory pools, so that each can use the temporary memory of the previous one. Output memory is
not freed while its graph exists, so a graph can only overwrite outputs of graphs captured after it in the same pool;
these must not be live either. A pool has one graph per function and scalars; a second one, captured while the first is
in use, goes to the next pool. A caller that keeps its last result thus alternates between two pools.
"""

from __future__ import annotations

import threading
import traceback
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Protocol

import torch

from fxwrap.devices import device_runtime
from fxwrap.errors import GraphCaptureWarning
from fxwrap.runtime.graph_capture.collectives import free_before_groups
from fxwrap.torch_compat import (
    foreach_copy,
    has_distinct_elements,
    same_addresses,
    storage_identity,
    storage_use_counts,
    strided_view,
)

FunctionBody = Callable[..., tuple[torch.Tensor, ...]]
"""A function of a program: `body(arguments, *scalars)` empties the list of its arguments."""

_MAX_SEEN_KEYS = 64
"""Number of remembered scalar tuples that occurred once."""

_MAX_EVICTION_ROUNDS = 8
"""How often all captured graphs of a function may be replaced."""


class GraphCapturer(Protocol):
    """Captures and replays work on one device."""

    def pool(self) -> object:
        """Returns a new memory pool, which captured graphs may share."""
        ...

    def capture(
        self, run: Callable[[], Sequence[torch.Tensor]], pool: object
    ) -> tuple[Callable[[], None], Sequence[torch.Tensor]]:
        """Captures the work that `run` launches without executing it; returns a replay function and the results.

        `run` allocates in the pool: later captures reuse memory that is freed.
        """
        ...

    def can_capture(self) -> bool:
        """Whether work may be captured or replayed now: no capture is in progress."""
        ...

    def can_capture_collectives(self, groups: Sequence[str]) -> bool:
        """Whether collectives of process groups, by name, can be captured. All ranks of a group must agree."""
        ...

    def stream(self) -> int:
        """Returns the handle of the current stream."""
        ...

    def wait_for_stream(self, stream: int) -> None:
        """Makes the current stream wait for the present work of another one."""
        ...

    def synchronize(self) -> None:
        """Waits for all work of the device."""
        ...


class _GraphPool:
    """A memory pool and its captured graphs, in capture order."""

    def __init__(self, handle: object) -> None:
        self.handle = handle
        self.graphs: list[GraphCapture] = []
        self.accepts_captures = True  # until a capture fails in it, which leaves the allocator's state undefined


class GraphManager:
    """The captured graphs of one program on one device: pools, and a lock for replays."""

    def __init__(self, device: str) -> None:
        self.lock = threading.RLock()
        self.pools: list[_GraphPool] = []
        self.functions: list[GraphedFunction] = []
        self.stream: int | None = None
        self._device = torch.device(device)

    @cached_property
    def graph_capturer(self) -> GraphCapturer | None:
        """The device's capturer; None for a device without graph capture."""
        make_capturer = device_runtime(self._device.type).graph_capturer
        return None if make_capturer is None else make_capturer(self._device)

    def select_pool(self, function: GraphedFunction, key: object) -> _GraphPool:
        """Returns a pool without a graph of this function and key, creating one if necessary."""
        used = {id(item.pool) for item in function.graphs.get(key, ())}
        for pool in self.pools:
            if pool.accepts_captures and id(pool) not in used:
                return pool
        assert self.graph_capturer is not None
        self.pools.append(_GraphPool(self.graph_capturer.pool()))
        return self.pools[-1]

    def free_collectives(self) -> None:
        """Frees the captured graphs that contain collectives, whose process groups are about to be destroyed."""
        with self.lock:
            for function in [item for item in self.functions if item.groups]:
                for graph in [graph for graphs in function.graphs.values() for graph in graphs]:
                    graph.pool.graphs.remove(graph)
                function.graphs.clear()

    def clear(self) -> None:
        """Frees all captured graphs and their memory; the functions run eagerly from now on."""
        with self.lock:
            if any(pool.graphs for pool in self.pools) and self.graph_capturer is not None:
                self.graph_capturer.synchronize()
            for function in self.functions:
                function.graphs.clear()
                function.capture_disabled = True
            for pool in self.pools:
                pool.graphs.clear()
            self.functions.clear()
            self.pools.clear()


@dataclass(frozen=True, eq=False)
class _OperandCopy:
    """The copy of an operand in memory of a graph.

    Fields: `position` is the operand's; `view` has its sizes and strides. `destination` is the view, or the contiguous
    range of memory that a tensor with overlapping elements covers.
    """

    position: int
    destination: torch.Tensor
    view: torch.Tensor

    def source(self, arguments: Sequence[Any]) -> torch.Tensor:
        """Returns the tensor that is copied to the destination, for these arguments of the function."""
        item: torch.Tensor = arguments[self.position]
        return item if self.destination is self.view else strided_view(item, tuple(self.destination.shape), (1,))


class GraphCapture:
    """Captured work: the addresses of its operands, its results, and whether results are still referenced."""

    def __init__(
        self,
        key: object,
        pool: _GraphPool,
        copied: Sequence[_OperandCopy],
        addresses: list[int | None],
        static_operands: frozenset[int],
        written: Collection[int],
    ) -> None:
        """Creates a graph before its capture.

        Args:
            key: the scalars and non-tensor operands of its calls.
            pool: its memory pool.
            copied: the operands which each call copies.
            addresses: required data pointer of each operand; None for copied ones.
            static_operands: positions of operands that are declared static.
            written: positions of operands that the function mutates.
        """
        self.key = key
        self.pool = pool
        self.copied = copied
        self.addresses = addresses
        self.static_operands = static_operands
        self.positions = [position for position, address in enumerate(addresses) if address is not None]
        self._destinations = [item.destination for item in copied]
        self._copied_back = [item for item in copied if item.position in written]
        self._written_in_place = [position for position in self.positions if position in written]
        self.replay: Callable[[], None] = _no_op
        self.results: list[tuple[torch.Tensor, tuple[int, ...], tuple[int, ...]]] = []
        self.storages: list[torch.UntypedStorage] = []
        self.baseline_use_counts: list[tuple[int, int]] = []  # reference counts without users
        self.outputs_escaped = False  # whether results may be in use
        self.last_used = 0  # logical time of the last replay

    def finish_capture(self, replay: Callable[[], None], results: Sequence[torch.Tensor]) -> None:
        """Sets the captured work and results."""
        self.replay = replay
        self.results = [(item, tuple(item.shape), item.stride()) for item in results]
        self.storages = list({storage_identity(item): item.untyped_storage() for item in results}.values())
        for storage in self.storages:
            _GRAPH_OF_STORAGE[storage_identity(storage)] = self

    def _uses(self) -> list[tuple[int, int]]:
        return [storage_use_counts(storage) for storage in self.storages]

    def matches_addresses(self, arguments: list[Any]) -> bool:
        """Whether all operands used in place have their captured addresses."""
        return same_addresses(arguments, self.addresses, self.positions)

    def moved_arguments(self, arguments: Sequence[Any]) -> list[int]:
        """Returns the positions of static operands whose address changed."""
        return [
            position
            for position in self.positions
            if position in self.static_operands and arguments[position].data_ptr() != self.addresses[position]
        ]

    def has_live_outputs(self) -> bool:
        """Whether results of this graph are in use."""
        if not self.outputs_escaped:
            return False
        for (uses, references), (most_uses, most_references) in zip(
            self._uses(), self.baseline_use_counts, strict=True
        ):
            if uses > most_uses or references > most_references:
                return True
        self.outputs_escaped = False
        return False

    def may_overwrite_live_outputs(self) -> bool:
        """Whether a replay could overwrite live results: its own, or those of later graphs in its pool."""
        if self.has_live_outputs():
            return True
        for other in reversed(self.pool.graphs):
            if other is self:
                return False
            if other.has_live_outputs():
                return True
        return False

    def run(self, arguments: Sequence[Any]) -> tuple[torch.Tensor, ...]:
        """Replays the work for these operands and returns the results."""
        if self.copied:
            foreach_copy(self._destinations, [item.source(arguments) for item in self.copied])
        self.replay()
        for item in self._copied_back:
            arguments[item.position].copy_(item.view)
        if self._written_in_place:
            torch.autograd.graph.increment_version([arguments[position] for position in self._written_in_place])
        if not self.baseline_use_counts:
            self.baseline_use_counts = self._uses()
        self.outputs_escaped = True
        return tuple([strided_view(item, sizes, strides) for item, sizes, strides in self.results])


_GRAPH_OF_STORAGE: weakref.WeakValueDictionary[int, GraphCapture] = weakref.WeakValueDictionary()
"""Captured graphs by the storages of their results, which live as long as the graph."""


def _no_op() -> None:
    """The replay function before the capture."""


class GraphedFunction:
    """A function of a program with capture and replay, called like the function itself. Thread-safe."""

    def __init__(
        self,
        body: FunctionBody,
        manager: GraphManager,
        name: str,
        max_captures: int,
        static_operands: Sequence[int] = (),
        mutated_operands: Sequence[int] = (),
        groups: Sequence[str] = (),
    ) -> None:
        """Wraps a function.

        Args:
            body: the function.
            manager: shared by the program's functions.
            name: its name in warnings.
            max_captures: the maximal number of captured graphs.
            static_operands: positions of arguments with fixed addresses.
            mutated_operands: positions of arguments that the function mutates.
            groups: the names of the process groups whose collectives the function contains.
        """
        self.body = body
        self.manager = manager
        self.name = name
        self.limit = max_captures
        self.static_operands = frozenset(static_operands)
        self.mutated_operands = frozenset(mutated_operands)
        self.groups = tuple(groups)
        self.graphs: dict[object, list[GraphCapture]] = {}
        self.capture_disabled = False
        self._other_positions: list[int] | None = None  # of operands that are no tensors
        self._seen: OrderedDict[object, None] = OrderedDict()
        self._moves: dict[int, int] = {}
        self._clock = 0
        self._evicted = 0
        self._has_warned = False
        manager.functions.append(self)

    def __call__(self, arguments: list[object], *numbers: object) -> tuple[torch.Tensor, ...]:
        """Runs the function for these arguments and scalars."""
        if self.capture_disabled:
            return self.body(arguments, *numbers)
        graph_capturer = self.manager.graph_capturer
        if graph_capturer is None:
            self.capture_disabled = True
            return self.body(arguments, *numbers)
        if not graph_capturer.can_capture():
            return self.body(arguments, *numbers)
        with self.manager.lock, torch.no_grad():
            graph = self._find_or_capture(arguments, numbers)
            if graph is not None:
                stream = graph_capturer.stream()
                if self.manager.stream is not None and self.manager.stream != stream:
                    graph_capturer.wait_for_stream(self.manager.stream)
                self.manager.stream = stream
                self._clock += 1
                graph.last_used = self._clock
                results = graph.run(arguments)
                arguments.clear()
                return results
        return self.body(arguments, *numbers)

    def _find_or_capture(self, arguments: list[object], numbers: tuple[object, ...]) -> GraphCapture | None:
        """Returns the graph for a call, captured now if necessary; None if the function must run eagerly."""
        if self._other_positions is None:  # the types of operands are those of the program
            self._other_positions = [at for at, item in enumerate(arguments) if not isinstance(item, torch.Tensor)]
        others = self._other_positions
        key = (numbers, *[arguments[at] for at in others]) if others else numbers
        known = self.graphs.get(key)
        if known is None:
            if key not in self._seen:
                self._seen[key] = None
                if len(self._seen) > _MAX_SEEN_KEYS:
                    self._seen.popitem(last=False)
                return None
            return self._capture(key, arguments, numbers)
        for graph in tuple(known):
            if graph.matches_addresses(arguments):
                if not graph.may_overwrite_live_outputs():
                    return graph
            else:
                self._evict_moved(graph, arguments)
        return self._capture(key, arguments, numbers)

    def _evict_moved(self, graph: GraphCapture, arguments: Sequence[object]) -> None:
        """Evicts a graph whose static operands moved; operands that move often are copied from then on."""
        moved_arguments = graph.moved_arguments(arguments)
        if not moved_arguments:
            return
        for position in moved_arguments:
            self._moves[position] = self._moves.get(position, 0) + 1
        self.static_operands -= {position for position in moved_arguments if self._moves[position] > self.limit}
        self._evict(graph)

    def _evict(self, graph: GraphCapture) -> None:
        assert self.manager.graph_capturer is not None
        self.manager.graph_capturer.synchronize()  # it may be in flight
        self.graphs[graph.key].remove(graph)
        if not self.graphs[graph.key]:
            del self.graphs[graph.key]
        graph.pool.graphs.remove(graph)

    # --- capture ------------------------------------------------------------------------------------------------

    def _capture(self, key: object, arguments: Sequence[object], numbers: tuple[object, ...]) -> GraphCapture | None:
        graph_capturer = self.manager.graph_capturer
        assert graph_capturer is not None
        if self.groups and not graph_capturer.can_capture_collectives(self.groups):
            self.capture_disabled = True
            self._warn(f"{self.name} runs eagerly: the backend of its process groups does not support graph capture")
            return None
        if not self._make_room(key):
            return None
        pool = self.manager.select_pool(self, key)
        copied: list[_OperandCopy] = []
        addresses: list[int | None] = [None] * len(arguments)
        operands: list[object] = []
        for position, item in enumerate(arguments):
            if not isinstance(item, torch.Tensor):
                operands.append(item)
            elif position in self.static_operands or storage_identity(item) in _GRAPH_OF_STORAGE:
                addresses[position] = item.data_ptr()
                operands.append(item)
            else:
                copied.append(_allocate_static_copy(position, item))
                operands.append(copied[-1].view)
        graph = GraphCapture(key, pool, copied, addresses, self.static_operands, self.mutated_operands)
        try:
            graph.finish_capture(*graph_capturer.capture(partial(_run, self.body, operands, numbers), pool.handle))
        except Exception as error:  # noqa: BLE001  the eager run raises the function's own errors
            self.capture_disabled = True
            pool.accepts_captures = False
            line = _failing_line(error, self.body)
            self._warn(f"{self.name} cannot be captured{line}, and runs eagerly: {type(error).__name__}: {error}")
            return None
        self.graphs.setdefault(key, []).append(graph)
        pool.graphs.append(graph)
        if self.groups:
            free_before_groups(self.manager)
        return graph

    def _make_room(self, key: object) -> bool:
        """Whether one more graph may be captured; for new scalars the least recently used one is evicted.

        The number of evictions is limited: capture does not pay off for scalars that always change.
        """
        existing = [graph for graphs in self.graphs.values() for graph in graphs]
        if len(existing) < self.limit:
            return True
        if not self._has_warned:
            self._has_warned = True
            self._warn(
                f"{self.name} has {len(existing)} captured graphs, and a call needs another, for new sizes or because "
                "results of the others are in use. Keep fewer results, or raise the option 'cuda_graph_limit'"
            )
        if key in self.graphs or self._evicted >= _MAX_EVICTION_ROUNDS * self.limit:
            return False
        oldest = min(existing, key=lambda graph: graph.last_used)
        self._evict(oldest)
        self._seen.pop(oldest.key, None)
        self._evicted += 1
        return True

    def _warn(self, text: str) -> None:
        warnings.warn(text, GraphCaptureWarning, stacklevel=2)


def _run(body: FunctionBody, operands: Sequence[object], numbers: tuple[object, ...]) -> tuple[torch.Tensor, ...]:
    return body([*operands], *numbers)


def _failing_line(error: BaseException, body: FunctionBody) -> str:
    """Returns the line of the function's source that failed, if known."""
    code = getattr(body, "__code__", None)
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.line for frame in frames if code is not None and frame.filename == code.co_filename and frame.line]
    return f" at `{lines[-1]}`" if lines else ""


def _allocate_static_copy(position: int, item: torch.Tensor) -> _OperandCopy:
    """Returns memory for copies of an operand, in the layout of this one."""
    sizes, strides = tuple(item.shape), item.stride()
    if has_distinct_elements(sizes, strides):
        copy = torch.empty_strided(sizes, strides, dtype=item.dtype, device=item.device)
        return _OperandCopy(position, copy, copy)
    length = 1 + sum([(size - 1) * stride for size, stride in zip(sizes, strides)])
    copy = torch.empty(length, dtype=item.dtype, device=item.device)
    return _OperandCopy(position, copy, strided_view(copy, sizes, strides))


class _GraphOwner:
    """The entry of a program with captured functions; their graphs are freed with it."""

    def __init__(self, entry: Callable[[list[object]], object], graph_managers: Sequence[GraphManager]) -> None:
        self.entry = entry
        weakref.finalize(self, _clear, graph_managers).atexit = False

    def __call__(self, inputs: list[object]) -> object:
        return self.entry(inputs)


def _clear(graph_managers: Sequence[GraphManager]) -> None:
    for manager in graph_managers:
        manager.clear()


def bind_graph_lifetime(
    entry: Callable[[list[object]], object], graph_managers: Sequence[GraphManager]
) -> Callable[[list[object]], object]:
    """Returns a boxed entry whose deletion frees the captured graphs of its program."""
    return _GraphOwner(entry, graph_managers) if graph_managers else entry
