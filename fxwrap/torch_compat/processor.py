"""Properties of the processor."""

from __future__ import annotations

import torch


def multiplies_bfloat16_matrices() -> bool:
    """Whether the processor has matrix instructions for bfloat16 (Intel's AMX).

    Why: torch publishes the processor's vector width alone (`torch.backends.cpu.get_cpu_capability`).
    """
    return torch.cpu._is_amx_tile_supported()


def multiplies_bfloat16_pairs() -> bool:
    """Whether the processor adds products of two pairs of bfloat16 to a float in one instruction (AVX512_BF16).

    Why: as for `multiplies_bfloat16_matrices`.
    """
    return torch.cpu._is_avx512_bf16_supported()


def multiplies_bytes_exactly() -> bool:
    """Whether libraries sum products of unsigned and signed bytes exactly (x86 processors with VNNI).

    On others, oneDNN adds two products in 16 bits, which saturate.

    Why: as for `multiplies_bfloat16_matrices`.
    """
    return torch.cpu._is_vnni_supported()


def sums_empty_groups(device: torch.device) -> bool:
    """Whether a grouped matmul along the rows returns zeros for groups without rows, as gradients of weights need.

    Why: on GPUs of compute capability 10 its results for these groups are not zero (pytorch/pytorch#172439).
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        return True
    return torch.cuda.get_device_capability(device)[0] < 10
