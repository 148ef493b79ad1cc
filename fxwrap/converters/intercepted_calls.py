"""Calls that torch intercepts: with fake or functional tensors, or inside of torch.func's transforms.

Emitted code reads the memory of its inputs, which such tensors have not. The program runs as an FX graph then, whose
operators torch intercepts as those of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from fxwrap.converters.emitted_program import BoxedCallable
from fxwrap.lines import CheckLayout
from fxwrap.runtime.checks import check_tensor_layout
from fxwrap.torch_compat import (
    DisableAutocast,
    FakeTensor,
    accept_real_tensors,
    detect_fake_mode,
    dispatch_mode_count,
    without_dispatch_modes,
)
from fxwrap.wrapper_ir import Program


def accept_fake_tensors(
    entry: BoxedCallable,
    run_graph: Callable[[tuple[Any, ...]], Any],
    tensors: Sequence[int],
    static_inputs: Collection[int],
    locate_error: Callable[[Exception], None],
) -> BoxedCallable:
    """Returns a boxed entry that returns fake tensors if it is called with them, or under a fake mode.

    Outside a mode it looks at one input only, the last tensor that is not static, since each look costs time in each
    call. `run_graph` runs the program's FX graph on the flat inputs, of which those at `tensors` are tensors.
    `locate_error` may add to the message of an error that the entry raises.
    """
    candidates = [position for position in tensors if position not in static_inputs] or tensors or [0]
    position = candidates[-1]

    def call(inputs: list[object]) -> Any:
        try:
            if dispatch_mode_count() or (inputs and type(inputs[position]) is FakeTensor):
                return call_under_modes(inputs)
            return entry(inputs)
        except (IndexError, RuntimeError) as error:
            locate_error(error)
            raise

    def call_under_modes(inputs: list[object]) -> Any:
        if detect_fake_mode(inputs) is None:
            return entry(inputs)
        arguments = tuple(inputs)
        inputs.clear()
        return run_graph(arguments)

    return call


def call_as_graph(program: Program, graph: Callable[[], Callable[..., object]], inputs: tuple[Any, ...]) -> Any:
    """Returns the outputs of a program's FX graph, fake for fake inputs. Raises InputError for another layout.

    `graph` returns the FX graph; its emission is not intercepted.
    """
    positions = {item.name: position for position, item in enumerate(program.inputs)}
    for line in program.body.lines:
        if isinstance(line, CheckLayout) and line.tensor.name in positions:
            tensor, name, type_ = inputs[positions[line.tensor.name]], line.name or line.tensor.name, line.expected
            sizes: Any = type_.sizes
            strides: Any = type_.strides
            if isinstance(tensor, torch.Tensor) and all(
                type(number) is int for number in (*sizes, *strides, *tensor.shape)
            ):
                check_tensor_layout(tensor, name, type_.dtype, sizes, strides, type_.device)
    with without_dispatch_modes():
        run = graph()
    mode = detect_fake_mode(inputs)
    with nullcontext() if mode is None else accept_real_tensors(mode), DisableAutocast():
        return run(*inputs)
