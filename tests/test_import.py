"""`import fxwrap` imports the runtime alone: its time is that of few modules, none of which imports SymPy or Triton."""

from __future__ import annotations

import subprocess
import sys

IMPORTED = """
import sys
import torch
before = set(sys.modules)
import fxwrap
print("\\n".join(sorted(set(sys.modules) - before)))
"""

# The runtime, with what it imports. A process that compiles imports the rest.
ROOMS = frozenset({"builtin_devices", "caching", "devices", "errors", "runtime", "torch_compat"})
MOST_MODULES = 72


def test_import_is_limited_to_the_runtime() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORTED], capture_output=True, text=True, check=True)
    modules = done.stdout.split()
    assert "fxwrap.runtime.library" in modules, "the operators of exported programs are not registered"
    own = [name for name in modules if name.startswith("fxwrap")]
    rooms = {name.split(".")[1] for name in own if "." in name}
    assert rooms <= ROOMS, f"import fxwrap imports {sorted(rooms - ROOMS)}"
    assert len(own) <= MOST_MODULES, own
    others = {name.split(".")[0] for name in modules} - {"fxwrap"}
    assert others <= {"torch", *sys.stdlib_module_names}, f"import fxwrap imports {sorted(others)}"
