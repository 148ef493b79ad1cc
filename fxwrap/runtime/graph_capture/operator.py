"""The operator by which emitted C++ calls functions with graph capture."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence

import torch

from fxwrap.runtime.graph_capture.replay import GraphedFunction

_library = torch.library.Library("fxwrap_runtime", "FRAGMENT")  # type: ignore[no-untyped-call]
_SCHEMA = "replay(Tensor program, int function, Tensor[] tensors, Scalar[] numbers) -> Tensor[]"
_library.define(_SCHEMA)  # type: ignore[no-untyped-call]

_handle_numbers = itertools.count()


class GraphedFunctions:
    """The captured functions of one loaded program. `handle` is the tensor by which its code refers to them."""

    def __init__(self, functions: Sequence[GraphedFunction]) -> None:
        self.functions = tuple(functions)
        number = next(_handle_numbers)
        self.handle = torch.tensor(number, dtype=torch.int64)
        _PROGRAMS[number] = self


_PROGRAMS: weakref.WeakValueDictionary[int, GraphedFunctions] = weakref.WeakValueDictionary()
"""Loaded programs by the number in their handle: native code receives tensors, but no Python objects."""


@torch.library.impl(_library, "replay", "CompositeExplicitAutograd")
def _replay(
    program: torch.Tensor, function: int, tensors: list[torch.Tensor], numbers: list[float]
) -> list[torch.Tensor]:
    graphed = _PROGRAMS[int(program.item())].functions[function]
    return list(graphed(list(tensors), *numbers))
