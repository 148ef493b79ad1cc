"""Tracing of whole training steps: state of optimizers, tensor subclasses, and torch's flag that it compiles."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def flatten_subclass(tensor: Any) -> tuple[Sequence[str], Any] | None:
    """Returns the attributes of a tensor subclass that hold its inner tensors, and its context; None for others.

    Why: DTensors and their like are traced as the plain tensors that they hold; the test has no public name.
    """
    return tensor.__tensor_flatten__() if is_traceable_wrapper_subclass(tensor) else None


def create_parameter_state(optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: torch.Tensor) -> bool:
    """Creates an optimizer's state for one parameter, as its first step does; False for other optimizers than torch's.

    Why: the state is created in a method without a public name, which takes the group and lists that it fills.
    """
    create = getattr(optimizer, "_init_group", None)
    if create is None:
        return False
    gradient = parameter.grad
    parameter.grad = torch.zeros_like(parameter)
    try:
        lists: list[list[object]] = [[] for _ in range(len(inspect.signature(create).parameters) - 1)]
        create({**group, "params": [parameter]}, *lists)
    finally:
        parameter.grad = gradient
    return bool(optimizer.state.get(parameter))


@contextmanager
def compiling(is_compiling: bool) -> Iterator[None]:
    """Sets `torch.compiler.is_compiling()`, which models and optimizers ask.

    Why: torch sets the flag in `torch.compile` and `torch.export` only.
    """
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = is_compiling
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def traced_node(tensor: torch.Tensor) -> torch.fx.Node | None:
    """Returns the node of a tensor in the graph that `make_fx` is tracing; None outside a trace, and for constants.

    Why: the tensor's proxy is in the tracer's tables, and has no public name.
    """
    mode = get_proxy_mode()
    tracked: Any = None if mode is None else get_proxy_slot(tensor, mode.tracer, None)
    return None if tracked is None else tracked.proxy.node
