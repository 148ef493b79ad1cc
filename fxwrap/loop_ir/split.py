"""Few long reductions as many short ones: a kernel over parts of the rows, and one that combines what they found.

A GPU that reduces 64 columns or 16 rows has work for a fraction of its processors. Cut into parts, the reduction keeps
all of them busy, for the price of writing and reading one number a part.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import sympy
import torch

from fxwrap.loop_ir.builder import without_dead_operations
from fxwrap.loop_ir.index import (
    ONE,
    Atom,
    Axis,
    Gathered,
    Index,
    IndexLike,
    as_index,
    linear_index,
    unflattened,
)
from fxwrap.loop_ir.kernel import (
    Buffer,
    Compute,
    Constant,
    IndexValue,
    Kernel,
    Load,
    Operation,
    Part,
    Reduce,
    Require,
    SizeValue,
    Store,
    check_kernel,
    map_operation,
    operands,
)
from fxwrap.symbolic import Size, ceiling_divide, product

_LEAST = 1 << 20  # elements; a smaller reduction is over before a second launch would begin
_LEAST_ROW = 2048  # elements of a part, where the row is contiguous
_LEAST_COLUMN = 64
_COLUMNS = 64  # columns a program takes, in a reduction across rows
_WITH_IDENTITY = ("sum", "prod", "any", "all", "max", "min")


@dataclass(frozen=True)
class SplitKernel:
    """Kernels that run in this order for one, and the buffers that they need besides its own."""

    kernels: tuple[Kernel, ...]
    temporaries: tuple[Buffer, ...]


def split_reductions(kernel: Kernel, hint: Callable[[Size], int], programs: int = 528) -> SplitKernel | None:
    """Returns a kernel's reductions in parts, or None where that cannot be done or would not be faster.

    `programs` is how many a device runs at a time with enough loads in flight; `hint` gives a typical value of a size.
    Row-level results that elements need go through memory, and a third kernel uses them.
    """
    return _split(kernel, hint, programs, frozenset())


def _split(kernel: Kernel, hint: Callable[[Size], int], programs: int, taken: frozenset[str]) -> SplitKernel | None:
    if not kernel.reductions or kernel.scans:
        return None
    cut = _cut(kernel, hint, programs)
    found = None if cut is None else _Splitting(kernel, cut, taken).run()
    if found is None or len(found.kernels) < 3:
        return found
    names = taken | {buffer.name for buffer in found.temporaries}
    more = _split(found.kernels[-1], hint, programs, names)
    if more is None:
        return found
    return SplitKernel((*found.kernels[:-1], *more.kernels), (*found.temporaries, *more.temporaries))


# --- how many parts -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Cut:
    """How the reduced axes are cut: into `parts` of `size` elements, which `reduced` walks over.

    `mapping` gives the old axes by the new ones; `inside` is the position that must be below the number of elements
    where the parts are not equal, else None.
    """

    part: Axis
    reduced: tuple[Axis, ...]
    mapping: dict[Atom, IndexLike]
    size: Size
    inside: Index | None


def _cut(kernel: Kernel, hint: Callable[[Size], int], programs: int) -> _Cut | None:
    count, size = hint(kernel.count), hint(kernel.reduced_count)
    across = _reduces_across(kernel)
    busy = max(-(-count // _COLUMNS) if across else count, 1)
    wanted = min(-(-programs // busy), size // (_LEAST_COLUMN if across else _LEAST_ROW))
    again = any(stage > 0 and varies for stage, varies in zip(kernel.stages, kernel.varying, strict=True))
    if count * size < _LEAST or busy * (4 if again else 2) > programs or wanted < 2:
        return None  # elements that wait for results would be read once more from memory, not from the cache
    outer, whole = kernel.reduced[0], kernel.reduced_count
    parts = _divisor(outer.size, wanted)
    if parts is not None:
        part, rest = Axis("part", parts), Axis("inner", int(outer.size) // parts)
        position = as_index(part) * rest.size + rest
        reduced = (rest, *kernel.reduced[1:])
        return _Cut(part, reduced, {outer: position}, product(axis.size for axis in reduced), None)
    equal = _divisor(whole, wanted)
    part = Axis("part", wanted if equal is None else equal)
    each = Axis("inner", ceiling_divide(whole, part.size))
    position = as_index(part) * each.size + each
    old = unflattened(position, [axis.size for axis in kernel.reduced])
    mapping: dict[Atom, IndexLike] = dict(zip(kernel.reduced, old, strict=True))
    return _Cut(part, (each,), mapping, each.size, position if equal is None else None)


def _divisor(size: Size, wanted: int) -> int | None:
    """Returns a divisor of a size that is close to the wanted number of parts, or None."""
    if not isinstance(size, int):
        return None
    near = [number for number in range(max(wanted // 2, 2), 2 * wanted + 1) if size % number == 0]
    return min(near, key=lambda number: abs(number - wanted), default=None)


def _reduces_across(kernel: Kernel) -> bool:
    """Whether what is read lies contiguous along a parallel axis."""
    loads = [(operation.index, len(axes)) for operation, axes in zip(kernel.operations, kernel.addressed, strict=True)
             if isinstance(operation, Load)]  # fmt: skip
    most = max([count for _, count in loads], default=0)
    indices = [index for index, count in loads if count == most]
    along = sum(index.stride(axis) == ONE for index in indices for axis in kernel.reduced)
    beside = sum(index.stride(axis) == ONE for index in indices for axis in kernel.axes)
    return beside > along


# --- the kernels ----------------------------------------------------------------------------------------------------


class _Body:
    """The operations of a new kernel, copied from an old one and added to."""

    def __init__(self, kernel: Kernel, mapping: dict[Atom, IndexLike]) -> None:
        self.kernel = kernel
        self.mapping = mapping
        self.operations: list[Operation] = []
        self.new: dict[int, int] = {}
        self.origin = ""

    def add(self, operation: Operation) -> int:
        self.operations.append(operation)
        return len(self.operations) - 1

    def copy(self, position: int) -> int:
        operation = self.kernel.operations[position]
        self.origin = operation.origin
        self.new[position] = self.add(map_operation(operation, self.new.__getitem__, self.index))
        return self.new[position]

    def index(self, old: Index) -> Index:
        gathered: dict[Atom, IndexLike] = {
            atom: Gathered(self.new[atom.operation], atom.size) for atom in old.atoms() if isinstance(atom, Gathered)
        }
        return old.substitute({**self.mapping, **gathered})

    def compute(self, name: str, *used: int, dtype: torch.dtype) -> int:
        return self.add(Compute(name, used, dtype, self.origin))

    def reduce(self, kind: str, value: int, dtype: torch.dtype) -> int:
        return self.add(Reduce(kind, (value,), dtype, self.origin))

    def load(self, buffer: Buffer, index: Index) -> int:
        return self.add(Load(buffer.name, index, buffer.dtype, origin=self.origin))

    def store(self, buffer: Buffer, index: Index, value: int) -> None:
        self.add(Store(buffer.name, index, value, origin=self.origin))


class _Splitting:
    def __init__(self, kernel: Kernel, cut: _Cut, taken: frozenset[str]) -> None:
        self.kernel = kernel
        self.cut = cut
        self.taken = taken | {item.name for item in (*kernel.inputs, *kernel.outputs)}
        self.first = [position for position in kernel.reductions if kernel.stages[position] == 0]
        self.temporaries: dict[str, Buffer] = {}
        self.partials: dict[int, list[Buffer]] = {}
        self.results: dict[tuple[int, int], Buffer] = {}
        sizes = [axis.size for axis in kernel.axes]
        self.row = linear_index(kernel.axes, sizes)
        self.element = as_index(cut.part) * kernel.count + self.row

    def run(self) -> SplitKernel | None:
        kinds = {item.kind for item in self.kernel.operations if isinstance(item, Reduce)}
        if self.cut.inside is not None and not kinds <= {*_WITH_IDENTITY}:
            return None
        parts = self._parts()
        rest = self._rest()
        kernels = [parts, self._combined(), *([rest] if rest is not None else [])]
        if not self._independent(kernels):
            return None
        return SplitKernel(tuple([check_kernel(item) for item in kernels]), tuple(self.temporaries.values()))

    def _independent(self, kernels: list[Kernel]) -> bool:
        """Whether no kernel reads what an earlier one has written, temporaries apart."""
        written: set[str] = set()
        for kernel in kernels:
            read = {item.buffer for item in kernel.operations if isinstance(item, Load)}
            if not (read - set(self.temporaries)).isdisjoint(written):
                return False
            written |= {store.buffer for store in kernel.stores}
        return True

    def _temporary(self, dtype: torch.dtype, extent: Size, what: str) -> Buffer:
        number = 0
        while f"{what}{number}" in self.taken or f"{what}{number}" in self.temporaries:
            number += 1
        buffer = self.temporaries[f"{what}{number}"] = Buffer(f"{what}{number}", dtype, extent)
        return buffer

    def _finish(self, body: _Body, axes: tuple[Axis, ...], reduced: tuple[Axis, ...]) -> Kernel:
        """Returns a kernel of these operations, with the buffers that it uses."""
        kernel = without_dead_operations(Kernel(axes, reduced, (), (), tuple(body.operations)))
        written = {store.buffer for store in kernel.stores}
        read = {item.buffer for item in kernel.operations if isinstance(item, Load)}
        known = [*self.kernel.inputs, *self.kernel.outputs, *self.temporaries.values()]
        inputs = tuple([item for item in known if item.name in read - written])
        return dataclasses.replace(kernel, inputs=inputs, outputs=tuple([b for b in known if b.name in written]))

    # --- parts ------------------------------------------------------------------------------------------------------

    def _parts(self) -> Kernel:
        """Returns the kernel that reduces each part, and stores what needs no reduction."""
        kernel, body = self.kernel, _Body(self.kernel, self.cut.mapping)
        inside = self._inside(body)
        for position, operation in enumerate(kernel.operations):
            if kernel.stages[position] > 0:
                continue
            if isinstance(operation, Reduce):
                body.origin = operation.origin
                self._part(body, position, operation, inside)
            elif isinstance(operation, Store | Require):
                if kernel.varying[position]:
                    self._masked(body, body.copy(position), inside)
            else:
                new = body.copy(position)
                if isinstance(operation, Load) and kernel.varying[position]:
                    self._masked(body, new, inside)
                    body.new[position] = len(body.operations) - 1
        return self._finish(body, (self.cut.part, *kernel.axes), self.cut.reduced)

    def _inside(self, body: _Body) -> int | None:
        if self.cut.inside is None:
            return None
        whole = self.kernel.reduced_count
        position = body.add(IndexValue(self.cut.inside))
        limit = Constant(whole, torch.int64) if isinstance(whole, int) else SizeValue(sympy.sympify(whole), torch.int64)
        return body.compute("lt", position, body.add(limit), dtype=torch.bool)

    def _masked(self, body: _Body, position: int, inside: int | None) -> None:
        """Makes the last operation happen only inside the row."""
        if inside is None:
            return
        operation = body.operations.pop()
        assert isinstance(operation, Load | Store | Require), "only these have masks"
        mask = (
            inside if operation.mask is None else body.compute("logical_and", operation.mask, inside, dtype=torch.bool)
        )
        body.add(dataclasses.replace(operation, mask=mask))

    def _part(self, body: _Body, position: int, operation: Reduce, inside: int | None) -> None:
        """Adds the reduction of a part and stores its results."""
        value = body.new[operation.operands[0]]
        dtype = _dtype(body.operations[value])
        if inside is not None:
            neutral = body.add(Constant(_identity(operation.kind, dtype), dtype))
            value = body.compute("where", inside, value, neutral, dtype=dtype)
        if operation.kind in ("argmax", "argmin"):
            found = [body.reduce(operation.kind[3:], value, dtype), self._position(body, operation, value)]
        else:
            whole = body.reduce(operation.kind, value, operation.dtype)
            count = 2 if operation.kind in ("welford", "softmax") else 1
            parts = [body.add(Part(whole, number, dtype, operation.origin)) for number in range(count)]
            found = parts if count == 2 else [whole]
        extent = product([self.cut.part.size, self.kernel.count])
        self.partials[position] = [self._temporary(_dtype(body.operations[item]), extent, "partial") for item in found]
        for buffer, item in zip(self.partials[position], found, strict=True):
            body.store(buffer, self.element, item)

    def _position(self, body: _Body, operation: Reduce, value: int) -> int:
        """Returns the position in the whole row of what a part finds."""
        start = body.add(IndexValue(as_index(self.cut.part) * self.cut.size))
        return body.compute("add", body.reduce(operation.kind, value, torch.int64), start, dtype=torch.int64)

    # --- their combination ------------------------------------------------------------------------------------------

    def _combined(self) -> Kernel:
        """Returns the kernel that combines the parts, computes what depends on rows alone, and stores it."""
        kernel, body = self.kernel, _Body(self.kernel, {})
        reached: set[int] = set()
        results: dict[tuple[int, int], int] = {}
        for position, operation in enumerate(kernel.operations):
            if position in self.first:
                body.origin = operation.origin
                assert isinstance(operation, Reduce), "a first reduction is one"
                for part, value in enumerate(self._combine(body, operation, self.partials[position])):
                    results[position, part] = value
                body.new[position] = results[position, 0]
                reached.add(position)
            elif isinstance(operation, Part) and (operation.operation, operation.position) in results:
                body.new[position] = results[operation.operation, operation.position]
                reached.add(position)
            elif not kernel.varying[position] and all(used in reached for used in operands(operation)):
                if not isinstance(operation, Reduce):
                    body.copy(position)
                    reached.add(position)
        for key, buffer in self.results.items():
            body.store(buffer, self.row, results[key])
        return self._finish(body, kernel.axes, (self.cut.part,))

    def _combine(self, body: _Body, operation: Reduce, buffers: list[Buffer]) -> list[int]:
        loads = [body.load(buffer, self.element) for buffer in buffers]
        dtype = buffers[0].dtype
        match operation.kind:
            case "welford":
                means = body.reduce("welford", loads[0], dtype)
                mean, spread = [body.add(Part(means, number, dtype, body.origin)) for number in range(2)]
                apart = body.compute("mul", spread, self._number(body, self.cut.size, dtype), dtype=dtype)
                within = body.reduce("sum", loads[1], dtype)
                return [mean, body.compute("add", within, apart, dtype=dtype)]
            case "softmax":
                return self._combine_softmax(body, loads, dtype)
            case "argmax" | "argmin":
                best = body.reduce(operation.kind, loads[0], torch.int64)
                chosen = as_index(Gathered(best, self.cut.part.size)) * self.kernel.count + self.row
                return [body.load(buffers[1], chosen)]
            case _:
                return [body.reduce(operation.kind, loads[0], dtype)]

    def _combine_softmax(self, body: _Body, loads: list[int], dtype: torch.dtype) -> list[int]:
        largest = body.reduce("max", loads[0], dtype)
        low, zero = body.add(Constant(-float("inf"), dtype)), body.add(Constant(0.0, dtype))
        nothing = body.compute("eq", largest, low, dtype=torch.bool)
        shift = body.compute("where", nothing, zero, largest, dtype=dtype)
        power = body.compute("exp", body.compute("sub", loads[0], shift, dtype=dtype), dtype=dtype)
        return [largest, body.reduce("sum", body.compute("mul", loads[1], power, dtype=dtype), dtype)]

    def _number(self, body: _Body, size: Size, dtype: torch.dtype) -> int:
        if isinstance(size, int):
            return body.add(Constant(float(size), dtype))
        return body.compute("cast", body.add(SizeValue(size, torch.int64)), dtype=dtype)

    # --- what elements need of them ---------------------------------------------------------------------------------

    def _rest(self) -> Kernel | None:
        """Returns the kernel of later stages, which loads the results it needs, or None when there are none."""
        kernel, body = self.kernel, _Body(self.kernel, {})
        later = [
            position
            for position, operation in enumerate(kernel.operations)
            if kernel.stages[position] > 0 and isinstance(operation, Store | Require | Reduce)
            if kernel.varying[position] or isinstance(operation, Reduce)
        ]
        if not later:
            return None
        after = self._depends_on(later)
        for position, operation in enumerate(kernel.operations):
            source = operation.operation if isinstance(operation, Part) else position
            if source in self.first:
                reduction = kernel.operations[source]
                if isinstance(operation, Reduce) and reduction.kind in ("welford", "softmax"):  # type: ignore[union-attr]
                    continue
                part = operation.position if isinstance(operation, Part) else 0
                body.origin = operation.origin
                body.new[position] = body.load(self._result(source, part, _dtype(operation)), self.row)
            elif isinstance(operation, Store | Require):
                if position in later or (not kernel.varying[position] and position in after):
                    body.copy(position)
            else:
                body.copy(position)
        whole = not any(isinstance(operation, Reduce) for operation in body.operations)
        axes, reduced = ((*kernel.axes, *kernel.reduced), ()) if whole else (kernel.axes, kernel.reduced)
        finished = self._finish(body, axes, reduced)
        used = {item.buffer for item in finished.operations if isinstance(item, Load)}
        for key, buffer in list(self.results.items()):
            if buffer.name not in used:
                del self.results[key], self.temporaries[buffer.name]
        return finished

    def _depends_on(self, later: list[int]) -> set[int]:
        """Returns what needs a reduction of a later stage, so that the combination cannot do it."""
        reductions = {position for position in later if isinstance(self.kernel.operations[position], Reduce)}
        found = set(reductions)
        for position, operation in enumerate(self.kernel.operations):
            if any(used in found for used in operands(operation)):
                found.add(position)
        return found

    def _result(self, position: int, part: int, dtype: torch.dtype) -> Buffer:
        known = self.results.get((position, part))
        if known is None:
            known = self.results[position, part] = self._temporary(dtype, self.kernel.count, "row")
        return known


def _dtype(operation: Operation) -> torch.dtype:
    assert not isinstance(operation, Store | Require), "neither has a value"
    return operation.dtype


def _identity(kind: str, dtype: torch.dtype) -> float | int | bool:
    if kind in ("any", "all"):
        return kind == "all"
    if kind in ("sum", "prod"):
        number = 0 if kind == "sum" else 1
        return float(number) if dtype.is_floating_point else number
    if dtype.is_floating_point:
        return -float("inf") if kind == "max" else float("inf")
    return torch.iinfo(dtype).min if kind == "max" else torch.iinfo(dtype).max
