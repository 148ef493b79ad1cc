"""Two GPUs with NCCL: communication is fused over symmetric memory and captured in CUDA graphs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.conftest import NO_SECOND_CUDA
from tests.distributed.gpu_rank import CHECKS
from tests.distributed.processes import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.device_count() < 2, reason=NO_SECOND_CUDA),
]


def test_two_gpus(tmp_path: Path) -> None:
    for number, results in enumerate(run_ranks("tests.distributed.gpu_rank", tmp_path, "2", *CHECKS)):
        assert results == dict.fromkeys(CHECKS, ""), f"rank {number}:\n" + "\n".join(results.values())
