"""Dumps of several processes in one folder."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fxwrap
from tests.support.child_processes import child_environment, run_python

SCRIPT = """
import sys, torch, torch.distributed as dist, fxwrap
rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
for size in (3, 4):
    compiled = torch.compile(lambda x: x.sin() @ x, backend="fxwrap", options={"fuse": False}, dynamic=False)
    compiled(torch.randn(size, size))
dist.barrier()
dist.destroy_process_group()
"""


def test_ranks_of_a_job_share_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "dumps"
    environment = child_environment(FXWRAP_DUMP=str(folder))
    with ThreadPoolExecutor(2) as pool:
        commands = [["-c", SCRIPT, rank, tmp_path / "store"] for rank in range(2)]
        for done in pool.map(lambda command: run_python(command, environment), commands):
            assert done.returncode == 0, done.stderr
    for path in folder.iterdir():
        program = fxwrap.parse((path / "program.txt").read_text())
        assert fxwrap.verify(program).name == "inference"
        assert json.loads((path / "events.json").read_text()) and (path / "index.html").stat().st_size > 10_000
    names = sorted([path.name for path in folder.iterdir()])
    patterns = [rf"rank{rank}-\d+-000[01]-inference-0-[01]" for rank in (0, 0, 1, 1)]
    assert len(names) == 4 and all(map(re.fullmatch, patterns, names))
