"""The operator by which emitted C++ calls functions that are recorded and replayed."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from fxwrap.runtime.replay import Replayed

_library = torch.library.Library("fxwrap_runtime", "FRAGMENT")  # type: ignore[no-untyped-call]
_SCHEMA = "replay(Tensor program, int function, Tensor[] tensors, Scalar[] numbers) -> Tensor[]"
_library.define(_SCHEMA)  # type: ignore[no-untyped-call]

_NUMBERS = itertools.count()


class ReplayedFunctions:
    """The replayed functions of one loaded program. `handle` is the tensor by which its code names them."""

    def __init__(self, functions: Sequence[Replayed]) -> None:
        self.functions = tuple(functions)
        number = next(_NUMBERS)
        self.handle = torch.tensor(number, dtype=torch.int64)
        _PROGRAMS[number] = self


_PROGRAMS: weakref.WeakValueDictionary[int, ReplayedFunctions] = weakref.WeakValueDictionary()
"""The programs that are loaded now, by the number in their handle: code can be given tensors, but no objects."""


@torch.library.impl(_library, "replay", "CompositeExplicitAutograd")
def _replay(
    program: torch.Tensor, function: int, tensors: list[torch.Tensor], numbers: list[Any]
) -> list[torch.Tensor]:
    found = _PROGRAMS[int(program.item())].functions[function]
    return list(found(list(tensors), *numbers))
