"""`fxwrap.compile_step`: a training step as one program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from fxwrap.compile import Compiled, compile_graph
from fxwrap.errors import StepError
from fxwrap.options import Options
from fxwrap.torch_compat import tree_flatten, tree_unflatten
from fxwrap.training.state import Slot, StepState, create_optimizer_state, find_state, optimizer_numbers
from fxwrap.training.subclasses import build, layout_of, plain_tensors
from fxwrap.training.trace import TracedStep, trace_step


class CompiledStep:
    """A compiled training step. Call it with the step's inputs; it returns the step's results, without gradients.

    A call reads and writes parameters, buffers and optimizer state where they are: checkpoints and eager code work with
    the same tensors. `compiled` is the program. Gradients are memory of the program; `parameter.grad` is neither read
    nor written.
    """

    def __init__(self, step: Callable[..., object], traced: TracedStep, state: StepState, compiled: Compiled) -> None:
        self.compiled = compiled
        self._step = step
        self._traced = traced
        self._constants = {slot.name: slot.get() for slot in state.numbers if isinstance(slot.container, dict)}
        self._has_subclasses = any(layout is not None for layout in (*traced.layouts, *traced.input_layouts))
        self._returns_one_tensor = traced.output_layouts == ((True, None),) and traced.outputs.is_leaf()
        self._bind(state)

    def _bind(self, state: StepState) -> None:
        """Notes where the state is: optimizers replace theirs when they load a checkpoint."""
        places = {slot.name: slot for slot in reversed(state.slots)}
        missing = [slot.name for slot in self._traced.state if slot.name not in places]
        if missing:
            raise StepError(f"'{missing[0]}' is no part of its state any more", "Restore it, or compile the step again")
        self._slots = [places[slot.name] for slot in self._traced.state]
        self._places = [(slot.container, slot.key) for slot in self._slots]
        self._optimizers = [(item, item.state, item.param_groups) for item in state.optimizers.values()]
        self._hyperparameters = [
            (slot.container, slot.key, self._constants.get(slot.name), slot) for slot in optimizer_numbers(state)
        ]

    @property
    def state(self) -> dict[str, Tensor]:
        """The tensors of the state by name, in the order of the program's inputs."""
        return {slot.name: slot.get() for slot in self._slots}

    def plain_inputs(self, *inputs: object) -> list[Tensor]:
        """Returns the flat inputs of the program for a call: the state's plain tensors, then those of `inputs`.

        A program that was loaded from a file takes them. Raises StepError for other inputs or another state than the
        step was compiled for.
        """
        traced = self._traced
        for optimizer, values, groups in self._optimizers:
            if optimizer.state is not values or optimizer.param_groups is not groups:
                self._bind(find_state(self._step))
                break
        for container, key, number, slot in self._hyperparameters:
            if container[key] != number:
                raise _changed(slot, number)
        leaves, tree = tree_flatten(inputs)
        if tree != traced.inputs:
            raise StepError(f"its inputs have the structure {tree}", f"Pass inputs of the structure {traced.inputs}")
        tensors = [*[container[key] for container, key in self._places], *leaves]
        return self._parts(tensors) if self._has_subclasses else tensors

    def _parts(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        parts: list[Tensor] = []
        traced = self._traced
        for tensor, layout in zip(tensors, (*traced.layouts, *traced.input_layouts), strict=True):
            if layout_of(tensor) != layout:
                raise StepError(
                    f"a {type(tensor).__name__} has another layout, mesh or placement than when the step was compiled",
                    "Compile the step again",
                )
            parts += plain_tensors(tensor, layout)
        return parts

    def __call__(self, *inputs: object) -> Any:
        """Runs the step once. Raises StepError as `plain_inputs` does, and InputError for tensors of other sizes."""
        flat = self.compiled.flat(*self.plain_inputs(*inputs))
        if self._returns_one_tensor:
            return flat[0]
        source = iter(flat)
        leaves = [build(item, source) if is_tensor else item for is_tensor, item in self._traced.output_layouts]
        return tree_unflatten(leaves, self._traced.outputs)

    def save(self, path: str | Path) -> None:
        """Saves the program into a file; see `fxwrap.save`. The state is not part of it."""
        self.compiled.save(path)


def _changed(slot: Slot, number: object) -> StepError:
    return StepError(
        f"'{slot.name}' was {number!r} when the step was compiled, and is {slot.get()!r} now",
        "Compile the step again, or make it a tensor before the step is compiled",
    )


def compile_step(
    step: Callable[..., object],
    example_inputs: Sequence[object],
    *,
    dynamic: bool | None = None,
    options: Options | None = None,
    name: str = "step",
) -> CompiledStep:
    """Compiles a training step: forward, loss, backward and optimizer update become one program.

    The step is a Python function that calls `backward()` and `optimizer.step()`. Modules and optimizers are found
    through its closure, the global variables that it names, and bound objects; their tensors are inputs that the
    program mutates. Python numbers, such as a learning rate that is no tensor, are constants.

    Args:
        step: the function. Nothing of it runs on real tensors, and the state keeps its values. Optimizers get the
            state that they would create in their first step.
        example_inputs: its positional arguments: tensors in any structure.
        dynamic: whether sizes of the inputs may change between calls: all that are at least 2, none, or by default
            those that `torch._dynamo.mark_dynamic` marks. DTensors have static sizes.
        options: see `Options`.
        name: the program's name.

    Raises StepError for a step that cannot become one program, and the errors of `compile_graph`.
    """
    options = options or Options()
    state = find_state(step)
    created = create_optimizer_state(state)
    if created:
        state = find_state(step)
    traced = trace_step(step, state, example_inputs, options, dynamic)
    compiled = compile_graph(traced.graph, traced.examples, options=options, name=name)
    return CompiledStep(step, traced, state, compiled)
