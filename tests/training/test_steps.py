"""Training steps as one program: equal to eager training, in every emitter, saved and loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxwrap
from fxwrap.comparison.measure import peak_bytes
from fxwrap.errors import InputError
from fxwrap.lines import CallFunction, ExternCall, Mutate
from fxwrap.options import Options
from fxwrap.wrapper_ir import Value, writes
from tests.runtime.cuda_graphs.cpu_graph_capturer import cpu_with_graph_capture
from tests.support.long_form import LONG, long_only
from tests.support.models import MODELS, SHALLOW
from tests.support.planned_peaks import PlannedPeaks, planned_peak
from tests.support.traced_classes import RedefinedParameter
from tests.training.steps import STEPS, Training, mlp, square_step, tensors_of


def transformer(name: str) -> Training:
    """A small model of `transformers`, with one layer unless in the long form."""
    case = (MODELS if LONG else SHALLOW)[name]
    model = case.build(0).double().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(inputs: dict[str, Tensor]) -> Tensor:
        loss = case.loss(model(**inputs))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Training(model, optimizer, step, lambda number: (case.inputs(number, training=True),))


def assert_same_training(
    make: Callable[[], Training], options: Options, steps: int = STEPS, dynamic: bool | None = None
) -> fxwrap.CompiledStep:
    """Compares losses, parameters, buffers and optimizer state of eager and compiled training."""
    eager, training = make(), make()
    compiled = fxwrap.compile_step(training.step, training.inputs(0), options=options, dynamic=dynamic)
    for number in range(steps):
        losses = []
        for step in (eager.step, compiled):
            torch.manual_seed(number)
            losses.append(step(*eager.inputs(number)))
        torch.testing.assert_close(losses[1], losses[0])
    assert_same_state(training, eager)
    return compiled


def assert_same_state(training: Training, eager: Training) -> None:
    """Compares by relative norm: Adam amplifies the rounding of single gradients that are nearly 0."""
    have, expected = tensors_of(training), tensors_of(eager)
    assert have.keys() == expected.keys()
    for name, value in expected.items():
        error = (have[name].double() - value.double()).norm() / value.double().norm().clamp(min=1e-30)
        assert error < 3e-6, (name, error)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("emitter", ["python", "cpp", long_only("fx"), long_only("interpreter")])
def test_training_equals_eager(emitter: str) -> None:
    compiled = assert_same_training(mlp, Options(emitter=emitter))
    assert not any(isinstance(line, Mutate) for line in compiled.compiled.program.lines())


@pytest.mark.parametrize(("name", "emitter"), [("gpt2", "cpp"), long_only("llama", "python")])
def test_transformers_train_as_in_eager(name: str, emitter: str) -> None:
    assert_same_training(partial(transformer, name), Options(emitter=emitter))


def varying_mlp() -> Training:
    """Batches of 6, 4, 9 and 3."""
    training = mlp()

    def inputs(number: int) -> tuple[Tensor, Tensor]:
        batch, generator = (6, 4, 9, 3)[number % 4], torch.Generator().manual_seed(number)
        return torch.randn(batch, 8, generator=generator, dtype=torch.float64), torch.arange(batch) % 4

    return replace(training, inputs=inputs)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("emitter", ["python", "cpp", long_only("fx"), long_only("interpreter")])
def test_batch_sizes_that_change(emitter: str) -> None:
    assert_same_training(varying_mlp, Options(emitter=emitter), steps=8, dynamic=True)


def test_a_marked_size_is_dynamic() -> None:
    training, eager = varying_mlp(), varying_mlp()
    x, labels = training.inputs(0)
    for tensor in (x, labels):
        torch._dynamo.mark_dynamic(tensor, 0)
    compiled = fxwrap.compile_step(training.step, (x, labels), options=Options(emitter="python"))
    for number in range(4):
        losses = []
        for step in (eager.step, compiled):
            torch.manual_seed(number)
            losses.append(step(*training.inputs(number)))
        torch.testing.assert_close(losses[1], losses[0])
    with pytest.raises(InputError, match="'input_0'"):
        compiled(torch.randn(6, 7, dtype=torch.float64), labels)


def test_conditions_on_sizes_are_checked_in_each_call() -> None:
    """The trace follows one branch: the program does not run for sizes of another one, and changes nothing."""
    layer = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = layer(x).sum() * (2 if x.shape[0] * y.shape[0] > 10 else 3) + y.sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    compiled = fxwrap.compile_step(
        step, (torch.ones(6, 8), torch.ones(4)), dynamic=True, options=Options(emitter="python")
    )
    compiled(torch.ones(3, 8), torch.ones(7))
    before = layer.weight.detach().clone()
    with pytest.raises(RuntimeError, match=r"for inputs with input_0\.size\(0\)\*input_1\.size\(0\) > 10"):
        compiled(torch.ones(5, 8), torch.ones(2))
    assert torch.equal(layer.weight, before)


def test_captured_graphs_use_the_state_in_place() -> None:
    """Parameters and optimizer state are static operands of captured functions: no call copies them."""
    with cpu_with_graph_capture() as capturer:
        options = Options(cuda_graphs=True, compile_cache=False)
        compiled = assert_same_training(mlp, options)
    calls = [line for line in compiled.compiled.program.body.lines if isinstance(line, CallFunction)]
    static = {value.name for line in calls for value in line.static_operands}
    state = {item.name for item in compiled.compiled.program.inputs[: len(compiled.state)]}
    operands = {value.name for line in calls for value in line.operands if isinstance(value, Value)}
    assert capturer.replayed
    assert static == state & operands != set()


def test_an_update_follows_its_gradient() -> None:
    """The weights of later layers are updated before the backward of earlier ones, and their gradients die there."""
    model = nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(4)])
    compiled = fxwrap.compile_step(square_step(model), (torch.randn(5, 512),), options=Options(emitter="interpreter"))
    lines = list(compiled.compiled.program.lines())
    matmuls = [position for position, line in enumerate(lines) if getattr(line, "target", "").startswith("aten.mm")]
    weights = [item.name for item in compiled.compiled.program.inputs if item.name.endswith("_weight")][:4]
    updates = [
        next(position for position, line in enumerate(lines) if name in [value.name for value in writes(line)])
        for name in weights
    ]
    assert updates == sorted(updates, reverse=True)
    for layer in (1, 2, 3):  # each layer before it has two gradients, and the first one that of its weight
        assert sum(position > updates[layer] for position in matmuls) == 2 * layer - 1


def test_masks_of_lower_triangles_become_is_causal() -> None:
    """Torch selects attention kernels while the step is traced; a mask that is written to, or an input, stays."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(8, 24)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            triangle = torch.ones(6, 6, dtype=torch.bool).tril()
            written = triangle.clone()
            written[0] = True
            for attn_mask in (triangle, torch.ones(6, 6, dtype=torch.bool), written, mask):
                q, k, v = self.project(x).unflatten(-1, (6, 4)).transpose(1, 2).chunk(3, 1)
                x = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask).transpose(1, 2).flatten(2)
            return x

    def training() -> tuple[Attention, Callable[..., Tensor]]:
        torch.manual_seed(0)
        model = Attention()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(*inputs: Tensor) -> Tensor:
            loss: Tensor = model(*inputs).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return model, step

    inputs = torch.randn(3, 6, 8), torch.rand(6, 6) > 0.3
    inputs[1][:, 0] = True
    (model, step), (eager, eager_step) = training(), training()
    compiled = fxwrap.compile_step(step, inputs, options=Options(emitter="python"))
    torch.testing.assert_close(compiled(*inputs), eager_step(*inputs))
    torch.testing.assert_close(model.project.weight, eager.project.weight)
    calls = [line for line in compiled.compiled.program.lines() if isinstance(line, ExternCall)]
    forward = [line for line in calls if line.target.endswith("attention_for_cpu.default")]
    is_causal = [line.arguments[4:5] == (True,) for line in forward]
    has_mask = ["attn_mask" in dict(line.keywords) for line in forward]
    assert is_causal == [True, False, False, False]
    assert has_mask == [False, False, True, True]


@pytest.mark.long  # `tests/memory_planning` bounds peaks of forwards and backwards
def test_peak_memory_is_at_most_that_of_separate_programs() -> None:
    """The backward recomputes what the partitioner of separate graphs lets it recompute, and gradients die early."""

    def make() -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], None]]:
        torch.manual_seed(0)
        model = nn.Sequential(*[part for _ in range(3) for part in (nn.Linear(64, 64), nn.GELU("tanh"))])
        optimizer = torch.optim.AdamW(model.parameters())
        return model, optimizer, optimizer.step

    def step_of(model: Callable[..., Any], optimizer: torch.optim.Optimizer, update: Callable[[], None]) -> Any:
        def step(x: Tensor) -> Tensor:
            loss: Tensor = model(x).square().mean()
            loss.backward()
            update()
            optimizer.zero_grad()
            return loss.detach()

        return step

    x = torch.randn(512, 64)
    model, optimizer, update = make()
    compiled = fxwrap.compile_step(step_of(model, optimizer, update), (x,))
    model, optimizer, update = make()
    planned = PlannedPeaks(lambda: [*model.parameters(), *[
        value for items in optimizer.state.values() for value in items.values()]])  # fmt: skip
    parts = [torch.compile(part, backend=planned.backend()) for part in (model, update)]
    separate = step_of(parts[0], optimizer, parts[1])
    peaks = []
    for step in (compiled, separate):
        step(x)
        step(x)
        peaks.append(peak_bytes(lambda: (x,), lambda inputs: step(*inputs)))  # noqa: B023
    assert peaks[0] <= peaks[1]
    # At the peak, the update of a bias has begun: it has two results of the bias's size instead of one gradient.
    assert 0 < planned_peak(compiled.compiled) <= planned.largest + model[0].bias.nbytes + 4
    activations = 3 * x.nbytes  # the three results of the linear layers; GELU is computed again
    assert peaks[0] < activations + 4 * x.nbytes


@pytest.mark.parametrize("emitter", ["python", "cpp"])
@pytest.mark.parametrize("compiles_optimizer_only", [False, True])
def test_parameters_whose_functions_are_traced(emitter: str, compiles_optimizer_only: bool) -> None:
    options, layers, x = (
        Options(emitter=emitter),
        [nn.Linear(4, 4).double() for _ in range(2)],
        torch.rand(3, 4).double(),
    )
    layers[1].load_state_dict(layers[0].state_dict())
    layers[1].weight = RedefinedParameter(layers[1].weight.detach())
    optimizers = [torch.optim.AdamW(layer.parameters()) for layer in layers]
    updates = [optimizer.step for optimizer in optimizers]
    if compiles_optimizer_only:
        updates[1] = torch.compile(updates[1], backend="fxwrap", options={"emitter": emitter})

    def step_of(layer: nn.Module, update: Callable[[], object]) -> Callable[[Tensor], Tensor]:
        def step(x: Tensor) -> Tensor:
            layer.zero_grad()
            loss: Tensor = layer(x).square().mean()
            loss.backward()
            update()
            return loss.detach()

        return step

    steps = [step_of(*pair) for pair in zip(layers, updates, strict=True)]
    if not compiles_optimizer_only:
        steps[1] = fxwrap.compile_step(steps[1], (x,), options=options)
    for _ in range(3):
        torch.testing.assert_close(*[step(x) for step in steps])
    for expected, result in zip(*[layer.parameters() for layer in layers], strict=True):
        torch.testing.assert_close(result.detach(), expected.detach())
