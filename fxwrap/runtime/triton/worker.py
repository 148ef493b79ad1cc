"""A worker process that compiles Triton kernels. It needs Triton and Python, but neither torch nor a GPU.

Its arguments are the id of the parent process and Triton's hash of its own files, "" if the parent does not know it. It
writes a line when it is ready; then it reads jobs and writes answers as lines of JSON: {"error": TEXT}, "" without one,
and "compiled": a description of the kernel, whose files are in Triton's cache on disk. The worker ends with its input
or its parent.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from types import ModuleType
from typing import Any, TextIO


class _TargetDriver:
    """The driver interface that Triton needs to compile for a job's target."""

    def __init__(self) -> None:
        self.target: object = None

    def get_current_target(self) -> object:
        return self.target

    def get_current_device(self) -> str:
        return repr(self.target)  # Triton caches by device

    def get_current_stream(self, _device: str) -> int:
        return 0


@lru_cache(maxsize=64)
def _element_type(name: str) -> object:
    """Returns a stand-in for torch's dtype of this name; Triton only reads names."""

    def text(_self: object) -> str:
        return f"torch.{name}"

    return type("dtype", (), {"__module__": "torch", "__str__": text, "__repr__": text})()


@lru_cache(maxsize=256)
def _function(path: str, name: str) -> Any:
    """Returns a function of a module's file, under its name in the parent process."""
    module = ModuleType(os.path.splitext(os.path.basename(path))[0])
    module.__file__ = path
    with open(path, encoding="utf-8") as file:
        exec(compile(file.read(), path, "exec", dont_inherit=True), module.__dict__)
    return module.__dict__[name]


class _TorchHider:
    """A finder without torch, which Triton 3.6 and 3.7 import for their first kernel, but do not need.

    Importing it takes longer than compiling ten kernels.
    """

    def find_spec(self, name: str, _path: object = None, _target: object = None) -> None:
        if name == "torch":
            raise ModuleNotFoundError(f"workers do not import {name}", name=name)


@contextmanager
def _hidden_torch() -> Iterator[None]:
    """Hides torch from imports, unless a kernel's module has imported it."""
    hider = _TorchHider()
    sys.meta_path.insert(0, hider)
    try:
        yield
    finally:
        sys.meta_path.remove(hider)


def _set_environment(variables: dict[str, str]) -> None:
    for name in [name for name in os.environ if name.startswith("TRITON") and name not in variables]:
        del os.environ[name]
    os.environ.update(variables)


def _compile(job: dict[str, Any], driver_stub: _TargetDriver) -> Any:
    """Returns Triton's compiled kernel."""
    from triton.backends.compiler import GPUTarget

    _set_environment(job["environment"])
    driver_stub.target = GPUTarget(*job["target"])
    arguments = [_element_type(item["dtype"]) if isinstance(item, dict) else item for item in job["arguments"]]
    warmup = partial(_function(job["path"], job["function"]).warmup, *arguments, grid=(1,), **job["constants"])
    try:
        with _hidden_torch():
            return warmup(**job["compile_options"])
    except Exception:  # noqa: BLE001  a kernel that fails or needs torch
        return warmup(**job["compile_options"])


def _answer(job: dict[str, Any], driver_stub: _TargetDriver) -> str:
    """Returns the answer to a job as JSON. The description of a kernel (`WorkerKernel`) that is no JSON is null."""
    try:
        compiled = _compile(job, driver_stub)
    except BaseException as raised:  # noqa: BLE001  the parent reports compiler errors
        return json.dumps({"error": f"{type(raised).__name__}: {raised}"})
    try:
        source = compiled.src
        described = {
            "hash": compiled.hash, "files": compiled.metadata_group, "names": source.fn.arg_names,
            "signature": source.signature, "constants": [*source.constants.items()],
            "attributes": [*source.attrs.items()],
        }  # fmt: skip
        return json.dumps({"error": "", "compiled": described})
    except (AttributeError, TypeError):
        return json.dumps({"error": "", "compiled": None})


def _watch(parent: int) -> None:
    """Ends this process with its parent, even if another process keeps its pipes open."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(0)


_IMPORTED_LATER = ("triton.compiler.code_generator", "triton.experimental.gluon.nvidia.hopper")
"""Modules that Triton 3.6 imports for its first kernel: a worker imports them before there are jobs."""


def _serve(jobs: TextIO, answers: TextIO, key: str) -> None:
    from triton.runtime import cache
    from triton.runtime.driver import driver

    driver_stub = _TargetDriver()
    driver.set_active(driver_stub)
    if key:
        cache.triton_key = lambda: key
    cache.triton_key()  # hashes Triton's files, once
    for module in _IMPORTED_LATER:
        with suppress(ImportError):
            importlib.import_module(module)
    answers.write("ready\n")
    answers.flush()
    for line in jobs:
        answers.write(_answer(json.loads(line), driver_stub) + "\n")
        answers.flush()


def main() -> None:
    """Serves until the input ends. Triton's output goes to stderr: stdout is for answers."""
    threading.Thread(target=_watch, args=(int(sys.argv[1]),), daemon=True).start()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    _serve(sys.stdin, answers, sys.argv[2])


if __name__ == "__main__":
    main()
