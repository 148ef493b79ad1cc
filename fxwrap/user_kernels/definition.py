"""The definition of a user-defined Triton kernel in a program: its source, or a kernel object of this process."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import sympy

from fxwrap.devices.in_process_kernels import InProcessKernel, register_in_process_kernel
from fxwrap.symbolic import NumberOrExpression, expression_kind
from fxwrap.torch_compat import DTYPE_NAMES, triton_constants_at, triton_mutated_arguments
from fxwrap.user_kernels.serialization import (
    ClassifiedArguments,
    KernelNotSerializable,
    TritonKernel,
    jit_function,
    serialize_kernel,
)
from fxwrap.wrapper_ir import KernelDefinition

_NUMBERS = {"int": "i64", "float": "f64", "bool": "i1"}


def all_call_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    """Returns all arguments of a call by name: the constants in torch's table, and those of the node."""
    return {**triton_constants_at(call["constant_args_idx"]), **call["kwargs"]}


def mutated_argument_names(call: Mapping[str, Any], known: Mapping[str, Any]) -> list[str]:
    """Returns the names of the tensors that a call mutates.

    `call` are the node's keywords, `known` its arguments by name, with fake tensors.
    """
    if "tensors_to_clone" in call:
        return [name for name in call["tensors_to_clone"] if name in known]
    return triton_mutated_arguments(
        call["kernel_idx"], call["constant_args_idx"], known, call["tma_descriptor_metadata"]
    )


def define_user_kernel(
    kernel: TritonKernel,
    arguments: ClassifiedArguments,
    written: Collection[str],
    restore_value: Sequence[str],
    grids: Sequence[tuple[NumberOrExpression, ...]],
) -> tuple[KernelDefinition, list[NumberOrExpression]]:
    """Returns a kernel's definition, and the numbers of its launch: its number arguments, then the grids.

    Its tensor parameters are those that it only reads, then those that it writes. `restore_value` names tensors that
    autotuning must restore. `grids` are the launch grids of the configurations; where they differ, those after the
    first are numbers of the launch. Raises KernelCallError for a kernel without parameters.
    """
    more = [] if all(grid == grids[0] for grid in grids) else [size for grid in grids[1:] for size in grid]
    reads = [name for name in arguments.tensors if name not in written]
    signature = (
        *[f"*{DTYPE_NAMES[arguments.tensors[name].tensor_type.dtype]} {name}" for name in (*reads, *written)],
        *[f"{_NUMBERS[_kind(number)]} {name}" for name, number in arguments.numbers.items()],
        *["i64 grid"] * len(more),
    )
    name = str(jit_function(kernel).__name__)
    try:
        source = serialize_kernel(kernel, arguments.constants, arguments.descriptors, restore_value)
    except KernelNotSerializable as reason:
        definition = _live_definition(kernel, arguments, signature, str(reason), name)
    else:
        definition = KernelDefinition(name, "user_triton", source, signature)
    return definition, [*arguments.numbers.values(), *more]


def _kind(number: object) -> str:
    return expression_kind(number) if isinstance(number, sympy.Basic) else type(number).__name__


def _live_definition(
    kernel: TritonKernel, arguments: ClassifiedArguments, signature: tuple[str, ...], reason: str, name: str
) -> KernelDefinition:
    function = kernel
    while not hasattr(function, "src"):
        function = function.fn
    content = (function.cache_key, type(kernel).__name__, arguments.constants, arguments.descriptors,
               [str(config) for config in getattr(kernel, "configs", ())])  # fmt: skip
    key = hashlib.sha256(repr(content).encode()).hexdigest()
    key = register_in_process_kernel(key, InProcessKernel(kernel, arguments.constants, arguments.descriptors))
    options = (("live", key), ("reason", reason))
    return KernelDefinition(name, "user_triton", function.src, signature, options)
