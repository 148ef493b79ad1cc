"""Process groups of Gloo without a race of torch's workers, which corrupts the heap once in thousands of programs.

torch gives each group two workers. Both write the name of the collective that they completed last into one string,
without a lock (`ProcessGroupGloo::runLoop` of torch 2.11 to 2.15). Names of more than 15 characters, such as that of
the functional `all_gather_into_tensor` (`ALLGATHER_COALESCED`), are on the heap: a worker that is preempted in its copy
writes into memory that the other one has freed. `python -m tests.distributed.gloo_race` shows it with torch alone.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import distributed_c10d

_WORKER = "pt_gloo_runloop"
"""The name of torch's worker threads."""


def use_one_worker() -> None:
    """Gives each Gloo group that this process makes from now on one worker thread, which runs its collectives in order.

    torch ignores the options of Gloo groups, so its name of the class is that of a subclass.
    """
    original: Any = getattr(distributed_c10d, "ProcessGroupGloo", None)
    if original is None or original.__name__ == "_OneWorker":
        return

    class _OneWorker(original):  # type: ignore[misc]
        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, **others: Any) -> None:
            options = original._Options()
            options._devices = [original.create_default_device()]
            options._timeout = timeout
            options._threads = 1
            for name, value in others.items():  # torch 2.14 has more of them
                setattr(options, name, value)
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = _OneWorker  # type: ignore[misc, attr-defined]


def worker_count() -> int:
    """Returns the number of worker threads of this process's Gloo groups; a thread has its name once it runs."""
    return sum(path.read_text().strip() == _WORKER for path in Path("/proc/self/task").glob("*/comm"))
