"""Combo kernels: several loop IR kernels printed as one Triton kernel, which one launch runs.

The kernels share one body: they may differ only in integer constants of their index arithmetic. Each program selects
the tensors and the integers of its kernel by its program id. Horizontal fusion after Li et al., "Automatic Horizontal
Fusion for GPU Kernels" (CGO 2022), restricted to equal bodies.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from fxwrap.devices import DeviceSpec
from fxwrap.loop_ir import DeviceAssert
from fxwrap.names import NameAllocator
from fxwrap.printers.printed_kernel import PrintedKernel
from fxwrap.printers.triton.kernel_text import MAX_SLOT_VALUE, RESERVED_WORDS, BodyParameters, comment_lines
from fxwrap.printers.triton.scheduled_kernel import ScheduledKernel
from fxwrap.printers.triton.tiling import (
    DotConfiguration,
    GroupSumConfiguration,
    RowGroupSumConfiguration,
    programs_of_a_wave,
)
from fxwrap.symbolic import product

_RESIDENT_WARPS = 32
"""Number of warps of programs without dots that a multiprocessor runs at once, with 64 registers for each thread."""


@dataclass
class _SlotNames:
    """Prints the integers that `IntegerSlots` records, in the same order, by their names."""

    names: Iterator[str]

    def __call__(self, value: int) -> str:
        return str(value) if value > MAX_SLOT_VALUE else next(self.names)


def group_key(kernel: PrintedKernel) -> Hashable:
    """Returns a key that is equal for kernels that can be combined; None for a kernel that cannot be combined.

    A kernel needs the loop IR that its source was printed from, a one-dimensional grid of known size and no assertion.
    """
    scheduled = kernel.scheduled
    if not isinstance(scheduled, ScheduledKernel) or scheduled.source != kernel.source:
        return None
    if any(isinstance(item, DeviceAssert) for item in scheduled.kernel.operations):
        return None
    if not isinstance(kernel.grid[0], int) or kernel.grid[1:] != (1, 1):
        return None
    text, _ = scheduled.template
    return text.head, text.parameters, text.constants, text.body, kernel.signature, kernel.options


def leaves_idle(kernel: PrintedKernel, spec: DeviceSpec) -> bool:
    """Whether a kernel multiplies matrices in too few tiles to occupy a device for more than one wave."""
    scheduled, programs = kernel.scheduled, product(kernel.grid)
    if not isinstance(scheduled, ScheduledKernel) or not isinstance(programs, int):
        return False
    match scheduled.configuration:
        case RowGroupSumConfiguration(num_warps=warps):
            return programs * warps <= spec.multiprocessors * _RESIDENT_WARPS
        case DotConfiguration() | GroupSumConfiguration():
            return programs <= programs_of_a_wave(spec)
        case _:
            return False


def combine_triton_kernels(kernels: Sequence[PrintedKernel], shared: Sequence[bool], name: str = "") -> PrintedKernel:
    """Returns one kernel that does the work of several with equal `group_key`s.

    Args:
        kernels: at least two kernels, each with the grid of its launch. None reads or writes the results of another.
        shared: for each parameter, whether all launches pass the same argument. A shared argument becomes one
            parameter; any other one becomes a parameter for each launch, in their order. Scalars are shared.
        name: a description of the computation. The function's name appends digits of a hash of its text.
    """
    scheduled = [_scheduled(kernel) for kernel in kernels]
    template, _ = scheduled[0].template
    values = list(zip(*[item.template[1] for item in scheduled], strict=True))
    unused = NameAllocator(set(template.names), RESERVED_WORDS)
    selected = [parameter for parameter, same in zip(template.parameters, shared) if not same]
    own = [[unused.create_name(f"{parameter}_{number}") for parameter in selected] for number in range(len(kernels))]
    sizes = {row: unused.create_name("size") for row in dict.fromkeys(values) if len(set(row)) > 1}
    program, local_program = unused.create_name("program"), unused.create_name("local_program")
    comments = frozenset[str].intersection(*[_comments(item) for item in scheduled])
    integers = _SlotNames(iter([sizes.get(row, str(row[0])) for row in values]))
    text = scheduled[0].text(BodyParameters(integers, local_program, comments))
    uses_program = local_program in text.body
    ends = list(accumulate([kernel.grid[0] for kernel in kernels]))
    names = [*selected, *sizes.values(), *([local_program] if uses_program else [])]

    def select(low: int, high: int, depth: int) -> list[str]:
        """Returns the statements that select one of the kernels from `low` to before `high`."""
        indent = "    " * depth
        if high - low > 1:
            middle = (low + high) // 2
            below, above = select(low, middle, depth + 1), select(middle, high, depth + 1)
            return [f"{indent}if {program} < {ends[middle - 1]}:", *below, f"{indent}else:", *above]
        integers = [f"tl.full((), {row[low]}, tl.int32)" for row in sizes]
        local = [f"{program} - {ends[low - 1]}" if low else program] if uses_program else []
        return [f"{indent}{', '.join(names)} = {', '.join([*own[low], *integers, *local])}"]

    head = ["    # each program runs a part of one of the combined kernels", f"    {program} = tl.program_id(0)"]
    columns = iter(zip(*own))
    parameters = [item for name, same in zip(text.parameters, shared) for item in ((name,) if same else next(columns))]
    pairs = zip(kernels[0].signature, shared)
    combined = replace(
        text,
        parameters=tuple(parameters),
        body="".join([f"{line}\n" for line in [*head, *select(0, len(kernels), 1)]]) + text.body,
        signature=tuple([entry for entry, same in pairs for _ in range(1 if same else len(kernels))]),
        options=kernels[0].options,
        num_programs=ends[-1],
    )
    return combined.printed(name)


def _scheduled(kernel: PrintedKernel) -> ScheduledKernel:
    assert isinstance(kernel.scheduled, ScheduledKernel), "kernels with a group key have their loop IR"
    return kernel.scheduled


def _comments(scheduled: ScheduledKernel) -> frozenset[str]:
    return frozenset([line for item in scheduled.kernel.operations for line in comment_lines(item.origin)])
