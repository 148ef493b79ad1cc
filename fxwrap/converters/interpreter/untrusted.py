"""An interpreter for programs from strangers, whose lines may declare less than they do."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fxwrap.converters.interpreter.interpreter import Interpreter
from fxwrap.errors import FxwrapError
from fxwrap.lines import ExternCall, Mutate
from fxwrap.torch_compat import storage_identity
from fxwrap.wrapper_ir import TensorType, Value, defined, reads


class UntrustedInterpreter(Interpreter):
    """An interpreter that zeroes the memory it allocates, and raises FxwrapError for undeclared aliases.

    So a program reads nothing that was in memory before, and writes no input that it may not write.
    """

    def _empty(self, type_: TensorType) -> torch.Tensor:
        return super()._empty(type_).zero_()

    def call(self, line: ExternCall | Mutate) -> None:
        operands = self._storages(reads(line))
        super().call(line)
        for value in defined(line):
            if line.alias_of(value) is None and not operands.isdisjoint(self._storages([value])):
                raise FxwrapError(
                    f"{line.target} returned memory of an operand as %{value.name}, which owns its memory"
                )

    mutate = call

    def _storages(self, values: Sequence[Value]) -> set[int]:
        contents = [self.values[value.name] for value in values]
        return {storage_identity(item) for item in contents if isinstance(item, torch.Tensor)}
