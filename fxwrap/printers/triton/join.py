"""Several kernels as one, so that one launch runs them: each program finds out whose it is, and goes on as there.

Kernels that are the same but for whole numbers in the arithmetic of their indices share one body. The new kernel takes
the tensors of all, and each program picks those of the launch that it belongs to, with the numbers.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from fxwrap.kernel_names import function_in, function_name
from fxwrap.printers.printed import PrintedKernel
from fxwrap.printers.triton.text import Names

_TOKEN = re.compile(r'#[^\n]*|"[^"\n]*"|\'[^\'\n]*\'|[A-Za-z_]\w*|\d+\.?\d*[eE][+-]?\d+|\d*\.\d+|\d+\.|(\d+)')
_REMARK = re.compile(r"^ *#.*\n", re.MULTILINE)
_BEFORE_NUMBER = re.compile(r"(?:[+\-*/%<>]|[<>]=) $|tl\.range\(0, $")
"""What stands before a number that need not be known when the kernel is compiled."""
_LONGEST_BEFORE = len("tl.range(0, ")

_NARROW = re.compile(r"\b(?:tl\.)?(?:i1|i8|i16|u8|u16|u32|u64|u?int(?:1|8|16)|uint(?:32|64))\b")
"""Integers that an int32 turns into another type, where a number in the text leaves them as they are."""

_PROGRAM = "tl.program_id(0)"
_INT32 = 2**31 - 1


@dataclass(frozen=True, slots=True)
class _Text:
    """A kernel's text in parts: `pieces` of the body, and between each two of them one of `numbers`.

    `parameters` are what a launch passes, `constants` the others.
    """

    head: str
    parameters: tuple[str, ...]
    constants: tuple[str, ...]
    pieces: tuple[str, ...]
    numbers: tuple[int, ...]


def joinable(kernel: PrintedKernel) -> Hashable:
    """Returns what kernels that can be joined have in common; None for one that cannot."""
    if "device_assert" in kernel.source or not isinstance(kernel.grid[0], int) or kernel.grid[1:] != (1, 1):
        return None
    text = _parts(kernel.source, kernel.signature)
    body = tuple([_REMARK.sub("", piece) for piece in text.pieces])
    return text.head, text.parameters, text.constants, body, kernel.signature, kernel.options


def join_triton(kernels: Sequence[PrintedKernel], shared: Sequence[bool], name: str = "") -> PrintedKernel:
    """Returns one kernel that does what several do, of which `joinable` says the same.

    Args:
        kernels: at least two, each with the grid of its launch. None needs what another writes.
        shared: for each parameter, whether all launches pass the same. The new kernel has one parameter for it then,
            else one for each launch, in their order. Numbers are shared.
        name: says what the kernel does; the function's name adds a few digits.
    """
    texts = [_parts(kernel.source, kernel.signature) for kernel in kernels]
    first = texts[0]
    unused = Names()
    unused.taken.update(re.findall(r"\w+", kernels[0].source))
    picked = [parameter for parameter, same in zip(first.parameters, shared) if not same]
    own = [[unused.new(f"{parameter}_{number}") for parameter in picked] for number in range(len(kernels))]
    values = list(zip(*[text.numbers for text in texts]))
    sizes = {given: unused.new("size") for given in dict.fromkeys(values) if len(set(given)) > 1}
    program, place = unused.new("program"), unused.new("place")
    starts, is_placed = _starts(kernels), _PROGRAM in kernels[0].source

    def choose(low: int, high: int, depth: int) -> list[str]:
        """Returns what picks one of the launches from `low` to before `high`."""
        indent = "    " * depth
        if high - low > 1:
            middle = (low + high) // 2
            below, above = choose(low, middle, depth + 1), choose(middle, high, depth + 1)
            return [f"{indent}if {program} < {starts[middle]}:", *below, f"{indent}else:", *above]
        given = [f"tl.full((), {numbers[low]}, tl.int32)" for numbers in sizes]
        there = [f"{program} - {starts[low]}" if low else program] if is_placed else []
        names = [*picked, *sizes.values(), *([place] if is_placed else [])]
        return [f"{indent}{', '.join(names)} = {', '.join([*own[low], *given, *there])}"]

    head = ["# each program belongs to one of the launches that are joined here", f"{program} = {_PROGRAM}"]
    lines = "".join([f"{line}\n" for line in [*[f"    {line}" for line in head], *choose(0, len(kernels), 1)]])
    body = [first.pieces[0]]
    for given, piece in zip(values, first.pieces[1:], strict=True):
        body += [sizes.get(given, str(given[0])), piece]
    remarks = [set(_REMARK.findall(kernel.source)) for kernel in kernels]
    said = set.intersection(*remarks)
    text = _REMARK.sub(lambda remark: remark[0] if remark[0] in said else "", "".join(body)).replace(_PROGRAM, place)
    parameters = [*_each(first.parameters, shared, own), *first.constants]
    function = f"({', '.join(parameters)}):\n{lines}{text}"
    pairs = zip(kernels[0].signature, shared)
    signature = tuple([entry for entry, same in pairs for _ in range(1 if same else len(kernels))])
    source = f"{first.head}def {function_name(name, function + repr(kernels[0].options))}{function}"
    return PrintedKernel(kernels[0].language, source, signature, kernels[0].options, (starts[-1], 1, 1))


@lru_cache(maxsize=1024)
def _parts(source: str, signature: tuple[str, ...]) -> _Text:
    """Returns the parts of a text that `print_triton` printed, whose last function is the kernel."""
    head, _, function = source.rpartition(f"def {function_in(source)}(")
    given, _, body = function.partition("):\n")
    parameters = given.split(", ")
    count = len(signature)
    pieces: list[str] = []
    numbers: list[int] = []
    start = 0
    keep = _NARROW.search(f"{signature} {body}") is not None
    for token in _TOKEN.finditer(body):
        before = body[max(token.start() - _LONGEST_BEFORE, 0) : token.start()]
        if token[1] is None or keep or int(token[1]) > _INT32 or not _BEFORE_NUMBER.search(before):
            continue
        pieces.append(body[start : token.start()])
        numbers.append(int(token[1]))
        start = token.end()
    pieces.append(body[start:])
    return _Text(head, tuple(parameters[:count]), tuple(parameters[count:]), tuple(pieces), tuple(numbers))


def _starts(kernels: Sequence[PrintedKernel]) -> list[int]:
    """Returns the number of each launch's first program, and how many there are in all."""
    found = [0]
    for kernel in kernels:
        count = kernel.grid[0]
        assert isinstance(count, int), "joinable kernels have grids of known size"
        found.append(found[-1] + count)
    return found


def _each(parameters: Sequence[str], shared: Sequence[bool], own: Sequence[Sequence[str]]) -> list[str]:
    """Returns what stands for each parameter: itself where it is shared, else what each launch has."""
    columns = iter(zip(*own))
    return [name for item, same in zip(parameters, shared) for name in ((item,) if same else next(columns))]
