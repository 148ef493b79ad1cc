"""User-defined Triton kernels: their definitions in programs, and the arguments of calls of torch's operator."""

from fxwrap.user_kernels.definition import all_call_arguments, define_user_kernel, mutated_argument_names
from fxwrap.user_kernels.serialization import (
    ClassifiedArguments,
    KernelCallError,
    KernelNotSerializable,
    classify_arguments,
    serialize_kernel,
)

__all__ = [
    "ClassifiedArguments",
    "KernelCallError",
    "KernelNotSerializable",
    "all_call_arguments",
    "classify_arguments",
    "define_user_kernel",
    "mutated_argument_names",
    "serialize_kernel",
]
