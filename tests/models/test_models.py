"""The models of the suite by every emitter: forward, and one step of training with dropout off and on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

import fxwrap
from fxwrap import from_fx
from fxwrap.comparison import COMPARED_EMITTERS, GRADIENT_NORM_FLOOR, CompiledFunction, tensor_error
from fxwrap.options import Options
from fxwrap.testing import assert_emitters_agree
from tests.support.models import MODELS, REPRESENTATIVE, ModelCase, TrainingStep, train_step
from tests.support.program_equality import assert_equal

TOLERANCE = 1e-5

CASES = [
    pytest.param(case, id=case.name, marks=[] if case.name in REPRESENTATIVE else [pytest.mark.long])
    for case in MODELS.values()
]
IN_SUITE = ("llama", "resnet")
"""Models whose training without dropout the short form has. An encoder alone is a part of T5, and GPT-2 has dropout."""
DROPOUT = ("gpt2", "bert", "t5")
"""The others drop the same: attention weights, embeddings, weights in plain operators."""

STEPS = [
    pytest.param(
        case,
        dropout,
        id=f"{case.name}-{'dropout' if dropout else 'no_dropout'}",
        marks=[pytest.mark.long] if case.name not in (REPRESENTATIVE if dropout else IN_SUITE) else [],
    )
    for case in MODELS.values()
    for dropout in ((False, True) if case.name in DROPOUT else (False,))
]


def layers_of(case: ModelCase, several: bool = True) -> int:
    """How many layers a model is compiled with: what several layers share, one model shows."""
    return case.layers if several and case.name == "gpt2" else 1


@pytest.mark.parametrize("case", CASES)
def test_forward_in_eval_mode(case: ModelCase) -> None:
    model = case.build(seed=0, layers=layers_of(case))
    report = assert_emitters_agree(model, case.inputs(seed=1), tolerance=TOLERANCE)
    assert report.graphs == 1
    assert report["eager"].float64_error is not None
    assert report["eager"].float64_error.relative < 1e-4  # the reference computes the same thing


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("case", "dropout"), STEPS)
def test_one_training_step(case: ModelCase, dropout: bool, tmp_path: Path) -> None:
    model = case.build(seed=0, dropout=dropout, layers=layers_of(case, several=dropout))
    inputs = case.inputs(seed=1, training=True)
    subject = CompiledFunction(model, Options(), dynamic=False)
    expected = train_step(model, model, inputs, seed=2)
    assert expected.gradients
    if dropout:
        subject.state.restore()
        assert not torch.equal(train_step(model, model, inputs, seed=3).loss, expected.loss)
    for emitter in COMPARED_EMITTERS:
        subject.state.restore()
        step = train_step(model, subject.call(emitter), inputs, seed=2)
        _assert_same_step(emitter, step, expected)
    assert [graph.name for graph in subject.graphs] == ["forward", "backward"]
    assert all(set(graph.emitted_programs) == set(COMPARED_EMITTERS) for graph in subject.graphs)
    for graph in subject.graphs:
        assert_equal(graph.compiled.program, from_fx(graph.emitted_programs["fx"]))
    if dropout:
        return
    for graph in subject.graphs:  # saved to files, and run as they are loaded from them
        path = tmp_path / f"{graph.name}.fxw"
        fxwrap.save(graph.compiled, path, emitters=[])
        loaded = fxwrap.load(path, emitter="fx" if graph.name == "forward" else "python")
        assert loaded.program == graph.compiled.program
        graph.emitted_programs["loaded"] = loaded.emitted
    subject.state.restore()
    _assert_same_step("loaded", train_step(model, subject.call("loaded"), inputs, seed=2), expected)


def _assert_same_step(emitter: str, step: TrainingStep, expected: TrainingStep) -> None:
    _assert_same(f"{emitter}: loss", {"loss": step.loss}, {"loss": expected.loss}, floor=0.0)
    # The bias of attention keys has no gradient in exact arithmetic: it is all rounding, which no emitter need share.
    floor = GRADIENT_NORM_FLOOR * math.hypot(*[float(gradient.norm()) for gradient in expected.gradients.values()])
    _assert_same(f"{emitter}: gradient", step.gradients, expected.gradients, floor)
    _assert_same(f"{emitter}: parameter", step.parameters, expected.parameters, floor=0.0)
    _assert_same(f"{emitter}: buffer", step.buffers, expected.buffers, floor=0.0)


def _assert_same(what: str, inputs: Mapping[str, Tensor], expected: Mapping[str, Tensor], floor: float) -> None:
    assert inputs.keys() == expected.keys(), what
    errors = {name: tensor_error(inputs[name], tensor, floor).relative for name, tensor in expected.items()}
    wrong = {name: error for name, error in errors.items() if error > (TOLERANCE if _is_real(expected[name]) else 0.0)}
    assert not wrong, f"{what}: relative errors {wrong}"


def _is_real(tensor: Tensor) -> bool:
    return tensor.dtype.is_floating_point
