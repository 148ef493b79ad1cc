"""Operators that exist in this process only because Python code registered them."""

from __future__ import annotations

import operator

import torch


def is_python_operator(name: str) -> bool:
    """Returns whether the operator "namespace::name" or "namespace::name.overload" is defined or implemented in Python.

    A process without Python lacks such an operator, or its kernel. Implementations for tracing do not count.
    """
    # Why: torch.library records its registrations by name in these two sets, and there is no public query.
    if name in torch.library._defs:
        return True
    namespace, _, rest = name.partition("::")
    keys = ("CPU", "CUDA", "CompositeExplicitAutograd", "CompositeImplicitAutograd")
    return namespace != "aten" and any(f"{namespace}/{rest}/{key}" in torch.library._impls for key in keys)


# Why: Dynamo's graphs call functions of torch's by the modules that define them, some of which are private.
FUNCTION_MODULES = (
    torch, torch.nn.functional, torch.functional, torch.special, torch.linalg, torch.fft, torch._C._nn,
    torch._C._special, torch._C._linalg, torch._C._fft,  # type: ignore[attr-defined]
    operator,
)  # fmt: skip
"""Modules whose functions of tensors depend on their operands and on the modes of gradients and autocast alone."""
