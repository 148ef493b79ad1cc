"""`fxwrap.compile_step`: a training step as one program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from fxwrap.artifact import LoadedProgram, load, save_program
from fxwrap.compile import Compiled, compile_graph
from fxwrap.errors import ArtifactError, StepError
from fxwrap.options import Options
from fxwrap.torch_compat import is_traced_class, one_compile_at_a_time, tree_flatten, tree_unflatten
from fxwrap.training.signature import StepSignature, signature_of
from fxwrap.training.state import Slot, StepState, create_optimizer_state, find_state, optimizer_numbers
from fxwrap.training.subclasses import append_parts, build, count_plain, layout_of
from fxwrap.training.trace import trace_step


class CompiledStep:
    """A compiled training step. Call it with the step's inputs; it returns the step's results, without gradients.

    A call reads and writes parameters, buffers and optimizer state where they are: checkpoints and eager code work with
    the same tensors. `compiled` is the program. Gradients are memory of the program; `parameter.grad` is neither read
    nor written.
    """

    def __init__(
        self,
        step: Callable[..., object],
        signature: StepSignature,
        state: StepState,
        compiled: Compiled | LoadedProgram,
    ) -> None:
        self.compiled = compiled
        self._step = step
        self._signature = signature
        self._layouts = (*signature.layouts, *signature.input_layouts)
        self._returns_one_tensor = signature.output_leaves == ((True, None),) and signature.outputs.is_leaf()
        self._bind(state)

    def _bind(self, state: StepState) -> None:
        """Notes where the state is: optimizers replace theirs when they load a checkpoint."""
        places = {slot.name: slot for slot in reversed(state.slots)}
        missing = [name for name in self._signature.state if name not in places]
        if missing:
            raise StepError(f"'{missing[0]}' is no part of its state any more", "Restore it, or compile the step again")
        self._slots = [places[name] for name in self._signature.state]
        has_layouts = any(layout is not None for layout in self._layouts)
        self._has_subclasses = has_layouts or any(is_traced_class(type(slot.get())) for slot in self._slots)
        self._places = [(slot.container, slot.key) for slot in self._slots]
        self._optimizers = [(item, item.state, item.param_groups) for item in state.optimizers.values()]
        self._hyperparameters = [
            (slot.container, slot.key, self._signature.numbers.get(slot.name), slot)
            for slot in optimizer_numbers(state)
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
        for optimizer, values, groups in self._optimizers:
            if optimizer.state is not values or optimizer.param_groups is not groups:
                self._bind(find_state(self._step))
                break
        for container, key, number, slot in self._hyperparameters:
            if container[key] != number:
                raise _changed(slot, number)
        leaves, tree = tree_flatten(inputs)
        if tree != self._signature.inputs:
            expected = self._signature.inputs
            raise StepError(f"its inputs have the structure {tree}", f"Pass inputs of the structure {expected}")
        tensors = [*[container[key] for container, key in self._places], *leaves]
        return self._parts(tensors) if self._has_subclasses else tensors

    def _parts(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        parts: list[Tensor] = []
        for tensor, layout in zip(tensors, self._layouts, strict=True):
            if not append_parts(tensor, layout, parts):
                raise StepError(
                    f"a {type(tensor).__name__} has another layout, mesh or placement than when the step was compiled",
                    "Compile the step again",
                )
        return parts

    def __call__(self, *inputs: object) -> Any:
        """Runs the step once. Raises StepError as `plain_inputs` does, and InputError for tensors of other sizes."""
        flat = self.compiled.flat(*self.plain_inputs(*inputs))
        if self._returns_one_tensor:
            return flat[0]
        source = iter(flat)
        leaves = [build(item, source) if is_tensor else item for is_tensor, item in self._signature.output_leaves]
        return tree_unflatten(leaves, self._signature.outputs)

    def save(self, path: str | Path) -> None:
        """Saves the program into a file for `load_step`; see `fxwrap.save`. The state is not part of it.

        Raises StepError for inputs and results that no file can hold, and the errors of `fxwrap.save`.
        """
        content = replace(self.compiled.content_to_save(), step=self._signature.description())
        save_program(content, path, emitters=(content.emitter,))


def _changed(slot: Slot, number: object) -> StepError:
    return StepError(
        f"'{slot.name}' was {number!r} when the step was compiled, and is {slot.get()!r} now",
        "Compile the step again, or make it a tensor before the step is compiled",
    )


@one_compile_at_a_time
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
    static_inputs = range(sum(map(count_plain, traced.signature.layouts)))  # CUDA graphs use the state where it is
    compiled = compile_graph(traced.graph, traced.examples, options=options, name=name, static_inputs=static_inputs)
    return CompiledStep(step, traced.signature, state, compiled)


def load_step(path: str | Path, step: Callable[..., object], **options: Any) -> CompiledStep:
    """Loads a step that `CompiledStep.save` wrote, without tracing it.

    Args:
        path: the file. Its kernels are code: see `fxwrap.load`.
        step: the same function as the one that was compiled, with a model and an optimizer of this process, which the
            program mutates. Nothing of it runs. Optimizers get the state that they would create in their first step.
        options: those of `fxwrap.load`.

    Raises StepError where the state of the step is another one than that of the file, in a job with another number of
    ranks, for example; ArtifactError for a file without a step, and as `fxwrap.load` does.
    """
    program = load(path, **options)
    description = program.metadata.get("step")
    state = find_state(step)
    if create_optimizer_state(state):
        state = find_state(step)
    layouts = {slot.name: layout_of(slot.get()) for slot in reversed(state.slots)}
    try:
        signature = signature_of(description, layouts)  # type: ignore[arg-type]
    except (KeyError, TypeError, ValueError) as error:
        remedy = "Load it with fxwrap.load, or save a step with CompiledStep.save"
        raise ArtifactError(str(path), "manifest.json", "it contains no training step", remedy) from error
    return CompiledStep(step, signature, state, program)
