"""How to write a call of an ATen overload by hand: `torch.mul(x, y)`, `x.add_(y)`, `torch.mm(x, w, out=b)`.

`torch.ops.aten.mul.Tensor(x, y)` runs the same kernel but costs about twice the time of `torch.mul(x, y)` on
a tiny tensor: it is called through a Python object and a generic conversion of its arguments. The public
functions have generated argument parsers, but these parsers choose the overload themselves, from the kinds of
the arguments. So a public spelling may be used only where it is known to reach that one overload with those
very arguments. The table of such spellings is `torch_calls_table.py`; `benchmarks/make_torch_calls_table.py`
makes it by asking torch, and a test asks again for every entry. Every entry was checked on torch 2.11 and
2.13.
"""

from __future__ import annotations

import enum
import functools
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from fxwrap.converters import torch_calls_table as table
from fxwrap.torch_compat import FunctionSchema, aten_schema


class Kind(enum.Enum):
    """What torch's argument parsers can tell about an argument without looking into it.

    A symbolic size is INT: emitted Python holds it as a plain int. BOOL is a truth value known only when the
    code runs, TRUE and FALSE are literals. EMPTY is an empty list, whatever its element type.
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


NUMBERS = (Kind.TRUE, Kind.FALSE, Kind.INT, Kind.FLOAT, Kind.COMPLEX)
"""The kinds an ACCEPTS line of the table calls "number"."""

_KINDS_OF_TYPE: Mapping[str, tuple[Kind, ...]] = {
    "Tensor": (Kind.TENSOR,),
    "int": (Kind.INT,),
    "float": (Kind.FLOAT, Kind.INT),
    "complex": (Kind.COMPLEX,),
    "bool": (Kind.TRUE, Kind.FALSE),
    "number": NUMBERS,
    "str": (Kind.STRING,),
    "ScalarType": (Kind.DTYPE,),
    "Device": (Kind.DEVICE,),
    "Layout": (Kind.LAYOUT,),
    "MemoryFormat": (Kind.MEMORY_FORMAT,),
    "Generator": (Kind.GENERATOR,),
    "List[Tensor]": (Kind.TENSORS, Kind.EMPTY),
    "List[Optional[Tensor]]": (Kind.OPTIONAL_TENSORS, Kind.TENSORS, Kind.EMPTY),
    "List[bool]": (Kind.BOOLS, Kind.EMPTY),
    "List[int]": (Kind.INTS, Kind.EMPTY),
    "List[float]": (Kind.FLOATS, Kind.EMPTY),
    "List[number]": (Kind.INTS, Kind.FLOATS, Kind.EMPTY),
}
"""The kinds that an argument of a schema type takes unless the table says otherwise; types not named take
none."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One argument of an overload's schema: its name, its type without `Optional`, and whether it may be
    None, left out, is passed by keyword only, and is an output buffer."""

    name: str
    type: str
    optional: bool
    has_default: bool
    keyword_only: bool
    is_out: bool

    def kinds(self) -> tuple[Kind, ...]:
        """Give the kinds that suit the schema: those of the type, NONE if optional, ABSENT if there is a
        default."""
        kinds = _KINDS_OF_TYPE.get(self.type, ())
        kinds += (Kind.NONE,) if self.optional else ()
        return kinds + ((Kind.ABSENT,) if self.has_default else ())


@dataclass(frozen=True, slots=True)
class TorchCall:
    """How one call is written: `function` takes the first `positional` arguments by position, then `keywords`
    by name.

    `function` is a dotted path from `torch`, or with `method` the name of a method of the first argument.
    `outputs` names the buffers that go into `out=` (several as a tuple), `literals` is text added at the end
    ("copy=True"). Arguments of the overload that are named nowhere here are left out: the function has the
    same default.
    """

    function: str
    method: bool
    positional: int
    keywords: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    literals: tuple[str, ...] = ()

    def write(self, args: Sequence[str], kwargs: Mapping[str, str]) -> str:
        """Give the call's Python text, from the texts of the overload's positional and keyword arguments.

        The text of a method's object must be a name. With `args=("x", "y")`, `kwargs={"alpha": "2"}`:
        `torch.add(x, y, alpha=2)`.
        """
        written = [*args[: self.positional], *(f"{name}={kwargs[name]}" for name in self.keywords)]
        if len(self.outputs) == 1:
            written.append(f"out={kwargs[self.outputs[0]]}")
        elif self.outputs:
            written.append(f"out=({', '.join(kwargs[name] for name in self.outputs)})")
        written.extend(self.literals)
        if self.method:
            return f"{written[0]}.{self.function}({', '.join(written[1:])})"
        return f"{self.function}({', '.join(written)})"


@dataclass(frozen=True, slots=True)
class Spelling:
    """One entry of the table: the function or method that reaches an overload, and for which kinds of
    arguments.

    `accepts` holds, by argument name, the kinds that replace those of the schema type. `dropped` are
    arguments not written (their only accepted kinds equal the function's own behaviour); `literals` as in
    `TorchCall`.
    """

    function: str
    method: bool
    dropped: tuple[str, ...] = ()
    literals: tuple[str, ...] = ()
    accepts: Mapping[str, frozenset[Kind]] = field(default_factory=dict)

    def call(
        self, parameters: Sequence[Parameter], args: Sequence[Kind], kwargs: Mapping[str, Kind]
    ) -> TorchCall | None:
        """Give the way to write a call with arguments of these kinds, or None if the spelling may not be
        used."""
        positional = [parameter for parameter in parameters if not parameter.keyword_only]
        if len(args) > len(positional):
            return None
        given = dict(zip((parameter.name for parameter in positional), args))
        if given.keys() & kwargs.keys() or (self.method and not args):
            return None
        given.update(kwargs)
        if not self._accepts_all(parameters, given):
            return None
        outputs = tuple(parameter.name for parameter in parameters if parameter.is_out)
        hidden = {*outputs, *self.dropped}
        return TorchCall(
            self.function,
            self.method,
            sum(parameter.name not in self.dropped for parameter in positional[: len(args)]),
            tuple(name for name in kwargs if name not in hidden),
            outputs,
            self.literals,
        )

    def _accepts_all(self, parameters: Sequence[Parameter], given: Mapping[str, Kind]) -> bool:
        if given.keys() - {parameter.name for parameter in parameters}:
            return False
        for parameter in parameters:
            kind = given.get(parameter.name, Kind.ABSENT)
            accepted = self.accepts.get(parameter.name) or parameter.kinds()
            wanted = (Kind.TRUE, Kind.FALSE) if kind is Kind.BOOL else (kind,)
            if not all(one in accepted for one in wanted):
                return False
        return True


def torch_call(op: str, overload: str, args: Sequence[Kind], kwargs: Mapping[str, Kind]) -> TorchCall | None:
    """Give the public spelling of a call of ATen overload `op.overload` ("mul", "Tensor"), or None if there
    is none.

    `args` and `kwargs` are the kinds of the call's arguments, as many and under the names that the call has.
    The spelling dispatches exactly that overload with equal arguments wherever grad mode is off;
    `TorchCall.write` makes the text. None means: write `torch.ops.aten.op.overload`, which is always right.
    """
    name = f"{op}.{overload}"
    spelling = spellings().get(name)
    parameters = parameters_of(name)
    if spelling is None or parameters is None:
        return None
    return spelling.call(parameters, args, kwargs)


def kind_of(value: object) -> Kind:
    """Give the kind of a run-time value, as `torch_call` takes it."""
    if isinstance(value, (list, tuple)):
        return _kind_of_sequence(value)
    if isinstance(value, bool):
        return Kind.TRUE if value else Kind.FALSE
    if value is None:
        return Kind.NONE
    return next((kind for type_, kind in _KIND_OF_VALUE.items() if isinstance(value, type_)), Kind.OTHER)


_KIND_OF_VALUE: Mapping[type, Kind] = {
    torch.Tensor: Kind.TENSOR,
    int: Kind.INT,
    torch.SymInt: Kind.INT,
    float: Kind.FLOAT,
    torch.SymFloat: Kind.FLOAT,
    torch.SymBool: Kind.BOOL,
    complex: Kind.COMPLEX,
    str: Kind.STRING,
    torch.dtype: Kind.DTYPE,
    torch.device: Kind.DEVICE,
    torch.layout: Kind.LAYOUT,
    torch.memory_format: Kind.MEMORY_FORMAT,
    torch.Generator: Kind.GENERATOR,
}

_KIND_OF_ELEMENTS: Mapping[frozenset[Kind], Kind] = {
    frozenset(): Kind.EMPTY,
    frozenset({Kind.TENSOR}): Kind.TENSORS,
    frozenset({Kind.TENSOR, Kind.NONE}): Kind.OPTIONAL_TENSORS,
    frozenset({Kind.TRUE}): Kind.BOOLS,
    frozenset({Kind.FALSE}): Kind.BOOLS,
    frozenset({Kind.TRUE, Kind.FALSE}): Kind.BOOLS,
    frozenset({Kind.INT}): Kind.INTS,
    frozenset({Kind.FLOAT}): Kind.FLOATS,
}


def _kind_of_sequence(values: Sequence[object]) -> Kind:
    return _KIND_OF_ELEMENTS.get(frozenset(map(kind_of, values)), Kind.OTHER)


@functools.cache
def parameters_of(name: str) -> tuple[Parameter, ...] | None:
    """Give the arguments of ATen overload `name` ("mul.Tensor") in schema order, or None if torch does not
    have it."""
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
    """Give the table: each covered overload ("mul.Tensor") with its spelling.

    The table is made on one version of torch and serves several: entries whose function this version lacks
    are left out.
    """
    accepts = dict(_accepts_line(line) for line in table.ACCEPTS.split("\n") if line)
    found = {
        name: Spelling(_function_of(name, namespace), namespace == "method", accepts=accepts.get(name, {}))
        for namespace, names in table.SAME_NAME.items()
        for name in names.split()
    }
    for line in table.RENAMED.strip().split("\n"):
        name, function, *changes = line.split()
        found[name] = Spelling(
            function.removeprefix("."),
            function.startswith("."),
            dropped=tuple(change[1:] for change in changes if change[0] == "-"),
            literals=tuple(change[1:] for change in changes if change[0] == "+"),
            accepts=accepts.get(name, {}),
        )
    return {name: spelling for name, spelling in found.items() if _exists(spelling)}


def _function_of(name: str, namespace: str) -> str:
    """`("linalg_inv_ex.default", "torch.linalg")` gives "torch.linalg.inv_ex"; for "method" the bare name."""
    op = name.split(".")[0]
    if namespace == "method":
        return op
    prefix = namespace.removeprefix("torch.") + "_"
    return f"{namespace}.{op.removeprefix(prefix)}"


def _accepts_line(line: str) -> tuple[str, dict[str, frozenset[Kind]]]:
    name, *rules = line.split()
    return name, {argument: _kinds(kinds) for argument, kinds in (rule.split("=") for rule in rules)}


def _kinds(text: str) -> frozenset[Kind]:
    names = text.split("|")
    return frozenset(Kind(name) for name in names if name != "number") | frozenset(
        NUMBERS if "number" in names else ()
    )


def _exists(spelling: Spelling) -> bool:
    path = f"Tensor.{spelling.function}" if spelling.method else spelling.function.removeprefix("torch.")
    try:
        operator.attrgetter(path)(torch)
    except AttributeError:
        return False
    return True
