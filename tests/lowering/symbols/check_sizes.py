"""One compiled program for many sizes: how a function is run on all of them, in every emitter, and compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fxwrap import Options
from fxwrap.comparison import COMPARED_EMITTERS, CapturedGraph, CompiledFunction
from fxwrap.debugging import copy_inputs
from fxwrap.torch_compat import tree_flatten


def check_all_sizes(
    function: Callable[..., Any],
    calls: Sequence[tuple[Any, ...]],
    *,
    training: bool = False,
    dynamic: bool | None = True,
    options: Options | None = None,
) -> list[CapturedGraph]:
    """Compiles a function on the first inputs, and compares it with eager on all of them, in every emitter.

    Returns the graphs that were captured for all calls together. With `training`, gradients of inputs are compared.
    """
    subject = CompiledFunction(function, options or Options(), dynamic)
    torch.compiler.reset()
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        for inputs in calls:
            wanted = _run(function, inputs, training)
            for emitter in COMPARED_EMITTERS:
                actual = _run(subject.call(emitter), inputs, training)
                torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-5)
    return subject.graphs


def _run(function: Callable[..., Any], inputs: tuple[Any, ...], training: bool) -> tuple[list[Any], list[Any]]:
    arguments = copy_inputs(inputs)
    with torch.set_grad_enabled(training):
        outputs = [leaf for leaf in tree_flatten(function(*arguments))[0] if leaf is not None]
    leaves = [leaf for leaf in tree_flatten(arguments)[0] if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not training:
        return outputs, []
    sum(leaf.float().sin().sum() for leaf in outputs if isinstance(leaf, Tensor) and leaf.requires_grad).backward()
    return [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in outputs], [leaf.grad for leaf in leaves]
