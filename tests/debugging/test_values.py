"""The option `check_values`: statistics of each line's tensors, and the first NaN."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import fxwrap
from fxwrap.debugging import ProgramValues, insert_observations, observation_points, tensor_statistics
from fxwrap.errors import NonFiniteError, OptionError
from fxwrap.options import EMITTERS, Options
from fxwrap.wrapper_ir import verify
from tests.support.samples import SAMPLES


@pytest.fixture(autouse=True)
def reset() -> Iterator[None]:
    """Without compiled graphs of other tests."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def model(x: Tensor, w: Tensor) -> Tensor:
    """NaN for negative sums in the second line."""
    y = (x @ w).relu() + 1
    z = torch.log(y.sum(0) - 20) @ w
    return torch.softmax(z, -1)


def inputs(scale: float) -> tuple[Tensor, Tensor]:
    return torch.full((4, 4), scale), torch.ones(4, 4)


def values_of(function: object) -> ProgramValues:
    record = fxwrap.inspect(function)[-1]
    assert isinstance(record.compiled, fxwrap.Compiled) and record.compiled.values is not None
    return record.compiled.values


@pytest.mark.parametrize("emitter", EMITTERS)
def test_the_first_nan_is_named_with_its_source(emitter: str) -> None:
    compiled = torch.compile(model, backend="fxwrap", options={"emitter": emitter, "check_values": "nan"})
    assert torch.equal(compiled(*inputs(2.0)), model(*inputs(2.0)))
    with pytest.raises(NonFiniteError, match="computes 4 NaN") as caught:
        compiled(*inputs(0.5))
    error = caught.value
    assert error.location == f"test_values.py:{model.__code__.co_firstlineno + 3}" and "aten.log" in error.operators
    assert error.nan == 4 and error.inf == 0 and error.line in str(error)


def test_infinities_are_errors_only_where_asked_for() -> None:
    def divide(x: Tensor) -> Tensor:
        return (1 / x).sum() + x

    x = torch.tensor([0.0, 1.0])
    assert torch.compile(divide, backend="fxwrap", options={"check_values": "nan"})(x).isinf().all()
    with pytest.raises(NonFiniteError, match="Inf"):
        torch.compile(divide, backend="fxwrap", options={"check_values": "inf"})(x)


@pytest.mark.parametrize("emitter", EMITTERS)
def test_statistics_by_line(emitter: str) -> None:
    compiled = torch.compile(model, backend="fxwrap", options={"emitter": emitter, "check_values": "stats"})
    compiled(*inputs(0.5))
    values = values_of(compiled)
    by_operator = {item.operators[-1]: item for item in values.lines}
    first = by_operator["aten.mm"]
    assert values.lines[0].statistics == tensor_statistics(inputs(0.5)[0] @ inputs(0.5)[1])
    assert first.location.startswith("test_values.py:")
    nan = values.first_nonfinite()
    assert nan is not None and nan.statistics.nan == 4
    rows = json.loads(values.to_json())
    assert rows["first_nan"] == nan.number and rows["values"][0]["statistics"]["maximum"] == 2.0
    assert str(nan) in str(values)
    compiled(*inputs(2.0))
    assert values.first_nonfinite() is None


def test_gradients_and_loops_are_observed() -> None:
    def loop(x: Tensor) -> Tensor:
        return torch.while_loop(lambda x: x.sum() < 100, lambda x: (x * 2,), (x,))[0]

    compiled = torch.compile(loop, backend="fxwrap", options={"check_values": "stats"})
    compiled(torch.ones(4))
    assert any(item.statistics.maximum == 32 for item in values_of(compiled).lines)
    x = torch.zeros(4, requires_grad=True)
    root = torch.compile(lambda x: x.sqrt().sum() * 0, backend="fxwrap", options={"check_values": "nan"})
    with pytest.raises(NonFiniteError, match="graph 'backward'"):
        root(x).backward()


def test_a_cached_program_is_observed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXWRAP_COMPILE_CACHE", "1")
    monkeypatch.setenv("FXWRAP_CACHE_DIR", str(tmp_path))
    # Nothing needs the bridge, which an empty cache folder does not have.
    options = {"check_values": "stats", "emitter": "python", "fuse": False}
    for _ in range(2):
        torch.compiler.reset()
        compiled = torch.compile(model, backend="fxwrap", options=options)
        compiled(*inputs(2.0))
        assert values_of(compiled).lines
    assert fxwrap.inspect(compiled)[-1].cached


@pytest.mark.parametrize("name", SAMPLES)
def test_observed_programs_are_valid(name: str) -> None:
    program = SAMPLES[name].program()
    observed = verify(insert_observations(program))
    points = observation_points(program)
    added = sum(1 for _ in observed.lines()) - sum(1 for _ in program.lines())
    assert added == len(points) and all(point.value.tensor_type for point in points)


@pytest.mark.parametrize(("tensor", "text"), [
    (torch.tensor([1.0, math.nan, math.inf, 3.0]), "f32[4]: min 1, max 3, mean 2, 1 NaN, 1 Inf"),
    (torch.tensor([math.nan]), "f32[1]: no finite elements, 1 NaN"),
    (torch.empty(0), "f32[0]: no elements"),
    (torch.tensor([True, False]), "bool[2]: min 0, max 1, mean 0.5"),
    (torch.tensor([3 + 4j]), "c64[1]: min 5, max 5, mean 5"),
    (torch.tensor(7), "i64[]: min 7, max 7, mean 7"),
    (torch.tensor([60000.0, 60000.0], dtype=torch.float16), "f16[2]: min 6e+04, max 6e+04, mean 6e+04"),
])  # fmt: skip
def test_statistics_of_tensors(tensor: Tensor, text: str) -> None:
    assert str(tensor_statistics(tensor)) == text


def test_unknown_checks_are_refused() -> None:
    with pytest.raises(OptionError, match="option 'check_values' takes 'nan', 'inf' or 'stats', not 'all'"):
        Options(check_values="all")  # type: ignore[arg-type]
