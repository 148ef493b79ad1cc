"""What the CPU can do."""

from __future__ import annotations

import torch


def multiplies_bfloat16_matrices() -> bool:
    """Whether the processor has matrix instructions for bfloat16 (Intel's AMX).

    Why: torch publishes the processor's vector width alone (`torch.backends.cpu.get_cpu_capability`).
    """
    return torch.cpu._is_amx_tile_supported()
