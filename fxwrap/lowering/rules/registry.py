"""The registry of lowering rules: how a kernel computes each overload, or why it declines a call."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, MutableMapping, MutableSet, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, TypeVar

import sympy
import torch

from fxwrap.caching import bounded_cache
from fxwrap.devices import DeviceSpec
from fxwrap.loop_ir import FLOAT8, INTEGERS, KERNEL_DTYPES, Scalar
from fxwrap.lowering.fusion.definitions import Definition, ElementReader, Indices, Pointwise, pointwise
from fxwrap.options import MatmulKernels
from fxwrap.symbolic import Number, Size
from fxwrap.torch_compat import operator_overload, torch_schema

NumberOrSymbol: TypeAlias = Number | sympy.Expr
"""A number argument: a constant, or an expression over the program's symbols."""

TensorOrNumber: TypeAlias = Definition | NumberOrSymbol

ElementBody: TypeAlias = Callable[[ElementReader, Indices], Scalar]
"""Computes the element at the given indices."""

DtypeDomain: TypeAlias = Literal["any", "stored", "equal", "float", "equal float", "number", "integer", "bits"]
"""The dtypes that a rule accepts: any that kernels compute with, also float8, which is only moved and cast ("stored"),
floating point, all but bool, integers, integers and bool.

With "equal", all operands have one dtype.
"""


INDEX_DTYPES = (torch.int64, torch.int32)
"""The dtypes of index tensors that kernels load."""


class Declined(Exception):
    """A rule raises it for a call that stays an extern call; its text is the reason."""


MAX_TUNED_ROWS = 16
"""The largest number of rows of matmuls that are timed beside the library whatever follows them."""


def may_reduce_rows(matmul_kernels: MatmulKernels, is_tuned: bool, spec: DeviceSpec, rows: Size) -> bool:
    """Whether the kernel of a matmul with so many rows may compute reductions along rows of its results.

    It may where the options ask for kernels, or where timing compares it with the library's call and other kernels.
    """
    is_timed = matmul_kernels == "auto" and is_tuned and spec.massively_parallel
    return matmul_kernels == "generated" or (is_timed and isinstance(rows, int) and rows > MAX_TUNED_ROWS)


@dataclass(frozen=True)
class OperatorCall:
    """A call to lower.

    `arguments` and `keywords` are those of the FX node, with definitions for tensors; other arguments are literals,
    sympy expressions, dtypes or sequences. `fake` is the fake tensor of the result, or a sequence of them; an unused
    gradient is None. `spec` describes the type of `device`; `may_be_zero` returns whether the ranges of symbols allow a
    size to be 0; `matmul_kernels` is the option of that name; `tunes_matmuls` is whether kernels of matmuls on the
    device are timed beside the library's calls; `shared` has definitions that several calls of the graph read, and
    `in_memory` those that kernels load instead of computing them again. `matrix_bytes` are those of the matrices that
    the left operand of a matmul multiplies in launches that may be combined; None where that is unknown.
    """

    name: str
    arguments: Sequence[object]
    keywords: Mapping[str, object]
    fake: Any
    device: torch.device
    sizes_of: Callable[[torch.Tensor], tuple[Size, ...]] = field(repr=False)
    spec: DeviceSpec
    may_be_zero: Callable[[Size], bool] = field(default=lambda size: size == 0, repr=False)
    matmul_kernels: MatmulKernels = "library"
    tunes_matmuls: bool = False
    shared: MutableMapping[Hashable, Definition] = field(default_factory=dict, repr=False)
    in_memory: MutableSet[Definition] = field(default_factory=set, repr=False)
    matrix_bytes: int | None = None

    @property
    def operator(self) -> str:
        """The operator's name without namespace and overload."""
        return self.name.split(".")[1]

    @property
    def result(self) -> torch.Tensor:
        """The fake tensor of the only result."""
        return self.fake  # type: ignore[no-any-return]

    @property
    def results(self) -> Sequence[torch.Tensor]:
        """The fake tensors of the results."""
        return tuple(self.fake) if isinstance(self.fake, tuple | list) else (self.fake,)

    @property
    def sizes(self) -> tuple[Size, ...]:
        """The sizes of the only result."""
        return self.sizes_of(self.result)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the only result."""
        return self.result.dtype

    def define(self, body: ElementBody, result: torch.Tensor | None = None) -> Pointwise:
        """Returns a pointwise definition of a result, by default of the only one."""
        fake = self.result if result is None else result
        return pointwise(self.sizes_of(fake), fake.dtype, self.device, body)

    def share(self, key: Hashable, define: Callable[[], Definition]) -> Definition:
        """Returns the definition of a key, the same for all calls of the graph."""
        if key not in self.shared:
            self.shared[key] = define()
        return self.shared[key]

    def bind(self) -> dict[str, Any]:
        """Returns all arguments by name, in the schema's order. Absent ones have the schema's defaults."""
        defaults, _ = _schema_arguments(self.name)
        return {**defaults, **dict(zip(defaults, self.arguments, strict=False)), **self.keywords}


LoweringResult: TypeAlias = Definition | tuple[Definition | None, ...]
Rule: TypeAlias = Callable[[OperatorCall], LoweringResult]
"""Returns the definitions of a call's results. Raises Declined for a call that stays an extern call."""

F = TypeVar("F", bound=Callable[..., LoweringResult])

RULES: dict[str, Rule] = {}
"""Rules by overload name ("aten.add.Tensor"). `lowering_rule` registers them when their modules are imported."""

LIBRARY_RULES: dict[str, Rule] = {}
"""Rules of matmuls and convolutions: library calls unless kernels are expected to be faster. Graph passes see calls."""


def lowering_rule(
    *names: str,
    dtypes: DtypeDomain = "any",
    equal: Sequence[str] = (),
    index_argument: int | None = None,
    index_dtypes: Sequence[torch.dtype] = INDEX_DTYPES,
    rules: dict[str, Rule] = RULES,
) -> Callable[[F], F]:
    """Registers `function(call, *arguments)` as the rule of overloads.

    The function receives as many of the schema's positional arguments as it has parameters, and those keyword-only
    arguments that it names. Absent arguments have the schema's defaults. A call is declined when a tensor is not
    strided or has a dtype that kernels lack, or when a condition below does not hold.

    Args:
        names: overload names. Raises ValueError for one that has a rule.
        dtypes: the dtypes that each tensor argument may have.
        equal: names of arguments that eager mode requires to have one dtype; None and numbers have none.
        index_argument: the position of an index tensor.
        index_dtypes: the dtypes that eager mode accepts for it.
        rules: the table of the rule.
    """

    def register(function: F) -> F:
        parameters = list(inspect.signature(function).parameters.values())[1:]
        variadic = any(item.kind is inspect.Parameter.VAR_POSITIONAL for item in parameters)
        accepted = {item.name for item in parameters}

        def rule(call: OperatorCall) -> LoweringResult:
            bound = call.bind()
            _, keyword_only = _schema_arguments(call.name)
            positional = [value for name, value in bound.items() if name not in keyword_only]
            named = {name: bound[name] for name in keyword_only & accepted}
            if not variadic:
                positional = positional[: len(parameters) - len(named)]
            _check_tensors(call, bound.values(), dtypes)
            _check_numbers(call, bound)
            check_equal_dtypes(*[bound[name] for name in equal])
            if index_argument is not None:
                check_index_dtype(positional[index_argument], accepted=index_dtypes)
            return function(call, *positional, **named)

        rule.__module__, rule.__doc__ = function.__module__, function.__doc__
        for name in names:
            if name in rules:
                raise ValueError(f"two rules for {name}")
            rules[name] = rule
        return function

    return register


@bounded_cache(4096)
def _schema_arguments(name: str) -> tuple[dict[str, Any], frozenset[str]]:
    """Returns the defaults of an overload's arguments in the schema's order, and the names of keyword-only ones."""
    arguments = torch_schema(operator_overload(name)).arguments
    return {item.name: item.default_value for item in arguments}, frozenset(
        item.name for item in arguments if item.kwarg_only
    )


def _check_tensors(call: OperatorCall, arguments: Iterable[object], dtypes: DtypeDomain) -> None:
    """Declines a call whose operands or results kernels cannot hold."""
    results: Sequence[object] = call.results
    for fake in results:
        if isinstance(fake, torch.Tensor):
            if fake.layout is not torch.strided:
                raise Declined(f"its result has the layout {fake.layout}")
            _check_float8(call, fake.dtype)
            check_dtype(fake.dtype, "stored" if dtypes == "stored" else "any")
    operand_dtypes: set[torch.dtype] = set()
    for argument in arguments:
        for item in argument if isinstance(argument, list | tuple) else (argument,):
            if isinstance(item, Definition | torch.Tensor):
                operand_dtypes.add(item.dtype)
                _check_float8(call, item.dtype)
                check_dtype(item.dtype, dtypes)
    if dtypes.startswith("equal"):
        _check_one_dtype(operand_dtypes)


def _check_float8(call: OperatorCall, dtype: torch.dtype) -> None:
    if dtype in FLOAT8 and not call.spec.float8_kernels:
        raise Declined(f"kernels of {call.spec.device_type} have no {dtype}")


def check_equal_dtypes(*operands: object) -> None:
    """Declines tensors of several dtypes, which eager mode rejects. Numbers and absent operands have no dtype."""
    _check_one_dtype({item.dtype for item in operands if isinstance(item, Definition)})


def _check_one_dtype(dtypes: Collection[torch.dtype]) -> None:
    if len(dtypes) > 1:
        raise Declined(f"its operands are of {' and '.join(sorted(map(str, dtypes)))}")


def check_dtype(dtype: torch.dtype, domain: DtypeDomain) -> None:
    """Declines operands of a dtype outside a domain."""
    if dtype not in KERNEL_DTYPES:
        raise Declined(f"kernels have no {dtype}")
    if dtype in FLOAT8 and domain != "stored":
        raise Declined(f"kernels do not compute in {dtype}")
    accepted = {
        "any": True,
        "equal": True,
        "stored": True,
        "float": dtype.is_floating_point,
        "equal float": dtype.is_floating_point,
        "number": dtype is not torch.bool,
        "integer": dtype in INTEGERS,
        "bits": dtype in INTEGERS or dtype is torch.bool,
    }[domain]
    if not accepted:
        raise Declined(f"its operands are of {dtype}")


def check_index_dtype(*tensors: Definition, accepted: Sequence[torch.dtype] = INDEX_DTYPES) -> None:
    """Declines index tensors of other dtypes."""
    for tensor in tensors:
        if tensor.dtype not in accepted:
            raise Declined(f"its indices are {tensor.dtype}, not {' or '.join(map(str, accepted))}")


def _check_numbers(call: OperatorCall, bound: Mapping[str, object]) -> None:
    """Declines constants out of the range of the results' dtype: eager mode raises for some, and wraps others."""
    results: Sequence[object] = call.results
    dtypes = {fake.dtype for fake in results if isinstance(fake, torch.Tensor)} - {torch.bool}
    for name in _scalar_arguments(call.name):
        number = bound[name]
        if isinstance(number, int | float) and math.isfinite(number):
            for dtype in dtypes:
                info = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
                if not info.min <= number <= info.max:
                    raise Declined(f"the number {number} is out of the range of {dtype}")


@bounded_cache(4096)
def _scalar_arguments(name: str) -> tuple[str, ...]:
    """Returns the names of an overload's arguments that are numbers of the operands' dtype, not sizes or flags."""
    arguments = torch_schema(operator_overload(name)).arguments
    return tuple([item.name for item in arguments if str(item.type) in ("number", "Optional[number]")])
