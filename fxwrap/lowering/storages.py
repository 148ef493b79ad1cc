"""The storages of a graph's values: which value owns each, which values alias it, and which are mutated."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import torch

from fxwrap.torch_compat import storage_identity
from fxwrap.wrapper_ir import Value


class Storages:
    """Maps each tensor value to its root, the value that owns its memory, and to its fake tensor."""

    def __init__(self) -> None:
        self._roots: dict[str, Value] = {}
        self._fakes: dict[str, Any] = {}
        self._root_of_storage: dict[int, Value] = {}
        self._mutated: set[str] = set()

    def add(self, value: Value, root: Value) -> None:
        """Records the root of a value; `root` may be the value itself."""
        self._roots[value.name] = root

    def add_fake(self, value: Value, fake: object) -> None:
        """Records the fake tensor, or the opaque object, of a value."""
        self._fakes[value.name] = fake

    def share(self, fake: torch.Tensor, root: Value, *, overwrite: bool = True) -> None:
        """Records that the storage of a tensor of the graph is the memory of a root."""
        if overwrite:
            self._root_of_storage[storage_identity(fake)] = root
        else:
            self._root_of_storage.setdefault(storage_identity(fake), root)

    def mark_mutated(self, value: Value) -> None:
        """Records that a line writes the memory of a value."""
        self._mutated.add(self._roots[value.name].name)

    @property
    def mutated(self) -> Set[str]:
        """The names of the roots that lines write."""
        return self._mutated

    def root(self, value: Value) -> Value:
        """Returns the value that owns a value's memory."""
        return self._roots[value.name]

    def root_names(self, values: list[Value]) -> list[str]:
        """Returns the names of the roots of values, without those that have none."""
        return [self._roots[value.name].name for value in values if value.name in self._roots]

    def root_of_fake(self, fake: torch.Tensor) -> Value | None:
        """Returns the root whose memory is the storage of a tensor of the graph, or None."""
        return self._root_of_storage.get(storage_identity(fake))

    def fake(self, value: Value) -> torch.Tensor:
        """Returns the fake tensor of a value."""
        return self._fakes[value.name]  # type: ignore[no-any-return]

    def example(self, operand: object) -> object:
        """Returns the fake tensor, or the opaque object, of a value; other operands are unchanged."""
        return self._fakes.get(operand.name, operand) if isinstance(operand, Value) else operand

    def device_types(self) -> list[str]:
        """Returns the types of the devices of all tensors and generators, sorted."""
        fakes = [fake for fake in self._fakes.values() if isinstance(fake, torch.Tensor | torch.Generator)]
        return sorted({fake.device.type for fake in fakes})
