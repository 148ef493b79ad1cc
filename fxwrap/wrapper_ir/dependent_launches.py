"""The rules of programmatic dependent launches: which launches may start before the launch before them has ended.

A **chain** is a sequence of launches on one stream of one device with nothing else between them that runs there. Its
first launch starts when all earlier work of the stream has ended; the others may be dependent. Each kernel of a chain
waits before it reads what another launch of the chain writes, and before it writes. Then:

- A dependent launch starts when all programs of its predecessor have started, thus after the first launch of the chain
  has started, and after all work before the chain has ended. Before it waits, it reads only memory that no launch of
  the chain writes, so that its last writer has ended.
- After it has waited, its predecessor has ended, and so have all launches before: each of them ended after it had
  waited for the one before.
- Work after the chain starts, as ever, when the last launch has ended.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from fxwrap.devices.kernel_names import EARLY_READS
from fxwrap.wrapper_ir.analyses import is_release
from fxwrap.wrapper_ir.line import LineBase, blocks, consumed, defined, defined_symbol, reads, writes
from fxwrap.wrapper_ir.program import KernelDefinition
from fxwrap.wrapper_ir.types import TensorType, Value


def early_reads(kernel: KernelDefinition) -> tuple[int, ...] | None:
    """Returns the positions of the tensors that a kernel reads before it waits; None if it does not wait."""
    text = dict(kernel.options).get(EARLY_READS)
    return None if not isinstance(text, str) else tuple(map(int, text.split()))


def kernel_name(line: LineBase) -> str:
    """Returns the name of the kernel that a line launches, or ""."""
    names = [getattr(line, name) for name, kind in line.target_fields if kind == "kernel"]
    return str(names[0]) if names else ""


@dataclass
class LaunchChain:
    """The chain before a line of a block.

    Fields: `place` is its device and stream, None without a chain; `written` are the roots that its launches write.
    """

    place: tuple[str, int] | None = None
    written: set[str] = field(default_factory=set)

    def conflict(self, line: LineBase, early: Collection[int], root_of: Mapping[str, str]) -> str | None:
        """Returns why a launch whose kernel reads the tensors `early` before it waits cannot be dependent, or None."""
        if self.place is None:
            return "no launch of a kernel that waits, over a grid that is not empty, is directly before it"
        if self.place != _place(line):
            return "the launch before it is on another device or stream"
        for value in self.early_values(line, early):
            if root_of[value.name] in self.written:
                return f"its kernel reads %{value.name} before it waits, which a launch before it writes"
        return None

    def early_values(self, line: LineBase, early: Collection[int]) -> list[Value]:
        """Returns the tensors of a launch at some positions."""
        tensors = launched_tensors(line)
        return [tensors[position] for position in early if position < len(tensors)]

    def unwritten(self, line: LineBase, root_of: Mapping[str, str]) -> frozenset[int]:
        """Returns the positions of the tensors of a launch that neither the chain nor itself writes."""
        written = self.written | {root_of[value.name] for value in writes(line)}
        tensors = enumerate(launched_tensors(line))
        return frozenset([position for position, value in tensors if root_of[value.name] not in written])

    def add(self, line: LineBase, waits: bool, root_of: Mapping[str, str]) -> None:
        """Extends or ends the chain by a line. `waits` is whether it launches a kernel that waits."""
        if _runs_nothing(line):
            return
        place = _place(line) if waits else None
        if place is None or place != self.place:
            grid = getattr(line, "grid", ())
            is_launched = place is not None and all(isinstance(size, int) and size > 0 for size in grid)
            self.place, self.written = place if is_launched else None, set()
        self.written |= {root_of[value.name] for value in writes(line)}


def launched_tensors(line: LineBase) -> list[Value]:
    """Returns the tensors that a launch passes, in the order of its kernel's parameters."""
    return [*reads(line), *writes(line)]


def _place(line: LineBase) -> tuple[str, int] | None:
    """Returns the device and stream of a launch; None unless its tensors are on one device."""
    devices = {str(value.type.device) for value in launched_tensors(line) if isinstance(value.type, TensorType)}
    return (devices.pop(), line.stream) if len(devices) == 1 else None


def _runs_nothing(line: LineBase) -> bool:
    """Whether a line queues no work: it names, allocates or releases memory, or computes sizes."""
    if line.on_host or is_release(line):
        return True
    is_inert = not (line.effects() or reads(line) or writes(line) or line.target_fields or blocks(line))
    is_unordered = not (line.zeroed or line.event_step or line.bracket[1] or line.terminator or line.device)
    return is_inert and is_unordered and bool(defined(line) or consumed(line) or defined_symbol(line))
