"""One rank: runs each training case in eager and compiled, and prints the result of each as a line of JSON."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed

from tests.distributed.processes import run_checks
from tests.distributed.training_cases import GPU_CASES, identity

COMMUNICATION = {"cpu": "gloo", "cuda": "nccl"}
"""The communication backend of each device type."""


def check(name: str, backend: str) -> None:
    """Compares a compiled case with eager."""
    results = []
    for compile_ in (identity, partial(torch.compile, backend=backend)):
        torch._dynamo.reset()
        torch.manual_seed(0)
        results.append(GPU_CASES[name](compile_))
    assert len(results[0]) == len(results[1])
    for expected, have in zip(*results, strict=True):
        tolerance: dict[str, Any] = {"rtol": 2e-2, "atol": 2e-2} if "mixed" in name else {"rtol": 1e-4, "atol": 1e-5}
        torch.testing.assert_close(have, expected, **tolerance)


def main(arguments: Sequence[str]) -> None:
    """Runs the cases: `training_rank.py RANK STORE WORLD_SIZE DEVICE BACKEND CASES...`."""
    rank, world, device, backend, names = int(arguments[0]), int(arguments[2]), *arguments[3:5], arguments[5:]
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
        torch.set_default_device(torch.device(device, rank))
    checks = {name: partial(check, name, backend) for name in names}
    run_checks(arguments, checks, world, backend=COMMUNICATION[device], timeout_s=180)


if __name__ == "__main__":
    main(sys.argv[1:])
