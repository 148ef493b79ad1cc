"""Programs for a GPU whose kernels start before their predecessors have ended, in each emitter."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from types import FunctionType

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap.compile import Compiled
from fxwrap.devices import DEVICE_SPECS
from fxwrap.lines import Launch
from fxwrap.options import MODES, Emitter
from fxwrap.torch_compat import FakeTensorMode


def function(x: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Two kernels in a chain, the second of which reads a weight."""
    y = torch.softmax(x * first, -1)
    return y, (y * second).sum(0)


def program(emitter: Emitter, **options: object) -> Compiled:
    with FakeTensorMode():
        inputs = [torch.empty(*sizes, device="cuda") for sizes in ((64, 128), (128,), (64, 128))]
        graph = make_fx(function)(*inputs)
    chosen = fxwrap.Options(emitter=emitter, compile_cache=False).replace(**options)
    return fxwrap.compile_graph(graph, inputs, options=chosen)


def launches(compiled: Compiled) -> list[Launch]:
    return [line for line in compiled.program.lines() if isinstance(line, Launch)]


@pytest.mark.parametrize("emitter", ["cpp", "python", "fx", "interpreter"])
def test_launches_are_dependent_on_request(emitter: Emitter) -> None:
    """FX graphs launch through torch's operator, and the interpreter is the reference: one kernel after the other."""
    compiled = program(emitter, dependent_launch=True)
    expected = emitter in ("cpp", "python")
    assert [line.dependent for line in launches(compiled)] == [False, expected]
    stages = [stage.pass_name for stage in compiled.stages]
    assert ("insert_dependent_launches" in stages) == expected
    sources = [item.source for item in compiled.program.kernels]
    assert all(("wait_for_launches()" in source) == expected for source in sources)


def test_the_flag_of_a_launch_in_emitted_code() -> None:
    text = program("cpp", dependent_launch=True).source
    grids = re.findall(r"launch\(f, \w+, \{([^}]*)\}", text)
    assert ["true" in grid for grid in grids] == [False, True] and grids[1].count(",") == 3
    text = program("python", dependent_launch=True).source
    assert len(re.findall(r"\('dependent', True\)", text)) == 1
    assert len(re.findall(r"^ +kernel_\w+_dependent\(", text, re.M)) == 1


def test_modes_that_capture_graphs_ask_for_dependent_launches() -> None:
    chosen = {mode: fxwrap.Options.from_mapping(mode=mode) for mode in MODES}
    assert {mode for mode, options in chosen.items() if options.dependent_launch} == {"reduce-overhead", "max-autotune"}
    assert all(options.dependent_launch == options.cuda_graphs for options in chosen.values())
    compiled = program("python", **MODES["reduce-overhead"])
    assert [line.dependent for line in launches(compiled)] == [False, True]


@pytest.mark.parametrize("emitter", ["cpp", "python"])
def test_programs_without_the_option_are_as_before(emitter: Emitter) -> None:
    compiled = program(emitter)
    assert "dependent" not in str(compiled.program) + compiled.source
    assert "dependent_launch" not in fxwrap.Options(emitter=emitter).text()
    devices = tuple([dataclasses.replace(spec, supports_dependent_launch=False) for spec in DEVICE_SPECS])
    other = program(emitter, dependent_launch=True, devices=devices).program
    assert (other.body, other.kernels) == (compiled.program.body, compiled.program.kernels)


def test_fx_graphs_of_a_dependent_program_launch_its_kernels_in_order() -> None:
    """The kernels wait, which does nothing there."""
    compiled = program("cpp", dependent_launch=True)
    graph = fxwrap.to_fx(compiled.program)
    imported = fxwrap.from_fx(graph.graph_module)
    lines = [line for line in imported.lines() if isinstance(line, Launch)]
    assert [line.dependent for line in lines] == [False, False]
    assert [item.source for item in imported.kernels] == [item.source for item in compiled.program.kernels]


def chain(x: Tensor, big: Tensor, small: Tensor, weights: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Long and short kernels in turn, each of which needs all of the result before it; two inputs are updated."""
    for weight in weights:
        big.add_((x * weight).sum() * 1e-3)
        small.mul_(0.5).add_(big.view(x.shape[0], -1).sum(1) * weight)
        x = torch.softmax(small + x, 0) + weight
    return x, small.sum() + big.view(x.shape[0], -1).amax(1)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{"emitter": "cpp"}, {"emitter": "python"}, {"cuda_graphs": True}], ids=str)
def test_a_chain_of_long_and_short_kernels_has_the_same_bits(options: dict[str, object]) -> None:
    count, generator = 2048, torch.Generator("cuda").manual_seed(1)
    weights = [torch.rand(count, device="cuda", generator=generator) for _ in range(4)]
    compiled = [
        torch.compile(fresh(chain), backend="fxwrap", options={**options, "dependent_launch": on}, fullgraph=True)
        for on in (False, True)
    ]
    for _ in range(30):
        inputs = [torch.rand(size, device="cuda", generator=generator) for size in (count, count**2, count)]
        results = []
        for function in compiled:
            x, big, small = [item.clone() for item in inputs]
            outputs = [item.clone() for item in function(x, big, small, weights)]
            results.append([*outputs, big, small])
        assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def fresh(function: Callable[..., object]) -> Callable[..., object]:
    """The function with a code object of its own, for which torch.compile compiles anew."""
    return FunctionType(function.__code__.replace(co_name=f"{function.__name__}_again"), function.__globals__)
