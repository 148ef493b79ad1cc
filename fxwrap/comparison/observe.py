"""Observations of runs, and their differences."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fxwrap.comparison.report import Deviation, Disagreement
from fxwrap.debugging import TensorState, named_leaves
from fxwrap.torch_compat import storage_identity

TOLERANCES: Mapping[torch.dtype, float] = {
    torch.float64: 1e-10,
    torch.complex128: 1e-10,
    torch.float32: 1e-5,
    torch.complex64: 1e-5,
    torch.float16: 4e-3,
    torch.complex32: 4e-3,
    torch.bfloat16: 3e-2,
}
"""The relative error by norm up to which results of a dtype count as equal. Other dtypes are compared exactly."""

GRADIENT_NORM_FLOOR = 2e-2
"""The least norm of a gradient for its relative error, as a fraction of the norm of all gradients.

A gradient may be zero in exact arithmetic (the bias of attention keys, or of a convolution before a batch norm); its
computed value is then only the rounding error of a sum."""


Function: TypeAlias = Callable[..., Any]
"""A function to compare."""


@dataclass(frozen=True)
class Arguments:
    """The arguments of a call."""

    positional: tuple[object, ...] = ()
    keywords: Mapping[str, object] | None = None

    def named(self) -> dict[str, object]:
        """Returns the leaves of the nested arguments, by a name with their path."""
        return {**named_leaves(self.positional, "input"), **named_leaves(dict(self.keywords or {}), "input")}


def normalize_arguments(inputs: object) -> Arguments:
    """Returns inputs (a tuple or list, a mapping of keywords, one value, or arguments) as arguments."""
    if isinstance(inputs, Arguments):
        return inputs
    if isinstance(inputs, Mapping):
        return Arguments((), dict(inputs))
    return Arguments(tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,), {})


@dataclass(frozen=True)
class TensorSnapshot:
    """The type of a tensor at the end of a run, and a copy of its contents."""

    dtype: torch.dtype
    device: torch.device
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    contents: Tensor


@dataclass(frozen=True)
class Observation:
    """The results and side effects of a run, by name.

    `aliases` describes, for each aliasing output, the input, state tensor or earlier output that it shares a storage
    with.
    """

    structure: str
    outputs: Mapping[str, object]
    inputs: Mapping[str, object]
    state: Mapping[str, object]
    gradients: Mapping[str, object]
    aliases: Mapping[str, str]


@dataclass(frozen=True)
class RunConfig:
    """How a function is run and compared.

    Fields:
        seed: the seed of all random numbers.
        training: whether to run the backward, with fixed random cotangents of the differentiable outputs.
        nested_outputs: whether to compare the nesting of outputs; programs return flat outputs.
        donated_inputs: positions of inputs whose final contents are not compared.
        cotangents: the cotangents so far.
    """

    seed: int
    training: bool
    nested_outputs: bool = True
    donated_inputs: frozenset[int] = frozenset()
    cotangents: dict[Hashable, Tensor] = field(default_factory=dict)

    def run(self, call: Function, arguments: Arguments) -> object:
        """Calls a function, with its backward if `training`, and returns its result."""
        with torch.set_grad_enabled(self.training):
            result = call(*arguments.positional, **(arguments.keywords or {}))
        if self.training:
            leaves = named_leaves(result, "").values()
            outputs = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
            if outputs:
                torch.autograd.backward(outputs, [self._cotangent(*item) for item in enumerate(outputs)])
        return result

    def observe(self, call: Function, arguments: Arguments, state: TensorState) -> Observation:
        """Runs a function once and returns the observation."""
        torch.manual_seed(self.seed)
        outputs = named_leaves(self.run(call, arguments), "output")
        if not self.nested_outputs:
            outputs = {f"output {position}": leaf for position, leaf in enumerate(outputs.values())}
        inputs = arguments.named()
        holders = {**inputs, **{f"state {name}": tensor for name, tensor in state.tensors.items()}}
        compared_inputs = {
            name: item for position, (name, item) in enumerate(inputs.items()) if position not in self.donated_inputs
        }
        return Observation(
            ", ".join(outputs),
            _snapshot_all(outputs),
            _snapshot_all(compared_inputs),
            _snapshot_all(state.tensors),
            {name: _snapshot(item.grad) for name, item in _leaves_with_gradient(holders)} if self.training else {},
            _aliases(outputs, {**holders, **outputs}),
        )

    def _cotangent(self, position: int, output: Tensor) -> Tensor:
        """Returns the cotangent of an output: equal numbers in every run, whatever the dtype."""
        key = (position, tuple(output.shape), output.dtype, output.device)
        if key not in self.cotangents:
            generator = torch.Generator().manual_seed(self.seed + position)
            drawn = torch.randn(output.shape, generator=generator, dtype=torch.float64)
            self.cotangents[key] = drawn.to(output.device, output.dtype)
        return self.cotangents[key]


def _leaves_with_gradient(holders: Mapping[str, object]) -> Iterator[tuple[str, Tensor]]:
    for name, item in holders.items():
        if isinstance(item, Tensor) and item.requires_grad and item.is_leaf:
            yield name, item


def _snapshot_all(items: Mapping[str, object]) -> dict[str, object]:
    return {name: _snapshot(item) for name, item in items.items()}


def _snapshot(item: object) -> object:
    if not isinstance(item, Tensor):
        return item
    strides = item.stride() if item.layout is torch.strided else ()
    return TensorSnapshot(item.dtype, item.device, tuple(item.shape), strides, item.detach().clone())


def _aliases(outputs: Mapping[str, object], holders: Mapping[str, object]) -> dict[str, str]:
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for name, item in holders.items():
        if not isinstance(item, Tensor) or item.layout is not torch.strided:
            continue
        holder = first.setdefault(storage_identity(item), name)
        if name in outputs and holder is not name:
            aliases[name] = f"shares memory with {holder}, from element {item.storage_offset()}"
    return aliases


# --- differences ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparator:
    """Compares runs with eager's run, and with the float64 reference if there is one.

    `tolerance` is the relative error by norm for every dtype; None means `TOLERANCES`. A tensor also agrees if its
    error to the float64 reference is at most twice eager's, and eager's is small: then the difference is rounding.
    """

    eager: Observation
    reference: Observation | None
    tolerance: float | None

    def disagreements(self, run: Observation) -> tuple[Disagreement, ...]:
        """Returns every difference from eager beyond rounding."""
        if run.structure != self.eager.structure:
            reason = f"the outputs are ({run.structure}), eager returns ({self.eager.structure})"
            return (Disagreement("structure", "the result", reason),)
        disagreements: list[Disagreement] = []
        for kind, attribute in _GROUPS:
            mine, theirs = getattr(run, attribute), getattr(self.eager, attribute)
            truth = getattr(self.reference, attribute) if self.reference is not None else {}
            floor = _floor(attribute, theirs)
            for name in theirs:
                disagreements.extend(
                    self._differences(kind, name, mine.get(name), theirs[name], truth.get(name), floor)
                )
        for name in self.eager.outputs:
            mine, theirs = run.aliases.get(name, _NO_ALIAS), self.eager.aliases.get(name, _NO_ALIAS)
            if mine != theirs:
                disagreements.append(Disagreement("aliasing", name, f"it {mine}, eager's {theirs}"))
        return tuple(disagreements)

    def _differences(
        self, kind: str, name: str, mine: object, eager: object, truth: object, floor: float
    ) -> Iterator[Disagreement]:
        if not isinstance(mine, TensorSnapshot) or not isinstance(eager, TensorSnapshot):
            if type(mine) is not type(eager) or not _same_number(mine, eager):
                yield Disagreement(kind, name, f"it is {_describe(mine)}, eager's is {_describe(eager)}")
            return
        for of, attribute in (("dtypes", "dtype"), ("devices", "device"), ("shapes", "sizes")):
            if getattr(mine, attribute) != getattr(eager, attribute):
                yield Disagreement(of, name, f"{getattr(mine, attribute)}, eager has {getattr(eager, attribute)}")
        if mine.sizes != eager.sizes:
            return
        if not _same_strides(mine, eager):
            yield Disagreement("strides", name, f"{mine.strides}, eager has {eager.strides}")
        tolerance = TOLERANCES.get(eager.dtype, 0.0) if self.tolerance is None else self.tolerance
        error = tensor_error(mine.contents, eager.contents, floor)
        if error.relative <= tolerance or self._is_as_accurate(truth, mine, eager, floor, tolerance):
            return
        yield Disagreement(kind, name, f"relative error {error.relative:.1e}, absolute {error.absolute:.1e}")

    def _is_as_accurate(
        self, truth: object, mine: TensorSnapshot, eager: TensorSnapshot, floor: float, tolerance: float
    ) -> bool:
        if not isinstance(truth, TensorSnapshot) or truth.sizes != eager.sizes or not eager.dtype.is_floating_point:
            return False
        own = tensor_error(eager.contents, truth.contents, floor).relative
        return own <= 100 * tolerance and tensor_error(mine.contents, truth.contents, floor).relative <= 2 * own


_GROUPS = (("values", "outputs"), ("mutations", "inputs"), ("mutations", "state"), ("gradients", "gradients"))
_NO_ALIAS = "shares memory with nothing"


def largest_error(run: Observation, expected: Observation) -> Deviation:
    """Returns the largest errors over the tensors of two runs with equal sizes."""
    worst = Deviation()
    for _, attribute in _GROUPS:
        mine, theirs = getattr(run, attribute), getattr(expected, attribute)
        floor = _floor(attribute, theirs)
        for name, reference in theirs.items():
            actual = mine.get(name)
            if not isinstance(actual, TensorSnapshot) or not isinstance(reference, TensorSnapshot):
                continue
            if actual.sizes == reference.sizes:
                worst = worst.maximum(tensor_error(actual.contents, reference.contents, floor))
    return worst


def tensor_error(actual: Tensor, expected: Tensor, floor: float = 0.0) -> Deviation:
    """Returns the errors of a tensor to the expected one of equal sizes, on any device and of any dtype.

    Equal infinities, and NaN at equal positions, have no error; others have an infinite one, and so has a tensor on the
    device "meta" to one with contents. `floor` is the least norm for the relative error.
    """
    if actual.is_meta or expected.is_meta:
        return Deviation() if actual.is_meta and expected.is_meta else Deviation(math.inf, math.inf)
    actual, expected = actual.cpu(), expected.cpu()
    if actual.dtype == expected.dtype and not (actual.is_floating_point() or actual.is_complex()):
        if torch.equal(actual, expected):
            return Deviation()
    wide = torch.complex128 if actual.is_complex() or expected.is_complex() else torch.float64
    actual, expected = actual.to(wide), expected.to(wide)
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    difference = torch.where(same, 0.0, actual - expected).abs()
    if difference.numel() == 0:
        return Deviation()
    difference = torch.where(difference.isnan(), float("inf"), difference)
    norm, scale = float(difference.norm()), max(float(torch.where(expected.isfinite(), expected, 0.0).norm()), floor)
    return Deviation(float(difference.max()), norm / scale if scale else float("inf") if norm else 0.0)


def _floor(attribute: str, items: Mapping[str, object]) -> float:
    if attribute != "gradients":
        return 0.0
    norms = [float(item.contents.abs().double().norm()) for item in items.values() if isinstance(item, TensorSnapshot)]
    return GRADIENT_NORM_FLOOR * math.hypot(*norms)


def _same_strides(mine: TensorSnapshot, eager: TensorSnapshot) -> bool:
    """Whether strides agree, except for empty tensors and dimensions of size 1."""
    if 0 in mine.sizes:
        return True
    return all(size == 1 or a == b for size, a, b in zip(mine.sizes, mine.strides, eager.strides))


def _same_number(mine: object, eager: object) -> bool:
    if mine is eager or type(mine).__eq__ is object.__eq__:
        return True  # an object without fields and without an equality of its own
    return bool(mine == eager) or (mine != mine and eager != eager)


def _describe(item: object) -> str:
    return f"a tensor of sizes {item.sizes}" if isinstance(item, TensorSnapshot) else repr(item)
