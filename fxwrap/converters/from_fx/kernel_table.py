"""The kernels that the launches of an imported graph name by their content hash."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from fxwrap.runtime import kernel_table
from fxwrap.wrapper_ir import KernelDefinition


class KernelTable:
    """The definitions that a graph's launches may name: known ones, then those that this process has emitted.

    `used` are the definitions of the launches so far, by hash, with distinct names.
    """

    def __init__(self, known: Iterable[KernelDefinition]) -> None:
        self._known = {kernel.hash: kernel for kernel in known}
        self.used: dict[str, KernelDefinition] = {}
        self._names: set[str] = set()

    def learn(self, definitions: Iterable[KernelDefinition]) -> None:
        """Adds definitions that later launches may name."""
        for definition in definitions:
            self._known.setdefault(definition.hash, definition)

    def get(self, kernel_hash: str) -> KernelDefinition | None:
        """Returns the definition with a content hash, None if it is unknown."""
        definition = self.used.get(kernel_hash) or self._known.get(kernel_hash) or registered_definition(kernel_hash)
        return None if definition is None else self.add(definition)

    def add(self, definition: KernelDefinition) -> KernelDefinition:
        """Returns a definition, or an equal one, under a name of its own."""
        used = self.used.get(definition.hash)
        if used is not None:
            return used
        name, number = definition.name, 0
        while name in self._names:
            number += 1
            name = f"{definition.name}_{number}"
        self._names.add(name)
        self.used[definition.hash] = renamed = replace(definition, name=name)
        return renamed


def registered_definition(kernel_hash: str) -> KernelDefinition | None:
    """Returns the definition of a kernel that this process has emitted or loaded, None if there is none."""
    kernel = kernel_table.find_registered_kernel(kernel_hash)
    return None if kernel is None else definition_of(kernel)


def definition_of(kernel: kernel_table.RegisteredKernel) -> KernelDefinition:
    """Returns the definition of a registered kernel."""
    return KernelDefinition(kernel.name, kernel.language, kernel.source, kernel.signature, kernel.options)
