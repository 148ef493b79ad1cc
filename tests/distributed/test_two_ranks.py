"""Two processes with Gloo: each case of `cases.py`, in every emitter, has the results and gradients of eager."""

from __future__ import annotations

from pathlib import Path

from tests.distributed.cases import CASES, EXAMPLE
from tests.distributed.processes import run_ranks


def test_two_ranks_agree_with_eager_in_every_emitter(tmp_path: Path) -> None:
    for number, results in enumerate(run_ranks("tests.distributed.rank", tmp_path)):
        assert results == dict.fromkeys([*CASES, EXAMPLE.stem], ""), f"rank {number}:\n" + "\n".join(results.values())
