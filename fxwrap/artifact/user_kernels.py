"""User-defined Triton kernels as ordinary ones, whose compiled code runs without Python, in files for native hosts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fxwrap.devices import TRITON, language_traits
from fxwrap.devices.kernel_names import find_function_name, make_function_name
from fxwrap.runtime.triton.compile import LAUNCH_OPTIONS, has_known_types
from fxwrap.runtime.triton.user_kernels import load_user_kernel
from fxwrap.user_kernels import KernelNotSerializable, TritonKernel, base_function
from fxwrap.wrapper_ir import KernelDefinition, Program

_CONFIGURED = ("num_warps", "num_stages", "num_ctas", "maxnreg")
"""The launch options of a configuration for autotuning."""


def with_ordinary_kernels(program: Program) -> Program:
    """Returns a program whose user-defined kernels are ordinary Triton kernels, where that is possible.

    An ordinary kernel calls the user's with its constants. Raises FxwrapError where Triton is missing.
    """
    return program.replace(kernels=tuple([
        _ordinary_kernel(kernel) if _is_user_defined(kernel) and not reason_for_python(kernel) else kernel
        for kernel in program.kernels
    ]))  # fmt: skip


def reason_for_python(kernel: KernelDefinition) -> str:
    """Returns why only Python launches a user-defined kernel; "" for others, and where ordinary code can call it."""
    if not _is_user_defined(kernel):
        return ""
    if "live" in dict(kernel.options):
        return "it exists only in this process"
    loaded = load_user_kernel(kernel.source, kernel.signature, kernel.options)
    tuned = loaded.on_gpu.kernel
    try:
        function = base_function(tuned)
    except KernelNotSerializable as reason:
        return str(reason)
    names = {*loaded.names, function.__name__}
    constants = {*loaded.constants, *[name for config in getattr(tuned, "configs", ()) for name in config.kwargs]}
    return next(
        (reason for applies, reason in (
            (len(getattr(tuned, "configs", ())) > 1, "it is autotuned: give it one configuration"),
            (bool(loaded.descriptors), "it takes tensor descriptors"),
            (len(names) == len(loaded.names), "a parameter has its name"),
            (function.fn.__globals__.get(function.__name__) is not function, "another thing has its name"),
            (not has_known_types(_types(kernel)), "a tensor has a type that Triton's kernels of files cannot have"),
            (any(map(_is_special, function.params)), "a parameter has a declared type, or is not specialized"),
            (not constants <= {*function.arg_names, *LAUNCH_OPTIONS}, "it has launch options of other devices"),
            (bool(function.debug), "it is compiled for debugging"),
            (find_function_name(kernel.source) != "kernel", "its name begins with 'fxwrap_'"),
        ) if applies), "",
    )  # fmt: skip


def _is_user_defined(kernel: KernelDefinition) -> bool:
    return language_traits(kernel.language).user_defined


def _is_special(parameter: TritonKernel) -> bool:
    """Whether the classes of arguments for a parameter are other than those of ordinary kernels."""
    not_specialized = parameter.do_not_specialize or parameter.do_not_specialize_on_alignment
    return not parameter.is_constexpr and bool(parameter.annotation_type or not_specialized)


def _types(kernel: KernelDefinition) -> tuple[str, ...]:
    return tuple([entry.partition(" ")[0] for entry in kernel.signature])


def _ordinary_kernel(kernel: KernelDefinition) -> KernelDefinition:
    """Returns a user-defined kernel as an ordinary one."""
    loaded = load_user_kernel(kernel.source, kernel.signature, kernel.options)
    tuned, constants = loaded.on_gpu.kernel, dict(loaded.constants)
    texts = {name: f"CONSTANTS[{name!r}]" for name in constants}
    for config in getattr(tuned, "configs", ()):
        constants |= {**config.kwargs, **{name: getattr(config, name, None) for name in _CONFIGURED}}
        texts |= {name: f"kernel.configs[0].kwargs[{name!r}]" for name in config.kwargs}
    options: dict[str, Any] = {"enable_fp_fusion": True}
    options |= {name: item for name, item in constants.items() if name in LAUNCH_OPTIONS}
    passed = {name: constants[name] for name in texts if name not in LAUNCH_OPTIONS}
    source = _calling_source(kernel.source, base_function(tuned).__name__, loaded.names, passed, texts)
    known = tuple([(name, item) for name, item in options.items() if item is not None])
    return KernelDefinition(kernel.name, TRITON.name, source, _types(kernel), known)


def _calling_source(
    source: str, function: str, names: Sequence[str], constants: Mapping[str, object], texts: Mapping[str, str]
) -> str:
    """Returns the source with a kernel of the parameters `names`, which calls a function of it.

    `constants` are its other arguments by name, `texts` expressions of them.
    """
    own = make_function_name(function, repr((source, names)))
    named = [name for name, item in constants.items() if not isinstance(item, bool | int | str | None)]
    lines = [f"{own}_{name} = triton.language.constexpr({texts[name]})\n" for name in named]
    passed = [f"{name}={name}" for name in names]
    passed += [f"{name}={f'{own}_{name}' if name in named else repr(item)}" for name, item in constants.items()]
    call = f"{function}({', '.join(passed)})"
    return f"{source}\n\n{''.join(lines)}\n\n@triton.jit\ndef {own}({', '.join(names)}):\n    {call}\n"
