"""Numbers in memory of the CPU that operators on another device take: tensors of rank 0, as torch lets them be mixed.

With dynamic shapes, Dynamo makes the Python floats of a model such inputs. A kernel cannot read them where they are;
what it takes is a number of its launch, which the program reads once. What was computed from such tensors alone is
computed in the kernel, from the numbers they hold. Dtypes stay those of tensors, and so does torch's promotion.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import Node

from fxwrap.loop_ir import KERNEL_DTYPES, Body, Number, Scalar
from fxwrap.lowering.definitions import Definition, HostNumber, Indices, Pointwise, Reader, Stored, Viewed
from fxwrap.lowering.tracing import resolved, trace_with
from fxwrap.symbolic import SymbolInfo, make_symbol

_MOST_COST = 60
"""Instructions up to which a kernel computes anew what the CPU could compute once."""


@dataclass(frozen=True)
class NumberRead:
    """The element of a tensor of rank 0 that a program reads, as a symbol.

    `node` stands for the tensor where `definition` is not one that is in memory anyway.
    """

    symbol: SymbolInfo
    definition: Definition
    node: Node


class HostNumbers:
    """Makes numbers of tensors, each tensor read once until it is written. `fresh` gives names of symbols by prefix."""

    def __init__(self, fresh: Callable[[str], str]) -> None:
        self._fresh = fresh
        self._reads: dict[Definition, NumberRead] = {}
        self._written: set[Definition] = set()

    def wrote(self, definitions: Iterable[Definition]) -> None:
        """Takes note that these are overwritten: what was read of them is old."""
        for definition in definitions:
            self._written.add(definition)
            self._reads.pop(definition, None)

    def moved(self, definition: Definition, device: torch.device, node: Node) -> tuple[HostNumber, list[NumberRead]]:
        """Returns a tensor of rank 0 as an operator on another device takes it, and what must be read before that."""
        leaves = self._leaves(definition)
        reads = [self._read(leaf, node) for leaf in leaves]
        numbers = dict(zip(leaves, [_number(read) for read in reads], strict=True))

        def body(reader: Reader, _: Indices) -> Scalar:
            return _Moved(reader, numbers).load(definition, ())

        found = HostNumber((), definition.dtype, device, body)
        found.name, found.origin = definition.name, definition.origin
        return found, reads

    def _leaves(self, definition: Definition) -> list[Definition]:
        """Returns the tensors from whose elements it is computed in the kernel: itself, unless that is cheap."""
        if not isinstance(definition, Pointwise):
            return [definition]
        trace = trace_with(definition, lambda other: isinstance(other, Pointwise))
        leaves = [leaf for leaf, _ in trace.reads]
        plain = all(isinstance(leaf, Stored) and not leaf.sizes and leaf not in self._written for leaf in leaves)
        return leaves if plain and trace.cost <= _MOST_COST else [definition]

    def _read(self, definition: Definition, node: Node) -> NumberRead:
        found = self._reads.get(definition)
        if found is None:
            info = SymbolInfo(self._fresh("f" if definition.dtype.is_floating_point else "u"))
            if definition.dtype is torch.bool:
                info = SymbolInfo(info.name, 0, 1)
            found = self._reads[definition] = NumberRead(info, definition, node)
        return found


def is_host_number(definition: Any) -> bool:
    """Whether a definition is a tensor of rank 0 on the CPU whose element a launch may pass."""
    return (
        isinstance(definition, Definition)
        and not definition.sizes
        and definition.device.type == "cpu"
        and definition.dtype in KERNEL_DTYPES
    )


def _number(read: NumberRead) -> sympy.Basic:
    symbol = make_symbol(read.symbol.name)
    return sympy.Eq(symbol, 1, evaluate=False) if read.definition.dtype is torch.bool else symbol


@dataclass(frozen=True)
class _Moved:
    """A reader that takes numbers for elements, and computes what is computed from them in place."""

    reader: Reader
    numbers: dict[Definition, sympy.Basic]

    @property
    def body(self) -> Body:
        return self.reader.body

    def load(self, definition: Definition, indices: Indices, other: Number = 0) -> Scalar:
        found = self.numbers.get(definition)
        if found is None and isinstance(definition, Viewed):
            definition, indices = resolved(definition, indices)
            found = self.numbers.get(definition)
        if found is not None:
            return self.reader.number(found, definition.dtype)
        assert isinstance(definition, Pointwise)
        with self.body.origins(definition.origin):
            return definition.body(self, indices)

    def number(self, number: Number | sympy.Basic, dtype: torch.dtype) -> Scalar:
        return self.reader.number(number, dtype)
