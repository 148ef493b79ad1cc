"""The native search of memory planning: plain C++ without torch, built on first use."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from functools import cache

from fxwrap.errors import CacheError, NativeBuildError
from fxwrap.runtime.native.build import build_planner

log = logging.getLogger("fxwrap.native")

_NUMBERS = ctypes.POINTER(ctypes.c_int64)


@cache
def load_planner() -> Callable[..., int] | None:
    """Returns the function `fxwrap_explore` of explore.cpp; None, with a log entry, where it cannot be built."""
    try:
        function = ctypes.CDLL(str(build_planner())).fxwrap_explore
    except (NativeBuildError, CacheError, OSError) as error:
        log.info("memory planning searches in Python: %s", error)
        return None
    function.restype = ctypes.c_int
    function.argtypes = [
        *[ctypes.c_int64] * 3, *[_NUMBERS] * 5, ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_double,
        *[_NUMBERS] * 3,
    ]  # fmt: skip
    return function
