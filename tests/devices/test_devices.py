"""Devices that vendors register: an imaginary one runs the models of the suite, and what is wrong is said."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

import fxwrap
from fxwrap import devices
from fxwrap.devices import CPU, CUDA, DeviceRuntime, DeviceSpec, KernelLanguage, KernelRequest, KernelRuntime
from fxwrap.emission import emit
from fxwrap.errors import DeviceError, FusionWarning, FxwrapError, GraphError
from fxwrap.lines import Launch
from fxwrap.options import Options
from fxwrap.pass_spec import Pass
from fxwrap.runtime.kernels import load_kernel
from tests.devices import abacus, abacus_runtime
from tests.devices.abacus_runtime import WORK
from tests.devices.copy_engine import LINES, AbacusCopy, stage_inputs
from tests.models import MODELS, ModelCase

STAGING = Pass(stage_inputs, key="abacus.stage_inputs 1")


@pytest.fixture
def on_abacus() -> Iterator[None]:
    """The Abacus, in the place of the CPU."""
    given: dict[str, Any] = {"runtime": abacus_runtime.RUNTIME, "language": abacus.LANGUAGE, "lines": LINES}
    with devices.registered(abacus.SPEC, printer=abacus.print_abacus, **given):
        yield


def graph_of(function: Any, *inputs: torch.Tensor) -> torch.fx.GraphModule:
    """A function as a graph of ATen operators."""
    return torch.export.export(_Module(function), inputs).run_decompositions({}).module(check_guards=False)


class _Module(torch.nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(*inputs)


# --- the models -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in MODELS.values()])
def test_the_models_run_on_a_made_up_device(case: ModelCase, on_abacus: None) -> None:
    model, inputs = case.build(seed=0, layers=1), case.inputs(seed=1)
    with torch.no_grad():
        expected = torch.utils._pytree.tree_leaves(model(**inputs))
        exported = torch.export.export(model, (), inputs, strict=False)
    compiled = fxwrap.compile_graph(exported, options=Options(emitter="interpreter", passes=(STAGING,)))
    program = compiled.program
    launches = sum(isinstance(line, Launch) for line in program.lines())
    copies = sum(isinstance(line, AbacusCopy) for line in program.lines())
    assert launches and {kernel.language for kernel in program.kernels} == {"abacus"}
    assert fxwrap.parse(str(program)) == program
    for emitter in ("interpreter", "python", "fx"):
        form = compiled if emitter == "interpreter" else emit(program, emitter)
        WORK.clear()
        results = form(*inputs.values())
        assert WORK["launch"] == launches, emitter
        assert WORK["copy"] == (0 if emitter == "fx" else copies), emitter
        assert emitter == "interpreter" or WORK["allocate"] > 0, emitter
        for result, wanted in zip(results, expected, strict=True):
            torch.testing.assert_close(result, wanted, rtol=1e-4, atol=1e-4)
