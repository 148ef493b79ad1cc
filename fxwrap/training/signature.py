"""The signature of a compiled step: its state by name, and the trees of its inputs and results."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fxwrap.errors import StepError
from fxwrap.torch_compat import treespec_dumps, treespec_loads
from fxwrap.training.subclasses import TensorLayout, layout_text


@dataclass(frozen=True)
class StepSignature:
    """How a step's arguments and state become the program's flat inputs, and its results the step's.

    Fields:
        state: the name of each tensor of the state, in the order of the program's inputs; `layouts` are their layouts.
        inputs, outputs: trees of the step's arguments and results.
        input_layouts: the layouts of the leaves of the arguments.
        output_leaves: for each leaf of the results (True, layout) for a tensor, else (False, constant).
        numbers: hyperparameters that are constants of the program, by name.
    """

    state: tuple[str, ...]
    layouts: tuple[TensorLayout, ...]
    inputs: Any
    input_layouts: tuple[TensorLayout, ...]
    outputs: Any
    output_leaves: tuple[tuple[bool, Any], ...]
    numbers: Mapping[str, object]

    def description(self) -> dict[str, object]:
        """Returns the signature as JSON. Raises StepError for what no file can hold."""
        leaves = [None if is_tensor else [item] for is_tensor, item in self.output_leaves]
        subclasses = [item for is_tensor, item in self.output_leaves if is_tensor and item is not None]
        if subclasses or any(layout is not None for layout in self.input_layouts):
            raise StepError(
                "it takes or returns a DTensor, whose mesh cannot be saved", "Pass and return local tensors"
            )
        description: dict[str, object] = {
            "state": list(self.state),
            "layouts": [layout_text(layout) for layout in self.layouts],
            "outputs": leaves,
            "numbers": dict(self.numbers),
        }
        try:
            trees = {"input_tree": treespec_dumps(self.inputs), "output_tree": treespec_dumps(self.outputs)}
            json.dumps(description)
        except (NotImplementedError, TypeError, ValueError) as error:
            raise StepError(
                f"its arguments or results cannot be saved: {error}", "Use dicts, lists and tuples"
            ) from error
        return {**description, **trees}


def signature_of(description: Mapping[str, Any], layouts: Mapping[str, TensorLayout]) -> StepSignature:
    """Returns the signature that a file describes, for a state with these layouts by name.

    Raises StepError where the state lacks a tensor, or has one with another layout; KeyError, TypeError or ValueError
    for a description of something else.
    """
    names = [str(name) for name in description["state"]]
    for name, text in zip(names, description["layouts"], strict=True):
        if name not in layouts:
            raise StepError(f"'{name}' is no part of its state", "Load the step that was saved, with its own optimizer")
        if layout_text(layouts[name]) != text:
            raise StepError(
                f"'{name}' is {layout_text(layouts[name]) or 'a plain tensor'}, and it was {text or 'a plain tensor'} "
                "where the step was saved",
                "Compile the step for this job",
            )
    inputs = treespec_loads(description["input_tree"])
    return StepSignature(
        tuple(names), tuple([layouts[name] for name in names]), inputs, (None,) * inputs.num_leaves,
        treespec_loads(description["output_tree"]), _leaves(description["outputs"]),
        {str(name): _number(value) for name, value in description["numbers"].items()},
    )  # fmt: skip


def _number(value: Any) -> Any:
    """Returns a hyperparameter, in which JSON has lists for tuples."""
    return tuple(map(_number, value)) if isinstance(value, list) else value


def _leaves(described: Sequence[Any]) -> tuple[tuple[bool, Any], ...]:
    return tuple([(True, None) if item is None else (False, item[0]) for item in described])
