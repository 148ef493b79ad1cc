"""The kernel definitions that a graph which is read back may launch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from fxwrap.errors import FxwrapError
from fxwrap.runtime import library
from fxwrap.wrapper_ir import KernelDefinition


class Kernels:
    """The definitions that a graph's launches may name: those given, then those that this process has emitted."""

    def __init__(self, given: Iterable[KernelDefinition]) -> None:
        self._known = {kernel.hash: kernel for kernel in given}
        self.used: dict[str, KernelDefinition] = {}
        self._names: set[str] = set()

    def named(self, kernel_hash: str) -> KernelDefinition | None:
        """Returns the definition with a content hash, under a name that no other one has; None where there is none."""
        found = self.used.get(kernel_hash)
        if found is not None:
            return found
        found = self._known.get(kernel_hash)
        if found is None:
            try:
                other = library.registered_kernel(kernel_hash)
            except FxwrapError:
                return None
            found = KernelDefinition(other.name, other.language, other.source, other.signature, other.options)
        return self.added(found)

    def added(self, definition: KernelDefinition) -> KernelDefinition:
        """Returns a definition, or an equal one, under a name that no other one has; the graph launches it."""
        found = self.used.get(definition.hash)
        if found is not None:
            return found
        found = definition
        name, number = found.name, 0
        while name in self._names:
            number += 1
            name = f"{found.name}_{number}"
        self._names.add(name)
        self.used[found.hash] = found = replace(found, name=name)
        return found
