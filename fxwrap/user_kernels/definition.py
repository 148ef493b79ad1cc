"""A Triton kernel of the user's as a definition of a program: as a text, or as an object that this process keeps."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import sympy

from fxwrap.live_kernels import LiveKernel, keep_kernel
from fxwrap.symbolic import expression_kind
from fxwrap.torch_compat import triton_constants_at, triton_written_arguments
from fxwrap.user_kernels.arguments import SortedArguments, jit_function
from fxwrap.user_kernels.text import NotCarried, kernel_text
from fxwrap.wrapper_ir import DTYPE_NAMES, KernelDefinition

_NUMBERS = {"int": "i64", "float": "f64", "bool": "i1"}


def table_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    """Returns all arguments by name that a call (its node's keywords) passes: those of torch's table, and its own."""
    return {**triton_constants_at(call["constant_args_idx"]), **call["kwargs"]}


def written_names(call: Mapping[str, Any], known: Mapping[str, Any]) -> list[str]:
    """Returns the names of the tensors that a call writes.

    `call` are its node's keywords, `known` its own arguments by name, tensors as fake ones.
    """
    if "tensors_to_clone" in call:
        return [name for name in call["tensors_to_clone"] if name in known]
    return triton_written_arguments(
        call["kernel_idx"], call["constant_args_idx"], known, call["tma_descriptor_metadata"]
    )


def define_user_kernel(
    kernel: Any, given: SortedArguments, written: Collection[str], restored: Sequence[str], grids: Sequence[Any]
) -> tuple[KernelDefinition, list[Any]]:
    """Returns a kernel's definition, and the numbers of its launch: those it takes, then the grids after the first.

    Its tensors are those it only reads, then those that are written. `restored` names tensors that tuning has to put
    back. `grids` are the launch grids of the kernel's configurations; those after the first are numbers of the launch
    where they differ. Raises KernelCallError for a kernel that has no parameters.
    """
    more = [] if all(grid == grids[0] for grid in grids) else [size for grid in grids[1:] for size in grid]
    reads = [name for name in given.tensors if name not in written]
    signature = (
        *[f"*{DTYPE_NAMES[given.tensors[name].tensor_type.dtype]} {name}" for name in (*reads, *written)],
        *[f"{_NUMBERS[_kind(number)]} {name}" for name, number in given.numbers.items()],
        *["i64 grid"] * len(more),
    )
    name = str(jit_function(kernel).__name__)
    try:
        source = kernel_text(kernel, given.constants, given.descriptors, restored)
    except NotCarried as reason:
        definition = _live_definition(kernel, given, signature, str(reason), name)
    else:
        definition = KernelDefinition(name, "user_triton", source, signature)
    return definition, [*given.numbers.values(), *more]


def _kind(number: Any) -> str:
    return expression_kind(number) if isinstance(number, sympy.Basic) else type(number).__name__


def _live_definition(
    kernel: Any, given: SortedArguments, signature: tuple[str, ...], reason: str, name: str
) -> KernelDefinition:
    function = kernel
    while not hasattr(function, "src"):
        function = function.fn
    content = (function.cache_key, type(kernel).__name__, given.constants, given.descriptors,
               [str(config) for config in getattr(kernel, "configs", ())])  # fmt: skip
    key = hashlib.sha256(repr(content).encode()).hexdigest()
    keep_kernel(key, LiveKernel(kernel, given.constants, given.descriptors))
    options = (("live", key), ("reason", reason))
    return KernelDefinition(name, "user_triton", function.src, signature, options)
