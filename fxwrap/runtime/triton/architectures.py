"""Triton kernels for several GPU architectures, compiled on any machine, for saved programs that run elsewhere."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import torch

from fxwrap.errors import KernelBuildError, OptionError
from fxwrap.runtime.cpp_kernels import KernelText
from fxwrap.runtime.triton.binaries import triton_compiled_kernels
from fxwrap.runtime.triton.compile import (
    KernelUse,
    import_triton,
    split_launch_options,
    triton_jit_function,
    warmup_arguments,
)
from fxwrap.runtime.triton.prebuilt import TritonBinary, find_prebuilt_triton, register_prebuilt_triton, triton_binary
from fxwrap.runtime.triton.variants import make_source

_NAME = re.compile(r"sm_(\d{2,3})")
_WARP_SIZE = 32
_SHARED_KIB = {75: 64, 80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 110: 227, 120: 99, 121: 99}
"""The most shared memory of a block by compute capability (CUDA Programming Guide)."""


def compile_for_architectures(uses: Sequence[KernelUse], architectures: Sequence[str]) -> None:
    """Compiles kernels for GPUs of these architectures ("sm_90"), which this machine need not have.

    Registers the binaries, which saved programs then contain. A kernel is compiled for the argument classes of its
    compilations in this process; without one, for its typical arguments. Raises OptionError for a text that names no
    architecture, FxwrapError where Triton is missing, KernelBuildError for a kernel that Triton cannot compile for one,
    or that needs more shared memory than it has.
    """
    capabilities = [_capability(name) for name in architectures]
    if not uses or not capabilities:
        return
    import_triton()
    sources = [(use.kernel, source) for use in uses for source in _sources(use)]
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        jobs = [pool.submit(_compile, kernel, source, capability)
                for (kernel, source), capability in product(sources, capabilities)]  # fmt: skip
        compiled = [job.result() for job in jobs]
    for kernel, binary in compiled:
        register_prebuilt_triton(kernel.symbol, binary)


def architectures_of_this_machine() -> tuple[str, ...]:
    """Returns the architectures of the NVIDIA GPUs here: ("sm_90",)."""
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return ()
    known = {torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())}
    return tuple([f"sm_{major}{minor}" for major, minor in sorted(known)])


def _capability(name: str) -> int:
    """Returns 90 for "sm_90"."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise OptionError(f"unknown architecture {name!r}; name them as 'sm_80', 'sm_90', 'sm_100'")
    return int(match[1])


def _sources(use: KernelUse) -> list[Any]:
    """Returns Triton's sources of a kernel, one for each combination of argument classes."""
    kernel = use.kernel
    sources = [item.src for item in triton_compiled_kernels(kernel) if hasattr(item.src, "fn")]
    if not sources or find_prebuilt_triton(kernel.symbol):  # workers compile for the typical arguments
        function = triton_jit_function(kernel.source, kernel.signature, kernel.options)
        sources.append(make_source(function, warmup_arguments(use), split_launch_options(kernel.options)[0]))
    return list({source.hash(): source for source in sources}.values())


def _compile(kernel: KernelText, source: Any, capability: int) -> tuple[KernelText, TritonBinary]:
    triton = import_triton()
    target = triton.backends.compiler.GPUTarget("cuda", capability, _WARP_SIZE)
    constants, compile_options = split_launch_options(kernel.options)
    try:
        compiled = triton.compile(source, target=target, options=compile_options)
    except Exception as raised:  # any error of Triton is the kernel's
        raise KernelBuildError(
            f"Triton cannot compile {kernel.symbol} for sm_{capability}: {type(raised).__name__}: {raised}"
        ) from raised
    limit = _SHARED_KIB.get(capability, _SHARED_KIB[90]) << 10
    if compiled.metadata.shared > limit:
        raise KernelBuildError(
            f"{kernel.symbol} needs {compiled.metadata.shared} bytes of shared memory, sm_{capability} has {limit}. "
            f"Compile for it: Options(devices=(CPU, dataclasses.replace(CUDA, shared_memory_bytes={limit})))"
        )
    return kernel, triton_binary(compiled, constants)
