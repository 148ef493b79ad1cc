"""Whether a process group can run collectives that are fused with matmuls."""

from __future__ import annotations

import torch

from fxwrap.torch_compat import has_symmetric_memory, load_symmetric_memory_operators, process_group


def symmetric_memory_decline(device: torch.device, group: str) -> str:
    """Returns why matmuls on a device cannot be fused with collectives of a group by symmetric memory; "" if they can.

    They need torch's operators `symm_mem.fused_all_gather_matmul` and `fused_matmul_reduce_scatter`, which run on CUDA
    devices of one host that access each other's memory, in a group whose symmetric memory the user has enabled.
    """
    if device.type != "cuda":
        return f"its tensors are on '{device.type}', and symmetric memory needs CUDA devices"
    if not load_symmetric_memory_operators():
        return "this build of torch has no operators over symmetric memory"
    if process_group(group) is None:
        return f"there is no process group '{group}' now: initialise it before the compile"
    if not has_symmetric_memory(group):
        return (
            f"group '{group}' has no symmetric memory: call "
            f"fxwrap.fused_communication.enable_symmetric_memory('{group}') on all its ranks"
        )
    return ""
