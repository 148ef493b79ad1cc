"""Programs, their inputs, constants, kernel definitions and blocks."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

from fxwrap.symbolic import SymbolInfo, quote, symbol_kind
from fxwrap.wrapper_ir.line import Block, LineBase, blocks
from fxwrap.wrapper_ir.printer import print_lines, print_literal, print_symbol_info, print_type
from fxwrap.wrapper_ir.types import Value


class Ownership(Enum):
    """What the program may do with an input's memory.

    `borrowed`: read it. `mutable`: write it too. `shared`: read it, and drop the caller's reference, which is one among
    others, after the last use. `owned`: the only reference; it must be freed, reused or returned.
    """

    BORROWED = "borrowed"
    MUTABLE = "mutable"
    SHARED = "shared"
    OWNED = "owned"


@dataclass(frozen=True, slots=True)
class Input:
    """An input of a program: a value with its ownership, or a symbol that the caller passes as a number."""

    value: Value | SymbolInfo
    ownership: Ownership = Ownership.BORROWED

    @property
    def name(self) -> str:
        """The input's name, without '%'."""
        return self.value.name


@dataclass(frozen=True, slots=True)
class Constant:
    """A tensor that belongs to the program. Its payload is in the program's `ConstantStore`, under its name."""

    value: Value
    mutable: bool = False


@dataclass(frozen=True, slots=True)
class KernelDefinition:
    """A kernel that `kernel.launch` lines call by name.

    `language` is an open name ("triton", "cpp", "user_triton" for a Triton kernel of the user's); `source` the text, in
    which the function is called `kernel`, or, where fxwrap printed it, by what it does, "fxwrap_..." (profilers show
    it); `signature` one entry a parameter, e.g. "*f32" for a tensor, "i64" for a size, for a user's kernel with the
    parameter's name ("i64 n"); `options` launch metadata as sorted pairs (num_warps, constants). The hash covers
    everything but `name`.
    """

    name: str
    language: str
    source: str
    signature: tuple[str, ...] = ()
    options: tuple[tuple[str, str | int | float | bool], ...] = ()

    @property
    def hash(self) -> str:
        """The content hash, 64 hex digits: equal kernels under different names have equal hashes."""
        content = repr((self.language, self.signature, self.options, self.source))
        return hashlib.sha256(content.encode()).hexdigest()


@dataclass(frozen=True)
class ConstantStore:
    """The payloads of a program's constants by name. Not part of a program's equality."""

    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Program:
    """A whole program, immutable: what goes in, what it owns, and the lines it runs.

    `header` holds sorted pairs (options, target, tuning record) that say what the program was made for; `functions` are
    the named blocks that `control.call` lines share.
    """

    name: str
    inputs: tuple[Input, ...]
    body: Block
    constants: tuple[Constant, ...] = ()
    kernels: tuple[KernelDefinition, ...] = ()
    functions: tuple[tuple[str, Block], ...] = ()
    header: tuple[tuple[str, str], ...] = ()
    store: ConstantStore = field(default_factory=ConstantStore, compare=False, repr=False)

    def replace(self, **changes: Any) -> Program:
        """Returns a copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def kernel(self, name: str) -> KernelDefinition:
        """Returns the kernel of this name. Raises KeyError when there is none."""
        for kernel in self.kernels:
            if kernel.name == name:
                return kernel
        raise KeyError(f"program @{self.name} defines no kernel @{name}")

    def all_blocks(self) -> Iterator[Block]:
        """Yields the body, the functions, and every block nested in them, outer before inner."""
        pending = [*(block for _, block in reversed(self.functions)), self.body]
        while pending:
            block = pending.pop()
            yield block
            for line in block.lines:
                pending.extend(nested for _, nested in blocks(line))

    def lines(self) -> Iterator[LineBase]:
        """Yields every line, nested ones included."""
        for block in self.all_blocks():
            yield from block.lines

    def __str__(self) -> str:
        return print_program(self)


def _print_input(item: Input) -> str:
    value = item.value
    if isinstance(value, SymbolInfo):
        return f"{value.name}: {symbol_kind(value.name)}{print_symbol_info(value)}"
    return f"%{value.name}: {item.ownership.value} {print_type(value.type)}"


def print_program(program: Program, *, origins: bool = False) -> str:
    """Returns the program's text form; with `origins`, each line ends in a comment that says where it came from."""
    inputs = ", ".join([_print_input(item) for item in program.inputs])
    header = "".join([f" {key}={quote(text)}" for key, text in program.header])
    parts = [f"program @{program.name}({inputs}){header} {{\n{print_lines(program.body, origins=origins)}}}\n"]
    for constant in program.constants:
        mutable = "mutable " if constant.mutable else ""
        parts.append(f"constant %{constant.value.name}: {mutable}{print_type(constant.value.type)}\n")
    for name, block in program.functions:
        arguments = ", ".join([f"%{value.name}: {print_type(value.type)}" for value in block.arguments])
        parts.append(f"function @{name}({arguments}) {{\n{print_lines(block, origins=origins)}}}\n")
    parts.extend(print_kernel(kernel) for kernel in program.kernels)
    return "".join(parts)


def print_kernel(kernel: KernelDefinition) -> str:
    """Returns the text of a kernel definition, ended by a newline."""
    signature = ", ".join(kernel.signature)
    options = "".join([f" {key}={print_literal(option)}" for key, option in kernel.options])
    return (
        f"kernel @{kernel.name}({quote(signature)}) language={kernel.language} hash={quote(kernel.hash)}{options} "
        f"{quote(kernel.source, raw=True)}\n"
    )
