"""The six models through emitted FX graphs: inference and a training step, equal to eager's to the last digits."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.models import MODELS, train_step

OPTIONS = {"emitter": "fx"}
TOLERANCE = {"rtol": 1e-4, "atol": 1e-6}


@pytest.mark.parametrize("name", MODELS)
def test_inference(name: str, fresh_dynamo: None) -> None:
    case = MODELS[name]
    model, inputs = case.build(seed=0), case.inputs(seed=1)
    with torch.no_grad():
        wanted = model(**inputs)
        result = torch.compile(model, backend="fxwrap", fullgraph=True, dynamic=False, options=OPTIONS)(**inputs)
    for key, tensor in wanted.items():
        if isinstance(tensor, torch.Tensor):
            torch.testing.assert_close(result[key], tensor, **TOLERANCE)


@pytest.mark.parametrize("name", MODELS)
def test_training_with_dropout(name: str, fresh_dynamo: None) -> None:
    case = MODELS[name]
    eager = case.build(seed=0, dropout=case.has_dropout)
    model, inputs = copy.deepcopy(eager), case.inputs(seed=2, training=True)
    wanted = train_step(eager, eager, inputs, seed=5)
    compiled = torch.compile(model, backend="fxwrap", fullgraph=True, dynamic=False, options=OPTIONS)
    result = train_step(model, compiled, inputs, seed=5)
    torch.testing.assert_close(result.loss, wanted.loss, **TOLERANCE)
    for ours, theirs in ((result.gradients, wanted.gradients), (result.buffers, wanted.buffers)):
        assert ours.keys() == theirs.keys()
        for key, tensor in theirs.items():
            torch.testing.assert_close(ours[key], tensor, **TOLERANCE)
