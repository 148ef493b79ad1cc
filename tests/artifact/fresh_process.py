"""Saved programs in another process, which never saw their models and finds nothing compiled."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.support.processes import child_environment

SCRIPT = """
import json, os, sys
import torch, fxwrap
torch.backends.cudnn.allow_tf32, torch.backends.cudnn.deterministic = False, True
folder, binaries, tracing = sys.argv[1], sys.argv[2], {}
for name in json.loads(sys.argv[3]):
    loaded = fxwrap.load(f"{folder}/{name}.fxw", binaries=binaries)
    inputs = torch.load(f"{folder}/{name}.inputs")
    torch.save(loaded(*inputs), f"{folder}/{name}.results")
    tracing[name] = [module for module in ("torch._dynamo", "torch._inductor", "functorch.compile",
                     "torch._functorch.aot_autograd") if module in sys.modules]
stages = [name for _, _, names in os.walk(os.environ["TRITON_CACHE_DIR"]) for name in names if name.endswith(".ttir")]
print(json.dumps({"tracing": tracing, "by_triton": stages, "own": os.listdir(os.environ["FXWRAP_CACHE_DIR"])}))
"""


@dataclass(frozen=True)
class FreshProcessResult:
    """Another process's results by the names of programs, and its work for them: the modules of torch's tracing
    that it loaded, Triton's files of kernels that it compiled, and what is in its cache folder."""

    results: Mapping[str, Any]
    tracing: Mapping[str, list[str]]
    by_triton: list[str]
    own: list[str]


def run_in_fresh_process(
    folder: Path, inputs: Mapping[str, Sequence[Any]], compiler: bool = False, binaries: str = "required"
) -> FreshProcessResult:
    """Runs the files NAME.fxw of a folder on these inputs in one process with empty caches.

    There is no C++ compiler unless asked for (Triton needs one to begin with).
    """
    (folder / "path").mkdir()
    environment = child_environment(FXWRAP_CACHE_DIR=str(folder / "cache"), TRITON_CACHE_DIR=str(folder / "triton"))
    if not compiler:
        environment["PATH"] = str(folder / "path")
        environment.pop("CXX", None)
    for name, items in inputs.items():
        torch.save(list(items), folder / f"{name}.inputs")
    command = [sys.executable, "-c", SCRIPT, str(folder), binaries, json.dumps(list(inputs))]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    results = {name: torch.load(folder / f"{name}.results") for name in inputs}
    return FreshProcessResult(results, **json.loads(done.stdout.splitlines()[-1]))
