"""What a converter gives: text, and a callable that is built from it on first use."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch

from fxwrap.runtime.cpp_kernels import KernelText
from fxwrap.torch_compat import DisableAutocast, is_any_autocast_enabled, set_grad_enabled, without_fake_mode
from fxwrap.wrapper_ir import Program

Boxed = Callable[[list[Any]], Any]
"""Takes the flat inputs in a list, which it empties, and returns the tuple of outputs."""


Flat = Callable[..., Any]
"""Takes the flat inputs as arguments and returns the tuple of outputs."""


class Emitted:
    """A program in a form that runs.

    Call it with the flat inputs; it returns the tuple of flat outputs. `flat` is that entry without the call through
    this object, for hot loops; `boxed` takes the inputs in a list and clears it, so that owned inputs are really freed
    at their last use. Gradients are not recorded and autocast is off: the graph was captured with its casts.
    """

    def __init__(self, source: str, build: Callable[[], Boxed], flat: Callable[[], Flat] | None = None) -> None:
        """`build` makes the boxed entry, once; `flat` the flat one, where there is a cheaper way than the box.

        A class whose text is made later has a `source` of its own, and gives none here.
        """
        self._source = source
        self._build = build
        self._flat = flat
        self._lock = threading.Lock()

    @property
    def source(self) -> str:
        """The text."""
        return self._source

    @cached_property
    def boxed(self) -> Boxed:
        """The boxed entry; built (imported, compiled) the first time it is asked for."""
        with self._lock, without_fake_mode():  # torch.compile asks while its tensors are fake
            if "boxed" not in self.__dict__:  # another thread may have built it meanwhile
                self.__dict__["boxed"] = self._build()
            built: Boxed = self.__dict__["boxed"]
            return built

    @cached_property
    def flat(self) -> Flat:
        """The flat entry; built the first time it is asked for."""
        if self._flat is None:
            return guarded(self.boxed)
        with without_fake_mode():
            return self._flat()

    def __call__(self, *inputs: Any) -> Any:
        return self.flat(*inputs)


def guarded(boxed: Boxed) -> Flat:
    """Returns a flat entry that runs a boxed one with gradients and autocast off."""

    def flat(*inputs: Any) -> Any:
        if is_any_autocast_enabled():
            with torch.no_grad(), DisableAutocast():
                return boxed([*inputs])
        if not torch.is_grad_enabled():
            return boxed([*inputs])
        set_grad_enabled(False)
        try:
            return boxed([*inputs])
        finally:
            set_grad_enabled(True)

    return flat


def kernel_texts(program: Program) -> tuple[KernelText, ...]:
    """Returns a program's kernels as the runtime takes them."""
    return tuple([KernelText(item.language, item.source, item.signature, item.options) for item in program.kernels])
