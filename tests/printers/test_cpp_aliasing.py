"""Vectors and words that C++ kernels load from memory of other types see what was stored there before.

GCC 12 drops `may_alias` from a typedef within a template whose vector size does not depend on the parameters, so that
loads of it may move before stores. Each case loads, stores by another pointer to the same memory, and loads again.
"""

from __future__ import annotations

import pytest
import torch

from fxwrap.printers.printed_kernel import SIGNATURE_TYPES
from fxwrap.runtime.kernels import load_kernel

CASES = {
    "words of bfloat16": ("bfloat16", "return uint16_t(gather(at, 0));", "bfloat16(2)"),
    "words of bytes": ("uint8_t", "return gather(at, 0);", "2"),
    "words of bools": ("bool", "return gather(at, 0);", "true"),
    "float16 in blocks": ("float16", "float to[16]; widen(at, 16, to); return to[0] != 0;", "float16(2)"),
    "elements of a row": (
        "double", "ElementVectors<8>::Eight row; ElementVectors<8>::load(at, row); return row[0] != 0;", "2"
    ),
    "four elements": (
        "float", "ElementVectors<4>::Four row; ElementVectors<4>::load(at, row); return row[0] != 0;", "2"
    ),
    "transposed rows": ("double", "double to[8][8]; transpose_8(at, 8, &to[0][0], 8); return to[0][0] != 0;", "2"),
    "columns": ("float", "float to[4][32]; load_columns<4>(at, 4, 32, &to[0][0], 32); return to[0][0] != 0;", "2"),
    "vectors of floats": ("float", "return (*reinterpret_cast<const Vector<float>::Type*>(at))[0] != 0;", "2"),
    "factors of bfloat16": (
        "bfloat16",
        """using F = Factors<bfloat16>::Type;
        if (!__is_same(F, bfloat16)) return at[0] != bfloat16();
        F ones[64];
        for (auto& one : ones) one = Factors<bfloat16>::of(1.0f);
        return Factors<bfloat16>::add(Vector<float>::Type{}, ones, reinterpret_cast<const F*>(at))[0] != 0;""",
        "bfloat16(0x4000)",
    ),
    "rows of scores": (
        "float", "float out[16]; contract_rows<1, false>(at, at, 0, 16, 16, out, 16, 0); return out[0] != 0;", "2"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_loads_follow_stores(case: str) -> None:
    element, load, value = CASES[case]
    source = f"""#include "kernel.h"
#include "half_blocks.h"
__attribute__((noinline)) int load_twice({element}* stored, const {element}* at) {{
  const auto load = [&]() -> int {{ {load} }};
  const int before = load();
  *stored = {element}({value});
  return load() != before;
}}
extern "C" void kernel(int32_t* result) {{
  alignas(64) {element} memory[512] = {{}};
  __asm__("" : : "r"(memory) : "memory");
  *result = load_twice(memory, memory);
}}
"""
    launch = load_kernel("cpp", source, (f"*{SIGNATURE_TYPES[torch.int32]}",), ())
    result = torch.zeros(1, dtype=torch.int32)
    launch((1, 1, 1), result)
    assert result.item() == 1
