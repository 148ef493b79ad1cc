"""Named cases of control flow: a function, inputs for it, and how all emitters are compared on them with eager."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch._higher_order_ops.utils as operators
from torch import Tensor

from fxwrap.testing import assert_emitters_agree
from tests.support.versions import is_before

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def random(*sizes: int, seed: int = 0, gradient: bool = False, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns random elements, equal for equal seeds."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*sizes, generator=generator).to(dtype).requires_grad_(gradient)


def to_device(tree: Any, device: str) -> Any:
    """Returns inputs on a device, with their own gradients."""
    if isinstance(tree, Tensor):
        return tree.detach().to(device).requires_grad_(tree.requires_grad)
    return type(tree)([to_device(item, device) for item in tree]) if isinstance(tree, tuple | list) else tree


@dataclass(frozen=True)
class TorchRejection:
    """What torch before a version, as "2.13", refuses before any backend sees a graph, and part of its message."""

    before: str
    message: str

    @property
    def applies(self) -> bool:
        """Whether this torch is older."""
        return is_before(self.before)


@dataclass(frozen=True)
class Case:
    """A function and the inputs, one tuple a call, that are to reach all of it: both branches, no round at all.

    All calls are compiled together. `training` also compares gradients, `dynamic` is as for `torch.compile`. Where
    torch refuses the function itself, what is checked is that its own error is what the user sees. Only the long form
    runs a case that is `long`: others have all of it.
    """

    function: Callable[..., Any]
    inputs: tuple[tuple[Any, ...], ...]
    training: bool = False
    dynamic: bool = False
    rejection: TorchRejection | None = None
    long: bool = False

    def check(self, device: str) -> None:
        """Compares every emitter with eager, on inputs moved to a device."""
        if isinstance(self.function, torch.nn.Module):
            self.function.to(device)
        moved = replace(self, inputs=tuple([to_device(inputs, device) for inputs in self.inputs]))
        if self.rejection is not None and self.rejection.applies:
            moved.check_rejection(self.rejection.message)
        else:
            moved.check_without_moving_inputs()

    def check_rejection(self, message: str) -> None:
        """Checks that torch raises this with a backend of its own, and with fxwrap the same."""
        errors = []
        for backend in ("aot_eager", "fxwrap"):
            torch.compiler.reset()
            with pytest.raises(Exception, match=message) as raised:
                torch.compile(self.function, backend=backend, fullgraph=True, dynamic=self.dynamic)(*self.inputs[0])
            errors.append(raised.type)
        torch.compiler.reset()
        assert errors[0] is errors[1]

    def check_without_moving_inputs(self) -> None:
        """Compares every emitter with eager, on inputs where they are."""
        function = self.function if len(self.inputs) == 1 else CallSequence(self.function)
        inputs = self.inputs[0] if len(self.inputs) == 1 else self.inputs
        captured = torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True)
        with captured, nullcontext() if self.training else eager_operators():
            assert_emitters_agree(function, inputs, training=self.training, dynamic=self.dynamic)


@contextmanager
def eager_operators() -> Iterator[None]:
    """Eager mode calls the blocks of `cond` and `while_loop` as they are; otherwise torch compiles each call of an
    operator for its backend "eager". Gradients need that, and the trees of scans.
    """
    original = getattr(operators, "_hop_compile_and_call", None)

    def call(run: Callable[..., Any], args: Any, kwargs: Any = None) -> Any:
        if run.__module__ in ("torch._higher_order_ops.cond", "torch._higher_order_ops.while_loop"):
            return run(*args, **(kwargs or {}))
        return original(run, args, kwargs)

    with pytest.MonkeyPatch.context() as patch:
        if original is not None:
            patch.setattr(operators, "_hop_compile_and_call", call)
        yield


class CallSequence(torch.nn.Module):
    """Calls a function once for each tuple of inputs."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: tuple[Any, ...]) -> list[Any]:
        return [self.function(*arguments) for arguments in inputs]


class Cases(dict[str, Case]):
    """Cases by the names of their functions."""

    def add(
        self,
        *inputs: tuple[Any, ...],
        training: bool = False,
        dynamic: bool = False,
        rejection: TorchRejection | None = None,
        long: bool = False,
    ) -> Callable[..., Any]:
        """Returns a decorator that adds a function, or a class of modules, with these inputs."""

        def decorate(function: Any) -> Any:
            called = function().eval() if isinstance(function, type) else function
            self[function.__name__] = Case(called, inputs, training, dynamic, rejection, long)
            return function

        return decorate

    @property
    def parameters(self) -> list[Any]:
        """The cases as parameters of a test."""
        marks = {True: [pytest.mark.long], False: []}
        return [pytest.param(case, id=name, marks=marks[case.long]) for name, case in self.items()]
