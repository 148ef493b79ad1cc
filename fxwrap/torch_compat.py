"""The one place through which fxwrap reaches PyTorch's private API.

Each item says why the public API does not do and on which versions it was checked.
"""

from __future__ import annotations

import torch
from torch._C import FunctionSchema as FunctionSchema

# --- symbolic expressions -------------------------------------------------------------------------------------------
# Why: ShapeEnv writes sizes with these sympy functions; there is no public name for them. Checked on 2.11, 2.13.
from torch.utils._sympy.functions import BitwiseFn_bitwise_and as BitwiseFn_bitwise_and
from torch.utils._sympy.functions import BitwiseFn_bitwise_or as BitwiseFn_bitwise_or
from torch.utils._sympy.functions import BitwiseFn_bitwise_xor as BitwiseFn_bitwise_xor
from torch.utils._sympy.functions import CeilDiv as CeilDiv
from torch.utils._sympy.functions import CeilToInt as CeilToInt
from torch.utils._sympy.functions import CleanDiv as CleanDiv
from torch.utils._sympy.functions import FloatPow as FloatPow
from torch.utils._sympy.functions import FloatTrueDiv as FloatTrueDiv
from torch.utils._sympy.functions import FloorDiv as FloorDiv
from torch.utils._sympy.functions import FloorToInt as FloorToInt
from torch.utils._sympy.functions import Identity as Identity
from torch.utils._sympy.functions import IntTrueDiv as IntTrueDiv
from torch.utils._sympy.functions import LShift as LShift
from torch.utils._sympy.functions import Max as Max
from torch.utils._sympy.functions import Min as Min
from torch.utils._sympy.functions import Mod as Mod
from torch.utils._sympy.functions import ModularIndexing as ModularIndexing
from torch.utils._sympy.functions import OpaqueUnaryFn_acos as OpaqueUnaryFn_acos
from torch.utils._sympy.functions import OpaqueUnaryFn_asin as OpaqueUnaryFn_asin
from torch.utils._sympy.functions import OpaqueUnaryFn_asinh as OpaqueUnaryFn_asinh
from torch.utils._sympy.functions import OpaqueUnaryFn_atan as OpaqueUnaryFn_atan
from torch.utils._sympy.functions import OpaqueUnaryFn_cos as OpaqueUnaryFn_cos
from torch.utils._sympy.functions import OpaqueUnaryFn_cosh as OpaqueUnaryFn_cosh
from torch.utils._sympy.functions import OpaqueUnaryFn_exp as OpaqueUnaryFn_exp
from torch.utils._sympy.functions import OpaqueUnaryFn_log as OpaqueUnaryFn_log
from torch.utils._sympy.functions import OpaqueUnaryFn_log2 as OpaqueUnaryFn_log2
from torch.utils._sympy.functions import OpaqueUnaryFn_sin as OpaqueUnaryFn_sin
from torch.utils._sympy.functions import OpaqueUnaryFn_sinh as OpaqueUnaryFn_sinh
from torch.utils._sympy.functions import OpaqueUnaryFn_sqrt as OpaqueUnaryFn_sqrt
from torch.utils._sympy.functions import OpaqueUnaryFn_tan as OpaqueUnaryFn_tan
from torch.utils._sympy.functions import OpaqueUnaryFn_tanh as OpaqueUnaryFn_tanh
from torch.utils._sympy.functions import PowByNatural as PowByNatural
from torch.utils._sympy.functions import PythonMod as PythonMod
from torch.utils._sympy.functions import RoundDecimal as RoundDecimal
from torch.utils._sympy.functions import RoundToInt as RoundToInt
from torch.utils._sympy.functions import RShift as RShift
from torch.utils._sympy.functions import ToFloat as ToFloat
from torch.utils._sympy.functions import TruncToFloat as TruncToFloat
from torch.utils._sympy.functions import TruncToInt as TruncToInt
from torch.utils._sympy.functions import Where as Where
from torch.utils._sympy.numbers import int_oo as int_oo
from torch.utils._sympy.value_ranges import ValueRanges as ValueRanges
from torch.utils._sympy.value_ranges import bound_sympy as bound_sympy

# --- operator schemas -----------------------------------------------------------------------------------------------
# Why: an overload's schema (names, types and defaults of its arguments) has no public accessor. Checked on 2.11, 2.13.


def aten_schema(operator: str, overload: str) -> FunctionSchema | None:
    """Give the schema of ATen overload `operator.overload` ("mul", "Tensor"), or None where torch has no such overload."""
    packet = getattr(torch.ops.aten, operator, None)
    found = getattr(packet, overload, None)
    return getattr(found, "_schema", None)
