"""Other backends of torch.compile beside the emitters."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from fxwrap.comparison.observe import Function
from fxwrap.errors import CompareError
from fxwrap.options import EMITTERS
from fxwrap.torch_compat import generated_kernels

Backend: TypeAlias = str | Callable[..., Any] | tuple[str | Callable[..., Any], Mapping[str, object]]
"""A backend of torch.compile: its name, a function, or one of these with options."""


@dataclass
class ComparedBackend:
    """A backend that compiles a function at its first call.

    Attributes:
        label: its name in the report, with its options.
        first_seconds: the seconds of the first call, which compiles.
        kernels: the number of kernels that the backend generated, None if it does not tell.
    """

    label: str
    backend: str | Callable[..., Any]
    options: Mapping[str, object] | None
    first_seconds: float | None = None
    kernels: int | None = None
    _compiled: Function | None = field(default=None, repr=False)

    def call(self, function: Function, dynamic: bool | None) -> Function:
        """Returns the compiled function."""
        if self._compiled is None:
            options: Any = None if self.options is None else dict(self.options)
            self._compiled = torch.compile(function, backend=self.backend, options=options, dynamic=dynamic)
        return self._compiled

    def time_first(self, run: Callable[[], Any]) -> Any:
        """Runs the first call, and records its seconds and the generated kernels."""
        before, start = generated_kernels(), time.perf_counter()
        result = run()
        self.first_seconds = time.perf_counter() - start
        after = generated_kernels()
        if self.backend == "inductor" and after is not None:
            self.kernels = after - (before or 0)
        return result


def compared_backends(backends: Sequence[Backend]) -> list[ComparedBackend]:
    """Returns backends with different labels, which are no names of emitters.

    Raises CompareError for all that torch.compile does not take.
    """
    compared = [_compared_backend(backend) for backend in backends]
    labels = {"eager", "float64", *EMITTERS}
    for item in compared:
        base, number = item.label, 1
        if base in labels:
            base = item.label = f"backend {base}"
        while item.label in labels:
            number += 1
            item.label = f"{base} {number}"
        labels.add(item.label)
    return compared


def _compared_backend(backend: Backend) -> ComparedBackend:
    name, options = backend if isinstance(backend, tuple) and len(backend) == 2 else (backend, None)
    if not isinstance(name, str) and not callable(name):
        raise CompareError(
            f"{backend!r} is no backend: pass a name that torch.compile knows, a function of a graph and its inputs, "
            "or a pair of one of these and options"
        )
    if options is not None and not isinstance(options, Mapping):
        raise CompareError(f"options of a backend are a mapping, not {options!r}")
    label = name if isinstance(name, str) else getattr(name, "__name__", type(name).__name__)
    if options:
        label += f"({', '.join([f'{key}={value}' for key, value in options.items()])})"
    return ComparedBackend(label, name, options)
