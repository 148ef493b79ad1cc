"""Combo kernels: several loop IR kernels printed as one Triton kernel, which one launch runs.

Each program finds its kernel by its program id. Kernels that differ only in integer constants of their index arithmetic
share one body, before which a program selects the tensors and the integers of its kernel. Other ones are functions, one
of which a program calls: a few small kernels, all of whose programs run at once. Horizontal fusion after Li et al.,
"Automatic Horizontal Fusion for GPU Kernels" (CGO 2022).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from fxwrap.devices import DeviceSpec
from fxwrap.devices.kernel_names import described_parameters
from fxwrap.loop_ir import DeviceAssert
from fxwrap.names import NameAllocator
from fxwrap.printers.printed_kernel import PrintedKernel
from fxwrap.printers.triton.kernel_text import (
    MAX_SLOT_VALUE,
    RESERVED_WORDS,
    BodyParameters,
    TritonKernelText,
    comment_lines,
)
from fxwrap.printers.triton.printer import ScheduledKernel
from fxwrap.printers.triton.tiling import (
    DotConfiguration,
    FragmentConfiguration,
    GroupSumConfiguration,
    RowGroupSumConfiguration,
    RowPartConfiguration,
    TileConfiguration,
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

    A kernel needs the loop IR that its source was printed from, a one-dimensional grid of known size, no assertion and
    no descriptors, which describe parameters.
    """
    scheduled = kernel.scheduled
    if not isinstance(scheduled, ScheduledKernel) or scheduled.source != kernel.source:
        return None
    if any(isinstance(item, DeviceAssert) for item in scheduled.kernel.operations):
        return None
    if not isinstance(kernel.grid[0], int) or kernel.grid[1:] != (1, 1) or described_parameters(kernel.source):
        return None
    text, _ = scheduled.template
    return text.head, text.parameters, text.constants, text.body, kernel.signature, kernel.options


def leaves_idle(kernel: PrintedKernel, spec: DeviceSpec) -> bool:
    """Whether a kernel multiplies matrices in too few tiles to occupy a device for more than one wave."""
    scheduled, programs = kernel.scheduled, product(kernel.grid)
    if not isinstance(scheduled, ScheduledKernel) or not isinstance(programs, int):
        return False
    match scheduled.configuration:
        case FragmentConfiguration(programs=looping) if looping:
            return False
        case RowGroupSumConfiguration(num_warps=warps):
            return programs * warps <= spec.multiprocessors * _RESIDENT_WARPS
        case DotConfiguration() | GroupSumConfiguration():
            return programs <= programs_of_a_wave(spec)
        case _:
            return False


def fits_together(kernels: Sequence[PrintedKernel], spec: DeviceSpec) -> bool:
    """Whether a device runs all programs of some kernels at once, and one launch can, whatever their bodies are.

    Each needs the loop IR that its source was printed from, and a one-dimensional grid of known size. Matmuls and
    streaming reductions do not fit: they need more registers and shared memory than the others could then have.
    """
    warps = 0
    for kernel in kernels:
        scheduled, programs = kernel.scheduled, kernel.grid[0]
        if not isinstance(scheduled, ScheduledKernel) or scheduled.source != kernel.source:
            return False
        if not isinstance(scheduled.configuration, TileConfiguration | RowPartConfiguration):
            return False
        if not isinstance(programs, int) or kernel.grid[1:] != (1, 1):
            return False
        warps += programs * scheduled.configuration.num_warps
    options = {tuple(_body_options(kernel).items()) for kernel in kernels}
    return len(options) == 1 and warps <= spec.multiprocessors * _RESIDENT_WARPS


def combine_triton_kernels(
    kernels: Sequence[PrintedKernel], positions: Sequence[Sequence[int]], name: str = ""
) -> PrintedKernel:
    """Returns one kernel that does the work of several, of equal `group_key`s or that fit together.

    Args:
        kernels: at least two kernels, each with the grid of its launch. None reads or writes the results of another.
        positions: for each kernel and each of its parameters, the position of the combo kernel's parameter that has
            the same argument. Inputs precede outputs, and these scalars.
        name: a description of the computation. The function's name appends digits of a hash of its text.
    """
    keys = {group_key(kernel) for kernel in kernels}
    combined = _with_branches if None in keys or len(keys) > 1 else _with_one_body
    return combined(kernels, positions).printed(name)


def _with_one_body(kernels: Sequence[PrintedKernel], positions: Sequence[Sequence[int]]) -> TritonKernelText:
    """Returns the text in which each program selects its arguments and integers before the body that all share."""
    scheduled = [_scheduled(kernel) for kernel in kernels]
    template, _ = scheduled[0].template
    values = list(zip(*[item.template[1] for item in scheduled], strict=True))
    unused = NameAllocator(set(template.names), RESERVED_WORDS)
    columns = list(zip(template.parameters, zip(*positions, strict=True), strict=True))
    parameters = dict[int, str]()
    for parameter, column in columns:
        if len(set(column)) == 1:
            parameters.setdefault(column[0], parameter)
    selected = [(parameter, column) for parameter, column in columns if parameters.get(column[0]) != parameter]
    for number in range(len(kernels)):
        for parameter, column in selected:
            if column[number] not in parameters:
                parameters[column[number]] = unused.create_name(f"{parameter}_{number}")
    sizes = {row: unused.create_name("size") for row in dict.fromkeys(values) if len(set(row)) > 1}
    program, local_program = unused.create_name("program"), unused.create_name("local_program")
    comments = frozenset[str].intersection(*[_comments(item) for item in scheduled])
    integers = _SlotNames(iter([sizes.get(row, str(row[0])) for row in values]))
    text = scheduled[0].text(BodyParameters(integers, local_program, comments))
    uses_program = local_program in text.body
    names = [*[parameter for parameter, _ in selected], *sizes.values(), *([local_program] if uses_program else [])]

    def selection(number: int, own_program: str) -> str:
        arguments = [parameters[column[number]] for _, column in selected]
        integers = [f"tl.full((), {row[number]}, tl.int32)" for row in sizes]
        return f"{', '.join(names)} = {', '.join([*arguments, *integers, *([own_program] if uses_program else [])])}"

    head, num_programs = _branches(kernels, program, selection)
    return replace(
        text,
        parameters=tuple([parameters[position] for position in sorted(parameters)]),
        body=head + text.body,
        signature=_signature(kernels, positions),
        options=kernels[0].options,
        num_programs=num_programs,
    )


def _with_branches(kernels: Sequence[PrintedKernel], positions: Sequence[Sequence[int]]) -> TritonKernelText:
    """Returns the text in which each program calls the function of its kernel."""
    unused = NameAllocator(set(), RESERVED_WORDS)
    program = unused.create_name("program")
    parameters = dict[int, str]()
    functions = dict[str, str]()  # their names, by what follows these in their definitions
    helpers = frozenset[str]()
    calls: list[tuple[str, list[str], list[str]]] = []
    for kernel, row in zip(kernels, positions, strict=True):
        text, own_program = _text_of_part(_scheduled(kernel))
        for parameter, position in zip(text.parameters, row, strict=True):
            name, _, kind = parameter.partition(":")
            if position not in parameters:
                parameters[position] = unused.create_name(name) + (f":{kind}" if kind else "")
        own = [*map(_name_of, text.parameters), own_program, *text.constants]
        function = functions.setdefault(f"({', '.join(own)}):\n{text.body.rstrip()}", f"part_{len(functions)}")
        constants = [repr(dict(kernel.options)[_name_of(constant)]) for constant in text.constants]
        calls.append((function, [_name_of(parameters[position]) for position in row], constants))
        helpers |= text.helpers

    def call(number: int, own_program: str) -> str:
        function, arguments, constants = calls[number]
        return f"{function}({', '.join([*arguments, own_program, *constants])})"

    body, num_programs = _branches(kernels, program, call)
    options = {name: value for kernel in kernels for name, value in kernel.options if not name.isupper()}
    return TritonKernelText(
        helpers,
        tuple([parameters[position] for position in sorted(parameters)]),
        (),
        body,
        _signature(kernels, positions),
        tuple(sorted(options.items())),
        num_programs,
        frozenset(unused.used),
        tuple([f"@triton.jit\ndef {name}{definition}" for definition, name in functions.items()]),
    )


def _text_of_part(scheduled: ScheduledKernel) -> tuple[TritonKernelText, str]:
    """Returns the text of a kernel, and the name in it of the index of the program."""
    own_program = NameAllocator(set(scheduled.template[0].names), RESERVED_WORDS).create_name("own_program")
    return scheduled.text(BodyParameters(program=own_program)), own_program


def _name_of(parameter: str) -> str:
    return parameter.partition(":")[0]


def _branches(kernels: Sequence[PrintedKernel], program: str, statement: Callable[[int, str], str]) -> tuple[str, int]:
    """Returns statements that dispatch on the program id, and the number of programs of all kernels.

    `statement` returns the statement of a kernel, by its number and by the expression of the program's index in it.
    """
    ends = list(accumulate([kernel.grid[0] for kernel in kernels]))

    def branch(low: int, high: int, depth: int) -> list[str]:
        """Returns the statements that select one of the kernels from `low` to before `high`."""
        indent = "    " * depth
        if high - low > 1:
            middle = (low + high) // 2
            below, above = branch(low, middle, depth + 1), branch(middle, high, depth + 1)
            return [f"{indent}if {program} < {ends[middle - 1]}:", *below, f"{indent}else:", *above]
        return [indent + statement(low, f"{program} - {ends[low - 1]}" if low else program)]

    head = ["    # each program runs a part of one of the combined kernels", f"    {program} = tl.program_id(0)"]
    return "".join([f"{line}\n" for line in [*head, *branch(0, len(kernels), 1)]]), ends[-1]


def _signature(kernels: Sequence[PrintedKernel], positions: Sequence[Sequence[int]]) -> tuple[str, ...]:
    """Returns the types of the combo kernel's parameters."""
    types = {position: entry for kernel, row in zip(kernels, positions, strict=True)
             for position, entry in zip(row, kernel.signature, strict=True)}  # fmt: skip
    return tuple([types[position] for position in range(len(types))])


def _body_options(kernel: PrintedKernel) -> Mapping[str, object]:
    """Returns the options of a kernel's launch that its body relies on: not those of assertions and constants."""
    assertions = {"debug", "sanitize_overflow"}
    return {name: value for name, value in kernel.options if not name.isupper() and name not in assertions}


def _scheduled(kernel: PrintedKernel) -> ScheduledKernel:
    assert isinstance(kernel.scheduled, ScheduledKernel), "kernels with a group key have their loop IR"
    return kernel.scheduled


def _comments(scheduled: ScheduledKernel) -> frozenset[str]:
    return frozenset([line for item in scheduled.kernel.operations for line in comment_lines(item.origin)])
