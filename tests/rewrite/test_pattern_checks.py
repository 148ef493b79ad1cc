"""Patterns and replacements are checked when a rewrite is built, not when it first matches."""

from __future__ import annotations

from typing import Any

import pytest

from fxwrap import rewrite as rw
from fxwrap.errors import RewriteError

X, Y = rw.tensors("x y")
NUMBER = rw.number("n")
SIN, MM, SUM = "aten.sin.default", "aten.mm.default", "aten.sum.dim_IntList"
SINE = rw.call(SIN, X)


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        (rw.call("aten.gelu", X), "no operator 'aten.gelu'; did you mean aten.gelu.default or aten.gelu.out?"),
        (rw.call("aten.geluu.default", X), "no operator 'aten.geluu.default'; did you mean aten.gelu.default"),
        (rw.call("vendor.gelu.default", X), "'vendor.gelu.default'; Import the library that registers it first"),
        (rw.call((SIN, "aten.sinus.default"), X), "torch has no operator 'aten.sinus.default'"),
        (rw.launch(rw.computes("aten.geluu"), X), "torch has no operator 'aten.geluu.default'"),
        (rw.computed("aten.geluu.default", X), "torch has no operator 'aten.geluu.default'"),
        (rw.call(MM, X), "aten.mm.default has no default for 'mat2': add its pattern, or `...`"),
        (rw.call(MM, X, Y, X), "aten.mm.default has 2 arguments, and the pattern 3"),
        (rw.call(SIN, X, out=Y), "aten.sin.default has no argument 'out'; its arguments are self"),
        (rw.call(MM, X, Y, self=X), "the pattern of aten.mm.default has the argument 'self' twice"),
        (rw.call(SUM, X, NUMBER), "argument 'dim' of aten.sum.dim_IntList is no number"),
        (rw.call(SUM, X, [0], Y), "argument 'keepdim' of aten.sum.dim_IntList is no tensor"),
        (rw.call("aten.cat.default", X), "argument 'tensors' of aten.cat.default is a list: write a list of patterns"),
        (rw.call(SIN, "x"), "argument 'self' of aten.sin.default is no string, and 'x' never matches"),
        (rw.call(SIN, [X]), "argument 'self' of aten.sin.default is no list"),
        (rw.call(MM, X, rw.number("x")), "wildcard 'x' is tensor and number: use one kind"),
        (rw.call(SIN, rw.tensor("")), "a wildcard has a name that is not empty"),
        (rw.call(MM, SINE.named("a"), rw.call(SIN, Y).named("a")), "two operations of the pattern have the name 'a'"),
        (rw.launch(rw.computes()), "computes() names no operator"),
        (rw.launch(rw.computes(SIN, SINE), X), "has names of operators, or patterns of calls; not both"),
        (rw.launch(rw.computes(SIN, exactly=False), X), "with exactly=False, its operand is `...`"),
        (rw.launch(rw.computes(SINE), X), "has no operands of its own: its operands are those of the calls"),
        (rw.launch(rw.computes(SINE, exactly=False)), "with exactly=False takes names of operators"),
        (rw.launch(rw.computes(rw.launch("sin_0", X))), "has patterns of calls by the names of operators, not sin_0"),
    ],
)  # fmt: skip
def test_a_pattern_that_cannot_match_is_an_error(pattern: Any, reason: str) -> None:
    with pytest.raises(RewriteError) as error:
        rw.rewrite_pass(pattern, SINE, key="1")
    assert reason in str(error.value)


@pytest.mark.parametrize(
    ("replacement", "reason"),
    [
        (rw.call("aten.coss.default", X), "torch has no operator 'aten.coss.default'"),
        (rw.call(MM, X), "aten.mm.default has no default for 'mat2'"),
        (rw.call(MM, X, Y), "the replacement uses 'y', which the pattern does not capture: x"),
        ((SINE, SINE), "the replacement has 2 results, and the pattern 1"),
        (rw.call("aten.max.dim", X, 0), "the replacement has 2 results, and the pattern 1"),
        (rw.view(X), "a replacement calls operators by name; for view, write a builder function"),
        (rw.call((SIN, "aten.cos.default"), X), "a replacement calls operators by name"),
        (rw.call(SIN, rw.one_of(X, SINE)), "a replacement has no choices: write a builder function"),
        (3, "a replacement is a function, or calls in terms of wildcards, not 3"),
    ],
)
def test_an_impossible_replacement_is_an_error(replacement: Any, reason: str) -> None:
    with pytest.raises(RewriteError) as error:
        rw.rewrite_pass(SINE, replacement, key="1")
    assert reason in str(error.value)
