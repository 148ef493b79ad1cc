"""Whether two tensors of a launch share bytes, beside the sets of their bytes."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxwrap.errors import VerifyError
from fxwrap.lines import Launch, Return
from fxwrap.symbolic import Size, make_symbol
from fxwrap.wrapper_ir import (
    Access,
    Block,
    Input,
    KernelDefinition,
    Ownership,
    Program,
    TensorType,
    Value,
    certain_overlap,
    verify,
)
from tests.support.long_form import sample_size

_CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.float32, torch.int8, torch.complex128)


def _access(name: str, type_: TensorType, start: Size, is_write: bool, root: str = "m") -> Access:
    return Access(Value(name, type_), root, start, is_write)


@st.composite
def _accesses(draw: st.DrawFn) -> list[Access]:
    """Draws tensors in memory of 256 bytes or few more: dense ones, slices with steps, and any strides."""
    accesses = []
    for position in range(draw(st.integers(2, 4))):
        dtype = draw(st.sampled_from(DTYPES))
        sizes = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
        strides = tuple([draw(st.sampled_from((0, 1, 2, 3, 4, 6, 8, 12))) for _ in sizes])
        start = draw(st.integers(0, 48)) * draw(st.sampled_from((1, 2, 4)))
        accesses.append(_access(f"v{position}", TensorType(dtype, sizes, strides, _CPU), start, draw(st.booleans())))
    return accesses


def _bytes_of(access: Access) -> set[int]:
    type_ = access.type
    firsts = [sum(map(int.__mul__, index, type_.strides)) for index in itertools.product(*map(range, type_.sizes))]
    size = type_.dtype.itemsize
    return {access.start + first * size + byte for first in firsts for byte in range(size)}


@given(_accesses())
@settings(max_examples=sample_size(2000))
def test_static_tensors_overlap_if_they_have_bytes_in_common(accesses: list[Access]) -> None:
    pairs = itertools.combinations(accesses, 2)
    sharing = [pair for pair in pairs if _bytes_of(pair[0]) & _bytes_of(pair[1]) and any(one.is_write for one in pair)]
    overlap = certain_overlap(accesses)
    assert (overlap is not None) == bool(sharing)
    if overlap is not None:
        assert overlap[0].is_write
        assert set(overlap) in [set(pair) for pair in sharing]


def test_symbolic_tensors_overlap_if_they_start_at_the_same_element() -> None:
    s0 = make_symbol("s0")
    half, whole = (TensorType.contiguous(torch.float32, sizes, _CPU) for sizes in ((s0,), (s0, 2)))
    first, second = _access("a", half, 4 * s0, True), _access("b", whole, sympy.Integer(4) * s0, False)
    assert certain_overlap([second, first]) == (first, second)
    assert certain_overlap([_access("a", half, 4 * s0, False), second]) is None
    assert certain_overlap([first, _access("b", whole, 8 * s0, False)]) is None
    assert certain_overlap([first, _access("b", whole, 4 * s0, False, root="n")]) is None


COLUMNS = TensorType(torch.float16, (1 << 20, 4096), (8192, 1), _CPU)
CHANNELS = TensorType(torch.float32, (64, 32, 112, 112), (1204224, 1, 10752, 96), _CPU)


@pytest.mark.parametrize(("type_", "beside", "across"), [(COLUMNS, 8192, 8190), (CHANNELS, 128, 124)])
def test_large_tensors_side_by_side(type_: TensorType, beside: int, across: int) -> None:
    """Halves of rows, thirds of channels: one element nearer, they overlap. The number of elements costs nothing."""
    first = _access("a", type_, 1 << 40, True)
    assert certain_overlap([first, _access("b", type_, (1 << 40) + beside, True)]) is None
    assert certain_overlap([first, _access("b", type_, (1 << 40) + across, False)]) is not None


def test_a_users_kernel_may_read_what_it_writes() -> None:
    value = Value("m", TensorType.contiguous(torch.float32, (8,), _CPU))
    body = Block((), (Launch("k", (value,), (value,)), Return(())))
    kernel = KernelDefinition("k", "user_triton", "def kernel(x, y): pass", ("*f32 x", "*f32 y"))
    program = Program("p", (Input(value, Ownership.MUTABLE),), body, kernels=(kernel,))
    verify(program)
    with pytest.raises(VerifyError, match=r"\[overlap\]"):
        verify(program.replace(kernels=(replace(kernel, language="triton"),)))
