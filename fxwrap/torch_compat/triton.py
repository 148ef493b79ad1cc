"""torch's operator for Triton kernels and its side table of kernels and constant arguments.

Why: the operator takes indices into a table that has no public name.
"""

from __future__ import annotations

import hashlib
import importlib
import sys
import threading
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch._higher_order_ops.triton_kernel_wrap import (
    kernel_side_table,
    triton_kernel_wrapper_functional,
    triton_kernel_wrapper_mutation,
)
from torch._ops import HigherOrderOperator
from torch.torch_version import TorchVersion

from fxwrap.torch_compat.operators import declare_side_effect

triton_launch: HigherOrderOperator = triton_kernel_wrapper_mutation
"""The launch of a Triton kernel. It mutates operands, which its schema does not show."""

declare_side_effect(triton_launch)

triton_launch_functional: HigherOrderOperator = triton_kernel_wrapper_functional
"""The functionalised launch: it mutates copies of the mutated tensors and returns them."""


_own_kernels: WeakValueDictionary[int, object] = WeakValueDictionary()
_own_constants: dict[int, dict[str, object]] = {}
_get_kernel, _get_constants = kernel_side_table.get_kernel, kernel_side_table.get_constant_args


def _kernel_at(index: int) -> Any:
    kernel = _own_kernels.get(index)
    return _get_kernel(index) if kernel is None else kernel


def _constants_at(index: int) -> Any:
    constants = _own_constants.get(index)
    return _get_constants(index) if constants is None else constants


# Why: `torch.compiler.reset()`, which strict export calls too, empties the table; graphs with its indices stay in use.
kernel_side_table.get_kernel = _kernel_at  # type: ignore[assignment, method-assign]
kernel_side_table.get_constant_args = _constants_at  # type: ignore[assignment, method-assign]


def _launch(**arguments: Any) -> None:
    triton_launch(**arguments)


def _launch_functional(**arguments: Any) -> tuple[torch.Tensor, ...]:
    results = triton_launch_functional(**arguments)
    return tuple([results[name] for name in arguments["tensors_to_clone"]])


def _launch_functional_by_name(**arguments: Any) -> dict[str, torch.Tensor]:
    return dict(zip(arguments["tensors_to_clone"], _launch_functional(**arguments)))


def traceable_triton_launches() -> dict[str, Callable[..., Any]]:
    """Returns functions that call torch's operators for Triton kernels, by the ends of the names of these operators.

    Dynamo does not trace these operators. It puts calls of the functions into its graphs if it was imported before,
    which each compile does.
    """
    if "torch._dynamo" in sys.modules:
        allow_in_graph: Any = torch.compiler.allow_in_graph
        allow_in_graph([_launch, _launch_functional])  # Dynamo rejects a function that returns a dict
    return {"mutation": _launch, "functional": _launch_functional_by_name}


def triton_kernel_index(kernel: object) -> int:
    """Returns the index of a Triton kernel object in torch's table, adding a new one.

    The index of a kernel with a content hash follows from the hash and is far above torch's own indices. An index that
    outlives the table or the process then either finds the same kernel or raises.
    """
    content = getattr(kernel, "fxwrap_hash", None)
    if content is None:
        return kernel_side_table.add_kernel(kernel)
    index = _content_index(content, type(kernel).__qualname__)
    with kernel_side_table.lock:
        kernel_side_table.id_to_kernel.setdefault(index, kernel)
        kernel_side_table.kernel_to_id.setdefault(kernel, index)
        _own_kernels[index] = kernel
    return index


def triton_kernel_at(index: int) -> Any:
    """Returns the Triton kernel object at an index of torch's table."""
    return kernel_side_table.get_kernel(index)


def triton_constants_index(constants: tuple[tuple[str, int | float | bool | str], ...]) -> int:
    """Returns the index of constant arguments in torch's table, which follows from them, adding new ones."""
    index = _content_index(repr(constants))
    kernel_side_table.constant_args.setdefault(index, _own_constants.setdefault(index, dict(constants)))
    return index


def add_triton_constants(constants: Mapping[str, object], kernel_hash: str | None = None) -> int:
    """Adds constant arguments of any type to torch's table and returns their index.

    The index of constants that belong to a kernel with a content hash follows from the hash.
    """
    if kernel_hash is None:
        return kernel_side_table.add_constant_args(dict(constants))
    index = _content_index("constants", kernel_hash)
    kernel_side_table.constant_args.setdefault(index, _own_constants.setdefault(index, dict(constants)))
    return index


def triton_constants_at(index: int) -> dict[str, object]:
    """Returns the constant arguments at an index of torch's table."""
    return dict(kernel_side_table.get_constant_args(index))


def interpreter_tensor_patch(
    extend: Callable[[Callable[..., None]], Callable[..., None]],
) -> tuple[object, str, object]:
    """Returns owner, name and extended form of the function by which Triton's interpreter patches its tensors.

    Why: the interpreter has no hook for it.
    """
    interpreter = importlib.import_module("triton.runtime.interpreter")
    return interpreter, "_patch_lang_tensor", extend(interpreter._patch_lang_tensor)


def interpreter_language_patch() -> tuple[object, str, object]:
    """Returns owner, name and a quicker form of the function by which Triton's interpreter patches its language.

    Why: a kernel that calls a function of the library, such as `tl.sum`, has the language patched again in each call.
    """
    interpreter = importlib.import_module("triton.runtime.interpreter")
    language, patch_language = interpreter.tl, interpreter._patch_lang

    def patch_once(function: Any) -> Any:
        modules = [item for item in function.__globals__.values() if item is language or item is language.core]
        if modules and not any(language.core.is_builtin(module.load) for module in modules):
            return interpreter._LangPatchScope()
        return patch_language(function)

    return interpreter, "_patch_lang", patch_once


_LAUNCHER_LOCK = threading.RLock()
_ARGUMENTS = "fxwrap_arguments"


@cache
def defer_triton_launchers(triton_version: str) -> None:
    """Makes Triton before 3.7 build the launcher of a kernel when Triton first launches it.

    Why: it runs a C compiler for each signature when it loads a kernel, which takes longer than the kernel itself, and
    fxwrap launches kernels without it. Launchers are built one at a time: all modules of theirs have one name, and
    Triton reads a function of the module after loading it.
    """
    if TorchVersion(triton_version) < "3.7":
        for backend in importlib.import_module("triton.backends").backends.values():
            launchers = [getattr(sys.modules[backend.driver.__module__], name, None) for name in _LAUNCHERS]
            for launcher in filter(None, launchers):
                build_at_first_use(launcher)


_LAUNCHERS = ("CudaLauncher", "HIPLauncher")


def build_at_first_use(kind: Any) -> None:
    """Changes a class: its constructor runs when an attribute of the object is first read, in one thread at a time."""
    build = kind.__init__

    def save_arguments(self: object, *arguments: object) -> None:
        vars(self)[_ARGUMENTS] = arguments

    def read(self: object, name: str) -> object:
        with _LAUNCHER_LOCK:
            arguments = vars(self).pop(_ARGUMENTS, None)
            try:
                if arguments is not None:
                    build(self, *arguments)
            except BaseException:
                vars(self)[_ARGUMENTS] = arguments
                raise
        return object.__getattribute__(self, name)

    kind.__init__, kind.__getattr__ = save_arguments, read


def _content_index(*content: str) -> int:
    return (1 << 60) + int(hashlib.sha256("\0".join(content).encode()).hexdigest()[:14], 16)


def triton_mutated_arguments(
    kernel: int, constants: int, arguments: Mapping[str, object], descriptors: Any
) -> list[str]:
    """Returns the names of the tensors that a Triton kernel writes, found by compiling it; all names if that fails.

    `kernel` and `constants` are indices of torch's table, `descriptors` the operator's metadata of tensor descriptors.
    Imported at first use because it needs Triton.
    """
    from torch._higher_order_ops.triton_kernel_wrap import get_mutated_tensors

    return list(get_mutated_tensors(kernel, constants, dict(arguments), descriptors))
