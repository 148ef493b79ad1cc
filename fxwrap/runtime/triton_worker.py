"""A process that compiles Triton kernels, and nothing else: it needs Triton and Python, neither torch nor a GPU.

It is run as a program with the number of the process that it works for, and writes a line when it is ready. Then each
line that it reads is a job in JSON, each that it writes the answer: {"error": ""}, or what went wrong as text. What is
compiled is in Triton's cache on disk, where the other process finds it. It ends with its input, and with the process
that it works for.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from types import ModuleType
from typing import Any, TextIO

_FUNCTIONS: dict[str, Any] = {}


class _Chip:
    """What Triton asks its driver for before it compiles: the target of the job."""

    def __init__(self) -> None:
        self.target: Any = None

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> str:
        return repr(self.target)  # Triton keeps what it compiled by device

    def get_current_stream(self, _device: str) -> int:
        return 0


def _element_type(name: str) -> Any:
    """Returns what Triton takes for torch's element type of this name: it looks at names alone."""

    def text(_self: Any) -> str:
        return f"torch.{name}"

    return type("dtype", (), {"__module__": "torch", "__str__": text, "__repr__": text})()


_ELEMENT_TYPES: dict[str, Any] = {}


def _argument(item: Any) -> Any:
    if not isinstance(item, dict):
        return item
    name = str(item["dtype"])
    if name not in _ELEMENT_TYPES:
        _ELEMENT_TYPES[name] = _element_type(name)
    return _ELEMENT_TYPES[name]


def _function(path: str, name: str) -> Any:
    """Returns a function of a module's file, under the name that it has in the other process."""
    found = _FUNCTIONS.get(path)
    if found is None:
        module = ModuleType(os.path.splitext(os.path.basename(path))[0])
        module.__file__ = path
        with open(path, encoding="utf-8") as file:
            exec(compile(file.read(), path, "exec", dont_inherit=True), module.__dict__)
        found = _FUNCTIONS[path] = module.__dict__[name]
    return found


def _set_environment(wanted: dict[str, str]) -> None:
    """Makes Triton's own variables those of the other process, as they are by now."""
    for name in [name for name in os.environ if name.startswith("TRITON") and name not in wanted]:
        del os.environ[name]
    os.environ.update(wanted)


def _compile(job: dict[str, Any], chip: _Chip) -> None:
    from triton.backends.compiler import GPUTarget

    _set_environment(job["environment"])
    chip.target = GPUTarget(*job["target"])
    arguments = [_argument(item) for item in job["arguments"]]
    _function(job["path"], job["function"]).warmup(*arguments, grid=(1,), **job["constants"], **job["choices"])


def _watch(owner: int) -> None:
    """Ends this process when the one that it works for is gone, also where another still holds its pipes open."""
    while os.getppid() == owner:
        time.sleep(1)
    os._exit(0)


def _serve(jobs: TextIO, answers: TextIO) -> None:
    from triton.runtime.cache import triton_key
    from triton.runtime.driver import driver

    chip = _Chip()
    driver.set_active(chip)
    triton_key()  # reads all of Triton, once
    answers.write("ready\n")
    answers.flush()
    for line in jobs:
        error = ""
        try:
            _compile(json.loads(line), chip)
        except BaseException as raised:  # noqa: BLE001  whatever a compiler raises is the other process's to tell
            error = f"{type(raised).__name__}: {raised}"
        answers.write(json.dumps({"error": error}) + "\n")
        answers.flush()


def main() -> None:
    """Serves until the input ends. What Triton prints goes nowhere, as answers have the output for themselves."""
    threading.Thread(target=_watch, args=(int(sys.argv[1]),), daemon=True).start()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    _serve(sys.stdin, answers)


if __name__ == "__main__":
    main()
