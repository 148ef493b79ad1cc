"""Decomposition of reductions with several results: reading a cached row twice is faster and more exact.

Products of float32 are computed in float64: near 1, their rounding errors all have the same sign.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from fxwrap.loop_ir import (
    Compute,
    Constant,
    Index,
    IndirectIndex,
    Kernel,
    Operation,
    Reduce,
    ReductionResult,
    SymbolicScalar,
    eliminate_dead_operations,
    map_operation,
)


def decompose_reductions(kernel: Kernel) -> Kernel:
    """Returns a kernel that computes `welford` as three sums and `softmax` as a maximum and a sum."""
    if not any(isinstance(item, Reduce) and item.kind in ("welford", "softmax", "prod") for item in kernel.operations):
        return kernel
    return _ReductionDecomposer(kernel).run()


class _ReductionDecomposer:
    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.operations: list[Operation] = []
        self.new: dict[int, int] = {}
        self.parts: dict[tuple[int, int], int] = {}
        self.origin = ""
        self.known: dict[tuple[Operation, str], int] = {}

    def run(self) -> Kernel:
        for position, operation in enumerate(self.kernel.operations):
            self.origin = operation.origin
            match operation:
                case Reduce("welford", (value,), dtype):
                    self.welford(position, self.new[value], dtype)
                case Reduce("softmax", (value,), dtype):
                    self.softmax(position, self.new[value], dtype)
                case Reduce("prod", (value,), torch.float32):
                    wide = self.compute("cast", self.new[value], dtype=torch.float64)
                    result = self.add(Reduce("prod", (wide,), torch.float64, self.origin))
                    self.new[position] = self.compute("cast", result, dtype=torch.float32)
                case ReductionResult(source, part) if (source, part) in self.parts:
                    self.new[position] = self.parts[source, part]
                case Compute("div", (value, divisor), torch.float32) if self.is_softmax_sum(divisor):
                    inverse = self.compute("reciprocal", self.new[divisor], dtype=torch.float32)
                    self.new[position] = self.compute("mul", self.new[value], inverse, dtype=torch.float32)
                case _:
                    self.new[position] = self.add(map_operation(operation, self.new.__getitem__, self.index))
        return eliminate_dead_operations(replace(self.kernel, operations=tuple(self.operations)))

    def add(self, operation: Operation) -> int:
        """Adds an operation unless there is an equal one: a softmax's sum shares its summands with the elements."""
        key = (operation, str(operation.value)) if isinstance(operation, Constant) else (operation, "")
        if isinstance(operation, Compute | Constant) and key in self.known:
            return self.known[key]
        self.known[key] = len(self.operations)
        self.operations.append(operation)
        return len(self.operations) - 1

    def compute(self, name: str, *operands: int, dtype: torch.dtype) -> int:
        return self.add(Compute(name, operands, dtype, self.origin))

    def index(self, old: Index) -> Index:
        indirect = [atom for atom in old.atoms() if isinstance(atom, IndirectIndex)]
        return old.substitute({atom: IndirectIndex(self.new[atom.operation], atom.size) for atom in indirect})

    def is_softmax_sum(self, position: int) -> bool:
        """Whether a value is the sum of a softmax: 0 or at least 1, so its reciprocal is as accurate as a division."""
        result = self.kernel.operations[position]
        if not isinstance(result, ReductionResult) or result.position != 1:
            return False
        source = self.kernel.operations[result.operation]
        return isinstance(source, Reduce) and source.kind == "softmax"

    def welford(self, position: int, value: int, dtype: torch.dtype) -> None:
        """Adds the corrected two-pass algorithm of Chan, Golub and LeVeque (1983).

        The rounding error of the mean is the mean of the differences from it. Without it, rows of equal elements would
        have differences from their mean, which a division by a small standard deviation amplifies.
        """
        count = self.kernel.reduced_count
        if isinstance(count, int):
            divisor = self.add(Constant(float(count), dtype, self.origin))
        else:
            divisor = self.compute("cast", self.add(SymbolicScalar(count, torch.int64, self.origin)), dtype=dtype)
        total = self.add(Reduce("sum", (value,), dtype, self.origin))
        mean = self.compute("div", total, divisor, dtype=dtype)
        difference = self.compute("sub", value, mean, dtype=dtype)
        square = self.compute("mul", difference, difference, dtype=dtype)
        residual = self.add(Reduce("sum", (difference,), dtype, self.origin))
        squares = self.add(Reduce("sum", (square,), dtype, self.origin))
        correction = self.compute("div", residual, divisor, dtype=dtype)
        zero = self.add(Constant(0.0, dtype, self.origin))
        is_finite = self.compute("eq", self.compute("sub", mean, mean, dtype=dtype), zero, dtype=torch.bool)
        corrected = self.compute("add", mean, correction, dtype=dtype)
        excess = self.compute("mul", residual, correction, dtype=dtype)
        self.parts[position, 0] = self.compute("where", is_finite, corrected, mean, dtype=dtype)
        m2 = self.compute("sub", squares, excess, dtype=dtype)
        self.parts[position, 1] = self.compute("maximum", m2, zero, dtype=dtype)

    def softmax(self, position: int, value: int, dtype: torch.dtype) -> None:
        largest = self.add(Reduce("max", (value,), dtype, self.origin))
        power = self.compute("exp", self.compute("sub", value, largest, dtype=dtype), dtype=dtype)
        total = self.add(Reduce("sum", (power,), dtype, self.origin))
        lowest = self.add(Constant(-float("inf"), dtype, self.origin))
        zero = self.add(Constant(0.0, dtype, self.origin))
        empty = self.compute("eq", largest, lowest, dtype=torch.bool)
        self.parts[position, 0] = largest
        self.parts[position, 1] = self.compute("where", empty, zero, total, dtype=dtype)
