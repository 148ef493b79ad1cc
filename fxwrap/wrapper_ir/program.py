"""Programs, their inputs, constants, kernel definitions and blocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

from fxwrap.devices.kernel_names import kernel_content_hash
from fxwrap.errors import ArgumentError, InputError
from fxwrap.symbolic import SymbolInfo, quote, symbol_kind
from fxwrap.torch_compat import without_traced_class
from fxwrap.wrapper_ir.highlight import highlight_html
from fxwrap.wrapper_ir.line import Block, LineBase, blocks
from fxwrap.wrapper_ir.printer import print_lines, print_literal, print_symbol_info, print_type
from fxwrap.wrapper_ir.roles import Role
from fxwrap.wrapper_ir.types import Value


class Ownership(Enum):
    """The program's rights to the memory of an input.

    `borrowed`: the program reads it. `mutable`: it reads and writes it. `shared`: it reads it and releases the caller's
    reference, one of several, after the last use. `owned` (donated): it has the only reference and must free, reuse or
    return it.
    """

    BORROWED = "borrowed"
    MUTABLE = "mutable"
    SHARED = "shared"
    OWNED = "owned"


@dataclass(frozen=True, slots=True)
class Input:
    """An input of a program: a value with its ownership, or a symbol."""

    value: Value | SymbolInfo
    ownership: Ownership = Ownership.BORROWED

    @property
    def name(self) -> str:
        """The input's name, without '%'."""
        return self.value.name


@dataclass(frozen=True, slots=True)
class ProgramConstant:
    """A tensor owned by the program. Its content is in the program's `ConstantStore`, by its name."""

    value: Value
    mutable: bool = False


@dataclass(frozen=True, slots=True)
class KernelDefinition:
    """A kernel that `kernel.launch` lines call by name.

    `language` is a registered language ("triton", "cpp", "user_triton" for a user's Triton kernel). The function in
    `source` is called `kernel`, or "fxwrap_..." if fxwrap printed it, so that profilers show its operators. `signature`
    has one entry for each parameter: "*f32" for a tensor, "i64" for a size, "i64 n" with the parameter's name for a
    user's kernel. `options` are launch metadata as sorted pairs (num_warps, constants). The hash covers everything but
    `name`. `loop_ir` is the kernel of the loop IR that was printed, None for kernels of other origin; `scheduled` is
    the printer's scheduled form of it, or the region. Both are no part of the text form, the hash or equality, and None
    in a program that was parsed or imported.
    """

    name: str
    language: str
    source: str
    signature: tuple[str, ...] = ()
    options: tuple[tuple[str, str | int | float | bool], ...] = ()
    scheduled: object = field(default=None, compare=False, repr=False)
    loop_ir: object = field(default=None, compare=False, repr=False)

    @property
    def hash(self) -> str:
        """The content hash, 64 hex digits: equal kernels under different names have equal hashes."""
        return kernel_content_hash(self.language, self.source, self.signature, self.options)


@dataclass(frozen=True)
class ConstantStore:
    """The contents of a program's constants by name, which are ignored by the program's equality."""

    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def operands(self) -> dict[str, Any]:
        """Returns the contents as emitted code takes them: plain tensors, also for a traced class."""
        return {name: without_traced_class(tensor) for name, tensor in self.tensors.items()}


@dataclass(frozen=True)
class Program:
    """An immutable program.

    `header` has sorted pairs that identify the compile (options, target, tuning record). `functions` are the named
    blocks that `control.call` lines run.
    """

    name: str
    inputs: tuple[Input, ...]
    body: Block
    constants: tuple[ProgramConstant, ...] = ()
    kernels: tuple[KernelDefinition, ...] = ()
    functions: tuple[tuple[str, Block], ...] = ()
    header: tuple[tuple[str, str], ...] = ()
    store: ConstantStore = field(default_factory=ConstantStore, compare=False, repr=False)

    def constant_operands(self) -> dict[str, Any]:
        """Returns the contents of the constants as emitted code takes them.

        Raises InputError for a constant without content: a program that was parsed has none.
        """
        missing = [item.value.name for item in self.constants if item.value.name not in self.store.tensors]
        if missing:
            raise InputError(
                f"program '{self.name}' has no content for its constant '{missing[0]}': a text does not contain it. "
                "Use program.replace(store=...) with that of the printed program, or fxwrap.save and fxwrap.load"
            )
        return self.store.operands()

    def replace(self, **changes: Any) -> Program:
        """Returns a copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def kernel(self, name: str) -> KernelDefinition:
        """Returns the kernel of this name. Raises KeyError if there is none."""
        for kernel in self.kernels:
            if kernel.name == name:
                return kernel
        raise KeyError(f"program @{self.name} defines no kernel @{name}")

    def all_blocks(self) -> Iterator[Block]:
        """Yields the body, the functions, and their nested blocks, outer before inner."""
        pending = [*(block for _, block in reversed(self.functions)), self.body]
        while pending:
            block = pending.pop()
            yield block
            with_blocks = [line for line in block.lines if line.fields_by_role[Role.BLOCK]]
            pending += [nested for line in with_blocks for _, nested in blocks(line)]

    def lines(self) -> Iterator[LineBase]:
        """Yields every line, including nested ones."""
        for block in self.all_blocks():
            yield from block.lines

    def __str__(self) -> str:
        return print_program(self)

    def _repr_html_(self) -> str:
        """Returns the text with origins in colours, which notebooks show."""
        return highlight_html(print_program(self, origins=True))


def _print_input(item: Input) -> str:
    value = item.value
    if isinstance(value, SymbolInfo):
        return f"{value.name}: {symbol_kind(value.name)}{print_symbol_info(value)}"
    return f"%{value.name}: {item.ownership.value} {print_type(value.type)}"


def print_program(program: Program, *, origins: bool = False) -> str:
    """Returns the text of a program. With `origins`, each line ends in a comment with its origin."""
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
    """Returns the text of a kernel definition, with a final newline."""
    signature = ", ".join(kernel.signature)
    options = "".join([f" {key}={print_literal(option)}" for key, option in kernel.options])
    return (
        f"kernel @{kernel.name}({quote(signature)}) language={kernel.language} hash={quote(kernel.hash)}{options} "
        f"{quote(kernel.source, raw=True)}\n"
    )


def check_program(function: str, program: object) -> None:
    """Raises ArgumentError for another object than a program; `function` is the public function that takes it."""
    remedy = "Pass the program of what fxwrap.compile_graph returns, or the result of fxwrap.lower or fxwrap.parse"
    ArgumentError.check(function, "program", program, (Program,), remedy)
