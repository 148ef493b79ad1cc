"""Training on several ranks has the losses, gradients and parameters of eager.

`make distributed` runs all cases on 2 and 4 ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from tests.conftest import NO_SECOND_CUDA
from tests.distributed.processes import run_ranks
from tests.distributed.training_cases import CASES, GPU_CASES
from tests.support.long_form import LONG

IN_SUITE = ("experts", "whole_step_of_fsdp_and_experts", *(("fsdp_of_blocks", "whole_step_of_ddp") if LONG else ()))
"""Cases that `test_two_ranks.py` has nothing like; `tests/training/test_data_parallel.py` has steps with DDP."""

GPU_PARTS = 6
"""Pairs of processes that share the cases on GPUs: each pair starts once."""


def run_cases(names: Sequence[str], folder: Path, world_size: int, device: str = "cpu") -> None:
    arguments = (str(world_size), device, "fxwrap", *names)
    ranks = run_ranks("tests.distributed.training_rank", folder, *arguments, world_size=world_size)
    for number, results in enumerate(ranks):
        assert results == dict.fromkeys(names, ""), f"rank {number}:\n" + "\n".join(results.values())


def test_two_ranks(tmp_path: Path) -> None:
    run_cases(IN_SUITE, tmp_path, 2)


@pytest.mark.long  # `rank.py` has the same on two ranks
def test_four_ranks(tmp_path: Path) -> None:
    run_cases(["fsdp_and_tensor_parallel"], tmp_path, 4)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason=NO_SECOND_CUDA)
@pytest.mark.parametrize("part", range(GPU_PARTS))
def test_two_gpus(part: int, tmp_path: Path) -> None:
    run_cases(list(GPU_CASES)[part::GPU_PARTS], tmp_path, 2, "cuda")


def main() -> None:
    """Runs each case by itself on 2 and 4 ranks."""
    for world_size in (2, 4):
        for name in CASES:
            with TemporaryDirectory() as folder:
                run_cases([name], Path(folder), world_size)
            sys.stdout.write(f"{world_size} ranks, {name}: equal to eager\n")


if __name__ == "__main__":
    main()
