"""Runs many random distributed programs on two ranks: `python -m tests.distributed.random_runs [COUNT [SEED]]`."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.distributed.processes import run_ranks


def main(arguments: Sequence[str]) -> int:
    """Prints the errors of each rank; returns the exit status."""
    count, first = arguments[0] if arguments else "500", arguments[1] if len(arguments) > 1 else "0"
    with tempfile.TemporaryDirectory() as folder:
        ranks = run_ranks("tests.distributed.overlap_rank", Path(folder), count, first, timeout=3600)
    for number, results in enumerate(ranks):
        print(f"rank {number}: {results['random'] or f'{count} programs from seed {first} return the same bits'}")
    return int(any(results["random"] for results in ranks))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
