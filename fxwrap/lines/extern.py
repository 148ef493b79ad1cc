"""Lines that call operators outside fxwrap: ATen's, or a user's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fxwrap.lines.results import aliased_operand, wrong_aliases, wrong_writes
from fxwrap.wrapper_ir import Effect, Form, LineBase, Value, attribute, define, leaves, line_class, read, target, write


def _operands(line: Call | Mutate) -> list[Any]:
    return [*leaves(line.arguments), *leaves(line.keywords)]


@line_class("extern.call")
class Call(LineBase):
    """Calls an operator that changes nothing it is given, or its out= form, which fills `outs`.

    `target` is "namespace.name.overload". Results are new roots, but for those that `aliases` says share an operand's
    root; a result that the program does not use, or that the operator leaves undefined, is `_` with type `none`.
    `outs` go to the operator's out arguments in the order of its schema.

    Example: `%y, %i = extern.call @aten.max.dim(%x, 1, keepdim=true) : f32[4, 1]@cpu, i64[4, 1]@cpu`
    """

    results: tuple[Any, ...] = define(Form.RESULTS)
    target: str = target()
    arguments: tuple[Any, ...] = read(Form.ARGUMENTS)
    keywords: tuple[tuple[str, Any], ...] = read(Form.NAMED, default=())
    outs: tuple[Value, ...] = write(Form.SEQUENCE, default=())
    aliases: tuple[Value | None, ...] = attribute(default=(), form=Form.SEQUENCE)
    effect_set: tuple[Effect, ...] = attribute(default=(), form=Form.SEQUENCE)
    stream: int = attribute(default=0)

    def effects(self) -> tuple[Effect, ...]:
        return self.effect_set

    def alias_of(self, result: Value) -> Value | None:
        return aliased_operand(self.results, self.aliases, result)

    def verify_self(self) -> str | None:
        if self.outs and self.results:
            return "a call fills outs or gives results, not both"
        return wrong_aliases(self.results, _operands(self), self.aliases) if self.aliases else None


@line_class("extern.mutate")
class Mutate(LineBase):
    """Calls an operator that writes some of its operands, listed in `writes`; it may give results too.

    Example: `extern.mutate @aten.copy_.default(%buf0, %x) writes=(%buf0)`
    """

    results: tuple[Any, ...] = define(Form.RESULTS)
    target: str = target()
    arguments: tuple[Any, ...] = read(Form.ARGUMENTS)
    writes: tuple[Value, ...] = write(Form.SEQUENCE)
    keywords: tuple[tuple[str, Any], ...] = read(Form.NAMED, default=())
    aliases: tuple[Value | None, ...] = attribute(default=(), form=Form.SEQUENCE)
    effect_set: tuple[Effect, ...] = attribute(default=(), form=Form.SEQUENCE)
    stream: int = attribute(default=0)

    def effects(self) -> tuple[Effect, ...]:
        return self.effect_set

    def alias_of(self, result: Value) -> Value | None:
        return aliased_operand(self.results, self.aliases, result)

    def verify_self(self) -> str | None:
        operands = _operands(self)
        return wrong_writes(operands, self.writes) or wrong_aliases(self.results, operands, self.aliases)


SCATTER_OPERATORS: Mapping[str, tuple[str, str]] = {
    "": ("aten.scatter_.src", "aten.scatter_.value"),
    "add": ("aten.scatter_.reduce", "aten.scatter_.value_reduce"),
    "multiply": ("aten.scatter_.reduce", "aten.scatter_.value_reduce"),
    **dict.fromkeys(("sum", "prod", "mean", "amax", "amin"), ("aten.scatter_reduce_.two", "")),
}
"""What an `extern.scatter` calls, by its reduction: with a tensor as source, and with a number ("" for no operator)."""


@line_class("extern.scatter")
class Scatter(LineBase):
    """Writes `source`, a tensor or a number, into `target` at `index` along `dim`, in place.

    `reduce` is "" (overwrite), "sum", "prod", "mean", "amax" or "amin", and `include_self` says whether the old content
    takes part in the reduction; or it is "add" or "multiply", which always include it and are an older operator, with
    dtypes and warnings of its own. A tensor has the target's dtype; a number is cast to it. Errors are those of
    `aten.scatter_` and `aten.scatter_reduce_`, which this line stands for.

    Example: `extern.scatter(%index, %source) target=%buf0 dim=0 reduce="sum"`
    """

    target: Value = write()
    index: Value = read()
    source: Any = read()
    dim: int = attribute()
    reduce: str = attribute(default="")
    include_self: bool = attribute(default=True)
    stream: int = attribute(default=0)

    def verify_self(self) -> str | None:
        if self.reduce not in SCATTER_OPERATORS:
            return f"reduce is one of {tuple(SCATTER_OPERATORS)}, not {self.reduce!r}"
        if not self.include_self and self.reduce in ("", "add", "multiply"):
            return f"include_self=false needs another reduction than {self.reduce!r}"
        return None


@line_class("extern.index_put")
class IndexPut(LineBase):
    """Writes `values` into `target` at `indices` (tensors or none, one a dimension), in place.

    With `accumulate` the values are added. Source: `aten.index_put_`.

    Example: `extern.index_put([none, %index], %values) target=%buf0 accumulate=true`
    """

    target: Value = write()
    indices: tuple[Value | None, ...] = read()
    values: Value = read()
    accumulate: bool = attribute(default=False)
    stream: int = attribute(default=0)
