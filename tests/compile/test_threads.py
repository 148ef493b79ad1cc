"""Compiles in several threads at once: tracing replaces parts of torch for the whole process."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import ExportedProgram

import fxwrap
from fxwrap import Options

OPTIONS = Options(fuse=False)


@pytest.fixture
def often_switching() -> Iterator[None]:
    """Threads take turns after a few microseconds."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.packed = nn.Linear(width, 3 * width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.packed(x).chunk(3, -1)
        return F.layer_norm((query @ key.mT / 4).softmax(-1) @ value, x.shape[-1:]) + x.std(-1, keepdim=True)


@dataclass(frozen=True)
class Case:
    """A model and an input; the model was exported in advance, because torch exports in one thread at a time."""

    model: nn.Module
    x: Tensor
    exported: ExportedProgram


def _compile(case: Case) -> Tensor:
    return fxwrap.compile_graph(case.exported, options=OPTIONS)(case.x)  # type: ignore[return-value]


def _lower(case: Case) -> Tensor:
    program = fxwrap.lower(case.exported, options=OPTIONS)
    return fxwrap.run(program, [case.x])[0]  # type: ignore[return-value]


def _export_and_compile(case: Case) -> Tensor:
    return fxwrap.compile_graph(case.model, (case.x,), options=OPTIONS)(case.x)  # type: ignore[return-value]


def _torch_compile(case: Case) -> Tensor:
    compiled = torch.compile(case.model, backend="fxwrap", options={"fuse": False})
    return compiled(case.x)  # type: ignore[no-any-return]


def _train(case: Case) -> Tensor:
    """Compiles the backward later, in autograd."""
    with torch.enable_grad():
        compiled = torch.compile(case.model, backend="fxwrap", options={"fuse": False})
        result: Tensor = compiled(case.x)
        result.square().sum().backward()
    return result.detach()


def _compile_step(case: Case) -> Tensor:
    optimizer = torch.optim.SGD(case.model.parameters(), lr=0.0)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        result: Tensor = case.model(x)
        result.square().mean().backward()
        optimizer.step()
        return result.detach()

    with torch.enable_grad():
        return fxwrap.compile_step(step, (case.x,), options=OPTIONS)(case.x)  # type: ignore[return-value]


TOGETHER = {
    "entry points": [_compile, _lower, _export_and_compile, _compile_step],
    "beside Dynamo": [_compile, _lower, _torch_compile, _train],
}


@pytest.mark.parametrize("together", TOGETHER)
def test_compiles_wait_for_those_of_other_threads(together: str, often_switching: None) -> None:
    """Without waiting, torch raises errors such as `Trying to override a python impl` now and then."""
    compiles = TOGETHER[together] * 2
    cases = []
    for width in range(4, 4 + len(compiles)):
        model, x = Attention(width), torch.randn(3, width)
        cases.append(Case(model, x, torch.export.export(model, (x,))))
    _torch_compile(cases[0])  # torch cannot register a backend's name in two threads at once
    barrier = threading.Barrier(len(compiles))

    def work(compile_with: Callable[[Case], Tensor], case: Case) -> Tensor:
        barrier.wait(600)
        with torch.no_grad():
            return compile_with(case)

    with ThreadPoolExecutor(len(compiles)) as threads:
        results = list(threads.map(work, compiles, cases))
    for result, case in zip(results, cases):
        torch.testing.assert_close(result, case.model(case.x).detach(), rtol=1e-4, atol=1e-5)
