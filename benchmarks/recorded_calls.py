"""Calls of operators as they were made, and programs that make them again.

`Recorder` is a dispatch mode that keeps the first call of every overload, with copies of its arguments from before the
call. `program_of` writes a program that makes recorded calls in a row; `replay` runs it and compares with eager.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fxwrap.converters.emitted import Emitted
from fxwrap.lines import Call, Mutate, RestoreState, Return
from fxwrap.torch_compat import OpOverload, operator_overload
from fxwrap.wrapper_ir import Block, Input, LineBase, Ownership, Program, ScalarType, TensorType, Value

_SEED = 7
_STATE = Value("state", TensorType.contiguous(torch.uint8, (torch.get_rng_state().numel(),), torch.device("cpu")))


@dataclass(frozen=True)
class RecordedCall:
    """One call: the overload, and its arguments as they were before it."""

    target: str
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]

    @property
    def overload(self) -> OpOverload:
        """The operator that is called."""
        return operator_overload(self.target)

    @property
    def writes(self) -> bool:
        """Whether it changes what it is given."""
        return bool(self.overload._schema.is_mutable)

    def copied(self) -> RecordedCall:
        """The call with copies of its tensors; those that share memory share the copy of it."""
        copies: dict[int, torch.UntypedStorage] = {}
        arguments = tuple([copied(item, copies) for item in self.arguments])
        keywords = {name: copied(item, copies) for name, item in self.keywords.items()}
        return RecordedCall(self.target, arguments, keywords)

    def run(self) -> Any:
        """Calls the operator eagerly, with random numbers from a fixed seed."""
        torch.manual_seed(_SEED)
        with torch.no_grad():
            return self.overload(*self.arguments, **self.keywords)


class Recorder(TorchDispatchMode):
    """Keeps the first call of each overload with each combination of argument classes and element types, in `calls`."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[Hashable, RecordedCall] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), keywords: Mapping[str, Any] | None = None
    ) -> Any:
        target = f"{function.namespace}.{function._schema.name.partition('::')[2]}.{function._overloadname}"
        key = (target, _class_of([*arguments, *(keywords or {}).items()]))
        if key not in self.calls:
            self.calls[key] = RecordedCall(target, arguments, keywords or {}).copied()
        return function(*arguments, **(keywords or {}))


def _class_of(item: Any) -> Hashable:
    if isinstance(item, list | tuple):
        return tuple([_class_of(part) for part in item])
    if isinstance(item, torch.Tensor):
        return item.dtype
    return type(item).__qualname__


def copied(tree: Any, copies: dict[int, torch.UntypedStorage]) -> Any:
    """Copies the tensors in a tree, with their strides and offsets; `copies` holds the storages copied so far."""
    if isinstance(tree, list | tuple):
        return [copied(item, copies) for item in tree]
    if not isinstance(tree, torch.Tensor):
        return tree
    if tree.layout is not torch.strided or tree.is_quantized:
        return tree.clone()
    storage = tree.untyped_storage()
    if storage.data_ptr() not in copies:
        copies[storage.data_ptr()] = storage.clone()
    made = torch.empty(0, dtype=tree.dtype, device=tree.device)
    made.set_(copies[storage.data_ptr()], tree.storage_offset(), tree.size(), tree.stride())
    if tree.is_conj():
        made = torch._conj(made)
    if tree.is_neg():
        made = torch._neg_view(made)
    return torch.nn.Parameter(made, requires_grad=False) if isinstance(tree, torch.nn.Parameter) else made


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors in a tree."""
    if isinstance(tree, list | tuple):
        for item in tree:
            yield from tensors_in(item)
    elif isinstance(tree, Mapping):
        yield from tensors_in(list(tree.values()))
    elif isinstance(tree, torch.Tensor):
        yield tree


def _type_of(item: Any) -> TensorType | ScalarType:
    if isinstance(item, torch.Tensor):
        strides = item.stride() if item.layout is torch.strided else ()
        return TensorType(item.dtype, tuple(item.shape), strides, item.device)
    return ScalarType(type(item).__name__)


@dataclass
class _Lines:
    lines: list[LineBase]
    inputs: list[Input]
    given: list[Any]
    outputs: list[Any]

    def take(self, tree: Any, prefix: str) -> Any:
        """Makes inputs of a tree's tensors."""
        if isinstance(tree, list | tuple):
            return tuple([self.take(item, f"{prefix}_{index}") for index, item in enumerate(tree)])
        if not isinstance(tree, torch.Tensor):
            return tree
        value = Value(prefix, _type_of(tree))
        self.inputs.append(Input(value, Ownership.MUTABLE))
        self.given.append(tree)
        return value

    def give(self, tree: Any, prefix: str) -> Any:
        """Makes results like those that eager gave."""
        if isinstance(tree, list | tuple):
            return tuple([self.give(item, f"{prefix}_{index}") for index, item in enumerate(tree)])
        if tree is None:
            return None
        value = Value(prefix, _type_of(tree))
        self.outputs.append(value)
        return value


def program_of(calls: Sequence[RecordedCall], results: Sequence[Any]) -> tuple[Program, list[Any]]:
    """Writes a program that makes the calls in a row, and its inputs; `results` are what eager gives for each."""
    made = _Lines([], [], [], [])
    seeded = any(torch.Tag.nondeterministic_seeded in call.overload.tags for call in calls)
    if seeded:
        torch.manual_seed(_SEED)
        made.inputs.append(Input(_STATE))
        made.given.append(torch.get_rng_state())
    for index, (call, result) in enumerate(zip(calls, results)):
        if torch.Tag.nondeterministic_seeded in call.overload.tags:
            made.lines.append(RestoreState(_STATE, "cpu"))
        arguments = tuple([made.take(item, f"a{index}_{place}") for place, item in enumerate(call.arguments)])
        keywords = tuple([(name, made.take(item, f"k{index}_{name}")) for name, item in call.keywords.items()])
        count = len(call.overload._schema.returns)
        tree = () if count == 0 else (result,) if count == 1 else tuple(result)
        defined = made.give(tree, f"r{index}")
        if call.writes:
            made.lines.append(Mutate(defined, call.target, arguments, (), keywords))
        else:
            made.lines.append(Call(defined, call.target, arguments, keywords))
    block = Block((), (*made.lines, Return(tuple(made.outputs))))
    return Program("replay", tuple(made.inputs), block), made.given


def results_of(tree: Any) -> list[Any]:
    """The tensors and numbers in an operator's results, flat, without None."""
    if isinstance(tree, list | tuple):
        return [item for part in tree for item in results_of(part)]
    return [] if tree is None else [tree]


def _leaves_memory_unwritten(target: str) -> bool:
    return not torch.are_deterministic_algorithms_enabled() and ("empty" in target or "resize" in target)


def difference(call: RecordedCall, got: Any, wanted: Any) -> str | None:
    """Says how a result differs from eager's, in type, layout or content, bit for bit; None where it does not."""
    if not isinstance(wanted, torch.Tensor):
        same = type(got) is type(wanted) and (got == wanted or (got != got and wanted != wanted))
        return None if same else f"{got!r} instead of {wanted!r}"
    if got.layout is not wanted.layout or got.dtype is not wanted.dtype or got.shape != wanted.shape:
        return f"{got.dtype}{list(got.shape)} instead of {wanted.dtype}{list(wanted.shape)}"
    if wanted.layout is torch.strided and got.stride() != wanted.stride():
        return f"strides {got.stride()} instead of {wanted.stride()}"
    if wanted.device.type == "meta" or _leaves_memory_unwritten(call.target):
        return None
    if wanted.layout is not torch.strided:
        got, wanted = got.to_dense(), wanted.to_dense()
    if wanted.is_quantized:
        got, wanted = got.int_repr(), wanted.int_repr()
    same = bool(((got == wanted) | ((got != got) & (wanted != wanted))).all())
    return None if same else "other numbers"


def replay(calls: Sequence[RecordedCall], emit: Callable[[Program], Emitted]) -> dict[int, str]:
    """Makes the calls through an emitter and eagerly; says by position how they differ.

    Raises what the program raises.
    """
    eager = [call.copied() for call in calls]
    results = [call.run() for call in eager]
    fresh = [call.copied() for call in calls]
    program, inputs = program_of(fresh, results)
    given = list(emit(program)(*inputs))
    failures: dict[int, str] = {}
    for position, (call, result, own) in enumerate(zip(eager, results, fresh)):
        wanted = results_of(result)
        got, given = given[: len(wanted)], given[len(wanted) :]
        changed = zip(tensors_in([own.arguments, own.keywords]), tensors_in([call.arguments, call.keywords]))
        pairs = [*zip(got, wanted), *changed]
        found = next((text for g, w in pairs if (text := difference(call, g, w)) is not None), None)
        if found is not None:
            failures[position] = found
    return failures
