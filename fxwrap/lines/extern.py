"""Lines for extern calls: operators of ATen, or of a user."""

from __future__ import annotations

from collections.abc import Mapping

from fxwrap.lines.operands import alias_error, aliased_operand, keyword_error, writes_error
from fxwrap.wrapper_ir import (
    Effect,
    Form,
    LineBase,
    Operand,
    Result,
    Value,
    attribute,
    define,
    leaves,
    line_class,
    read,
    target,
    write,
)


def _operands(line: ExternCall | Mutate) -> list[Operand]:
    return [*leaves(line.arguments), *leaves(tuple([item for _, item in line.keywords]))]


@line_class("extern.call")
class ExternCall(LineBase):
    """Calls an operator that mutates none of its operands, or its out variant, which writes `outs`.

    `target` is "namespace.name.overload". Results are new roots unless `aliases` lists an operand for them. Unused and
    undefined results are `_` with type `none`. `outs` are the operator's out arguments in the order of its schema.

    Example: `%y, %i = extern.call @aten.max.dim(%x, 1, keepdim=true) : f32[4, 1]@cpu, i64[4, 1]@cpu`
    """

    results: tuple[Result, ...] = define(Form.RESULTS)
    target: str = target()
    arguments: tuple[Operand, ...] = read(Form.ARGUMENTS)
    keywords: tuple[tuple[str, Operand], ...] = read(Form.NAMED, default=())
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
            return "a call has outs or results, not both"
        aliases = alias_error(self.results, _operands(self), self.aliases) if self.aliases else None
        return keyword_error(self.keywords) or aliases


@line_class("extern.mutate")
class Mutate(LineBase):
    """Calls an operator that mutates the operands listed in `writes`; it may also have results.

    Example: `extern.mutate @aten.copy_.default(%buf0, %x) writes=(%buf0)`
    """

    results: tuple[Result, ...] = define(Form.RESULTS)
    target: str = target()
    arguments: tuple[Operand, ...] = read(Form.ARGUMENTS)
    writes: tuple[Value, ...] = write(Form.SEQUENCE)
    keywords: tuple[tuple[str, Operand], ...] = read(Form.NAMED, default=())
    aliases: tuple[Value | None, ...] = attribute(default=(), form=Form.SEQUENCE)
    effect_set: tuple[Effect, ...] = attribute(default=(), form=Form.SEQUENCE)
    stream: int = attribute(default=0)

    def effects(self) -> tuple[Effect, ...]:
        return self.effect_set

    def alias_of(self, result: Value) -> Value | None:
        return aliased_operand(self.results, self.aliases, result)

    def verify_self(self) -> str | None:
        operands = _operands(self)
        aliases = alias_error(self.results, operands, self.aliases)
        return keyword_error(self.keywords) or writes_error(operands, self.writes) or aliases


SCATTER_OPERATORS: Mapping[str, tuple[str, str]] = {
    "": ("aten.scatter_.src", "aten.scatter_.value"),
    "add": ("aten.scatter_.reduce", "aten.scatter_.value_reduce"),
    "multiply": ("aten.scatter_.reduce", "aten.scatter_.value_reduce"),
    **dict.fromkeys(("sum", "prod", "mean", "amax", "amin"), ("aten.scatter_reduce_.two", "")),
}
"""The operators of `extern.scatter` by reduction: for a tensor source, and for a scalar source ("" for none)."""


@line_class("extern.scatter")
class Scatter(LineBase):
    """Writes `source`, a tensor or a scalar, into `target` at `index` along `dim`, in place.

    `reduce` is "" (overwrite), or "sum", "prod", "mean", "amax" or "amin", which reduce the old content too if
    `include_self`, or "add" or "multiply", which belong to an older operator that always includes it. A tensor has the
    target's dtype; a scalar is cast to it. Source, and errors raised: `aten.scatter_` and `aten.scatter_reduce_`.

    Example: `extern.scatter(%index, %source) target=%buf0 dim=0 reduce="sum"`
    """

    target: Value = write()
    index: Value = read()
    source: Operand = read()
    dim: int = attribute()
    reduce: str = attribute(default="")
    include_self: bool = attribute(default=True)
    stream: int = attribute(default=0)

    def verify_self(self) -> str | None:
        if self.reduce not in SCATTER_OPERATORS:
            return f"reduce is one of {tuple(SCATTER_OPERATORS)}, not {self.reduce!r}"
        if not self.include_self and self.reduce in ("", "add", "multiply"):
            return f"include_self=false is not possible with the reduction {self.reduce!r}"
        return None


@line_class("extern.index_put")
class IndexPut(LineBase):
    """Writes `values` into `target` at `indices` (a tensor or none for each dimension), in place.

    With `accumulate`, adds the values. Source: `aten.index_put_`.

    Example: `extern.index_put([none, %index], %values) target=%buf0 accumulate=true`
    """

    target: Value = write()
    indices: tuple[Value | None, ...] = read()
    values: Value = read()
    accumulate: bool = attribute(default=False)
    stream: int = attribute(default=0)
