"""The lines, names and parameters of a Triton kernel, which its printer writes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

import torch

from fxwrap.loop_ir import (
    DeviceAssert,
    FloorDivide,
    Index,
    Kernel,
    Modulo,
    index_range,
    indices,
    operation_dtype,
    size_range,
)
from fxwrap.names import NameAllocator
from fxwrap.printers.printed_kernel import SIGNATURE_TYPES
from fxwrap.printers.triton.kernel_text import RESERVED_WORDS, TritonKernelText, comment_lines
from fxwrap.symbolic import Size, symbol_kind

_MAX_INDEX = 2**31 - 1 - (1 << 16)
"""Largest 32-bit index: positions of a block may be beyond the end of an axis."""

_SYMBOL_TYPES = {"int": "i64", "float": "f64", "bool": "i1"}


class KernelWriter:
    """Base of the printers of Triton kernels.

    Indices have 64 bits (`use_int64`) if 32 do not represent an extent, or an integer that index arithmetic divides,
    within the `limits` of its symbols. `comments` are the origin comments to print, None for all.
    """

    def __init__(self, kernel: Kernel, limits: Mapping[str, int], comments: Collection[str] | None = None) -> None:
        self.kernel = kernel
        self.use_int64 = not (
            all(_fits_int32(size_range(size, limits)) for size in self._extents())
            and all(_fits_int32(index_range(index, limits)) for index in self._exact_indices())
        )
        self.comments = comments
        self.lines: list[str] = []
        self.depth = 1
        self.origin = ""
        self.helpers: set[str] = set()
        self.names = NameAllocator(reserved=RESERVED_WORDS)
        self.symbols = {symbol: self.names.create_name(str(symbol)) for symbol in kernel.symbols}
        buffers = (*kernel.inputs, *kernel.outputs)
        self.pointers = {item.name: self.names.create_name(f"{item.name}_ptr") for item in buffers}

    def _extents(self) -> list[Size]:
        """Returns the sizes that indices must represent: those of the buffers; subclasses add their own."""
        return [item.extent for item in (*self.kernel.inputs, *self.kernel.outputs)]

    def _exact_indices(self) -> Iterator[Index]:
        """Yields the indices that must not wrap around, although an index that they are part of is less."""
        for operation in self.kernel.operations:
            for index in indices(operation):
                for atom in index.atoms():
                    if isinstance(atom, FloorDivide | Modulo):
                        yield atom.base

    def line(self, text: str, origin: str = "") -> None:
        """Adds a line, after a comment that names a new origin."""
        indent = "    " * self.depth
        if origin and origin != self.origin:
            comments = [line for line in comment_lines(origin) if self.comments is None or line in self.comments]
            self.lines += [f"{indent}# {line}" for line in comments]
            self.origin = origin
        self.lines.append(indent + text)

    @contextmanager
    def nested(self, head: str) -> Iterator[None]:
        """Indents the lines inside under a head."""
        self.line(head)
        self.depth += 1
        yield
        self.depth -= 1

    def use(self, helper: str) -> str:
        """Adds a helper function to the text; returns its name."""
        self.helpers.add(helper)
        return helper

    def cast_symbols(self) -> None:
        """Writes conversions of the kernel's sizes to the width of its indices."""
        for symbol, name in self.symbols.items():
            if self.use_int64 and symbol_kind(symbol.name) == "int":
                self.line(f"{name} = tl.cast({name}, tl.int64)")

    def dtype_of(self, position: int) -> torch.dtype:
        """Returns the dtype of an operation's value."""
        return operation_dtype(self.kernel.operations[position])

    def kernel_text(
        self, constants: Mapping[str, int], options: Mapping[str, int | bool], num_programs: Size
    ) -> TritonKernelText:
        """Returns the text of the kernel.

        Args:
            constants: the compile-time parameters.
            options: the options of the launch.
            num_programs: the number of programs of a launch.
        """
        options = {**constants, **options}
        if any(isinstance(item, DeviceAssert) for item in self.kernel.operations):
            options |= {"debug": True, "sanitize_overflow": False}  # Triton leaves assertions out otherwise
        kinds = {symbol: symbol_kind(symbol.name) for symbol in self.symbols}
        pointers = [f"*{SIGNATURE_TYPES[item.dtype]}" for item in (*self.kernel.inputs, *self.kernel.outputs)]
        scalars = [name + (': "fp64"' if kinds[symbol] == "float" else "") for symbol, name in self.symbols.items()]
        body = "\n".join(self.lines) or "    pass"
        return TritonKernelText(
            frozenset(self.helpers),
            (*self.pointers.values(), *scalars),
            tuple([f"{name}: tl.constexpr" for name in constants]),
            f"{body}\n",
            (*pointers, *[_SYMBOL_TYPES[kind] for kind in kinds.values()]),
            tuple(sorted(options.items())),
            num_programs,
            frozenset(self.names.used),
        )


def _fits_int32(limits: tuple[float, float]) -> bool:
    """Whether 32-bit indices represent a range."""
    return limits[0] >= -_MAX_INDEX and limits[1] < _MAX_INDEX
