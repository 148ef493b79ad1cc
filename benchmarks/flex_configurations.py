"""The kernels of FlexAttention by themselves: their resources, and launches in each configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor

import fxwrap
from fxwrap.loop_ir import Kernel
from fxwrap.printers.triton import StreamingConfiguration, print_triton
from fxwrap.printers.triton.streaming_configuration import streaming_configurations
from fxwrap.runtime.kernels import load_kernel
from fxwrap.runtime.triton.compile import triton_jit_function
from fxwrap.wrapper_ir import KernelDefinition


def kernel_usage(programs: Sequence[fxwrap.Compiled]) -> dict[str, dict[str, int]]:
    """Returns registers of a thread, spills and shared bytes of the Triton kernels of programs that ran on a GPU."""
    usage: dict[str, dict[str, int]] = {}
    for definition in [kernel for program in programs for kernel in program.program.kernels]:
        if definition.language == "triton" and definition.name.startswith("flex_attention"):
            function = triton_jit_function(definition.source, definition.signature, definition.options)
            for caches in getattr(function, "device_caches", {}).values():
                for kernel in caches[0].values():
                    usage[definition.name] = {
                        "registers": kernel.n_regs, "spills": kernel.n_spills, "shared": kernel.metadata.shared,
                    }  # fmt: skip
    return usage


def configurations(
    programs: Sequence[fxwrap.Compiled], leaves: Sequence[Tensor], captured: Sequence[Tensor], mask: Any
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yields launches of the kernels of attention in each configuration that compiles."""
    for definition in [kernel for program in programs for kernel in program.program.kernels]:
        kernel, operands = definition.loop_ir, _operands(definition, leaves, captured, mask)
        dtypes = [item.dtype for item in operands]
        if not isinstance(kernel, Kernel) or [item.dtype for item in kernel.inputs] != dtypes:
            continue
        kind = definition.name.rpartition("_")[0]
        outputs = [torch.empty(int(item.extent), dtype=item.dtype, device=mask.kv_indices.device)
                   for item in kernel.outputs]  # fmt: skip
        candidates = streaming_configurations(kernel, int)
        with ThreadPoolExecutor(8) as pool:
            runs = pool.map(partial(_launch, kernel, [*operands, *outputs]), candidates)
        yield from [(f"{kind}: {item}", run) for item, run in zip(candidates, runs, strict=True) if run is not None]


def _operands(
    definition: KernelDefinition, leaves: Sequence[Tensor], captured: Sequence[Tensor], mask: Any
) -> list[Tensor]:
    """Returns the operands of a kernel of attention; none for another kernel."""
    keys = [mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices]
    queries = [mask.q_num_blocks, mask.q_indices, mask.full_q_num_blocks, mask.full_q_indices]
    query, key, value = [item.detach() for item in leaves]
    statistic = torch.ones(query.shape[:3], device=query.device)
    operands = {
        "flex_attention": [*keys, query, key, *captured, value],
        "flex_attention_grad_query": [*keys, query, key, query, value, *captured, statistic, statistic],
        "flex_attention_grad_key_value": [*queries, query, key, query, value, *captured, statistic, statistic],
    }
    return operands.get(definition.name.rpartition("_")[0], [])


def _launch(kernel: Kernel, operands: Sequence[Tensor], item: StreamingConfiguration) -> Callable[[], Any] | None:
    """Returns a launch of a kernel in a configuration; None for one that the processor has no memory for."""
    printed = print_triton(kernel, item)
    run = partial(load_kernel("triton", printed.source, printed.signature, printed.options), printed.grid, *operands)
    try:
        run()
    except Exception as error:  # noqa: BLE001 - other processors have less memory
        print(f"{item}: {error}")
        return None
    return run
