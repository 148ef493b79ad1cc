"""Triton kernels of the user's as definitions of a program, and what a call of torch's operator for them passes."""

from fxwrap.user_kernels.arguments import KernelCallError, SortedArguments, sort_arguments
from fxwrap.user_kernels.definition import define_user_kernel, table_arguments, written_names
from fxwrap.user_kernels.text import NotCarried, kernel_text

__all__ = [
    "KernelCallError",
    "NotCarried",
    "SortedArguments",
    "define_user_kernel",
    "kernel_text",
    "sort_arguments",
    "table_arguments",
    "written_names",
]
