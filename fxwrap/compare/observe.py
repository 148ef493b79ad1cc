"""What one run of a function leaves behind, and how two runs differ."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fxwrap.compare.copies import State
from fxwrap.compare.report import Disagreement, Error
from fxwrap.torch_compat import keystr, storage_identity, tree_flatten, tree_flatten_with_path

TOLERANCES: Mapping[torch.dtype, float] = {
    torch.float64: 1e-10,
    torch.complex128: 1e-10,
    torch.float32: 1e-5,
    torch.complex64: 1e-5,
    torch.float16: 4e-3,
    torch.complex32: 4e-3,
    torch.bfloat16: 3e-2,
}
"""The relative error, by norm, up to which results of a dtype count as equal. Other dtypes are compared exactly."""

SMALL_SHARE = 2e-2
"""A gradient whose norm is below this share of all gradients' norm is measured against that share instead: it may be
zero in exact arithmetic (the bias of attention keys, and one before a batch norm, are such), and then all of it is
rounding of the numbers it is summed from. With float32's tolerance a few units in their last place remain."""


@dataclass(frozen=True)
class Arguments:
    """What a function is called with."""

    positional: tuple[Any, ...] = ()
    keywords: Mapping[str, Any] | None = None

    def named(self) -> dict[str, Any]:
        """Returns the leaves of nested arguments, by a name that says where each is."""
        return {**_named(self.positional, "input"), **_named(dict(self.keywords or {}), "input")}


@dataclass(frozen=True)
class Seen:
    """A tensor as it was when a run ended: its type, and a copy of its contents."""

    dtype: torch.dtype
    device: torch.device
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    contents: Tensor


@dataclass(frozen=True)
class Observation:
    """What a run left behind, each tensor by name.

    `aliases` says of each output which input, state tensor or earlier output it shares memory with, and where in it.
    """

    structure: str
    outputs: Mapping[str, Any]
    inputs: Mapping[str, Any]
    state: Mapping[str, Any]
    gradients: Mapping[str, Any]
    aliases: Mapping[str, str]


@dataclass(frozen=True)
class Way:
    """How a function is run and what of it counts.

    With `training`, differentiable outputs are pulled back from fixed random cotangents. `nested` says whether the
    nesting of outputs counts; a program gives them flat. What the inputs at the positions `given_away` hold after the
    run is nobody's business. All random numbers start from `seed`.
    """

    seed: int
    training: bool
    nested: bool = True
    given_away: frozenset[int] = frozenset()
    cotangents: dict[Any, Tensor] = field(default_factory=dict)

    def run(self, call: Callable[..., Any], arguments: Arguments) -> Any:
        """Calls a function, forward and with `training` backward. Returns what it returns."""
        with torch.set_grad_enabled(self.training):
            result = call(*arguments.positional, **(arguments.keywords or {}))
        if self.training:
            outputs = [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, Tensor) and leaf.requires_grad]
            if outputs:
                torch.autograd.backward(outputs, [self._cotangent(*item) for item in enumerate(outputs)])
        return result

    def observe(self, call: Callable[..., Any], arguments: Arguments, state: State) -> Observation:
        """Runs a function once and returns what it leaves behind."""
        torch.manual_seed(self.seed)
        outputs = _named(self.run(call, arguments), "output")
        if not self.nested:
            outputs = {f"output {position}": leaf for position, leaf in enumerate(outputs.values())}
        inputs = arguments.named()
        places = {**inputs, **{f"state {name}": tensor for name, tensor in state.tensors.items()}}
        kept = {name: item for position, (name, item) in enumerate(inputs.items()) if position not in self.given_away}
        return Observation(
            ", ".join(outputs),
            _seen(outputs),
            _seen(kept),
            _seen(state.tensors),
            {name: _see(item.grad) for name, item in _leaves_with_gradient(places)} if self.training else {},
            _aliases(outputs, {**places, **outputs}),
        )

    def _cotangent(self, position: int, output: Tensor) -> Tensor:
        """Returns the cotangent of an output: the same numbers for every way of running, whatever their dtype."""
        key = (position, tuple(output.shape), output.dtype, output.device)
        if key not in self.cotangents:
            generator = torch.Generator().manual_seed(self.seed + position)
            drawn = torch.randn(output.shape, generator=generator, dtype=torch.float64)
            self.cotangents[key] = drawn.to(output.device, output.dtype)
        return self.cotangents[key]


def _named(tree: Any, prefix: str) -> dict[str, Any]:
    return {prefix + keystr(path): leaf for path, leaf in tree_flatten_with_path(tree)[0]}


def _leaves_with_gradient(places: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    for name, item in places.items():
        if isinstance(item, Tensor) and item.requires_grad and item.is_leaf:
            yield name, item


def _seen(items: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _see(item) for name, item in items.items()}


def _see(item: Any) -> Any:
    if not isinstance(item, Tensor):
        return item
    strides = item.stride() if item.layout is torch.strided else ()
    return Seen(item.dtype, item.device, tuple(item.shape), strides, item.detach().clone())


def _aliases(outputs: Mapping[str, Any], holders: Mapping[str, Any]) -> dict[str, str]:
    first: dict[int, str] = {}
    found: dict[str, str] = {}
    for name, item in holders.items():
        if not isinstance(item, Tensor) or item.layout is not torch.strided:
            continue
        holder = first.setdefault(storage_identity(item), name)
        if name in outputs and holder is not name:
            found[name] = f"shares memory with {holder}, from element {item.storage_offset()}"
    return found


# --- differences ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Judge:
    """Compares runs with eager's, by what a float64 run says where there is one.

    `tolerance` is a relative error by norm for every dtype; None means the one of `TOLERANCES`. A tensor is also
    taken as right when it is at most twice as far from the float64 reference as eager is, where eager itself is near
    it: then what differs is how each of them rounds.
    """

    eager: Observation
    reference: Observation | None
    tolerance: float | None

    def disagreements(self, run: Observation) -> tuple[Disagreement, ...]:
        """Returns every difference from eager that is more than rounding."""
        if run.structure != self.eager.structure:
            reason = f"the outputs are ({run.structure}), eager gives ({self.eager.structure})"
            return (Disagreement("structure", "the result", reason),)
        found: list[Disagreement] = []
        for kind, attribute in _GROUPS:
            mine, theirs = getattr(run, attribute), getattr(self.eager, attribute)
            truth = getattr(self.reference, attribute) if self.reference is not None else {}
            floor = _floor(attribute, theirs)
            for name in theirs:
                found.extend(self._differences(kind, name, mine.get(name), theirs[name], truth.get(name), floor))
        for name in self.eager.outputs:
            mine, theirs = run.aliases.get(name, _ALONE), self.eager.aliases.get(name, _ALONE)
            if mine != theirs:
                found.append(Disagreement("aliasing", name, f"it {mine}, eager's {theirs}"))
        return tuple(found)

    def _differences(
        self, kind: str, name: str, mine: Any, eager: Any, truth: Any, floor: float
    ) -> Iterator[Disagreement]:
        if not isinstance(mine, Seen) or not isinstance(eager, Seen):
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
        if error.relative <= tolerance or self._as_near_to(truth, mine, eager, floor, tolerance):
            return
        yield Disagreement(kind, name, f"relative error {error.relative:.1e}, absolute {error.absolute:.1e}")

    def _as_near_to(self, truth: Any, mine: Seen, eager: Seen, floor: float, tolerance: float) -> bool:
        if not isinstance(truth, Seen) or truth.sizes != eager.sizes or not eager.dtype.is_floating_point:
            return False
        own = tensor_error(eager.contents, truth.contents, floor).relative
        return own <= 100 * tolerance and tensor_error(mine.contents, truth.contents, floor).relative <= 2 * own


_GROUPS = (("values", "outputs"), ("mutations", "inputs"), ("mutations", "state"), ("gradients", "gradients"))
_ALONE = "shares memory with nothing"


def largest_error(run: Observation, expected: Observation) -> Error:
    """Returns the largest errors over all tensors of two runs that have the same sizes."""
    worst = Error()
    for _, attribute in _GROUPS:
        mine, theirs = getattr(run, attribute), getattr(expected, attribute)
        floor = _floor(attribute, theirs)
        for name, wanted in theirs.items():
            given = mine.get(name)
            if isinstance(given, Seen) and isinstance(wanted, Seen) and given.sizes == wanted.sizes:
                worst = worst.worst(tensor_error(given.contents, wanted.contents, floor))
    return worst


def tensor_error(given: Tensor, expected: Tensor, floor: float = 0.0) -> Error:
    """Returns how far a tensor is from the expected one of the same sizes, on any device and of any dtype.

    Equal infinities and NaN in the same places count as equal, other ones as infinitely far. `floor` is the least norm
    that the norm of the difference is divided by. A tensor without numbers, on the device "meta", is infinitely far
    from one with numbers.
    """
    if given.is_meta or expected.is_meta:
        return Error() if given.is_meta and expected.is_meta else Error(math.inf, math.inf)
    given, expected = given.cpu(), expected.cpu()
    if given.dtype == expected.dtype and not (given.is_floating_point() or given.is_complex()):
        if torch.equal(given, expected):
            return Error()
    wide = torch.complex128 if given.is_complex() or expected.is_complex() else torch.float64
    given, expected = given.to(wide), expected.to(wide)
    same = (given == expected) | (given.isnan() & expected.isnan())
    difference = torch.where(same, 0.0, given - expected).abs()
    if difference.numel() == 0:
        return Error()
    difference = torch.where(difference.isnan(), float("inf"), difference)
    norm, scale = float(difference.norm()), max(float(torch.where(expected.isfinite(), expected, 0.0).norm()), floor)
    return Error(float(difference.max()), norm / scale if scale else float("inf") if norm else 0.0)


def _floor(attribute: str, items: Mapping[str, Any]) -> float:
    if attribute != "gradients":
        return 0.0
    norms = [float(item.contents.abs().double().norm()) for item in items.values() if isinstance(item, Seen)]
    return SMALL_SHARE * math.hypot(*norms)


def _same_strides(mine: Seen, eager: Seen) -> bool:
    """Whether strides agree where they matter: not in an empty tensor, and not in dimensions of one element."""
    if 0 in mine.sizes:
        return True
    return all(size == 1 or a == b for size, a, b in zip(mine.sizes, mine.strides, eager.strides))


def _same_number(mine: Any, eager: Any) -> bool:
    return mine is eager or bool(mine == eager) or (mine != mine and eager != eager)


def _describe(item: Any) -> str:
    return f"a tensor of sizes {item.sizes}" if isinstance(item, Seen) else repr(item)
