"""`import fxwrap` imports the runtime alone: its time is that of few modules, none of which imports SymPy or Triton.

Without it, torch finds the backend by its name.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

FRESH = """
import json, os, sys
import torch
before = set(sys.modules)
if os.fork() == 0:
    model = torch.nn.Linear(4, 4)
    compiled, x = torch.compile(model, backend="fxwrap"), torch.randn(2, 4)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
    os._exit(0 if "fxwrap" in sys.modules else 2)
status = os.waitstatus_to_exitcode(os.wait()[1])
import fxwrap
print(json.dumps({"by_name": status, "modules": sorted(set(sys.modules) - before)}))
"""

# The runtime, with what it imports. A process that compiles imports the rest.
ROOMS = frozenset({"builtin_devices", "caching", "devices", "errors", "runtime", "torch_compat"})
MOST_MODULES = 73


@pytest.fixture(scope="module")
def fresh() -> dict[str, Any]:
    """The results of a process that has imported torch, and imports fxwrap; its child names the backend."""
    done = subprocess.run([sys.executable, "-c", FRESH], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return {**result, "errors": done.stderr}


def test_import_is_limited_to_the_runtime(fresh: dict[str, Any]) -> None:
    modules: list[str] = fresh["modules"]
    assert "fxwrap" in modules and "fxwrap.runtime.library" in modules, "exported programs' operators are registered"
    own = [name for name in modules if name.startswith("fxwrap")]
    rooms = {name.split(".")[1] for name in own if "." in name}
    assert rooms <= ROOMS, f"import fxwrap imports {sorted(rooms - ROOMS)}"
    assert len(own) <= MOST_MODULES, own
    others = {name.split(".")[0] for name in modules} - {"fxwrap"}
    assert others <= {"torch", *sys.stdlib_module_names}, f"import fxwrap imports {sorted(others)}"


def test_the_backend_is_found_by_name_without_an_import(fresh: dict[str, Any]) -> None:
    assert fresh["by_name"] == 0, fresh["errors"]
