"""One rank: runs each training case in eager and compiled, and prints the result of each as a line of JSON."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed

from tests.distributed.training_cases import CASES, identity


def check(name: str, backend: str) -> None:
    """Compares a compiled case with eager."""
    results = []
    for compile_ in (identity, partial(torch.compile, backend=backend)):
        torch._dynamo.reset()
        torch.manual_seed(0)
        results.append(CASES[name](compile_))
    assert len(results[0]) == len(results[1])
    for expected, have in zip(*results, strict=True):
        tolerance: dict[str, Any] = {"rtol": 2e-2, "atol": 2e-2} if "mixed" in name else {"rtol": 1e-4, "atol": 1e-5}
        torch.testing.assert_close(have, expected, **tolerance)


def main(arguments: Sequence[str]) -> None:
    """Runs the cases: `training_rank.py RANK STORE WORLD_SIZE BACKEND CASES...`."""
    rank, world, backend, names = int(arguments[0]), int(arguments[2]), arguments[3], arguments[4:]
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(arguments[1], world)
    timeout = timedelta(seconds=60)  # a rank that failed does not take part in collectives
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
    for name in names:
        error = ""
        try:
            check(name, backend)
        except Exception:  # noqa: BLE001  # the other cases run too
            error = traceback.format_exc()
        print(json.dumps({"case": name, "error": error}), flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
