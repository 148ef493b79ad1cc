"""Arguments of public functions that are of another type, number or range: errors that name the place and a remedy."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap.errors import ArgumentError, FxwrapError, GraphError, OptionError

X = torch.ones(2, 3)


@cache
def traced() -> GraphModule:
    return make_fx(lambda x: x.sin())(X)


@cache
def compiled() -> fxwrap.Compiled:
    return fxwrap.compile_graph(traced(), [X])


TAKES_PROGRAMS = ("to_python", "to_cpp", "to_fx", "verify")
OTHER_OBJECTS: tuple[object, ...] = (None, 3, "text", X, [X])

TYPES: list[tuple[str, Callable[[Any], Any], str]] = [
    *[(name, getattr(fxwrap, name), f"fxwrap.{name} takes Program as 'program', not ") for name in TAKES_PROGRAMS],
    ("run", lambda other: fxwrap.run(other, [X]), "fxwrap.run takes Program as 'program', not "),
    ("save", lambda other: fxwrap.save(other, "/nowhere"), "fxwrap.save takes .* as 'subject', not "),
    ("lower", fxwrap.lower, "fxwrap.lower takes GraphModule or ExportedProgram as 'graph', not "),
    ("from_fx", fxwrap.from_fx, "fxwrap.from_fx takes GraphModule or .* as 'graph', not "),
]
"""Functions, by name, that take none of `OTHER_OBJECTS`, and the beginnings of their errors."""


@pytest.mark.parametrize(("function", "text"), [row[1:] for row in TYPES], ids=[row[0] for row in TYPES])
def test_objects_of_other_types(function: Callable[[Any], Any], text: str) -> None:
    for other in OTHER_OBJECTS:
        with pytest.raises(ArgumentError, match=rf"^{text}{type(other).__name__}\. (Pass|Trace)"):
            function(other)


def hints(**values: Any) -> fxwrap.Options:
    return fxwrap.Options(symbol_hints={"s0": -3}, **values)


def compile_with(*inputs: object, **arguments: Any) -> fxwrap.Compiled:
    return fxwrap.compile_graph(traced(), inputs, **arguments)


VALUES: list[tuple[Callable[[], object], type[FxwrapError], str]] = [
    (lambda: fxwrap.to_python(compiled()), ArgumentError, "not Compiled. Pass its attribute 'program'"),  # type: ignore[arg-type]
    (lambda: fxwrap.parse(b"program"), ArgumentError, "fxwrap.parse takes str as 'text', not bytes"),  # type: ignore[arg-type]
    (lambda: fxwrap.load(3), ArgumentError, "fxwrap.load takes str or PathLike as 'path', not int"),  # type: ignore[arg-type]
    (lambda: fxwrap.save(compiled(), None), ArgumentError, "as 'path', not NoneType. Pass the path"),  # type: ignore[arg-type]
    (lambda: fxwrap.environment_key({}), ArgumentError, "takes Options or None as 'options', not dict"),  # type: ignore[arg-type]
    (lambda: compile_with(X, options={}), ArgumentError, "'options', not dict. Pass fxwrap.Options"),
    (lambda: compile_with(X, name=3), ArgumentError, "takes str as 'name', not int"),
    (compile_with, GraphError, "the graph has 1 inputs, but there are 0 example inputs. Pass"),
    (lambda: compile_with(X, X), GraphError, "the graph has 1 inputs, but there are 2 example inputs. Pass"),
    (lambda: fxwrap.lower(traced(), [X, X]), GraphError, "has 1 inputs, but there are 2 example inputs. Pass"),
    (lambda: fxwrap.compile_graph(traced(), X), GraphError, "object of type Tensor, not a sequence. Pass"),  # type: ignore[arg-type]
    (lambda: compile_with(3), GraphError, "with 2 dimensions, and its example input is a number. Pass"),
    (lambda: compile_with(X[0]), GraphError, "is a tensor of torch.float32 with 1 dimensions. Pass"),
    (lambda: compile_with(X.double()), GraphError, "is a tensor of torch.float64 with 2 dimensions. Pass"),
    (lambda: compile_with(X, static_inputs=[1]), GraphError, "static_inputs has 1, which is no position of an input"),
    (lambda: compile_with(X, ownership={-1: None}), GraphError, "ownership has -1, which is no position of an input"),
    (lambda: compile_with(X, flexible_stride_outputs=[1]), GraphError, "no position of an output. Pass positions of"),
    (hints, OptionError, "'symbol_hints': -3 for 's0' is not from 0 to"),
    (lambda: hints(symbol_ranges={"s0": (-2, 8)}), OptionError, "-3 for 's0' is not from -2 to"),
    (lambda: fxwrap.Options(symbol_hints={"s0": 1 << 63}), OptionError, "2\\*\\*63 - 1. Pass a typical"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "text"), VALUES, ids=[text for _, _, text in VALUES])
def test_values(call: Callable[[], object], error: type[FxwrapError], text: str) -> None:
    with pytest.raises(error, match=text):
        call()


def test_a_number_that_may_be_negative_has_such_a_hint() -> None:
    assert hints(symbol_ranges={"s0": (-4, 8)}).symbol_hints == {"s0": -3}
