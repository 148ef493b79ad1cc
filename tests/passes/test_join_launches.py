"""Launches of like kernels become one where nothing tells the difference but the clock.

A CPU with Triton's kernels and a GPU's facts shows what a GPU's programs are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap import Options
from fxwrap.compiler import Compiled, compile_graph
from fxwrap.device_spec import CPU
from fxwrap.lines import Alloc, Launch
from fxwrap.passes import join_launches as joining
from fxwrap.passes.join_launches import join_launches
from fxwrap.wrapper_ir import Program, live_bytes, verify
from tests.capture import watching
from tests.read_back import assert_equal

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SMALL = 1 << 12
ALIKE = dataclasses.replace(CPU, joined_launches=SMALL)
OPTIONS = Options(devices=(ALIKE,), cpu_kernels="triton", fallback="error", compile_cache=False)


def graph(function: Callable[..., Any], *inputs: Tensor) -> torch.fx.GraphModule:
    return make_fx(function, tracing_mode="fake")(*inputs)


def lowered(function: Callable[..., Any], *inputs: Tensor) -> Program:
    return fxwrap.lower(graph(function, *inputs), options=OPTIONS)


def joined(program: Program, most: int = SMALL) -> Program:
    return verify(join_launches(program, {"cpu": most}))


def launches(program: Program) -> list[Launch]:
    return [line for line in program.body.lines if isinstance(line, Launch)]


def check(function: Callable[..., Any], *inputs: Tensor, most: int = SMALL) -> Program:
    """Returns the joined program, which gives what the other one gives and what eager does."""
    program = lowered(function, *inputs)
    found = joined(program, most)
    wanted = function(*[item.clone() for item in inputs])
    for one in (program, found):
        given = fxwrap.run(one, [item.clone() for item in inputs])
        torch.testing.assert_close(list(given), list(wanted), rtol=1e-5, atol=1e-6)
    return found


def vectors(*sizes: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.rand(size, generator=generator) + 0.5 for size in sizes]


def each(*given: Tensor) -> tuple[Tensor, ...]:
    return tuple([item.sin() * 2 for item in given])


def test_independent_launches_become_one() -> None:
    found = check(each, *vectors(20, 24, 30))
    (launch,) = launches(found)
    assert [value.name for value in launch.arguments] == [item.name for item in found.inputs]
    assert len(launch.outs) == 3
    assert [kernel.name for kernel in found.kernels] == [launch.kernel]
    assert launch.kernel.startswith("joined_")


def test_where_the_joined_launch_came_from() -> None:
    program = lowered(each, *vectors(20, 24))
    (launch,) = launches(joined(program))
    assert launch.origin is not None
    nodes = [node for line in launches(program) if line.origin is not None for node in line.origin.nodes]
    assert list(launch.origin.nodes) == nodes


def test_what_needs_the_others_result_is_not_joined() -> None:
    """Means of columns, each of which reads all that the one before wrote, are equal kernels."""

    def chain(x: Tensor) -> tuple[Tensor]:
        for _ in range(3):
            x = x.mean(0).unsqueeze(0).expand(20, 20).contiguous().t().cumsum(0)
        return (x,)

    program = lowered(chain, torch.rand(20, 20))
    assert len({line.kernel for line in launches(program)}) < len(launches(program))
    assert len(launches(check(chain, torch.rand(20, 20)))) == len(launches(program))


def test_what_needs_the_others_result_through_another_call_is_not_joined() -> None:
    def chain(x: Tensor, y: Tensor) -> tuple[Tensor]:
        return (torch.softmax(torch.mm(torch.softmax(x, -1), y), -1),)

    assert len(launches(check(chain, torch.rand(5, 5), torch.rand(5, 5)))) == 2


def test_results_are_made_late_and_inputs_read_early() -> None:
    """What the calls between them read is computed before them, and what they make is read after them."""

    def between(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        first = torch.mm(torch.softmax(x, -1), w)
        second = torch.mm(torch.softmax(y, -1), w)
        return first, second, torch.softmax(first, -1), torch.softmax(second, -1)

    found = check(between, *[torch.rand(6, 6) for _ in range(3)])
    kinds = [type(line).__name__ for line in found.body.lines if type(line).__name__ in ("Launch", "Call")]
    assert kinds == ["Launch", "Call", "Call", "Launch"]


def test_allocations_stand_right_before_what_writes_them() -> None:
    def between(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        return torch.mm(x, w).sin() * 2, torch.mm(y, w).sin() * 2

    found = check(between, *[torch.rand(6, 6) for _ in range(3)])
    lines = [line for line in found.body.lines if isinstance(line, Alloc | Launch)]
    assert len(launches(found)) == 1
    assert isinstance(lines[-1], Launch)


def test_writes_in_place_stay_in_their_order() -> None:
    x = torch.rand(12)

    def overlapping(x: Tensor) -> tuple[Tensor, ...]:
        x[:8].mul_(2)
        x[4:].mul_(2)
        return (x + 0,)

    inputs = [x.clone()]
    module = make_fx(functionalize(overlapping, remove="mutations_and_views"), tracing_mode="fake")(*inputs)
    program = fxwrap.lower(module, options=OPTIONS)
    given, wanted = x.clone(), x.clone()
    torch.testing.assert_close(list(fxwrap.run(joined(program), [given])), list(overlapping(wanted)))
    torch.testing.assert_close(given, wanted)


def test_no_more_memory_is_held_than_a_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight rows of sums, each of a product: to join all would hold all products at once."""
    monkeypatch.setattr(joining, "MOST_HELD", 0)

    def sums(*given: Tensor) -> tuple[Tensor, ...]:
        return tuple([torch.softmax(torch.mm(x, x), -1).square().sum(-1) for x in given])

    inputs = [torch.rand(size, size) for size in range(17, 25)]
    program = lowered(sums, *inputs)
    found = joined(program)
    assert live_bytes(found).peak <= live_bytes(program).peak
    monkeypatch.setattr(joining, "MOST_HELD", 1 << 20)
    more = joined(program)
    assert len(launches(more)) < len(launches(found)) <= len(launches(program))
    assert live_bytes(more).peak > live_bytes(program).peak
    torch.testing.assert_close(list(fxwrap.run(more, inputs)), list(sums(*inputs)))


def test_large_launches_stay() -> None:
    inputs = vectors(500, 700, 600, 20, 24)
    found = check(each, *inputs)
    assert sorted(len(line.outs) for line in launches(found)) == [1, 1, 1, 2]
    assert len(launches(check(each, *inputs[:3], most=1 << 20))) == 1


def test_devices_without_a_limit_stay_as_they_are() -> None:
    program = lowered(each, *vectors(20, 24))
    assert join_launches(program, {"cuda": SMALL}) is program
    assert join_launches(program, {"cpu": 0}) is program


def test_languages_without_a_joiner_stay_as_they_are() -> None:
    program = fxwrap.lower(graph(each, *vectors(20, 24)), options=OPTIONS.replace(cpu_kernels="cpp"))
    assert len(launches(program)) == 2
    assert join_launches(program, {"cpu": SMALL}) is program


def test_sizes_that_are_not_known_stay_apart() -> None:
    module = make_fx(each, tracing_mode="symbolic")(*vectors(20, 24))
    program = fxwrap.lower(module, options=OPTIONS)
    assert len(launches(program)) == 2
    assert join_launches(program, {"cpu": SMALL}) is program


def test_a_joined_launch_takes_so_many_tensors_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "MOST_TENSORS", 6)
    found = check(each, *vectors(*range(20, 30)))
    assert [len(line.outs) for line in launches(found)] == [3, 3, 3, 1]


def test_equal_joined_kernels_are_one() -> None:
    def function(*given: Tensor) -> tuple[Tensor, ...]:
        first = [torch.softmax(torch.mm(item, item), -1) for item in given]
        return tuple([torch.softmax(torch.mm(item, item), -1) for item in first])

    found = check(function, torch.rand(5, 5), torch.rand(6, 6))
    assert [line.kernel for line in launches(found)] == ["joined_softmax_0", "joined_softmax_0"]
    assert len(found.kernels) == 1


STEPS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x.sin() * 2,
    lambda x: torch.softmax(x, -1),
    lambda x: torch.mm(x, x),
    lambda x: x.sum(0, keepdim=True) + x,
    lambda x: x.t().contiguous(),
]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(STEPS) - 1), st.integers(0, 7)), min_size=4, max_size=14))
def test_random_programs(steps: Sequence[tuple[int, int]]) -> None:
    def function(*given: Tensor) -> tuple[Tensor, ...]:
        values = list(given)
        for kind, operand in steps:
            values.append(STEPS[kind](values[operand % len(values)]) / 2)
        return tuple(values[len(given) :])

    inputs = [torch.rand(4, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    check(function, *inputs)


@pytest.mark.parametrize("emitter", ["python", "fx", "interpreter"])
def test_the_pipeline_joins(emitter: str) -> None:
    inputs = vectors(20, 24, 30)
    compiled = compile_graph(graph(each, *inputs), options=OPTIONS.replace(emitter=emitter))
    assert [stage.made_by for stage in compiled.stages][:3] == ["lower", "fold_views", "join_launches"]
    (launch,) = launches(compiled.program)
    assert launch.origin is not None
    assert launch.origin.handle == f"{launch.kernel}:1"
    torch.testing.assert_close(compiled(*inputs), each(*inputs))
    apart = compile_graph(graph(each, *inputs), options=OPTIONS.replace(emitter=emitter, join_launches=False))
    assert len(launches(apart.program)) == 3


def test_an_emitted_graph_with_joined_launches_is_read_back() -> None:
    """With definitions in the order in which they are launched, whatever moved."""

    def function(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, ...]:
        return torch.mm(x.sin() * 2, x), z.cumsum(0), torch.mm(y.sin() * 2, y), z.sum(0)

    inputs = [torch.rand(6, 6), torch.rand(7, 7), torch.rand(30, 40)]
    compiled = compile_graph(graph(function, *inputs), options=OPTIONS.replace(emitter="fx"))
    names = [line.kernel for line in launches(compiled.program)]
    assert any(name.startswith("joined_") for name in names)
    assert [kernel.name for kernel in compiled.program.kernels] == list(dict.fromkeys(names))
    again = fxwrap.from_fx(compiled.graph_module)
    assert_equal(compiled.program, again)
    torch.testing.assert_close(list(fxwrap.run(again, inputs)), list(function(*inputs)))


def test_memory_is_watched_in_joined_programs() -> None:
    inputs = [torch.rand(6, 6) for _ in range(3)]

    def function(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        return torch.softmax(torch.mm(x, w), -1), torch.softmax(torch.mm(y, w), -1)

    compiled: Compiled = compile_graph(graph(function, *inputs), options=OPTIONS.replace(check_memory=True))
    assert len(launches(compiled.program)) == 1
    torch.testing.assert_close(compiled(*inputs), function(*inputs))


# --- on a GPU -------------------------------------------------------------------------------------------------------


def on_gpu(function: Callable[..., Any], inputs: Sequence[Tensor], emitter: str, graphs: bool) -> Program:
    """Compiles a function, compares three calls with eager's, and returns the program."""
    given = [item.cuda() for item in inputs]
    module = make_fx(function, tracing_mode="fake")(*given)
    compiled = compile_graph(module, options=Options(emitter=emitter, cuda_graphs=graphs, fallback="error"))
    for number in range(3):
        here = [item + number for item in given]
        torch.testing.assert_close(list(compiled(*here)), list(function(*here)), rtol=1e-4, atol=1e-4)
    return compiled.program


def of_many_kinds(*given: Tensor) -> tuple[Tensor, ...]:
    """Pointwise kernels, transposed ones, rows that fit into registers, rows that are walked, sums of columns."""
    found: list[Tensor] = []
    for x in given:
        found += [x.sin() * 2, x.t().contiguous() + 1, torch.softmax(x, -1), x.sum(0)]
    return tuple(found)


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("emitter", ["python", "cpp", "fx"])
def test_kernels_of_many_kinds_on_a_gpu(emitter: str, graphs: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(100, 300), (120, 300), (64, 256), (96, 256), (3, 20000), (5, 20000), (300, 500), (310, 500)]
    inputs = [torch.randn(shape, generator=generator) for shape in shapes]
    program = on_gpu(of_many_kinds, inputs, emitter, graphs)
    assert any(kernel.name.startswith("joined_") for kernel in program.kernels)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*Profiler record function")
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("emitter", ["python", "cpp", "fx"])
def test_a_step_of_an_optimizer_on_a_gpu(emitter: str, graphs: bool) -> None:
    torch._dynamo.reset()
    compiled: list[Compiled] = []
    shapes = [(768,), (2304,), (768, 2304), (768,), (768, 768), (768,), (3072,), (768, 3072), (50, 30), (11,)] * 4
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(shape, generator=generator) for shape in shapes]
    sides = [[torch.nn.Parameter(item.cuda()) for item in drawn] for _ in range(2)]
    optimizers = [torch.optim.AdamW(side, weight_decay=0.1, capturable=True) for side in sides]
    options = Options(emitter=emitter, cuda_graphs=graphs)
    steps = [torch.compile(optimizers[0].step, backend=watching(compiled, options)), optimizers[1].step]
    for number in range(4):
        for side, step in zip(sides, steps, strict=True):
            for place, parameter in enumerate(side):
                parameter.grad = torch.cos(drawn[place] * number).cuda()
            step()
    torch.testing.assert_close(sides[0], sides[1], rtol=1e-5, atol=1e-6)
    for part in compiled:
        before, after = part.stages[1].program, part.program
        assert len([line for line in after.lines() if isinstance(line, Launch)]) * 3 < len(launches(before))
