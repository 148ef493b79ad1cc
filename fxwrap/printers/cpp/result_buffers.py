"""Values that the memory of a result holds for a later pass, which stores the result."""

from __future__ import annotations

from collections.abc import Sequence, Set

from fxwrap.loop_ir import IndirectIndex, Kernel, Load, Store, operation_dtype
from fxwrap.printers.cpp.loop_plan import LoopPlan

MIN_COST = 10
"""Smallest cost in instructions of a value that is worth more than a store and a load of memory."""


class ResultBuffers:
    """Chooses a result for each of the values that several passes need.

    Attributes:
        stores: the store of the result whose memory holds a value, by the value's position.
    """

    def __init__(self, plan: LoopPlan, stores: Sequence[Store]) -> None:
        self.plan = plan
        self.stores: dict[int, Store] = {}
        self._free = [store for store in stores if _is_unread(plan.kernel, store)]

    def hold(self, position: int, known: Set[int]) -> bool:
        """Chooses a result of the value's dtype, its own if it is one; returns whether one is free and it is costly."""
        operations = self.plan.kernel.operations
        dtype = operation_dtype(operations[position])
        free = [item for item in self._free if operation_dtype(operations[item.value]) is dtype]
        store = min(free, key=lambda item: item.value != position, default=None)
        if store is None or self.plan.cost(position, known) < MIN_COST:
            return False
        self._free.remove(store)
        self.stores[position] = store
        return True


def _is_unread(kernel: Kernel, store: Store) -> bool:
    """Whether nothing else accesses a result, and each element is stored once."""
    accesses = [item for item in kernel.operations if isinstance(item, Load | Store) and item.buffer == store.buffer]
    axes = {axis for axis in (*kernel.axes, *kernel.reduced) if axis.size != 1}
    is_direct = not any(isinstance(atom, IndirectIndex) for atom in store.index.atoms())
    return (
        len(accesses) == 1 and is_direct and store.mode == "set" and store.mask is None and axes <= store.index.axes()
    )
