"""Building kernels: an operation is added once however often it is asked for, and constants fold.

`Scalar` is what lowering's formulas compute with: a value of one element, with Python's operators and a method for each
scalar operation, so that a formula reads as it is written in the literature.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeAlias

import sympy
import torch

from fxwrap.loop_ir.index import Axis, Gathered, Index, IndexLike, as_index
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
    Scan,
    SizeValue,
    Store,
    check_kernel,
    map_operation,
    operands,
)
from fxwrap.loop_ir.operations import (
    INTEGERS,
    OPERATIONS,
    POSITION_RESULTS,
    REDUCTIONS,
    SCANS,
    STORAGE_ONLY,
    CombineSpec,
)
from fxwrap.symbolic import Size

Number: TypeAlias = "float | int | bool"


class Body:
    """The operations of a kernel that is being built."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.origin = ""
        self.mask: Scalar | None = None
        self.guards: dict[int, Scalar] = {}  # by computed position: where it is in bounds
        self._known: dict[Operation, int] = {}

    # --- leaves -----------------------------------------------------------------------------------------------------

    def load(self, buffer: str, index: IndexLike, dtype: torch.dtype, other: Number = 0) -> Scalar:
        """Loads an element, `index` elements from the buffer's start, where the current mask allows it."""
        index = as_index(index)
        guarded = self._guarded(index, self.mask)
        mask = None if guarded is None else guarded.position
        return self._add(Load(buffer, index, dtype, mask, other if mask is not None else 0, self.origin))

    def _guarded(self, index: Index, mask: Scalar | None) -> Scalar | None:
        """Returns a mask that also leaves out elements at positions that are out of bounds of what may be empty."""
        if not self.guards:
            return mask
        for atom in index.atoms():
            guard = self.guards.get(atom.operation) if isinstance(atom, Gathered) else None
            if guard is not None:
                mask = guard if mask is None else mask & guard
        return mask

    def constant(self, value: Number, dtype: torch.dtype) -> Scalar:
        """Returns a number of a dtype, converted to it as torch does. Half precision gives float32, rounded."""
        fits = dtype in _WIDEST or (dtype in INTEGERS and 0 <= value < 128)
        if not fits or type(value) is not _PYTHON_KINDS[_kind(dtype)]:
            value = _converted(repr(value), value, dtype)
        return self._add(Constant(value, torch.float32 if dtype in STORAGE_ONLY else dtype, self.origin))

    def number(self, expression: sympy.Basic, dtype: torch.dtype) -> Scalar:
        """Returns a scalar of the program: an expression over its symbols."""
        return self._add(SizeValue(expression, dtype, self.origin))

    def index(self, index: IndexLike) -> Scalar:
        """Returns the value of an index expression, int64."""
        index = as_index(index)
        number = index.constant
        if number is not None:
            return self.constant(number, torch.int64)
        return self._add(IndexValue(index, origin=self.origin))

    # --- operations -------------------------------------------------------------------------------------------------

    def compute(self, name: str, *values: Scalar, dtype: torch.dtype | None = None) -> Scalar:
        """Applies a row of the operations' table. `dtype` is for the rows that need one."""
        spec = OPERATIONS[name]
        result = {"bool": torch.bool, "same": values[-1].dtype}.get(spec.result, dtype)
        assert result is not None, f"{name} needs a dtype"
        positions = tuple([value.position for value in values])
        return self._add(Compute(name, positions, result, self.origin))

    def reduce(self, kind: str, value: Scalar) -> tuple[Scalar, ...]:
        """Reduces over the kernel's reduced axes; returns the kind's results."""
        dtype = self._combined(kind, value)
        return self._combine(Reduce(kind, (value.position,), dtype, self.origin), REDUCTIONS[kind])

    def scan(self, kind: str, value: Scalar) -> tuple[Scalar, ...]:
        """Scans along the kernel's reduced axis; returns the kind's results."""
        dtype = self._combined(kind, value)
        return self._combine(Scan(kind, (value.position,), dtype, self.origin), SCANS[kind])

    def gathered(self, position: Scalar, size: Size, guard: Scalar | None = None) -> Index:
        """Returns a computed int64 position, known to be within 0 to size - 1, as an index.

        Where there is one position it is 0: so a kernel's own element is known for what it is. With `guard`, that is
        known only where the guard holds, and elsewhere nothing is loaded or stored at it.
        """
        if guard is not None:
            self.guards[position.position] = guard
        return as_index(0 if size == 1 else Gathered(position.position, size))

    def store(
        self, buffer: str, index: IndexLike, value: Scalar, mask: Scalar | None = None, mode: str = "set"
    ) -> None:
        """Stores a value, which has the buffer's dtype."""
        index = as_index(index)
        guarded = self._guarded(index, mask)
        position = None if guarded is None else guarded.position
        self.operations.append(Store(buffer, index, value.position, position, mode, self.origin))

    def require(self, condition: Scalar, message: str, error: str = "index") -> None:
        """Makes the launch fail with a message where the condition is false and the current mask is true.

        `error` is a key of REQUIREMENT_ERRORS.
        """
        mask = None if self.mask is None else self.mask.position
        operation = Require(condition.position, message, mask, self.origin, error)
        if operation not in self._known:
            self._known[operation] = len(self.operations)
            self.operations.append(operation)

    @contextmanager
    def masked(self, condition: Scalar) -> Iterator[None]:
        """Makes loads inside happen only where the condition, and those around it, hold."""
        outer = self.mask
        self.mask = condition if outer is None else outer & condition
        try:
            yield
        finally:
            self.mask = outer

    def where(self, condition: Scalar, inside: Callable[[], Scalar], other: Number) -> Scalar:
        """Returns `inside()`, computed under the condition as a mask, where it holds, and `other` elsewhere."""
        with self.masked(condition):
            value = inside()
        return condition.where(value, other)

    @contextmanager
    def origins(self, origin: str) -> Iterator[None]:
        """Makes operations added inside carry an origin."""
        outer, self.origin = self.origin, origin
        try:
            yield
        finally:
            self.origin = outer

    def finish(
        self, axes: Sequence[Axis], reduced: Sequence[Axis], inputs: Sequence[Buffer], outputs: Sequence[Buffer]
    ) -> Kernel:
        """Returns the kernel, without operations that no store needs. Raises KernelError when it breaks a rule."""
        kernel = Kernel(tuple(axes), tuple(reduced), tuple(inputs), tuple(outputs), tuple(self.operations))
        return check_kernel(without_dead_operations(kernel))

    # --- inside -----------------------------------------------------------------------------------------------------

    def _combined(self, kind: str, value: Scalar) -> torch.dtype:
        return torch.int64 if (kind, 0) in POSITION_RESULTS else value.dtype

    def _combine(self, operation: Reduce | Scan, spec: CombineSpec) -> tuple[Scalar, ...]:
        whole = self._add(operation)
        if spec.results == 1:
            return (whole,)
        types = [torch.int64 if (spec.name, part) in POSITION_RESULTS else whole.dtype for part in range(spec.results)]
        return tuple([self._add(Part(whole.position, part, dtype, self.origin)) for part, dtype in enumerate(types)])

    def _add(self, operation: Any) -> Scalar:
        known = self._known.get(operation)
        if known is None:
            known = self._known[operation] = len(self.operations)
            self.operations.append(operation)
        return Scalar(self, known, operation.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Scalar:
    """One element's value while a kernel is built. Numbers that it meets become constants of its dtype."""

    body: Body
    position: int
    dtype: torch.dtype

    def of(self, other: Scalar | Number) -> Scalar:
        """Returns a number as a constant of this value's dtype, a scalar as it is."""
        return other if isinstance(other, Scalar) else self.body.constant(other, self.dtype)

    def apply(self, name: str, *others: Scalar | Number) -> Scalar:
        """Applies an operation by name, this value first."""
        return self.body.compute(name, self, *[self.of(other) for other in others])

    @property
    def constant(self) -> Number | None:
        """The number that this is known to be, or None."""
        operation = self.body.operations[self.position]
        return operation.value if isinstance(operation, Constant) else None

    def to(self, dtype: torch.dtype) -> Scalar:
        """Returns the value as another dtype. Casting what was just widened back gives what was there before."""
        if dtype is self.dtype:
            return self
        operation = self.body.operations[self.position]
        if isinstance(operation, Compute) and operation.name == "cast" and self.dtype is torch.float32:
            source = self.body.operations[operation.operands[0]]
            if not isinstance(source, Store | Require) and source.dtype is dtype and dtype in STORAGE_ONLY:
                return Scalar(self.body, operation.operands[0], dtype)
        if isinstance(operation, Constant) and dtype not in STORAGE_ONLY:
            return self.body.constant(operation.value, dtype)
        return self.body.compute("cast", self, dtype=dtype)

    def where(self, value: Scalar | Number, other: Scalar | Number) -> Scalar:
        """Returns `value` where this bool is true, else `other`; one of them at least is a scalar."""
        example = value if isinstance(value, Scalar) else other
        assert isinstance(example, Scalar), "where needs one scalar"
        return self.body.compute("where", self, example.of(value), example.of(other))

    def __add__(self, other: Scalar | Number) -> Scalar:
        return self.apply("add", other)

    def __sub__(self, other: Scalar | Number) -> Scalar:
        return self.apply("sub", other)

    def __mul__(self, other: Scalar | Number) -> Scalar:
        return self.apply("mul", other)

    def __truediv__(self, other: Scalar | Number) -> Scalar:
        return self.apply("div", other)

    def __radd__(self, other: Number) -> Scalar:
        return self.of(other) + self

    def __rsub__(self, other: Number) -> Scalar:
        return self.of(other) - self

    def __rmul__(self, other: Number) -> Scalar:
        return self.of(other) * self

    def __rtruediv__(self, other: Number) -> Scalar:
        return self.of(other) / self

    def __neg__(self) -> Scalar:
        return self.apply("neg")

    def __abs__(self) -> Scalar:
        return self.apply("abs")

    def __and__(self, other: Scalar) -> Scalar:
        return self.apply("logical_and" if self.dtype is torch.bool else "bitwise_and", other)

    def __or__(self, other: Scalar) -> Scalar:
        return self.apply("logical_or" if self.dtype is torch.bool else "bitwise_or", other)

    def __invert__(self) -> Scalar:
        return self.apply("logical_not" if self.dtype is torch.bool else "bitwise_not")

    def __lt__(self, other: Scalar | Number) -> Scalar:
        return self.apply("lt", other)

    def __le__(self, other: Scalar | Number) -> Scalar:
        return self.apply("le", other)

    def __gt__(self, other: Scalar | Number) -> Scalar:
        return self.apply("gt", other)

    def __ge__(self, other: Scalar | Number) -> Scalar:
        return self.apply("ge", other)

    def equals(self, other: Scalar | Number) -> Scalar:
        """Returns whether the two are equal."""
        return self.apply("eq", other)

    def differs(self, other: Scalar | Number) -> Scalar:
        """Returns whether the two are unequal."""
        return self.apply("ne", other)

    def maximum(self, other: Scalar | Number) -> Scalar:
        """Returns the larger, NaN where one is NaN."""
        return self.apply("maximum", other)

    def minimum(self, other: Scalar | Number) -> Scalar:
        """Returns the smaller, NaN where one is NaN."""
        return self.apply("minimum", other)

    def exp(self) -> Scalar:
        """Returns e to the power of the value."""
        return self.apply("exp")

    def log(self) -> Scalar:
        """Returns the natural logarithm."""
        return self.apply("log")

    def tanh(self) -> Scalar:
        """Returns the hyperbolic tangent."""
        return self.apply("tanh")

    def sqrt(self) -> Scalar:
        """Returns the square root."""
        return self.apply("sqrt")

    def rsqrt(self) -> Scalar:
        """Returns one over the square root."""
        return self.apply("rsqrt")

    def sigmoid(self) -> Scalar:
        """Returns 1 / (1 + exp(-x))."""
        return self.apply("sigmoid")

    def erf(self) -> Scalar:
        """Returns the error function."""
        return self.apply("erf")


_WIDEST = frozenset({torch.float64, torch.int64, torch.bool})
"""Dtypes that hold every number of their kind that a graph has."""

_PYTHON_KINDS = {"float": float, "int": int, "bool": bool}


@lru_cache(maxsize=4096)
def _converted(text: str, value: Number, dtype: torch.dtype) -> Number:
    """Returns a number converted as torch does. Its text tells apart what compares equal: 1 and True, 0.0 and -0.0."""
    return torch.tensor(value).to(dtype).item()


def _kind(dtype: torch.dtype) -> str:
    return "bool" if dtype is torch.bool else "float" if dtype.is_floating_point else "int"


def without_dead_operations(kernel: Kernel) -> Kernel:
    """Returns the kernel with only the operations that its stores need, renumbered in order."""
    needed: set[int] = set()
    for position in range(len(kernel.operations) - 1, -1, -1):
        if position in needed or isinstance(kernel.operations[position], Store | Require):
            needed.add(position)
            needed.update(operands(kernel.operations[position]))
    if len(needed) == len(kernel.operations):
        return kernel
    return renumbered(kernel, sorted(needed))


def renumbered(kernel: Kernel, order: Sequence[int]) -> Kernel:
    """Returns the kernel with the operations at these positions, in this order, which keeps operands first."""
    new_position = {position: number for number, position in enumerate(order)}

    def index(old: Index) -> Index:
        found = [atom for atom in old.atoms() if isinstance(atom, Gathered)]
        return old.substitute({atom: Gathered(new_position[atom.operation], atom.size) for atom in found})

    chosen = [map_operation(kernel.operations[position], new_position.__getitem__, index) for position in order]
    return replace(kernel, operations=tuple(chosen))
