"""With `freeze`, weights of matmuls stay in the library's layout, and writes into weights are seen."""

from __future__ import annotations

import copy
import dataclasses
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxwrap
from fxwrap import Options
from fxwrap.devices import CPU
from fxwrap.runtime import prepacked_weights
from tests.support.agreement import assert_as_exact
from tests.support.child_processes import child_environment, run_python
from tests.support.frozen_operators import compiled_programs, count_conversions, extern_targets, use_python_operators
from tests.support.garbage import freeze_heap

PREPACKED = "fxwrap.prepacked_linear.default"
FROZEN = Options(freeze=True)


class Layers(nn.Module):
    """A linear layer, one without bias, and one whose weight is stored as GPT-2's are: rows are terms."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(256, 384), nn.Linear(384, 256, bias=False)
        self.third, self.bias = nn.Parameter(torch.randn(256, 320) / 16), nn.Parameter(torch.randn(320))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, self.second(torch.relu(self.first(x))), self.third)


@pytest.mark.parametrize(
    ("emitter", "dtype", "is_native"),
    [
        ("python", torch.float32, True), ("cpp", torch.float32, True), ("cpp", torch.bfloat16, True),
        ("fx", torch.bfloat16, True), ("interpreter", torch.float32, True), ("python", torch.bfloat16, False),
        ("fx", torch.float32, False),
    ],
)  # fmt: skip
def test_writes_into_frozen_weights_are_seen(
    emitter: str, dtype: torch.dtype, is_native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_native:
        use_python_operators(monkeypatch)
    torch.manual_seed(0)
    model, x = Layers().to(dtype), torch.randn(64, 256).to(dtype)
    exact = copy.deepcopy(model).double()
    with torch.no_grad():
        programs, compiled = compiled_programs(model, x, emitter=emitter)
        assert [extern_targets(program) for program in programs] == [[PREPACKED] * 3]
        for conversions in (0, 1):
            expected = exact(x.double())
            assert count_conversions(lambda: compiled(x)) == conversions
            assert count_conversions(lambda: compiled(x)) == 0
            error, eager = [float((item.double() - expected).norm()) for item in (compiled(x), model(x))]
            assert error <= 1.5 * eager
            model.second.weight.mul_(3)
            exact.second.weight.mul_(3)


def test_weights_that_may_change_are_not_prepacked() -> None:
    torch.manual_seed(0)
    model, x = Layers(), torch.randn(64, 256)
    programs, _ = compiled_programs(model, x)  # a training step updates its weights
    assert len(programs) >= 1 and PREPACKED not in [
        target for program in programs for target in extern_targets(program)
    ]

    def writes(left: Tensor) -> Tensor:
        model.second.weight.mul_(2)
        return model.second(left)

    with torch.no_grad():
        programs, _ = compiled_programs(writes, torch.randn(64, 384))
        assert PREPACKED not in extern_targets(programs[0])
        programs, _ = compiled_programs(lambda left, right: left @ right, torch.randn(64, 256), torch.randn(256, 256))
        assert PREPACKED not in extern_targets(programs[0])


def test_few_rows_are_not_prepacked() -> None:
    program = fxwrap.lower(torch.export.export(Layers(), (torch.randn(8, 256),)), options=FROZEN)
    assert PREPACKED not in extern_targets(program)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("emitter", ["python", "cpp", "fx", "interpreter"])
def test_weights_are_converted_once_for_all_numbers_of_rows(emitter: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Layers().to(dtype)
    exact = copy.deepcopy(model).double()
    dims = ({0: torch.export.Dim("rows", min=0, max=512)},)
    program = torch.export.export(model, (torch.randn(64, 256).to(dtype),), dynamic_shapes=dims)
    compiled = fxwrap.compile_graph(program, options=Options(freeze=True, emitter=emitter))
    assert extern_targets(compiled.program) == [PREPACKED] * 3
    conversions = []
    with torch.no_grad():
        for rows in (64, 1, 0, 500):
            x = torch.randn(rows, 256).to(dtype)
            conversions.append(count_conversions(lambda x=x: compiled(x)))  # type: ignore[misc]
            expected = exact(x.double())
            error, eager = [float((item.double() - expected).norm()) for item in (compiled(x), model(x))]
            assert error <= 1.5 * eager
    assert conversions == [3, 0, 0, 0]


def test_other_devices_are_not_prepacked() -> None:
    options = Options(
        freeze=True,
        devices=(dataclasses.replace(CPU, matmuls=dataclasses.replace(CPU.matmuls, prepacked_dtypes=frozenset())),),
    )
    program = fxwrap.lower(torch.export.export(Layers(), (torch.randn(64, 256),)), options=options)
    assert PREPACKED not in extern_targets(program)


def test_constants_of_exported_and_saved_programs(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Layers(), torch.randn(64, 256)
    compiled = fxwrap.compile_graph(torch.export.export(model, (x,)), options=Options(freeze=True, emitter="cpp"))
    assert extern_targets(compiled.program) == [PREPACKED] * 3
    compiled.save(tmp_path / "model.fxw")
    loaded = fxwrap.load(tmp_path / "model.fxw")
    torch.testing.assert_close(loaded(x), model(x))


def test_converted_weights_are_freed_with_the_weight_and_limited_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    use_python_operators(monkeypatch)
    freeze_heap()
    weight, before = torch.randn(256, 256), len(prepacked_weights._cache)
    most = prepacked_weights._MOST_FORMS
    for packs_for_rows in (False, True) if torch.backends.mkl.is_available() else (False,):
        monkeypatch.setattr(prepacked_weights, "packs_for_rows", lambda _, packs=packs_for_rows: packs)
        for rows in range(16, 16 + most + 3):
            left = torch.randn(rows, 256)
            result = torch.ops.fxwrap.prepacked_linear(left, weight, None, True, rows)
            torch.testing.assert_close(result, left @ weight.t(), atol=1e-4, rtol=1e-4)
        assert len(prepacked_weights._cache) == before + 1
        assert len(prepacked_weights._cache[weight]) == (most if packs_for_rows else 1)
    del weight
    gc.collect()
    assert len(prepacked_weights._cache) == before


_SHARING = """
import torch, fxwrap
from tests.support.resident_memory import resident_bytes
from tests.support.agreement import assert_as_exact
left, size = torch.randn(1, 2048), 2048 * 2048 * 4
for shares in (False, True):
    before = resident_bytes()
    weights = [torch.randn(2048, 2048) for _ in range(8)]
    for weight in weights:
        torch.ops.fxwrap.prepacked_linear(left, weight, None, True)
    others = [weight.data for weight in weights] if shares else []
    converted = resident_bytes() - before
    weights.clear()
    del weight
    print(converted // size >= 15, (resident_bytes() - before) // size <= len(others) + 1)
    others.clear()
"""


def test_the_bridge_frees_converted_weights_with_the_weight() -> None:
    """Also where other tensors share its memory."""
    run = run_python(["-c", _SHARING], child_environment())
    assert run.stdout.split() == ["True"] * 4, run.stderr


# --- biases -----------------------------------------------------------------------------------------------------------

BIASED = "fxwrap.biased_linear.default"
BIASED_CPU = dataclasses.replace(
    CPU, matmuls=dataclasses.replace(CPU.matmuls, biased_linear_dtypes=frozenset({torch.bfloat16}))
)


@pytest.mark.parametrize("emitter", ["python", "cpp", "fx", "interpreter"])
def test_the_library_adds_biases_to_its_accumulators(emitter: str) -> None:
    torch.manual_seed(0)
    model, x = Layers().bfloat16(), torch.randn(256, 256).bfloat16()
    options = Options(emitter=emitter, devices=(BIASED_CPU,))
    with torch.no_grad():
        compiled = fxwrap.compile_graph(torch.export.export(model, (x,)), options=options)
        assert extern_targets(compiled.program) == [BIASED, "aten.mm.default", BIASED]
        assert_as_exact(compiled(x), model(x), copy.deepcopy(model).double()(x.double()))


def test_a_library_without_the_dtype_adds_biases_as_eager_does() -> None:
    left, weight, bias = torch.randn(20, 16).double(), torch.randn(24, 16).double(), torch.randn(24).double()
    expected = torch.addmm(bias, left, weight.t())
    torch.testing.assert_close(torch.ops.fxwrap.biased_linear(left, weight, bias, True), expected)
    torch.testing.assert_close(torch.ops.fxwrap.biased_linear(left, weight.t().contiguous(), bias, False), expected)


@pytest.mark.parametrize(
    ("rows", "products", "columns", "options"),
    [
        (64, 320, 1024, {}),  # the weight is rearranged as slowly as the bias is copied
        (256, 256, 128, {}),  # a small result
        (256, 256, 300, {}),  # columns that do not fill blocks
        (256, 256, 320, {"preserve_ops": ("aten.addmm.default",)}),
        (
            256,
            256,
            320,
            {
                "devices": (
                    dataclasses.replace(
                        CPU, matmuls=dataclasses.replace(CPU.matmuls, biased_linear_dtypes=frozenset())
                    ),
                )
            },
        ),
    ],
)
def test_biases_that_stay_in_the_matmul(rows: int, products: int, columns: int, options: dict[str, Any]) -> None:
    model, x = nn.Linear(products, columns).bfloat16(), torch.randn(rows, products).bfloat16()
    program = fxwrap.lower(torch.export.export(model, (x,)), options=Options(**{"devices": (BIASED_CPU,), **options}))
    assert extern_targets(program)[0].startswith("aten.addmm")
