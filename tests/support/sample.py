"""What a sample program is: IR text with its kernels, and random inputs for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from fxwrap.lines import CORE_LINES, ExtensionLine
from fxwrap.symbolic import Number, SymbolInfo, evaluate
from fxwrap.wrapper_ir import (
    GENERATOR,
    ConstantStore,
    KernelDefinition,
    OpaqueType,
    Program,
    TensorType,
    parse_program,
    print_kernel,
)
from tests.devices.copy_engine import AbacusCopy
from tests.support.opaque import Counter

EXTENSIONS: tuple[type[ExtensionLine], ...] = (AbacusCopy,)
"""The lines of an imaginary vendor that samples use besides the core's."""


@dataclass(frozen=True)
class Sample:
    """One program.

    `text` holds its lines and `kernels` what they launch. `cpu_runnable` says that a CPU can run it with what is
    installed for the tests; `symbols` are the sizes to make inputs with; `limits` the exclusive upper bounds of integer
    inputs, 8 where nothing is said.
    """

    name: str
    text: str
    kernels: tuple[KernelDefinition, ...] = ()
    cpu_runnable: bool = True
    symbols: Mapping[str, Number] = field(default_factory=dict)
    limits: Mapping[str, int] = field(default_factory=dict)

    @property
    def languages(self) -> frozenset[str]:
        """The kernel languages that running it needs."""
        return frozenset(kernel.language for kernel in self.kernels)

    def full_text(self) -> str:
        """Returns the text, kernels included."""
        return self.text + "".join(print_kernel(kernel) for kernel in self.kernels)

    def program(self) -> Program:
        """Returns the program, its constants filled with random numbers that are the same each time."""
        return _parsed(self.full_text(), self.cpu_runnable)

    def inputs(self, seed: int) -> list[Any]:
        """Returns random flat inputs, numbers among them, for a seed."""
        if not self.cpu_runnable:
            raise ValueError(f"sample '{self.name}' does not run on a CPU")
        generator = torch.Generator().manual_seed(seed)
        inputs: list[Any] = []
        for item in self.program().inputs:
            if isinstance(item.value, SymbolInfo):
                inputs.append(self.symbols[item.name])
            elif item.value.type == GENERATOR:
                inputs.append(torch.Generator().manual_seed(seed))
            elif isinstance(item.value.type, OpaqueType):
                inputs.append(Counter(seed % 5 + len(inputs)))
            else:
                limit = self.limits.get(item.name, 8)
                inputs.append(random_tensor(item.value.tensor_type, self.symbols, generator, limit))
        return inputs


def contents(inputs: Sequence[Any]) -> list[Any]:
    """Returns the compared state of inputs: tensors, numbers, the states of generators and counters."""
    return [_content(item) for item in inputs]


def _content(item: Any) -> Any:
    if isinstance(item, Counter):
        return item.count
    return item.get_state() if isinstance(item, torch.Generator) else item


def random_tensor(
    type_: TensorType, symbols: Mapping[str, Number], generator: torch.Generator, limit: int = 8
) -> torch.Tensor:
    """Returns a tensor of a type with random content: integers from 0 to `limit` - 1, normal floats, coin flips."""
    sizes = [int(evaluate(size, symbols)) for size in type_.sizes]
    strides = [int(evaluate(stride, symbols)) for stride in type_.strides]
    tensor = torch.empty_strided(sizes, strides, dtype=type_.dtype, device=type_.device)
    if type_.dtype == torch.bool:
        content = torch.randint(0, 2, sizes, generator=generator).bool()
    elif type_.dtype.is_floating_point or type_.dtype.is_complex:
        wide = torch.complex64 if type_.dtype.is_complex else torch.float32
        content = torch.randn(sizes, generator=generator, dtype=wide)
    else:
        content = torch.randint(0, limit, sizes, generator=generator)
    return tensor.copy_(content)


@cache
def _parsed(text: str, with_constants: bool) -> Program:
    program = parse_program(text, (*CORE_LINES, *EXTENSIONS))
    generator = torch.Generator().manual_seed(0)
    constants = [constant.value for constant in program.constants] if with_constants else []
    tensors = {value.name: Counter(7) if isinstance(value.type, OpaqueType)
               else random_tensor(value.tensor_type, {}, generator) for value in constants}  # fmt: skip
    return program.replace(store=ConstantStore(tensors))
