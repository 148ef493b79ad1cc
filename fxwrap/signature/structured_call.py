"""Calls of a program with the arguments of the model, which return the model's result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fxwrap.errors import InputError
from fxwrap.signature.convention import CallingConvention

ResultBuilder = Callable[[Sequence[Any]], Any]


def structured_call(convention: CallingConvention, flat: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Returns a function that takes the model's arguments, calls a flat entry and returns the model's result.

    It raises InputError, with the name of the program, for arguments that do not fit, and for inputs that require
    gradients unless grad mode is off: the results would silently have none.
    """
    bind, check_constants = convention.bind, convention.check_constants if convention.constants else None
    build = _result_builder(convention)
    is_plain = convention.takes_plain_arguments and not convention.constants
    is_grad_enabled = torch.is_grad_enabled

    def call(arguments: Sequence[object], keywords: Mapping[str, object]) -> Any:
        inputs = arguments
        if keywords or not is_plain:
            try:
                inputs = bind(arguments, keywords)
                if check_constants is not None:
                    check_constants(inputs)
            except InputError as error:
                raise InputError(f"program '{name}': {error}") from None
        if is_grad_enabled():
            check_no_gradients(inputs, convention)
        outputs = flat(*inputs)
        return outputs if build is None else build(outputs)

    return call


def check_no_gradients(inputs: Sequence[object], convention: CallingConvention | None = None) -> None:
    """Raises InputError for an input that requires gradients."""
    for position, item in enumerate(inputs):
        if isinstance(item, torch.Tensor) and item.requires_grad:
            label = f"input {position}" if convention is None else f"input '{convention.input_names[position]}'"
            raise InputError(
                f"{label} requires gradients, which a compiled graph does not record; call it under "
                "torch.no_grad(), pass input.detach(), or train with torch.compile(backend='fxwrap')"
            )


def _result_builder(convention: CallingConvention) -> ResultBuilder | None:
    """Returns a function of the flat outputs that returns the result; None if that is the tuple of them."""
    tree = convention.result
    if tree.is_leaf():
        return lambda outputs: outputs[0]
    if tree.type is tuple and all(child.is_leaf() for child in tree.children()):
        return None
    return tree.unflatten
