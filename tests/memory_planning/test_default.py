"""Where memory is planned without being asked to: in emitted C++ for devices whose allocations take long."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap.devices import CPU
from fxwrap.wrapper_ir import Ownership

POOLED = (replace(CPU, prefers_memory_pools=True),)


def function(x: Tensor) -> Tensor:
    return (x @ x).softmax(1) @ x


CASES: dict[str, tuple[dict[str, object], bool]] = {
    "pooled, C++": ({"emitter": "cpp", "devices": POOLED}, True),
    "pooled, C++, none": ({"emitter": "cpp", "devices": POOLED, "memory_planning": "none"}, False),
    "pooled, C++, graphs": ({"emitter": "cpp", "devices": POOLED, "cuda_graphs": True}, False),
    "pooled, watched": ({"emitter": "cpp", "devices": POOLED, "check_memory": True}, False),
    "pooled, Python": ({"emitter": "python", "devices": POOLED}, False),
    "C++": ({"emitter": "cpp"}, False),
    "Python, auto": ({"emitter": "python", "memory_planning": "auto"}, True),
}
"""Options, and whether memory is planned."""


@pytest.mark.parametrize("name", CASES)
def test_default(name: str) -> None:
    (options, planned), x = CASES[name], torch.randn(8, 8)
    compiled = fxwrap.compile_graph(make_fx(function)(x), [x], options=fxwrap.Options(**options))  # type: ignore[arg-type]
    assert (compiled.plan is not None) == planned
    torch.testing.assert_close(compiled(x)[0], function(x))


def test_a_program_that_returns_its_inputs_has_no_pools() -> None:
    """Like a backward: a pool would add to inputs that are not released yet."""
    x = torch.randn(8, 8)
    graph, options = make_fx(function)(x), fxwrap.Options(emitter="cpp", devices=POOLED)
    planned = {}
    for kind in Ownership:
        compiled = fxwrap.compile_graph(graph, [x], options=options, ownership={0: kind})
        planned[kind] = compiled.plan is not None
    pooled, unpooled = (Ownership.BORROWED, Ownership.MUTABLE), (Ownership.SHARED, Ownership.OWNED)
    assert planned == {**dict.fromkeys(pooled, True), **dict.fromkeys(unpooled, False)}
