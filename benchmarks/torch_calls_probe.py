"""Ask torch which overload a public spelling reaches, and with what arguments, without running any kernel.

A dispatch mode records the calls that reach the dispatcher and returns placeholders, so any overload can be tried with
any kind of argument. `benchmarks/make_torch_calls_table.py` uses
this to generate the table of spellings, and the test suite to check it.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from fxwrap.converters.torch_calls import ArgumentKind, Parameter, Spelling, TorchCall, parameters_of

Record = tuple[OpOverload, tuple[Any, ...], dict[str, Any]]
"""One call that reached the dispatcher: the overload and its arguments."""

Pattern = Mapping[str, ArgumentKind]
"""A choice of kind for each parameter of an overload, ABSENT for omitted ones."""

_MATRIX = torch.ones(2, 3)
_SCALAR_TENSORS = (torch.tensor(0.5), torch.tensor(2))

_VALUES: Mapping[ArgumentKind, tuple[object, ...]] = {
    ArgumentKind.NONE: (None,),
    ArgumentKind.TENSOR: (_MATRIX, *_SCALAR_TENSORS),
    ArgumentKind.TRUE: (True,),
    ArgumentKind.FALSE: (False,),
    ArgumentKind.INT: (2, 0, 1, -1),
    ArgumentKind.FLOAT: (0.5, 1.0),
    ArgumentKind.COMPLEX: (1j,),
    ArgumentKind.STRING: ("none", "mean"),
    ArgumentKind.DTYPE: (torch.float32, torch.int64),
    ArgumentKind.DEVICE: (torch.device("cpu"), torch.device("meta")),
    ArgumentKind.LAYOUT: (torch.strided,),
    ArgumentKind.MEMORY_FORMAT: (torch.contiguous_format, torch.preserve_format),
    ArgumentKind.GENERATOR: (torch.Generator(),),
    ArgumentKind.EMPTY: ([],),
    ArgumentKind.TENSORS: ([_MATRIX, _MATRIX], [_MATRIX]),
    ArgumentKind.OPTIONAL_TENSORS: ([None, _MATRIX],),
    ArgumentKind.BOOLS: ([True, False, True],),
    ArgumentKind.INTS: ([1, 0, 2], [2, 3], [1]),
    ArgumentKind.FLOATS: ([0.5, 1.0, 2.0],),
}
"""Values of each kind. 0-dimensional tensors are among the tensors because torch's parsers accept them as
scalars too."""

_RESULTS: Mapping[str, Callable[[], object]] = {
    "Tensor": lambda: torch.ones(2, 3),
    "List[Tensor]": lambda: [torch.ones(2), torch.ones(2)],
    "int": lambda: 1,
    "float": lambda: 1.0,
    "bool": lambda: True,
    "number": lambda: 1.0,
}


class Recorder(TorchDispatchMode):
    """Records each call that reaches the dispatcher and returns a placeholder of the schema's result
    types.

    With `run=True` the call runs, and the record holds copies of the arguments before the call.
    """

    def __init__(self, run: bool = False) -> None:
        super().__init__()
        self.run = run
        self.records: list[Record] = []

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        if self.run:
            self.records.append((func, *copy.deepcopy((args, kwargs or {}))))
            return func(*args, **(kwargs or {}))
        self.records.append((func, args, kwargs or {}))
        return _placeholder(func, args)


def _placeholder(func: OpOverload, args: tuple[Any, ...]) -> object:
    """Returns a value of the overload's result types; a view of the first argument if the schema declares one."""
    results: list[object] = []
    for result in func._schema.returns:
        of_type = _RESULTS[str(result.real_type)]()
        is_view = result.alias_info is not None and not result.alias_info.is_write
        if is_view and args and isinstance(args[0], torch.Tensor):
            of_type = [args[0].detach()] if isinstance(of_type, list) else args[0].detach()
        results.append(of_type)
    return results[0] if len(results) == 1 else tuple(results)


@dataclass(frozen=True)
class Arguments:
    """The arguments of one call of an overload."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def recorded(call: Callable[[], object]) -> list[Record] | None:
    """Returns the calls that reach the dispatcher, without running kernels; None if `call` raises."""
    with torch.no_grad(), Recorder() as recorder:
        try:
            call()
        except Exception:  # noqa: BLE001 - any error means that the operator rejects the arguments
            return None
    return recorder.records


@functools.cache
def compiled(text: str) -> CodeType:
    """Returns the code of a Python expression."""
    return compile(text, "<spelling>", "eval")


def evaluate(call: TorchCall, arguments: Arguments) -> object:
    """Runs a spelling's own text on these arguments."""
    names = [f"a{index}" for index in range(len(arguments.args))]
    text = call.write(names, {name: name for name in arguments.kwargs})
    scope = {"torch": torch, **dict(zip(names, arguments.args)), **arguments.kwargs}
    return eval(compiled(text), scope)


def same_records(left: Record, right: Record) -> bool:
    """Whether two records are the same overload with equal arguments, defaults filled in.

    For `pin_memory` None means False, and for `layout` of an overload that takes no tensor it means strided.
    """
    return left[0] is right[0] and all(map(_same_value, _filled(left), _filled(right)))


def reaches(name: str, call: TorchCall, arguments: Arguments) -> bool | None:
    """Whether the spelling and `torch.ops.aten.<name>` send the same call to the dispatcher for these arguments.

    None if the overload rejects the arguments or is decomposed before it reaches a dispatch mode.
    """
    overload = overload_of(name)
    expected = recorded(lambda: overload(*arguments.args, **arguments.kwargs))
    if expected is None or len(expected) != 1 or expected[0][0] is not overload:
        return None
    records = recorded(lambda: evaluate(call, arguments))
    return records is not None and len(records) == 1 and same_records(records[0], expected[0])


def overload_of(name: str) -> OpOverload:
    """Returns `torch.ops.aten.<name>` of "mul.Tensor"."""
    op, overload = name.split(".")
    result: OpOverload = getattr(getattr(torch.ops.aten, op), overload)
    return result


def arguments_of(name: str, pattern: Pattern, rng: random.Random) -> Arguments:
    """Returns arguments of these kinds: positional up to the first omitted one, then by keyword."""
    args: list[object] = []
    kwargs: dict[str, object] = {}
    by_keyword = False
    for parameter in parameters_of(name) or ():
        kind = pattern[parameter.name]
        by_keyword = by_keyword or parameter.keyword_only or kind is ArgumentKind.ABSENT
        if kind is ArgumentKind.ABSENT:
            continue
        value = rng.choice(_VALUES[kind])
        if isinstance(value, list) and rng.random() < 0.5:
            value = tuple(value)
        if by_keyword:
            kwargs[parameter.name] = value
        else:
            args.append(value)
    return Arguments(tuple(args), kwargs)


def passes(name: str, spelling: Spelling, pattern: Pattern, rng: random.Random) -> bool | None:
    """`reaches` for one pattern of kinds; ignores the spelling's own list of accepted kinds."""
    arguments = arguments_of(name, pattern, rng)
    parameters = parameters_of(name) or ()
    free = Spelling(
        spelling.function,
        spelling.method,
        spelling.dropped,
        spelling.literals,
        {parameter: frozenset({kind}) for parameter, kind in pattern.items()},
    )
    args = [pattern[parameter.name] for parameter in parameters[: len(arguments.args)]]
    call = free.call(parameters, args, {key: pattern[key] for key in arguments.kwargs})
    if call is None:
        return None
    return reaches(name, call, arguments)


def patterns(choices: Mapping[str, Sequence[ArgumentKind]], count: int, rng: random.Random) -> Iterator[Pattern]:
    """Yields `count` combinations of these kinds: all of them, repeated, or a random selection."""
    if math.prod(map(len, choices.values())) <= count:
        combinations = itertools.cycle(list(itertools.product(*choices.values())))
        for combination in itertools.islice(combinations, count):
            yield dict(zip(choices, combination))
        return
    for _ in range(count):
        yield {parameter: rng.choice(kinds) for parameter, kinds in choices.items()}


def accepted_kinds(parameters: Sequence[Parameter], spelling: Spelling) -> dict[str, tuple[ArgumentKind, ...]]:
    """Returns for each parameter the kinds for which the table allows this spelling, in a fixed order."""
    return {
        parameter.name: tuple(
            sorted(spelling.accepts.get(parameter.name) or parameter.kinds(), key=lambda kind: kind.value)
        )
        for parameter in parameters
    }


def _filled(record: Record) -> list[Any]:
    overload, args, kwargs = record
    values: list[Any] = []
    is_factory = not any("Tensor" in str(argument.real_type) for argument in overload._schema.arguments)
    for index, argument in enumerate(overload._schema.arguments):
        if index < len(args):
            values.append(args[index])
        elif argument.name in kwargs:
            values.append(kwargs[argument.name])
        else:
            values.append(argument.default_value)
        if values[-1] is None and argument.name == "pin_memory":
            values[-1] = False
        if values[-1] is None and argument.name == "layout" and is_factory:
            values[-1] = torch.strided
    return values


def _same_value(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor) or isinstance(right, torch.Tensor):
        return left is right
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(map(_same_value, left, right))
    return type(left) is type(right) and bool(left == right)
