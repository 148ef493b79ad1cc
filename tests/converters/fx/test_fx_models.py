"""Models through torch.compile with emitted FX graphs: inference, a training step, and when memory is released.

`tests/models/test_models.py` runs all models by every emitter; these few go through the backend itself, guards and all.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fxwrap
from fxwrap.torch_compat import storage_identity
from fxwrap.wrapper_ir import Ownership, live_bytes
from tests.support.capture import capture_graphs
from tests.support.long_form import long_only
from tests.support.models import MODELS, SHALLOW, train_step


class _Live(TorchDispatchMode):
    """Watches how many bytes of tensor memory are alive after each operator, inputs included."""

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.tensors = [weakref.ref(tensor) for tensor in inputs]
        self.peak = self.now()

    def now(self) -> int:
        """Returns the bytes that are alive now."""
        alive = [tensor for tensor in (reference() for reference in self.tensors) if tensor is not None]
        return sum({storage_identity(tensor): tensor.untyped_storage().nbytes() for tensor in alive}.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        results = outputs if isinstance(outputs, tuple | list) else (outputs,)
        self.tensors += [weakref.ref(item) for item in results if isinstance(item, torch.Tensor)]
        self.peak = max(self.peak, self.now())
        return outputs


@pytest.mark.parametrize("name", ["gpt2", long_only("resnet")])
def test_memory_is_released_at_the_programs_frees(name: str) -> None:
    for captured in capture_graphs(SHALLOW[name], training=True):
        placeholders = captured.graph_module.graph.find_nodes(op="placeholder")
        released = [
            position for position, node in enumerate(placeholders)
            if captured.kind == "backward" and not node.name.startswith("primals_")
        ]  # fmt: skip
        options, ownership = fxwrap.Options(check_inputs=False), dict.fromkeys(released, Ownership.OWNED)
        program = fxwrap.lower(captured.graph_module, options=options, ownership=ownership)
        run = fxwrap.to_fx(program).boxed
        inputs = _ones(captured.example_inputs)
        retained = [tensor for position, tensor in enumerate(inputs) if position not in released]
        live = _Live(inputs)
        with live, torch.no_grad():
            outputs = run(inputs)
        assert not inputs and outputs and len(retained) + len(released) == len(placeholders)
        bound = live_bytes(program).peak
        assert bound * 0.98 <= live.peak <= bound * 1.02


def _ones(fakes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns tensors of ones that share storages as the fake ones do, such as slices of a packed projection."""
    storages = {
        storage_identity(fake): torch.ones(fake.untyped_storage().nbytes() // fake.dtype.itemsize, dtype=fake.dtype)
        for fake in fakes
    }
    return [storages[storage_identity(fake)].as_strided(fake.shape, fake.stride(), fake.storage_offset())
            for fake in fakes]  # fmt: skip


OPTIONS = {"emitter": "fx"}
TOLERANCE = {"rtol": 1e-4, "atol": 1e-6}
THROUGH_THE_BACKEND = ("gpt2", long_only("resnet"))


@pytest.mark.parametrize("name", THROUGH_THE_BACKEND)
def test_inference(name: str) -> None:
    case = MODELS[name]
    model, inputs = case.build(seed=0), case.inputs(seed=1)
    with torch.no_grad():
        wanted = model(**inputs)
        result = torch.compile(model, backend="fxwrap", fullgraph=True, dynamic=False, options=OPTIONS)(**inputs)
    for key, tensor in wanted.items():
        if isinstance(tensor, torch.Tensor):
            torch.testing.assert_close(result[key], tensor, **TOLERANCE)


@pytest.mark.parametrize("name", THROUGH_THE_BACKEND)
def test_training_with_dropout(name: str) -> None:
    case = MODELS[name]
    eager = case.build(seed=0, dropout=case.has_dropout, layers=1)
    model, inputs = copy.deepcopy(eager), case.inputs(seed=2, training=True)
    wanted = train_step(eager, eager, inputs, seed=5)
    compiled = torch.compile(model, backend="fxwrap", fullgraph=True, dynamic=False, options=OPTIONS)
    result = train_step(model, compiled, inputs, seed=5)
    torch.testing.assert_close(result.loss, wanted.loss, **TOLERANCE)
    for ours, theirs in ((result.gradients, wanted.gradients), (result.buffers, wanted.buffers)):
        assert ours.keys() == theirs.keys()
        for key, tensor in theirs.items():
            torch.testing.assert_close(ours[key], tensor, **TOLERANCE)
