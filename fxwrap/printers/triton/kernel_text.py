"""The text of a Triton kernel by parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from fxwrap.devices.kernel_names import make_function_name
from fxwrap.printers.printed_kernel import PrintedKernel
from fxwrap.symbolic import Size

MAX_SLOT_VALUE = 2**31 - 1
"""Largest integer of index arithmetic that may be a variable: variables are int32."""


@dataclass
class IntegerSlots:
    """Prints integers of index arithmetic as numbered slots, and records their values."""

    values: list[int] = field(default_factory=list)

    def __call__(self, value: int) -> str:
        if value > MAX_SLOT_VALUE:
            return str(value)
        self.values.append(value)
        return f"#{len(self.values)}"  # no text of a kernel that is combined has a name or a literal like this


@dataclass(frozen=True)
class BodyParameters:
    """The parts of a kernel's body that a combo kernel replaces.

    Fields: `integer` prints an integer constant of index arithmetic; `program` is the index of the program within its
    launch; `comments` are the origin comments to print, None for all.
    """

    integer: Callable[[int], str] = str
    program: str = "tl.program_id(0)"
    comments: frozenset[str] | None = None


@dataclass(frozen=True)
class TritonKernelText:
    """The text of a Triton kernel by parts.

    Fields: `head` precedes the function's name; `parameters` are those that a launch passes, with their types in
    `signature`; `constants` are compile-time parameters, with their values among `options`; `names` are all names that
    the body uses or must not redefine.
    """

    head: str
    parameters: tuple[str, ...]
    constants: tuple[str, ...]
    body: str
    signature: tuple[str, ...]
    options: tuple[tuple[str, str | int | float | bool], ...]
    num_programs: Size
    names: frozenset[str] = field(compare=False, repr=False)

    def printed(self, name: str) -> PrintedKernel:
        """Returns the kernel with a function that is named after what it computes and after its content."""
        function = f"({', '.join([*self.parameters, *self.constants])}):\n{self.body}"
        source = f"{self.head}def {make_function_name(name, f'{function}{self.options}')}{function}"
        return PrintedKernel("triton", source, self.signature, self.options, (self.num_programs, 1, 1))


def comment_lines(origin: str) -> list[str]:
    """Returns the comment lines that show an operation's origin."""
    return [" ".join(line.split()) for line in origin.splitlines()]
