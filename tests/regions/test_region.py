"""Regions as text, as data and as functions."""

from __future__ import annotations

import pytest
import torch

from fxwrap.errors import FxwrapError, ParseError
from fxwrap.regions import load_region, parse_region
from fxwrap.symbolic import make_symbol

TEXT = """\
program @region(%in0: borrowed f32[4, s0]@cpu, %out1: mutable f32[4, s0]@cpu, s0: int) \
index_space="p0: 4" reduced="r0: s0" {
  %v0 = extern.call @aten.add.Tensor(%in0, %out1) : f32[4, s0]@cpu
  [%v1_0, _] = extern.call @aten.max.dim(%v0, 1, true) : [f32[4, 1]@cpu, none]
  %v2 = extern.call @aten.mul.Tensor(%v0, 2*s0) : f32[4, s0]@cpu
  control.return(%v1_0, %v2)
}
kernel(in0: f32[4*s0]) -> (out0: f32[4]) for [p0: 4] reduce [r0: s0] {
}
"""


def test_text_is_parsed_to_an_equal_region() -> None:
    region = parse_region(TEXT)
    assert str(region) == TEXT
    assert parse_region(str(region)) == region


def test_metadata_follows_from_types_and_axes() -> None:
    region, size = parse_region(TEXT), make_symbol("s0")
    assert region.index_space == (("p0", 4),)
    assert region.reduced == (("r0", size),)
    assert region.bytes_read == 32 * size
    assert region.bytes_written == 16 + 16 * size
    assert region.operators == ("aten.add.Tensor", "aten.max.dim", "aten.mul.Tensor")
    assert region.signature == ("*f32", "*f32", "*f32", "i64")
    assert list(region.overwritten) == [1]
    assert region.loop_ir.startswith("kernel(in0")


def test_a_loaded_region_fills_its_outputs() -> None:
    x, first, second = torch.randn(4, 3), torch.empty(4, 1), torch.randn(4, 3)
    total = x + second
    load_region(TEXT, (), ())(x, first, second, 3)
    assert torch.equal(first, total.max(1, keepdim=True).values)
    assert torch.equal(second, total * 6)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("control.return(%v1_0, %v2)", "memory.free(%v0)", "unknown line 'memory.free'"),
        ("  control.return(%v1_0, %v2)\n", "", r"a region is a list of extern\.call lines and one control\.return"),
        ("%out1", "%x", "a mutable input of a region is an output, %out0 for the first one, not %x"),
        ("%in0, %out1)", "%in0, %in9)", "%in9 is not defined"),
        ('"p0: 4"', '"p0"', "expected ':', found end of text"),
    ],
)  # fmt: skip
def test_text_that_is_no_region_is_refused(old: str, new: str, reason: str) -> None:
    with pytest.raises(ParseError, match=reason):
        parse_region(TEXT.replace(old, new))


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("aten.add_.Tensor", r"a region calls 'aten\.add_\.Tensor', which has effects; regions only compute tensors"),
        ("aten.nothing.Tensor", r"a region calls 'aten\.nothing\.Tensor': torch has no operator"),
    ],
)
def test_operators_with_effects_and_unknown_ones_are_refused(target: str, reason: str) -> None:
    with pytest.raises(FxwrapError, match=reason):
        load_region(TEXT.replace("aten.add.Tensor", target), (), ())
