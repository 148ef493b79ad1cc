"""Lowering rules without fusion: each definition is computed once, by the loop IR's evaluator."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map, tree_map_only

from fxwrap.devices import CPU
from fxwrap.loop_ir import ZERO, Axis, Buffer, KernelBuilder, Scalar, compute_dtype, evaluate_kernel, linearize_index
from fxwrap.lowering.fusion.definitions import (
    Definition,
    Indices,
    Pointwise,
    Reduced,
    Scanned,
    Scattered,
    Stored,
    Viewed,
)
from fxwrap.lowering.rules import RULES, Declined, OperatorCall
from fxwrap.lowering.rules.registry import LoweringResult


def call_rule(overload: Any, *arguments: Any, **keywords: Any) -> Any:
    """Returns the tensors that an overload's rule computes, one or a tuple; or the reason why it declines the call."""
    try:
        result, payloads = _define(overload, arguments, keywords, overload(*arguments, **keywords))
    except Declined as declined:
        return str(declined)
    computed = Computed(payloads)
    if isinstance(result, Definition):
        return computed.tensor(result)
    return tuple([None if item is None else computed.tensor(item) for item in result])


def fuses(overload: Any, *arguments: Any, **keywords: Any) -> bool:
    """Whether torch's rule for fake tensors accepts a call, and fxwrap's does not decline it."""
    with FakeTensorMode() as mode, contextlib.suppress(Exception):
        fakes = tree_map_only(torch.Tensor, mode.from_tensor, (arguments, keywords))
        fake = overload(*fakes[0], **fakes[1])
        _define(overload, arguments, keywords, fake)
        return True
    return False


def _define(
    overload: Any, arguments: Sequence[Any], keywords: Mapping[str, Any], fake: Any
) -> tuple[LoweringResult, dict[Definition, torch.Tensor]]:
    payloads: dict[Definition, torch.Tensor] = {}

    def stored(item: Any) -> Any:
        if not isinstance(item, torch.Tensor):
            return item
        definition = Stored(tuple(item.shape), item.dtype, item.device)
        payloads[definition] = item
        return definition

    name = f"{overload._schema.name.replace('::', '.')}.{overload._overloadname}"
    positional = [tree_map(stored, item) for item in arguments]
    named = {key: tree_map(stored, item) for key, item in keywords.items()}
    call = OperatorCall(name, positional, named, fake, torch.device("cpu"), lambda item: tuple(item.shape), CPU)
    return RULES[name](call), payloads


class Computed:
    """Tensors of definitions, each computed once."""

    def __init__(self, payloads: dict[Definition, torch.Tensor]) -> None:
        self.payloads = payloads

    def tensor(self, definition: Definition) -> torch.Tensor:
        """Returns a definition's tensor, contiguous."""
        known = self.payloads.get(definition)
        if known is None:
            known = self.payloads[definition] = self._compute(definition)
        return known

    def _compute(self, definition: Definition) -> torch.Tensor:
        sizes = [int(size) for size in definition.sizes]
        out = torch.empty(sizes, dtype=definition.dtype).flatten()
        if isinstance(definition, Scattered):
            out = self.tensor(definition.initial).clone().flatten()
        reading = _DefinitionKernel(self)
        axes, reduced = reading.store(definition)
        buffers = [Buffer(name, item.dtype, item.numel()) for name, item in reading.buffers.items()]
        kernel = reading.body.finish(axes, reduced, buffers, (Buffer("out", definition.dtype, out.numel()),))
        evaluate_kernel(kernel, {**reading.buffers, "out": out})
        return out.reshape(sizes)


class _DefinitionKernel:
    """A kernel for one definition, which reads all others from memory."""

    def __init__(self, computed: Computed) -> None:
        self.body = KernelBuilder()
        self.computed = computed
        self.names: dict[Definition, str] = {}
        self.buffers: dict[str, torch.Tensor] = {}

    def load(self, definition: Definition, indices: Indices, other: Any = 0) -> Scalar:
        assert len(indices) == len(definition.sizes), (definition, indices)
        if isinstance(definition, Viewed):
            return self.load(definition.base, definition.index_map(indices), other)
        tensor = self.computed.tensor(definition)
        name = self.names.setdefault(definition, f"in{len(self.names)}")
        self.buffers[name] = tensor.contiguous().flatten()
        return self.body.load(name, linearize_index(indices, definition.sizes), definition.dtype, other).to(
            compute_dtype(definition.dtype)
        )

    def number(self, number: Any, dtype: torch.dtype) -> Scalar:
        return self.body.constant(number, dtype)

    def store(self, definition: Definition) -> tuple[list[Axis], list[Axis]]:
        """Adds the definition's value and its store; returns parallel and reduced axes."""
        match definition:
            case Pointwise():
                axes = _axes("p", definition.sizes)
                value = definition.body(self, axes)
                self._store(definition, axes, value)
                return axes, []
            case Viewed():
                axes = _axes("p", definition.sizes)
                self._store(definition, axes, self.load(definition, axes))
                return axes, []
            case Reduced():
                source = definition.source
                axes, reduced = _axes("p", source.parallel), _axes("r", source.reduced)
                parts = self.body.reduce(source.kind, source.body(self, axes, reduced))
                self._store(definition, axes, parts[definition.part])
                return axes, reduced
            case Scanned():
                scan = definition.source
                axes = _axes("p", scan.sizes)
                value = scan.body(self, axes)
                self._store(definition, axes, self.body.scan(scan.kind, value)[definition.part])
                return [axis for dim, axis in enumerate(axes) if dim != scan.dim], [axes[scan.dim]]
            case Scattered():
                axes = _axes("p", definition.space)
                for body in definition.bodies:
                    target, value = body(self, axes)
                    value = value.to(definition.compute_dtype).to(definition.dtype)
                    self.body.store("out", linearize_index(target, definition.sizes), value, mode=definition.mode)
                return axes, []
        raise AssertionError(definition)

    def _store(self, definition: Definition, axes: list[Axis], value: Scalar) -> None:
        value = value.to(compute_dtype(definition.dtype)).to(definition.dtype)
        self.body.store("out", linearize_index(axes, definition.sizes) if axes else ZERO, value)


def _axes(prefix: str, sizes: Any) -> list[Axis]:
    return [Axis(f"{prefix}{number}", int(size)) for number, size in enumerate(sizes)]
