"""Recorded operator calls, and programs that repeat them.

`Recorder` is a dispatch mode that records the first call of every overload, with copies of its arguments before the
call. `program_of` returns a program of recorded calls; `replay` runs it and compares with eager.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fxwrap.converters.emitted_program import EmittedProgram
from fxwrap.lines import ExternCall, Mutate, RestoreRngState, Return
from fxwrap.torch_compat import OpOverload, operator_overload
from fxwrap.wrapper_ir import Block, Input, LineBase, Ownership, Program, ScalarType, TensorType, Value

_SEED = 7
_STATE = Value("state", TensorType.contiguous(torch.uint8, (torch.get_rng_state().numel(),), torch.device("cpu")))


@dataclass(frozen=True)
class RecordedCall:
    """One call: the overload, and its arguments before the call."""

    target: str
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]

    @property
    def overload(self) -> OpOverload:
        """The called operator."""
        return operator_overload(self.target)

    @property
    def writes(self) -> bool:
        """Whether it writes an argument."""
        return bool(self.overload._schema.is_mutable)

    def copied(self) -> RecordedCall:
        """Returns the call with copies of its tensors; tensors that share storage share its copy."""
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
    """Records the first call of each overload and combination of argument classes and dtypes, in `calls`."""

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
    copy = torch.empty(0, dtype=tree.dtype, device=tree.device)
    copy.set_(copies[storage.data_ptr()], tree.storage_offset(), tree.size(), tree.stride())
    if tree.is_conj():
        copy = torch._conj(copy)
    if tree.is_neg():
        copy = torch._neg_view(copy)
    return torch.nn.Parameter(copy, requires_grad=False) if isinstance(tree, torch.nn.Parameter) else copy


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
class _ProgramBuilder:
    lines: list[LineBase]
    inputs: list[Input]
    operands: list[Any]
    outputs: list[Any]

    def add_inputs(self, tree: Any, prefix: str) -> Any:
        """Adds inputs for a tree's tensors."""
        if isinstance(tree, list | tuple):
            return tuple([self.add_inputs(item, f"{prefix}_{index}") for index, item in enumerate(tree)])
        if not isinstance(tree, torch.Tensor):
            return tree
        value = Value(prefix, _type_of(tree))
        self.inputs.append(Input(value, Ownership.MUTABLE))
        self.operands.append(tree)
        return value

    def add_outputs(self, tree: Any, prefix: str) -> Any:
        """Adds results like eager's."""
        if isinstance(tree, list | tuple):
            return tuple([self.add_outputs(item, f"{prefix}_{index}") for index, item in enumerate(tree)])
        if tree is None:
            return None
        value = Value(prefix, _type_of(tree))
        self.outputs.append(value)
        return value


def program_of(calls: Sequence[RecordedCall], results: Sequence[Any]) -> tuple[Program, list[Any]]:
    """Returns a program of the calls, and its inputs; `results` are eager's for each call."""
    builder = _ProgramBuilder([], [], [], [])
    seeded = any(torch.Tag.nondeterministic_seeded in call.overload.tags for call in calls)
    if seeded:
        torch.manual_seed(_SEED)
        builder.inputs.append(Input(_STATE))
        builder.operands.append(torch.get_rng_state())
    for index, (call, result) in enumerate(zip(calls, results)):
        if torch.Tag.nondeterministic_seeded in call.overload.tags:
            builder.lines.append(RestoreRngState(_STATE, "cpu"))
        arguments = tuple(
            [builder.add_inputs(item, f"a{index}_{position}") for position, item in enumerate(call.arguments)]
        )
        keywords = tuple([(name, builder.add_inputs(item, f"k{index}_{name}")) for name, item in call.keywords.items()])
        count = len(call.overload._schema.returns)
        tree = () if count == 0 else (result,) if count == 1 else tuple(result)
        defined = builder.add_outputs(tree, f"r{index}")
        if call.writes:
            builder.lines.append(Mutate(defined, call.target, arguments, (), keywords))
        else:
            builder.lines.append(ExternCall(defined, call.target, arguments, keywords))
    block = Block((), (*builder.lines, Return(tuple(builder.outputs))))
    return Program("replay", tuple(builder.inputs), block), builder.operands


def results_of(tree: Any) -> list[Any]:
    """The tensors and numbers in an operator's results, flat, without None."""
    if isinstance(tree, list | tuple):
        return [item for part in tree for item in results_of(part)]
    return [] if tree is None else [tree]


def _leaves_memory_unwritten(target: str) -> bool:
    return not torch.are_deterministic_algorithms_enabled() and ("empty" in target or "resize" in target)


def difference(call: RecordedCall, result: Any, expected: Any) -> str | None:
    """Returns how a result differs from eager's in type, layout or content, bit for bit, or None."""
    if not isinstance(expected, torch.Tensor):
        same = type(result) is type(expected) and (result == expected or (result != result and expected != expected))
        return None if same else f"{result!r} instead of {expected!r}"
    if result.layout is not expected.layout or result.dtype is not expected.dtype or result.shape != expected.shape:
        return f"{result.dtype}{list(result.shape)} instead of {expected.dtype}{list(expected.shape)}"
    if expected.layout is torch.strided and result.stride() != expected.stride():
        return f"strides {result.stride()} instead of {expected.stride()}"
    if expected.device.type == "meta" or _leaves_memory_unwritten(call.target):
        return None
    if expected.layout is not torch.strided:
        result, expected = result.to_dense(), expected.to_dense()
    if expected.is_quantized:
        result, expected = result.int_repr(), expected.int_repr()
    same = bool(((result == expected) | ((result != result) & (expected != expected))).all())
    return None if same else "different values"


def replay(calls: Sequence[RecordedCall], emit: Callable[[Program], EmittedProgram]) -> dict[int, str]:
    """Runs the calls through an emitter and in eager; returns the differences by position.

    Raises the errors of the program.
    """
    eager = [call.copied() for call in calls]
    eager_results = [call.run() for call in eager]
    fresh = [call.copied() for call in calls]
    program, inputs = program_of(fresh, eager_results)
    remaining = list(emit(program)(*inputs))
    failures: dict[int, str] = {}
    for position, (call, eager_result, own) in enumerate(zip(eager, eager_results, fresh)):
        expected = results_of(eager_result)
        results, remaining = remaining[: len(expected)], remaining[len(expected) :]
        mutated = zip(tensors_in([own.arguments, own.keywords]), tensors_in([call.arguments, call.keywords]))
        pairs = [*zip(results, expected), *mutated]
        failure = next((text for pair in pairs if (text := difference(call, *pair)) is not None), None)
        if failure is not None:
            failures[position] = failure
    return failures
