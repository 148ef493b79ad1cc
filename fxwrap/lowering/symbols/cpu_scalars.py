"""Zero-dimensional CPU tensors as operands of operators on another device, which torch allows.

With dynamic shapes, Dynamo turns the Python floats of a model into such inputs. A kernel on another device cannot read
them: the program reads each once and passes it to the launch as a scalar. Values computed from such tensors alone are
recomputed in the kernel. Dtypes and type promotion stay those of tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import sympy
import torch
from torch.fx import Node

from fxwrap.loop_ir import FLOAT8, KERNEL_DTYPES, KernelBuilder, Scalar
from fxwrap.lowering.fusion.definitions import CpuScalar, Definition, ElementReader, Indices, Pointwise, Stored, Viewed
from fxwrap.lowering.fusion.tracing import resolve_views, trace_with
from fxwrap.symbolic import Number, SymbolInfo, make_symbol

_MAX_COST = 60
"""The most instructions that a kernel repeats instead of reading a value that the CPU computes once."""


@dataclass(frozen=True)
class ScalarRead:
    """The read of a zero-dimensional tensor's element as a symbol; `node` is the tensor's node."""

    symbol: SymbolInfo
    definition: Definition
    node: Node


class CpuScalarReads:
    """Replaces CPU tensors by scalars; each tensor is read once until it is overwritten."""

    def __init__(self, fresh_symbol: Callable[[str], str], operator_of: Callable[[Definition], str]) -> None:
        self._fresh_symbol = fresh_symbol
        self._operator_of = operator_of
        self._reads: dict[Definition, ScalarRead] = {}
        self._written: set[Definition] = set()

    def invalidate(self, definitions: Iterable[Definition]) -> None:
        """Forgets the reads of definitions that are overwritten."""
        for definition in definitions:
            self._written.add(definition)
            self._reads.pop(definition, None)

    def replacements(
        self, operands: Sequence[Definition], devices: Iterable[torch.device], nodes: Mapping[Definition, Node]
    ) -> tuple[dict[Definition, CpuScalar], list[ScalarRead]]:
        """Returns the operand that replaces each CPU scalar of an operator, and the reads that they depend on.

        None is replaced unless all other operands and the results, whose `devices` these are, are on one other device,
        and the node of each scalar is known.
        """
        scalars = [item for item in dict.fromkeys(operands) if is_cpu_scalar(item)]
        others = {*devices, *[item.device for item in operands if not is_cpu_scalar(item)]}
        if not scalars or len(others) != 1 or not nodes.keys() >= set(scalars):
            return {}, []
        device = next(iter(others))
        if device.type == "cpu":
            return {}, []
        pairs = {item: self._as_kernel_scalar(item, device, nodes[item]) for item in scalars}
        reads = [read for _, own in pairs.values() for read in own]
        return {item: replacement for item, (replacement, _) in pairs.items()}, reads

    def _as_kernel_scalar(
        self, definition: Definition, device: torch.device, node: Node
    ) -> tuple[CpuScalar, list[ScalarRead]]:
        """Returns a CPU tensor as an operand on another device, and the reads that it depends on."""
        leaves = self._leaves(definition)
        reads = [self._read(leaf, node) for leaf in leaves]
        scalars = dict(zip(leaves, [_expression(read) for read in reads], strict=True))

        def body(reader: ElementReader, _: Indices) -> Scalar:
            return _ScalarReader(reader, scalars, self._operator_of).load(definition, ())

        return CpuScalar((), definition.dtype, device, body), reads

    def _leaves(self, definition: Definition) -> list[Definition]:
        """Returns the stored tensors that a kernel can recompute it from, or itself if that is too expensive."""
        if not isinstance(definition, Pointwise):
            return [definition]
        trace = trace_with(definition, lambda other: "inlined" if isinstance(other, Pointwise) else "fetched")
        leaves = [leaf for leaf, _ in trace.reads]
        plain = all(isinstance(leaf, Stored) and not leaf.sizes and leaf not in self._written for leaf in leaves)
        return leaves if plain and trace.cost <= _MAX_COST else [definition]

    def _read(self, definition: Definition, node: Node) -> ScalarRead:
        if definition not in self._reads:
            info = SymbolInfo(self._fresh_symbol("f" if definition.dtype.is_floating_point else "u"))
            if definition.dtype is torch.bool:
                info = SymbolInfo(info.name, 0, 1)
            self._reads[definition] = ScalarRead(info, definition, node)
        return self._reads[definition]


def is_cpu_scalar(definition: Definition) -> bool:
    """Whether a definition is a zero-dimensional CPU tensor whose element can be passed to a launch."""
    dtype = definition.dtype
    return not definition.sizes and definition.device.type == "cpu" and dtype in KERNEL_DTYPES - FLOAT8


def _expression(read: ScalarRead) -> sympy.Basic:
    symbol = make_symbol(read.symbol.name)
    return sympy.Eq(symbol, 1, evaluate=False) if read.definition.dtype is torch.bool else symbol


@dataclass(frozen=True)
class _ScalarReader:
    """An element reader that replaces stored tensors by scalars, and recomputes everything else."""

    reader: ElementReader
    scalars: dict[Definition, sympy.Basic]
    operator_of: Callable[[Definition], str]

    @property
    def body(self) -> KernelBuilder:
        return self.reader.body

    def load(self, definition: Definition, indices: Indices, other: Number = 0) -> Scalar:
        scalar = self.scalars.get(definition)
        if scalar is None and isinstance(definition, Viewed):
            definition, indices = resolve_views(definition, indices)
            scalar = self.scalars.get(definition)
        if scalar is not None:
            return self.reader.number(scalar, definition.dtype)
        assert isinstance(definition, Pointwise)
        with self.body.origin_scope(self.operator_of(definition) or self.body.origin):
            return definition.body(self, indices)

    def number(self, number: Number | sympy.Basic, dtype: torch.dtype) -> Scalar:
        return self.reader.number(number, dtype)
