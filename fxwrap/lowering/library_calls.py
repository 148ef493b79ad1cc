"""Operators that stay library calls by design: matmuls, convolutions and attention."""

from __future__ import annotations

import re

_FAMILIES = {
    "matmul": r"mm|bmm|addmm|addbmm|baddbmm|addr|mv|addmv|dot|vdot|linear|bilinear|matmul|_trilinear|_addmm_activation"
    r"|_(int|scaled|grouped|scaled_grouped|cslt_sparse|weight_int8pack|weight_int4pack)_mm\w*",
    "convolution": r"\w*conv(olution|\dd|_transpose\dd|_tbc)?(_\w+)?",
    "attention": r"\w*scaled_dot_product\w*|_(flash|efficient)_attention(_forward)?|_native_multi_head_attention",
}


def library_call_reason(name: str) -> str | None:
    """Returns why a matmul, convolution or attention ("aten.mm.default") is a call, None for other operators."""
    namespace, _, rest = name.partition(".")
    operator = rest.partition(".")[0].removesuffix("_backward")
    for family, pattern in _FAMILIES.items():
        if namespace in ("aten", "mkldnn") and re.fullmatch(pattern, operator):
            return f"a library call, by design: {family}"
    return None
