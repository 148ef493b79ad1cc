"""Tests do not depend on those that ran before them in the process, whichever a worker takes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch._dynamo.config
import torch._functorch.config
from torch import Tensor
from torch.fx import GraphModule

from tests.support.process_settings import settings_unchanged

CHANGES: dict[str, Callable[[], object]] = {
    "the default dtype": lambda: torch.set_default_dtype(torch.float64),
    "deterministic algorithms": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    "the precision of matmuls": lambda: torch.set_float32_matmul_precision("medium"),
    "the grad mode": lambda: torch.set_grad_enabled(False),
    "the number of threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "torch._dynamo.config": lambda: setattr(torch._dynamo.config, "capture_scalar_outputs", True),
    "torch._functorch.config": lambda: setattr(torch._functorch.config, "bundled_autograd_cache", True),
    "the current folder": lambda: os.chdir(Path.cwd().parent),
    "the environment": lambda: os.environ.update(FXWRAP_NOTHING_READS_THIS="1"),
}
"""A change of each setting."""


@pytest.fixture
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undoes each of the changes."""
    dtype, precision, threads = torch.get_default_dtype(), torch.get_float32_matmul_precision(), torch.get_num_threads()
    monkeypatch.chdir(Path.cwd())
    monkeypatch.setenv("FXWRAP_NOTHING_READS_THIS", "0")
    with (
        torch._dynamo.config.patch(capture_scalar_outputs=False),
        torch._functorch.config.patch(bundled_autograd_cache=False),
    ):
        yield
    torch.set_default_dtype(dtype)
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision(precision)
    torch.set_grad_enabled(True)
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", CHANGES)
def test_a_setting_that_stays_changed_is_an_error(name: str, restored: None) -> None:
    error = pytest.raises(AssertionError, match=f"the test changed {name} for the tests after it")
    with error, settings_unchanged():
        CHANGES[name]()


def _doubled(x: Tensor) -> Tensor:
    return x * 2


@pytest.mark.parametrize("size", [3, 4, 5])
def test_a_compile_does_not_know_the_sizes_of_other_tests(size: int) -> None:
    """Dynamo would make the size a symbol, since it differs from that of the test before."""
    graphs: list[GraphModule] = []

    def backend(graph: GraphModule, _inputs: object) -> GraphModule:
        graphs.append(graph)
        return graph

    torch.compile(_doubled, backend=backend)(torch.ones(size))
    (x,) = graphs[0].graph.find_nodes(op="placeholder")
    assert tuple(x.meta["example_value"].shape) == (size,)
