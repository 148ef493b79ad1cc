"""Settings that all tests of a process share: a test that leaves one changed decides what those after it test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch._dynamo.config
import torch._functorch.config

_ENVIRONMENT = ("FXWRAP_", "TRITON_INTERPRET", "CXX", "PATH", "TMPDIR")
"""How names of variables begin that fxwrap, its compilers and child processes read; libraries set others for good."""


def process_settings() -> dict[str, object]:
    """Returns the settings of this process by name. It takes some microseconds: each test calls it twice."""
    return {
        "the default dtype": torch.get_default_dtype(),
        "deterministic algorithms": (
            torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        "the precision of matmuls": torch.get_float32_matmul_precision(),
        "the grad mode": torch.is_grad_enabled(),
        "the number of threads": torch.get_num_threads(),
        "torch._dynamo.config": torch._dynamo.config.get_hash(),
        "torch._functorch.config": torch._functorch.config.get_hash(),
        "the current folder": os.getcwd(),
        "the environment": {name: value for name, value in os.environ.items() if name.startswith(_ENVIRONMENT)},
    }  # fmt: skip


@contextmanager
def settings_unchanged() -> Iterator[None]:
    """Raises AssertionError, with their names, if settings are others at the end."""
    before = process_settings()
    yield
    after = process_settings()
    changed = [name for name in before if before[name] != after[name]]
    assert not changed, f"the test changed {', '.join(changed)} for the tests after it: restore what was there"
