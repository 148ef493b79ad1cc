"""Construction of kernels with value numbering: equal operations are added once.

Formulas compute with `Scalar`, the value of one element, which has operators and methods for scalar operations.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import sympy
import torch

from fxwrap.caching import bounded_cache
from fxwrap.loop_ir.atoms import Axis, IndirectIndex
from fxwrap.loop_ir.body_operations import (
    Compute,
    Constant,
    DeviceAssert,
    IndexValue,
    Load,
    Operation,
    Reduce,
    ReductionResult,
    Scan,
    Store,
    SymbolicScalar,
    ValueOperation,
    map_operation,
    operands,
    renumber_index,
)
from fxwrap.loop_ir.index import Atom, Index, IndexLike, as_index
from fxwrap.loop_ir.kernel import Buffer, Kernel
from fxwrap.loop_ir.operations import (
    INTEGERS,
    OPERATIONS,
    POSITION_RESULTS,
    REDUCTIONS,
    SCANS,
    STORAGE_ONLY,
    CombineSpec,
)
from fxwrap.loop_ir.verify import verify_kernel
from fxwrap.symbolic import Number, Size


class KernelBuilder:
    """The operations of a kernel that is being built."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.origin = ""
        self.mask: Scalar | None = None
        self.guards: dict[int, Scalar] = {}  # by the operation of an indirect index: where it is in bounds
        self._value_numbers: dict[Operation, int] = {}

    # --- leaves ------------------------------------------------------------------------------------------------------

    def load(self, buffer: str, index: IndexLike, dtype: torch.dtype, other: Number = 0) -> Scalar:
        """Loads the element at offset `index` of a buffer where the current mask holds, else `other`."""
        index = as_index(index)
        guarded = self._mask_with_guards(index, self.mask)
        mask = None if guarded is None else guarded.position
        return self.add(Load(buffer, index, dtype, mask, other if mask is not None else 0, self.origin))

    def _mask_with_guards(self, index: Index, mask: Scalar | None) -> Scalar | None:
        """Returns the mask with the guards of the indirect indices in an index."""
        if not self.guards:
            return mask
        for atom in index.atoms():
            guard = self.guards.get(atom.operation) if isinstance(atom, IndirectIndex) else None
            if guard is not None:
                mask = guard if mask is None else mask & guard
        return mask

    def constant(self, value: Number, dtype: torch.dtype) -> Scalar:
        """Returns a number converted to a dtype as torch does. Half precision is rounded and has the dtype float32."""
        fits = dtype in _WIDEST_DTYPES or (dtype in INTEGERS and 0 <= value < 128)
        if not fits or type(value) is not _PYTHON_KINDS[_kind(dtype)]:
            value = _convert_number(repr(value), value, dtype)
        return self.add(Constant(value, torch.float32 if dtype in STORAGE_ONLY else dtype, self.origin))

    def number(self, expression: sympy.Basic, dtype: torch.dtype) -> Scalar:
        """Returns an expression over the program's symbols."""
        return self.add(SymbolicScalar(expression, dtype, self.origin))

    def index(self, index: IndexLike) -> Scalar:
        """Returns the value of an index expression, int64."""
        index = as_index(index)
        number = index.constant
        if number is not None:
            return self.constant(number, torch.int64)
        return self.add(IndexValue(index, origin=self.origin))

    # --- operations --------------------------------------------------------------------------------------------------

    def compute(self, name: str, *values: Scalar, dtype: torch.dtype | None = None) -> Scalar:
        """Applies an operation of `OPERATIONS`. `dtype` is the result's, for casts."""
        spec = OPERATIONS[name]
        result = {"bool": torch.bool, "same": values[-1].dtype}.get(spec.result, dtype)
        assert result is not None, f"{name} needs a dtype"
        positions = tuple([value.position for value in values])
        return self.add(Compute(name, positions, result, self.origin))

    def reduce(
        self, kind: str, value: Scalar, axes: Sequence[Axis] = (), operand_precision: torch.dtype | None = None
    ) -> tuple[Scalar, ...]:
        """Reduces over reduced axes of the kernel, by default over all, and returns the results of the kind.

        `operand_precision` is that of a matmul's operands (`Reduce`).
        """
        operation = Reduce(kind, (value.position,), value.dtype, self.origin, tuple(axes), operand_precision)
        return self._add_combine(operation, REDUCTIONS[kind])

    def scan(self, kind: str, value: Scalar) -> tuple[Scalar, ...]:
        """Scans along the kernel's reduced axis and returns the results of the kind."""
        return self._add_combine(Scan(kind, (value.position,), value.dtype, self.origin), SCANS[kind])

    def indirect_index(self, position: Scalar, size: Size, guard: Scalar | None = None) -> Index:
        """Returns a computed int64 position from 0 to `size` - 1 as an index.

        With `guard`, the position is in bounds only where the guard holds; loads and stores elsewhere are masked.
        Without, it is the constant 0 for size 1.
        """
        if guard is None:
            return as_index(0 if size == 1 else IndirectIndex(position.position, size))
        self.guards[position.position] = guard
        return as_index(IndirectIndex(position.position, size))

    def store(
        self, buffer: str, index: IndexLike, value: Scalar, mask: Scalar | None = None, mode: str = "set"
    ) -> None:
        """Stores a value of the buffer's dtype."""
        index = as_index(index)
        guarded = self._mask_with_guards(index, mask)
        position = None if guarded is None else guarded.position
        self.operations.append(Store(buffer, index, value.position, position, mode, self.origin))

    def device_assert(self, condition: Scalar, message: str, error: str = "index") -> None:
        """Fails the launch with a message where the condition is false and the current mask true.

        `error` is a key of ASSERT_ERRORS.
        """
        mask = None if self.mask is None else self.mask.position
        operation = DeviceAssert(condition.position, message, mask, self.origin, error)
        if operation not in self._value_numbers:
            self._value_numbers[operation] = len(self.operations)
            self.operations.append(operation)

    @contextmanager
    def masked(self, condition: Scalar) -> Iterator[None]:
        """Masks the loads inside with the condition and those around it."""
        outer = self.mask
        self.mask = condition if outer is None else outer & condition
        try:
            yield
        finally:
            self.mask = outer

    def where(self, condition: Scalar, inside: Callable[[], Scalar], other: Number) -> Scalar:
        """Returns `inside()`, masked by the condition, where it holds, and `other` elsewhere."""
        with self.masked(condition):
            value = inside()
        return condition.where(value, other)

    @contextmanager
    def origin_scope(self, origin: str) -> Iterator[None]:
        """Gives operations added inside an origin."""
        outer, self.origin = self.origin, origin
        try:
            yield
        finally:
            self.origin = outer

    def finish(
        self, axes: Sequence[Axis], reduced: Sequence[Axis], inputs: Sequence[Buffer], outputs: Sequence[Buffer]
    ) -> Kernel:
        """Returns the verified kernel without dead operations. Raises KernelError for an invalid one.

        The kernels of equal layers are one object, whose properties are computed once.
        """
        kernel = Kernel(tuple(axes), tuple(reduced), tuple(inputs), tuple(outputs), tuple(self.operations))
        return _finished(kernel, kernel.uncompared_fields)

    # --- internals ---------------------------------------------------------------------------------------------------

    def _add_combine(self, operation: Reduce | Scan, spec: CombineSpec) -> tuple[Scalar, ...]:
        whole = self.add(operation)
        if spec.results == 1:
            return (whole,)
        types = [torch.int64 if (spec.name, part) in POSITION_RESULTS else whole.dtype for part in range(spec.results)]
        return tuple(
            [self.add(ReductionResult(whole.position, part, dtype, self.origin)) for part, dtype in enumerate(types)]
        )

    def add(self, operation: ValueOperation) -> Scalar:
        """Adds an operation whose operands are positions of this body, unless it has an equal one."""
        position = self._value_numbers.get(operation)
        if position is None:
            position = self._value_numbers[operation] = len(self.operations)
            self.operations.append(operation)
        return Scalar(self, position, operation.dtype)


@bounded_cache(1024)
def _finished(kernel: Kernel, _uncompared_fields: tuple[str, ...]) -> Kernel:
    return verify_kernel(eliminate_dead_operations(kernel))


def _unary(name: str) -> Callable[[Scalar], Scalar]:
    return lambda self: self.apply(name)


def _binary(name: str) -> Callable[[Scalar, Scalar | Number], Scalar]:
    return lambda self, other: self.apply(name, other)


@dataclass(frozen=True, slots=True, eq=False)
class Scalar:
    """The value of one element in a kernel that is being built. Number operands become constants of its dtype."""

    body: KernelBuilder
    position: int
    dtype: torch.dtype

    def coerce(self, other: Scalar | Number) -> Scalar:
        """Returns a number as a constant of this value's dtype, a scalar as it is."""
        return other if isinstance(other, Scalar) else self.body.constant(other, self.dtype)

    def apply(self, name: str, *others: Scalar | Number) -> Scalar:
        """Applies an operation by name, this value first."""
        return self.body.compute(name, self, *[self.coerce(other) for other in others])

    @property
    def constant(self) -> Number | None:
        """The value of a constant, or None."""
        operation = self.body.operations[self.position]
        return operation.value if isinstance(operation, Constant) else None

    def to(self, dtype: torch.dtype) -> Scalar:
        """Returns the value cast to another dtype. Casting a widened value back returns the original."""
        if dtype is self.dtype:
            return self
        operation = self.body.operations[self.position]
        if isinstance(operation, Compute) and operation.name == "cast" and self.dtype is torch.float32:
            source = self.body.operations[operation.operands[0]]
            if not isinstance(source, Store | DeviceAssert) and source.dtype is dtype and dtype in STORAGE_ONLY:
                return Scalar(self.body, operation.operands[0], dtype)
        if isinstance(operation, Constant) and dtype not in STORAGE_ONLY:
            return self.body.constant(operation.value, dtype)
        return self.body.compute("cast", self, dtype=dtype)

    def where(self, value: Scalar | Number, other: Scalar | Number) -> Scalar:
        """Returns `value` where this bool is true, else `other`; at least one of them is a scalar."""
        example = value if isinstance(value, Scalar) else other
        assert isinstance(example, Scalar), "where needs one scalar"
        return self.body.compute("where", self, example.coerce(value), example.coerce(other))

    __add__ = _binary("add")
    __sub__ = _binary("sub")
    __mul__ = _binary("mul")
    __truediv__ = _binary("div")
    __lt__ = _binary("lt")
    __le__ = _binary("le")
    __gt__ = _binary("gt")
    __ge__ = _binary("ge")
    equals = _binary("eq")
    differs = _binary("ne")
    maximum = _binary("maximum")  # NaN where one is NaN
    minimum = _binary("minimum")
    __neg__ = _unary("neg")
    __abs__ = _unary("abs")
    exp = _unary("exp")
    log = _unary("log")
    tanh = _unary("tanh")
    sqrt = _unary("sqrt")
    rsqrt = _unary("rsqrt")
    sigmoid = _unary("sigmoid")
    erf = _unary("erf")

    def __radd__(self, other: Number) -> Scalar:
        return self.coerce(other) + self

    def __rsub__(self, other: Number) -> Scalar:
        return self.coerce(other) - self

    def __rmul__(self, other: Number) -> Scalar:
        return self.coerce(other) * self

    def __rtruediv__(self, other: Number) -> Scalar:
        return self.coerce(other) / self

    def __and__(self, other: Scalar) -> Scalar:
        return self._logical("and", other)

    def __or__(self, other: Scalar) -> Scalar:
        return self._logical("or", other)

    def __invert__(self) -> Scalar:
        return self._logical("not")

    def _logical(self, name: str, *others: Scalar) -> Scalar:
        return self.apply(f"{'logical' if self.dtype is torch.bool else 'bitwise'}_{name}", *others)


_WIDEST_DTYPES = frozenset({torch.float64, torch.int64, torch.bool})
"""Dtypes that represent every number of their kind."""

_PYTHON_KINDS = {"float": float, "int": int, "bool": bool}


@bounded_cache(4096)
def _convert_number(text: str, value: Number, dtype: torch.dtype) -> Number:
    """Returns a number converted as torch does. `text` distinguishes equal keys: 1 and True, 0.0 and -0.0."""
    return torch.tensor(value).to(dtype).item()


def _kind(dtype: torch.dtype) -> str:
    return "bool" if dtype is torch.bool else "float" if dtype.is_floating_point else "int"


def eliminate_dead_operations(kernel: Kernel) -> Kernel:
    """Returns the kernel with the operations that stores and assertions depend on."""
    needed: set[int] = set()
    for position in range(len(kernel.operations) - 1, -1, -1):
        if position in needed or isinstance(kernel.operations[position], Store | DeviceAssert):
            needed.add(position)
            needed.update(operands(kernel.operations[position]))
    if len(needed) == len(kernel.operations):
        return kernel
    return reorder_operations(kernel, sorted(needed))


def with_used_buffers(kernel: Kernel, known: Collection[Buffer]) -> Kernel:
    """Returns a kernel without dead operations, and with those of the known buffers that it reads or writes."""
    kernel = eliminate_dead_operations(kernel)
    written = {store.buffer for store in kernel.stores}
    read = {item.buffer for item in kernel.operations if isinstance(item, Load)} - written
    inputs, outputs = [tuple([item for item in known if item.name in names]) for names in (read, written)]
    return replace(kernel, inputs=inputs, outputs=outputs)


def reorder_operations(kernel: Kernel, order: Sequence[int]) -> Kernel:
    """Returns the kernel with the operations at these positions, in this order, which keeps operands first."""
    new_position = {position: number for number, position in enumerate(order)}

    chosen = [map_operation(kernel.operations[position], new_position.__getitem__) for position in order]
    return replace(kernel, operations=tuple(chosen))


class OperationCopier:
    """Builds the operations of a kernel, partly copied from another one; `mapping` replaces atoms of its indices.

    `new` maps the positions of copied operations to their new ones; `origin` is that of added operations.
    """

    def __init__(self, kernel: Kernel, mapping: Mapping[Atom, IndexLike] | None = None) -> None:
        self.kernel = kernel
        self.operations: list[Operation] = []
        self.new: dict[int, int] = {}
        self.origin = ""
        self._index = partial(renumber_index, self.new.__getitem__, mapping or {})

    def add(self, operation: Operation) -> int:
        """Adds an operation and returns its position."""
        self.operations.append(operation)
        return len(self.operations) - 1

    def copy(self, position: int) -> int:
        """Adds a copy of an operation and returns its position."""
        operation = self.kernel.operations[position]
        self.origin = operation.origin
        self.new[position] = self.add(map_operation(operation, self.new.__getitem__, self._index))
        return self.new[position]

    def compute(self, name: str, *used: int, dtype: torch.dtype) -> int:
        """Adds an operation of `OPERATIONS`."""
        return self.add(Compute(name, used, dtype, self.origin))

    def reduce(
        self,
        kind: str,
        value: int,
        dtype: torch.dtype,
        axes: tuple[Axis, ...] = (),
        operand_precision: torch.dtype | None = None,
    ) -> int:
        """Adds a reduction over some reduced axes, by default all."""
        return self.add(Reduce(kind, (value,), dtype, self.origin, axes, operand_precision))

    def constant(self, value: Number, dtype: torch.dtype) -> int:
        """Adds a number."""
        return self.add(Constant(value, dtype, self.origin))

    def size(self, size: Size, dtype: torch.dtype) -> int:
        """Adds a size as a float."""
        if isinstance(size, int):
            return self.constant(float(size), dtype)
        return self.compute("cast", self.add(SymbolicScalar(size, torch.int64, self.origin)), dtype=dtype)


def replace_operations(
    kernel: Kernel, positions: Collection[int], replacement: Callable[[OperationCopier, int], int]
) -> Kernel:
    """Returns the kernel without dead operations, with others in place of those at these positions.

    `replacement(body, position)` adds what computes the value of an operation, and returns the position of that.
    """
    body = OperationCopier(kernel)
    for position, operation in enumerate(kernel.operations):
        if position in positions:
            body.origin = operation.origin
            body.new[position] = replacement(body, position)
        else:
            body.copy(position)
    return eliminate_dead_operations(replace(kernel, operations=tuple(body.operations)))
