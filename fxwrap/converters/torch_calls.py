"""Calls of ATen overloads by torch's public functions and methods: `torch.mul(x, y)`, `x.add_(y)`.

They dispatch to the same kernel as `torch.ops.aten.mul.Tensor(x, y)` with less overhead, because their argument parsers
are generated. These parsers select the overload from the kinds of the arguments, so a call is used only if it is known
to reach the intended overload with equal arguments. `torch_calls_table.py` has the table of such calls;
`benchmarks/make_torch_calls_table.py` generates it by asking torch, and a test checks every entry.
"""

from __future__ import annotations

import enum
import functools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from fxwrap.caching import bounded_cache
from fxwrap.converters import torch_calls_table as table
from fxwrap.torch_compat import FunctionSchema, aten_schema


class ArgumentKind(enum.Enum):
    """The properties of an argument that torch's argument parsers see.

    A symbolic size is INT, since emitted Python holds it as an int. TRUE and FALSE are literals, BOOL is known only at
    run time. EMPTY is an empty list of any element type.
    """

    ABSENT = "absent"
    NONE = "none"
    TENSOR = "tensor"
    TRUE = "true"
    FALSE = "false"
    BOOL = "bool"
    INT = "int"
    FLOAT = "float"
    COMPLEX = "complex"
    STRING = "string"
    DTYPE = "dtype"
    DEVICE = "device"
    LAYOUT = "layout"
    MEMORY_FORMAT = "memory_format"
    GENERATOR = "generator"
    EMPTY = "empty"
    TENSORS = "tensors"
    OPTIONAL_TENSORS = "optional_tensors"
    BOOLS = "bools"
    INTS = "ints"
    FLOATS = "floats"
    OTHER = "other"


NUMBERS = (ArgumentKind.TRUE, ArgumentKind.FALSE, ArgumentKind.INT, ArgumentKind.FLOAT, ArgumentKind.COMPLEX)
"""The kinds that an ACCEPTS entry of the table calls "number"."""

_KINDS_OF_TYPE: Mapping[str, tuple[ArgumentKind, ...]] = {
    "Tensor": (ArgumentKind.TENSOR,),
    "int": (ArgumentKind.INT,),
    "float": (ArgumentKind.FLOAT, ArgumentKind.INT),
    "complex": (ArgumentKind.COMPLEX,),
    "bool": (ArgumentKind.TRUE, ArgumentKind.FALSE),
    "number": NUMBERS,
    "str": (ArgumentKind.STRING,),
    "ScalarType": (ArgumentKind.DTYPE,),
    "Device": (ArgumentKind.DEVICE,),
    "Layout": (ArgumentKind.LAYOUT,),
    "MemoryFormat": (ArgumentKind.MEMORY_FORMAT,),
    "Generator": (ArgumentKind.GENERATOR,),
    "List[Tensor]": (ArgumentKind.TENSORS, ArgumentKind.EMPTY),
    "List[Optional[Tensor]]": (ArgumentKind.OPTIONAL_TENSORS, ArgumentKind.TENSORS, ArgumentKind.EMPTY),
    "List[bool]": (ArgumentKind.BOOLS, ArgumentKind.EMPTY),
    "List[int]": (ArgumentKind.INTS, ArgumentKind.EMPTY),
    "List[float]": (ArgumentKind.FLOATS, ArgumentKind.EMPTY),
    "List[number]": (ArgumentKind.INTS, ArgumentKind.FLOATS, ArgumentKind.EMPTY),
}
"""The kinds accepted for each schema type unless the table has others; none for all other types."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """An argument of an overload's schema. `type` is its type without `Optional`."""

    name: str
    type: str
    optional: bool
    has_default: bool
    keyword_only: bool
    is_out: bool

    def kinds(self) -> tuple[ArgumentKind, ...]:
        """Returns the kinds accepted by the schema, with ABSENT if there is a default."""
        kinds = _KINDS_OF_TYPE.get(self.type, ())
        kinds += (ArgumentKind.NONE,) if self.optional else ()
        return kinds + ((ArgumentKind.ABSENT,) if self.has_default else ())


@dataclass(frozen=True, slots=True)
class TorchCall:
    """A call of a public function or method for one overload.

    `function` is a dotted path from `torch`, or with `method` the name of a method of the first argument. It takes the
    first `positional` arguments by position, then `keywords` by name, then `outputs` as `out=` (several as a tuple),
    then `literals`, fixed text such as "copy=True". The function has the overload's defaults for all other arguments.
    """

    function: str
    method: bool
    positional: int
    keywords: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    literals: tuple[str, ...] = ()

    def write(self, args: Sequence[str], kwargs: Mapping[str, str]) -> str:
        """Returns the call's Python text, given the texts of the overload's arguments.

        The text of a method's object must be a name. With `args=("x", "y")`, `kwargs={"alpha": "2"}`:
        `torch.add(x, y, alpha=2)`.
        """
        texts = [*args[: self.positional], *[f"{name}={kwargs[name]}" for name in self.keywords]]
        if len(self.outputs) == 1:
            texts.append(f"out={kwargs[self.outputs[0]]}")
        elif self.outputs:
            texts.append(f"out=({', '.join([kwargs[name] for name in self.outputs])})")
        texts.extend(self.literals)
        if self.method:
            return f"{texts[0]}.{self.function}({', '.join(texts[1:])})"
        return f"{self.function}({', '.join(texts)})"


@dataclass(frozen=True, slots=True)
class Spelling:
    """An entry of the table: the function or method for an overload, and the kinds of arguments it is valid for.

    `accepts` overrides the kinds of the schema, by argument name. `dropped` arguments are not written, because their
    only accepted kinds are the function's behaviour. `literals` are as in `TorchCall`.
    """

    function: str
    method: bool
    dropped: tuple[str, ...] = ()
    literals: tuple[str, ...] = ()
    accepts: Mapping[str, frozenset[ArgumentKind]] = field(default_factory=dict)

    def call(
        self, parameters: Sequence[Parameter], args: Sequence[ArgumentKind], kwargs: Mapping[str, ArgumentKind]
    ) -> TorchCall | None:
        """Returns the call for arguments of these kinds, or None if the spelling is not valid for them."""
        positional = [parameter for parameter in parameters if not parameter.keyword_only]
        kinds = dict(zip([parameter.name for parameter in positional], args))
        if len(args) > len(positional) or kinds.keys() & kwargs.keys() or (self.method and not args):
            return None
        kinds.update(kwargs)
        if not self._accepts_all(parameters, kinds):
            return None
        outputs = tuple([parameter.name for parameter in parameters if parameter.is_out])
        count = sum(parameter.name not in self.dropped for parameter in positional[: len(args)])
        keywords = tuple([name for name in kwargs if name not in (*outputs, *self.dropped)])
        return TorchCall(self.function, self.method, count, keywords, outputs, self.literals)

    def _accepts_all(self, parameters: Sequence[Parameter], kinds: Mapping[str, ArgumentKind]) -> bool:
        if kinds.keys() - {parameter.name for parameter in parameters}:
            return False
        for parameter in parameters:
            kind = kinds.get(parameter.name, ArgumentKind.ABSENT)
            accepted = self.accepts.get(parameter.name) or parameter.kinds()
            needed = (ArgumentKind.TRUE, ArgumentKind.FALSE) if kind is ArgumentKind.BOOL else (kind,)
            if not all(one in accepted for one in needed):
                return False
        return True


def torch_call(
    op: str, overload: str, args: Sequence[ArgumentKind], kwargs: Mapping[str, ArgumentKind]
) -> TorchCall | None:
    """Returns the public spelling of a call of ATen overload `op.overload` ("mul", "Tensor"), or None if there is none.

    `args` and `kwargs` are the kinds of the call's arguments. The spelling dispatches to that overload with equal
    arguments if grad mode is off. `torch.ops.aten.op.overload` is always valid.
    """
    name = f"{op}.{overload}"
    spelling = spellings().get(name)
    parameters = parameters_of(name)
    if spelling is None or parameters is None:
        return None
    return spelling.call(parameters, args, kwargs)


def kind_of(value: object) -> ArgumentKind:
    """Returns the kind of a run-time value."""
    if isinstance(value, list | tuple):
        return kind_of_elements(map(kind_of, value))
    if isinstance(value, bool):
        return ArgumentKind.TRUE if value else ArgumentKind.FALSE
    if value is None:
        return ArgumentKind.NONE
    return next((kind for type_, kind in _KIND_OF_VALUE.items() if isinstance(value, type_)), ArgumentKind.OTHER)


def kind_of_elements(kinds: Iterable[ArgumentKind]) -> ArgumentKind:
    """Returns the kind of a list whose elements have these kinds."""
    return _KIND_OF_ELEMENTS.get(frozenset(kinds), ArgumentKind.OTHER)


_KIND_OF_VALUE: Mapping[type, ArgumentKind] = {
    torch.Tensor: ArgumentKind.TENSOR,
    int: ArgumentKind.INT,
    torch.SymInt: ArgumentKind.INT,
    float: ArgumentKind.FLOAT,
    torch.SymFloat: ArgumentKind.FLOAT,
    torch.SymBool: ArgumentKind.BOOL,
    complex: ArgumentKind.COMPLEX,
    str: ArgumentKind.STRING,
    torch.dtype: ArgumentKind.DTYPE,
    torch.device: ArgumentKind.DEVICE,
    torch.layout: ArgumentKind.LAYOUT,
    torch.memory_format: ArgumentKind.MEMORY_FORMAT,
    torch.Generator: ArgumentKind.GENERATOR,
}

_KIND_OF_ELEMENTS: Mapping[frozenset[ArgumentKind], ArgumentKind] = {
    frozenset(): ArgumentKind.EMPTY,
    frozenset({ArgumentKind.TENSOR}): ArgumentKind.TENSORS,
    frozenset({ArgumentKind.TENSOR, ArgumentKind.NONE}): ArgumentKind.OPTIONAL_TENSORS,
    frozenset({ArgumentKind.TRUE}): ArgumentKind.BOOLS,
    frozenset({ArgumentKind.FALSE}): ArgumentKind.BOOLS,
    frozenset({ArgumentKind.TRUE, ArgumentKind.FALSE}): ArgumentKind.BOOLS,
    frozenset({ArgumentKind.INT}): ArgumentKind.INTS,
    frozenset({ArgumentKind.FLOAT}): ArgumentKind.FLOATS,
}


@bounded_cache(4096)
def parameters_of(name: str) -> tuple[Parameter, ...] | None:
    """Returns the arguments of ATen overload `name` ("mul.Tensor") in schema order, or None if torch lacks it."""
    schema = aten_schema(*name.split("."))
    return None if schema is None else tuple(_parameters(schema))


def _parameters(schema: FunctionSchema) -> Iterator[Parameter]:
    for argument in schema.arguments:
        type_text = str(argument.real_type)
        optional = type_text.startswith("Optional[")
        yield Parameter(
            argument.name,
            type_text.removeprefix("Optional[").removesuffix("]") if optional else type_text,
            optional,
            argument.has_default_value(),
            argument.kwarg_only,
            argument.is_out,
        )


@functools.cache
def spellings() -> Mapping[str, Spelling]:
    """Returns the table by overload ("mul.Tensor"), without the functions that this version of torch lacks."""
    accepts: dict[str, dict[str, frozenset[ArgumentKind]]] = {}
    for rules, names in table.ACCEPTS.items():
        kinds = {argument: _kinds(text) for argument, text in [rule.split("=") for rule in rules.split()]}
        accepts |= dict.fromkeys(_expand_overloads(names), kinds)
    entries = {
        name: Spelling(_function_of(name, namespace), namespace == "method", accepts=accepts.get(name, {}))
        for namespace, names in table.SAME_NAME.items()
        for name in _expand_overloads(names)
    }
    for line in table.RENAMED.strip().split("\n"):
        name, function, *changes = line.split()
        entries[name] = Spelling(
            function.removeprefix("."),
            function.startswith("."),
            dropped=tuple([change[1:] for change in changes if change[0] == "-"]),
            literals=tuple([change[1:] for change in changes if change[0] == "+"]),
            accepts=accepts.get(name, {}),
        )
    return {name: spelling for name, spelling in entries.items() if _exists(spelling)}


def _expand_overloads(names: str) -> list[str]:
    """Returns the overloads of "abs.default|out acos.default": abs.default, abs.out and acos.default."""
    operators = [name.split(".") for name in names.split()]
    return [f"{op}.{overload}" for op, overloads in operators for overload in overloads.split("|")]


def _function_of(name: str, namespace: str) -> str:
    """Returns "torch.linalg.inv_ex" for ("linalg_inv_ex.default", "torch.linalg"); for "method" the bare name."""
    op = name.split(".")[0]
    if namespace == "method":
        return op
    prefix = namespace.removeprefix("torch.") + "_"
    return f"{namespace}.{op.removeprefix(prefix)}"


def _kinds(text: str) -> frozenset[ArgumentKind]:
    names = text.split("|")
    kinds = frozenset([ArgumentKind(name) for name in names if name != "number"])
    return kinds.union(NUMBERS) if "number" in names else kinds


def _exists(spelling: Spelling) -> bool:
    path = f"Tensor.{spelling.function}" if spelling.method else spelling.function.removeprefix("torch.")
    try:
        operator.attrgetter(path)(torch)
    except AttributeError:
        return False
    return True
