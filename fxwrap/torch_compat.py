"""The one place through which fxwrap reaches PyTorch's private API.

Each item says why the public API does not do and on which versions it was checked.
"""

from __future__ import annotations

# --- symbolic expressions -------------------------------------------------------------------------------------------
# Why: ShapeEnv writes sizes with these sympy functions; there is no public name for them. Checked on 2.11, 2.13.
from torch.utils._sympy.functions import CeilDiv as CeilDiv
from torch.utils._sympy.functions import FloorDiv as FloorDiv
from torch.utils._sympy.functions import Max as Max
from torch.utils._sympy.functions import Min as Min
from torch.utils._sympy.functions import ModularIndexing as ModularIndexing
