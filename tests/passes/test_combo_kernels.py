"""Horizontal fusion of launches.

Most tests run Triton kernels on the CPU, with the capabilities of a GPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import TypeAlias

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap import Options, printers
from fxwrap.compile import Compiled, compile_graph
from fxwrap.devices import CPU, DeviceSpec
from fxwrap.lines import Alloc, Launch
from fxwrap.passes.combo_kernels import combine_kernels
from fxwrap.printers import PrintedKernel
from fxwrap.wrapper_ir import Program, live_bytes, verify
from tests.support.capture import recording_backend
from tests.support.long_form import sample_size
from tests.support.program_equality import assert_equal

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

TensorFunction: TypeAlias = Callable[..., tuple[Tensor, ...]]

SMALL = 1 << 12
ALIKE = dataclasses.replace(CPU, combo_kernel_bytes=SMALL)
OPTIONS = Options(devices=(ALIKE,), cpu_kernels="triton", fallback="error", compile_cache=False)


def graph(function: TensorFunction, *inputs: Tensor) -> torch.fx.GraphModule:
    return make_fx(function, tracing_mode="fake")(*inputs)


def lowered(function: TensorFunction, *inputs: Tensor) -> Program:
    return fxwrap.lower(graph(function, *inputs), options=OPTIONS)


def specs(max_bytes: int = SMALL, max_large: int = 0) -> dict[str, DeviceSpec]:
    return {"cpu": dataclasses.replace(CPU, combo_kernel_bytes=max_bytes, combo_large_kernels=max_large)}


def combined(program: Program, max_bytes: int = SMALL, **limits: int) -> Program:
    return verify(combine_kernels(program, specs(max_bytes), **limits))


def launches(program: Program) -> list[Launch]:
    return [line for line in program.body.lines if isinstance(line, Launch)]


def check(function: TensorFunction, *inputs: Tensor, max_bytes: int = SMALL, **limits: int) -> Program:
    """Returns the program with combo kernels after comparing its results with eager's."""
    program = lowered(function, *inputs)
    result = combined(program, max_bytes, **limits)
    expected = function(*[item.clone() for item in inputs])
    for item in (program, result):
        outputs = fxwrap.run(item, [tensor.clone() for tensor in inputs])
        torch.testing.assert_close(list(outputs), list(expected), rtol=1e-5, atol=1e-6)
    return result


def vectors(*sizes: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.rand(size, generator=generator) + 0.5 for size in sizes]


def each(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple([item.sin() * 2 for item in tensors])


def test_independent_launches_are_combined() -> None:
    program = check(each, *vectors(20, 24, 30))
    (launch,) = launches(program)
    assert [value.name for value in launch.arguments] == [item.name for item in program.inputs]
    assert len(launch.outs) == 3
    assert [kernel.name for kernel in program.kernels] == [launch.kernel]
    assert launch.kernel.startswith("combo_")


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts of the kernels whose group keys are computed."""
    sources: list[str] = []
    group_key = printers.TRITON_KERNEL_COMBINER.group_key

    def counted(kernel: PrintedKernel) -> Hashable:
        sources.append(kernel.source)
        return group_key(kernel)

    combiner = dataclasses.replace(printers.TRITON_KERNEL_COMBINER, group_key=counted)
    monkeypatch.setattr(printers, "TRITON_KERNEL_COMBINER", combiner)
    return sources


def test_kernels_of_other_texts_are_not_printed_for_their_keys(keys: list[str]) -> None:
    program = lowered(lambda *x: (x[0].sin(), x[1].cos(), x[2].sin(), x[3].exp()), *vectors(20, 24, 30, 36))
    assert len(launches(combined(program))) == 3
    assert len(keys) == 2 and all("sin" in source for source in keys)


def test_kernels_of_layers_that_follow_each_other_are_not_printed_for_their_keys(keys: list[str]) -> None:
    def layers(x: Tensor, *weights: Tensor) -> Tensor:
        for weight in weights:
            x = torch.mm(x.sin(), weight)
        return x

    inputs = [torch.rand(5, 5), torch.rand(5, 6), torch.rand(6, 5), torch.rand(5, 6)]
    assert len(launches(check(lambda *x: (layers(*x),), *inputs))) == 3
    assert keys == []
    check(lambda y, *x: (layers(*x), y.sin()), torch.rand(4, 7), *inputs)
    assert len(set(keys)) == 2, "the last one may run beside the first, which alone writes no operand either"


def test_combined_launches_have_all_origins() -> None:
    program = lowered(each, *vectors(20, 24))
    (launch,) = launches(combined(program))
    assert launch.origin is not None
    nodes = [node for line in launches(program) if line.origin is not None for node in line.origin.nodes]
    assert list(launch.origin.nodes) == nodes


def test_dependent_launches_are_not_combined() -> None:
    """The means of columns are equal kernels, and each reads the results of the one before."""

    def chain(x: Tensor) -> tuple[Tensor]:
        for _ in range(3):
            x = x.mean(0).unsqueeze(0).expand(20, 20).contiguous().t().cumsum(0)
        return (x,)

    program = lowered(chain, torch.rand(20, 20))
    assert len({line.kernel for line in launches(program)}) < len(launches(program))
    assert len(launches(check(chain, torch.rand(20, 20)))) == len(launches(program))


def test_transitively_dependent_launches_are_not_combined() -> None:
    def chain(x: Tensor, y: Tensor) -> tuple[Tensor]:
        return (torch.softmax(torch.mm(torch.softmax(x, -1), y), -1),)

    assert len(launches(check(chain, torch.rand(5, 5), torch.rand(5, 5)))) == 2


def test_combined_launches_respect_defs_and_uses() -> None:
    """The extern calls between the launches read results of the first, and the second reads theirs."""

    def between(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        first = torch.mm(torch.softmax(x, -1), w)
        second = torch.mm(torch.softmax(y, -1), w)
        return first, second, torch.softmax(first, -1), torch.softmax(second, -1)

    program = check(between, *[torch.rand(6, 6) for _ in range(3)])
    kinds = [type(line).__name__ for line in program.body.lines if type(line).__name__ in ("Launch", "ExternCall")]
    assert kinds == ["Launch", "ExternCall", "ExternCall", "Launch"]


def test_allocations_directly_precede_their_writer() -> None:
    def between(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        return torch.mm(x, w).sin() * 2, torch.mm(y, w).sin() * 2

    program = check(between, *[torch.rand(6, 6) for _ in range(3)])
    lines = [line for line in program.body.lines if isinstance(line, Alloc | Launch)]
    assert len(launches(program)) == 1
    assert isinstance(lines[-1], Launch)


def test_in_place_writes_stay_ordered() -> None:
    x = torch.rand(12)

    def overlapping(x: Tensor) -> tuple[Tensor, ...]:
        x[:8].mul_(2)
        x[4:].mul_(2)
        return (x + 0,)

    inputs = [x.clone()]
    module = make_fx(functionalize(overlapping, remove="mutations_and_views"), tracing_mode="fake")(*inputs)
    program = fxwrap.lower(module, options=OPTIONS)
    actual, expected = x.clone(), x.clone()
    torch.testing.assert_close(list(fxwrap.run(combined(program), [actual])), list(overlapping(expected)))
    torch.testing.assert_close(actual, expected)


def test_peak_memory_growth_is_bounded() -> None:
    """Combining the softmax launches of all matmuls would keep all matmul results alive at once."""

    def sums(*tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple([torch.softmax(torch.mm(x, x), -1).square().sum(-1) for x in tensors])

    inputs = [torch.rand(size, size) for size in range(17, 21)]
    program = lowered(sums, *inputs)
    bounded = combined(program, max_extra_peak_bytes=0)
    assert live_bytes(bounded).peak <= live_bytes(program).peak
    more = combined(program, max_extra_peak_bytes=1 << 20)
    assert len(launches(more)) < len(launches(bounded)) <= len(launches(program))
    assert live_bytes(more).peak > live_bytes(program).peak
    torch.testing.assert_close(list(fxwrap.run(more, inputs)), list(sums(*inputs)))


def test_large_launches_are_not_combined() -> None:
    inputs = vectors(500, 700, 600, 20, 24)
    program = check(each, *inputs)
    assert sorted(len(line.outs) for line in launches(program)) == [1, 1, 1, 2]
    assert len(launches(check(each, *inputs[:3], max_bytes=1 << 20))) == 1


def projections(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """Queries, keys and values."""
    return tuple([x @ weight.t() for weight in weights])


@pytest.mark.parametrize(("rows", "count"), [(3, 1), (70, 2)])
def test_large_matmuls_of_few_programs_are_combined(rows: int, count: int) -> None:
    """Of 70 rows, those of other sizes have other tiles."""
    parallel = dataclasses.replace(ALIKE, massively_parallel=True)
    options = OPTIONS.replace(devices=(parallel,), matmul_kernels="generated")
    inputs = [torch.randn(sizes) for sizes in ((rows, 64), (96, 64), (32, 64), (32, 64))]
    compiled = compile_graph(graph(projections, *inputs), inputs, options=options)
    assert len(launches(compiled.program)) == count
    for result, want in zip(compiled(*inputs), projections(*[item.double() for item in inputs]), strict=True):
        torch.testing.assert_close(result.double(), want, rtol=1e-4, atol=1e-4)


def test_devices_without_a_limit_are_unchanged() -> None:
    program = lowered(each, *vectors(20, 24))
    assert combine_kernels(program, {"cuda": specs()["cpu"]}) is program
    assert combine_kernels(program, specs(0)) is program


def test_languages_without_a_kernel_combiner_are_unchanged() -> None:
    program = fxwrap.lower(graph(each, *vectors(20, 24)), options=OPTIONS.replace(cpu_kernels="cpp"))
    assert len(launches(program)) == 2
    assert combine_kernels(program, specs()) is program


def test_unknown_sizes_are_not_combined() -> None:
    module = make_fx(each, tracing_mode="symbolic")(*vectors(20, 24))
    program = fxwrap.lower(module, options=OPTIONS)
    assert len(launches(program)) == 2
    assert combine_kernels(program, specs()) is program


def test_launches_beside_unknown_sizes_are_combined() -> None:
    """A size that is read from data counts in estimates of the peak of memory as an assumed one."""

    def selected(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, ...]:
        return (x[x > 1.0].cos(), *each(y, z))

    compiled: list[Compiled] = []
    inputs = vectors(20, 24, 30)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        results = torch.compile(selected, backend=recording_backend(compiled, OPTIONS), fullgraph=True)(*inputs)
    torch.testing.assert_close(list(results), list(selected(*inputs)))
    (program,) = [item.program for item in compiled]
    assert any(launch.kernel.startswith("combo_") for launch in launches(program))


def test_large_launches_are_combined_few_at_a_time() -> None:
    """Apart from small ones: to select one of few kernels costs less than a launch, also for a large kernel."""
    inputs = vectors(20, 24, 30, *range(2000, 2005))
    program = lowered(each, *inputs)
    assert [len(line.outs) for line in launches(combined(program))] == [3, 1, 1, 1, 1, 1]
    result = verify(combine_kernels(program, specs(max_large=2)))
    assert sorted([len(line.outs) for line in launches(result)]) == [1, 2, 2, 3]
    assert all(len({item.type.sizes[0] > 1000 for item in line.outs}) == 1 for line in launches(result))
    outputs = fxwrap.run(result, [item.clone() for item in inputs])
    torch.testing.assert_close(list(outputs), list(each(*inputs)), rtol=1e-5, atol=1e-6)


def reduced(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Each result needs a collective of its own."""
    c10d = torch.ops._c10d_functional
    return tuple([c10d.wait_tensor(c10d.all_reduce(item, "sum", "0")).sin() * 2 for item in tensors])


def test_large_launches_pass_no_collective() -> None:
    """A combined one would wait for the last of them. Small ones take less time than a launch."""
    program = lowered(reduced, *vectors(20, 24, 2000, 2001))
    result = verify(combine_kernels(program, specs(max_large=2)))
    assert [[int(item.type.sizes[0]) for item in line.outs] for line in launches(result)] == [[20, 24], [2000], [2001]]
    asynchronous = [str(line) for line in program.body.lines if line.is_async_start or line.is_async_wait]
    assert asynchronous == [str(line) for line in result.body.lines if line.is_async_start or line.is_async_wait]


def test_launches_are_combined_after_overlap() -> None:
    """The launches wait for collectives that overlap first made run at once."""
    inputs = vectors(20, 24, 30)
    compiled = compile_graph(graph(reduced, *inputs), options=OPTIONS.replace(bucket_collectives=False))
    names = [stage.pass_name for stage in compiled.stages]
    assert names.index("overlap_collectives") < names.index("combo_kernels")
    starts = [line.is_async_start for line in compiled.program.body.lines if line.is_async_start or line.is_async_wait]
    assert starts == [True] * 3 + [False] * 3
    assert len(launches(compiled.program)) == 1


def test_a_combined_launch_has_a_tensor_limit() -> None:
    program = check(each, *vectors(*range(20, 30)), max_tensors=6)
    assert [len(line.outs) for line in launches(program)] == [3, 3, 3, 1]


def test_equal_combined_kernels_are_shared() -> None:
    def function(*tensors: Tensor) -> tuple[Tensor, ...]:
        first = [torch.softmax(torch.mm(item, item), -1) for item in tensors]
        return tuple([torch.softmax(torch.mm(item, item), -1) for item in first])

    program = check(function, torch.rand(5, 5), torch.rand(6, 6))
    assert [line.kernel for line in launches(program)] == ["combo_softmax_0", "combo_softmax_0"]
    assert len(program.kernels) == 1


STEPS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x.sin() * 2,
    lambda x: torch.softmax(x, -1),
    lambda x: torch.mm(x, x),
    lambda x: x.sum(0, keepdim=True) + x,
    lambda x: x.t().contiguous(),
]


RANDOM_STEPS = st.lists(st.tuples(st.integers(0, len(STEPS) - 1), st.integers(0, 7)), min_size=4, max_size=14)
"""The steps of random programs: the number of each, and that of the value that it reads."""


def random_program(steps: Sequence[tuple[int, int]]) -> tuple[TensorFunction, list[Tensor]]:
    """Returns a function that returns the results of all steps, and its inputs."""

    def function(*tensors: Tensor) -> tuple[Tensor, ...]:
        values = list(tensors)
        for kind, operand in steps:
            values.append(STEPS[kind](values[operand % len(values)]) / 2)
        return tuple(values[len(tensors) :])

    return function, [torch.rand(4, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]


@settings(max_examples=sample_size(25), deadline=None)
@given(RANDOM_STEPS)
def test_random_programs(steps: Sequence[tuple[int, int]]) -> None:
    function, inputs = random_program(steps)
    check(function, *inputs)


@pytest.mark.parametrize("emitter", ["python", "fx", "interpreter"])
def test_the_pipeline_combines_launches(emitter: str) -> None:
    inputs = vectors(20, 24, 30)
    compiled = compile_graph(graph(each, *inputs), options=OPTIONS.replace(emitter=emitter))
    assert [stage.pass_name for stage in compiled.stages][:2] == ["lower", "combo_kernels"]
    (launch,) = launches(compiled.program)
    assert launch.origin is not None
    assert launch.origin.handle == f"{launch.kernel}:1"
    torch.testing.assert_close(compiled(*inputs), each(*inputs))
    uncombined = compile_graph(graph(each, *inputs), options=OPTIONS.replace(emitter=emitter, combo_kernels=False))
    assert len(launches(uncombined.program)) == 3


def test_graphs_with_combined_launches_round_trip() -> None:
    """Kernel definitions are in the order of their first launch, which combination may change."""

    def function(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, ...]:
        return torch.mm(x.sin() * 2, x), z.cumsum(0), torch.mm(y.sin() * 2, y), z.sum(0)

    inputs = [torch.rand(6, 6), torch.rand(7, 7), torch.rand(30, 40)]
    compiled = compile_graph(graph(function, *inputs), options=OPTIONS.replace(emitter="fx"))
    names = [line.kernel for line in launches(compiled.program)]
    assert any(name.startswith("combo_") for name in names)
    assert [kernel.name for kernel in compiled.program.kernels] == list(dict.fromkeys(names))
    again = fxwrap.from_fx(compiled.graph_module)
    assert_equal(compiled.program, again)
    torch.testing.assert_close(list(fxwrap.run(again, inputs)), list(function(*inputs)))


def test_memory_checks_cover_combined_launches() -> None:
    inputs = [torch.rand(6, 6) for _ in range(3)]

    def function(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        return torch.softmax(torch.mm(x, w), -1), torch.softmax(torch.mm(y, w), -1)

    compiled: Compiled = compile_graph(graph(function, *inputs), options=OPTIONS.replace(check_memory=True))
    assert len(launches(compiled.program)) == 1
    torch.testing.assert_close(compiled(*inputs), function(*inputs))


# --- kernels of other bodies ------------------------------------------------------------------------------------------

PARALLEL = dataclasses.replace(ALIKE, massively_parallel=True, combo_kernel_bytes=1 << 20)


def check_adjacent(function: TensorFunction, *inputs: Tensor, count: int, spec: DeviceSpec = PARALLEL) -> Program:
    """Checks the results and the number of launches on a device that runs all programs of a few kernels at once."""
    program = fxwrap.lower(graph(function, *inputs), options=OPTIONS.replace(devices=(spec,)))
    result = verify(combine_kernels(program, {"cpu": spec}))
    outputs = fxwrap.run(result, [item.clone() for item in inputs])
    torch.testing.assert_close(list(outputs), list(function(*[item.clone() for item in inputs])), rtol=1e-5, atol=1e-6)
    assert len(launches(result)) == count
    return result


def unlike(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, ...]:
    return x.sin() * 2, y.cos() + 1, z.t().contiguous() + 3


def test_adjacent_launches_of_other_bodies_are_combined() -> None:
    inputs = [torch.rand(20), torch.rand(6, 40), torch.rand(30, 8)]
    before = fxwrap.lower(graph(unlike, *inputs), options=OPTIONS.replace(devices=(PARALLEL,)))
    assert len({line.kernel for line in launches(before)}) == 3
    result = check_adjacent(unlike, *inputs, count=1)
    nodes = [node for line in launches(result) if line.origin is not None for node in line.origin.nodes]
    assert sorted(nodes) == sorted([node for line in launches(before) if line.origin for node in line.origin.nodes])
    sequential = dataclasses.replace(PARALLEL, massively_parallel=False)
    assert combine_kernels(before, {"cpu": sequential}) is before


def test_launches_of_other_bodies_need_a_device_that_is_idle() -> None:
    inputs = [torch.rand(20), torch.rand(6, 40), torch.rand(30, 8)]
    check_adjacent(unlike, *inputs, count=3, spec=dataclasses.replace(PARALLEL, combo_kernel_bytes=64))
    check_adjacent(unlike, *inputs, count=3, spec=dataclasses.replace(PARALLEL, multiprocessors=0))


def test_launches_with_a_call_between_them_are_not_combined() -> None:
    def separate(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return torch.linalg.inv(x.sin() * 2), y.cos() + 1

    check_adjacent(separate, torch.rand(6, 6) + torch.eye(6), torch.rand(6, 40), count=2)


def rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cosine + torch.cat([-second, first], -1) * sine


def test_rotations_and_writes_into_caches_are_one_launch() -> None:
    """The launch that writes elements of a large tensor is small, and has an assertion."""

    def step(*tensors: Tensor) -> tuple[Tensor, ...]:
        query, key, value, cosine, sine, position, cache = tensors
        rows = torch.stack([rotated(key, cosine, sine), value])
        return rotated(query, cosine, sine), cache.copy_(cache.index_copy(2, position, rows))

    generator = torch.Generator().manual_seed(0)
    sizes = [(1, 1, 8, 16), (1, 1, 2, 16), (1, 1, 2, 16), (1, 16), (1, 16)]
    inputs = [*[torch.randn(size, generator=generator) for size in sizes], torch.tensor([70])]
    inputs.append(torch.randn(2, 1, 128, 2, 16, generator=generator))
    spec = dataclasses.replace(PARALLEL, combo_kernel_bytes=4096, asserts_raise=False)
    result = check_adjacent(step, *inputs, count=1, spec=spec)
    (kernel,) = result.kernels
    assert "tl.device_assert" in kernel.source


@settings(max_examples=sample_size(15), deadline=None)
@given(RANDOM_STEPS)
def test_random_programs_of_adjacent_launches(steps: Sequence[tuple[int, int]]) -> None:
    function, inputs = random_program(steps)
    program = fxwrap.lower(graph(function, *inputs), options=OPTIONS.replace(devices=(PARALLEL,)))
    result = verify(combine_kernels(program, {"cpu": PARALLEL}))
    assert len(launches(result)) <= len(launches(program))
    torch.testing.assert_close(list(fxwrap.run(result, inputs)), list(function(*inputs)), rtol=1e-5, atol=1e-6)


# --- on a GPU -------------------------------------------------------------------------------------------------------


def on_gpu(function: TensorFunction, inputs: Sequence[Tensor], emitter: str, graphs: bool) -> Program:
    """Compiles a function, compares three calls with eager's, and returns the program."""
    on_device = [item.cuda() for item in inputs]
    module = make_fx(function, tracing_mode="fake")(*on_device)
    compiled = compile_graph(module, options=Options(emitter=emitter, cuda_graphs=graphs, fallback="error"))
    for number in range(3):
        arguments = [item + number for item in on_device]
        torch.testing.assert_close(list(compiled(*arguments)), list(function(*arguments)), rtol=1e-4, atol=1e-4)
    return compiled.program


def mixed_kernels(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Pointwise and transposing kernels, persistent and looped row reductions, and column reductions."""
    results: list[Tensor] = []
    for x in tensors:
        results += [x.sin() * 2, x.t().contiguous() + 1, torch.softmax(x, -1), x.sum(0)]
    return tuple(results)


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("emitter", ["python", "cpp", "fx"])
def test_kernels_of_many_kinds_on_a_gpu(emitter: str, graphs: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(100, 300), (120, 300), (64, 256), (96, 256), (3, 20000), (5, 20000), (300, 500), (310, 500)]
    inputs = [torch.randn(shape, generator=generator) for shape in shapes]
    program = on_gpu(mixed_kernels, inputs, emitter, graphs)
    assert any(kernel.name.startswith("combo_") for kernel in program.kernels)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*Profiler record function")
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("emitter", ["python", "cpp", "fx"])
def test_an_optimizer_step_on_a_gpu(emitter: str, graphs: bool) -> None:
    torch._dynamo.reset()
    compiled: list[Compiled] = []
    shapes = [(768,), (2304,), (768, 2304), (768,), (768, 768), (768,), (3072,), (768, 3072), (50, 30), (11,)] * 4
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(shape, generator=generator) for shape in shapes]
    sides = [[torch.nn.Parameter(item.cuda()) for item in drawn] for _ in range(2)]
    optimizers = [torch.optim.AdamW(side, weight_decay=0.1, capturable=True) for side in sides]
    options = Options(emitter=emitter, cuda_graphs=graphs)
    steps = [torch.compile(optimizers[0].step, backend=recording_backend(compiled, options)), optimizers[1].step]
    for number in range(4):
        for side, step in zip(sides, steps, strict=True):
            for index, parameter in enumerate(side):
                parameter.grad = torch.cos(drawn[index] * number).cuda()
            step()
    torch.testing.assert_close(sides[0], sides[1], rtol=1e-5, atol=1e-6)
    for part in compiled:
        before, after = part.stages[0].program, part.program
        assert len([line for line in after.lines() if isinstance(line, Launch)]) * 3 < len(launches(before))
