"""Compiled graphs leave nothing behind: no objects of fxwrap, no entries in its tables."""

from __future__ import annotations

import copy
import gc
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache

import pytest
import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap import Options
from fxwrap.caching import bounded_cache, clear_caches, shared_cache
from fxwrap.runtime.native.background import join_background
from tests.support.garbage import freeze_heap
from tests.support.long_form import sample_size

_WARM_UP_GRAPHS = 3


@pytest.fixture(autouse=True)
def small_heap() -> None:
    """Leaves out what other tests have left."""
    freeze_heap()


def fxwrap_objects() -> Counter[str]:
    """Objects of fxwrap's classes that are alive after a collection, by class."""
    clear_caches()
    for _ in range(3):
        gc.collect()
    classes = [type(item) for item in gc.get_objects()]
    return Counter(kind.__qualname__ for kind in classes if str(kind.__module__).startswith("fxwrap"))


def table_sizes() -> dict[str, int]:
    """Lengths of the module-level tables of fxwrap."""
    return {
        f"{name}.{key}": len(item)
        for name, module in list(sys.modules.items())
        if name.startswith("fxwrap.")
        for key, item in vars(module).items()
        if not key.startswith("__") and isinstance(item, Mapping | set | list)
    }


def _function(x: torch.Tensor, y: torch.Tensor, offset: int = 0) -> torch.Tensor:
    return (x @ y * 2 + offset).relu().sum(1)


@cache
def _captured() -> GraphModule:
    return make_fx(lambda x, y: _function(x, y), tracing_mode="fake")(torch.randn(4, 8), torch.randn(8, 4))


def compile_and_run(offset: int, emitter: str) -> None:
    inputs = [torch.randn(4, 8), torch.randn(8, 4)]
    module = GraphModule(_captured(), copy.deepcopy(_captured().graph))
    (add,) = module.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)
    add.update_arg(1, offset)
    compiled = fxwrap.compile_graph(module, options=Options(emitter=emitter, fuse=False))
    torch.testing.assert_close(compiled(*inputs)[0], _function(*inputs, offset))


def compile_with_dynamo(size: int, _emitter: str) -> None:
    torch.compile(lambda x: x.t() @ x + size, backend="fxwrap", options={"emitter": "python", "fuse": False})(
        torch.randn(4, size)
    )
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("run", "emitter", "graphs"),
    [
        (compile_and_run, "python", sample_size(500, part=50)),
        (compile_and_run, "fx", sample_size(470, part=47)),
        (compile_with_dynamo, "python", sample_size(30, part=10)),
    ],
    ids=["python", "fx", "dynamo"],
)
def test_compiled_graphs_leave_nothing(run: Callable[[int, str], None], emitter: str, graphs: int) -> None:
    for size in range(2, 2 + _WARM_UP_GRAPHS):
        run(size, emitter)
    objects, tables = fxwrap_objects(), table_sizes()
    for size in range(10, 10 + graphs):
        run(size, emitter)
    assert dict(fxwrap_objects() - objects) == {}
    assert {name: size for name, size in table_sizes().items() if size > tables.get(name, size)} == {}


def test_kernels_live_as_long_as_their_programs() -> None:
    """A fused program owns its launchers and sources; nothing but the loaded library remains of it."""

    def one(number: float) -> None:
        graph = make_fx(lambda x: x.sin() * number + 1, tracing_mode="fake")(torch.randn(64))
        for emitter in ("python", "fx"):
            x = torch.randn(64)
            compiled = fxwrap.compile_graph(graph, options=Options(emitter=emitter))
            assert compiled.program.kernels
            torch.testing.assert_close(compiled(x)[0], x.sin() * number + 1)

    one(0.5)
    join_background()  # launchers live until the bridge, which this process may compile, has theirs
    objects, tables = fxwrap_objects(), table_sizes()
    one(1.5)
    join_background()
    assert dict(fxwrap_objects() - objects) == {}
    assert {name: size for name, size in table_sizes().items() if size > tables.get(name, size)} == {}


class _Launcher:
    pass


def test_shared_objects_are_found_while_they_are_in_use() -> None:
    create = shared_cache(1)(lambda name: _Launcher())
    first = create("a")
    create("b")
    assert create("a") is first
    clear_caches()
    assert create("a") is first
    reference = weakref.ref(first)
    del first
    create("b")  # the one strong reference is to this one
    assert reference() is None


def test_bounded_caches_forget_the_oldest() -> None:
    calls: list[int] = []

    @bounded_cache(2)
    def double(number: int) -> int:
        calls.append(number)
        return 2 * number

    assert [double(number) for number in (1, 2, 1, 3, 1, 2)] == [2, 4, 2, 6, 2, 4]
    assert calls == [1, 2, 3, 2]
    clear_caches()
    assert double(1) == 2 and calls[-1] == 1
