"""The native search of memory planning: plain C++ without torch."""

from __future__ import annotations

import ctypes
import logging
from functools import cache

from fxwrap.errors import CacheError, NativeBuildError
from fxwrap.runtime.native.planner_library import build_planner, find_planner

log = logging.getLogger("fxwrap.native")

_NUMBERS = ctypes.POINTER(ctypes.c_int64)
_NUMBER, _SECONDS, _HANDLE = ctypes.c_int64, ctypes.c_double, ctypes.c_void_p

_FUNCTIONS: dict[str, tuple[type | None, list[type]]] = {
    "fxwrap_explore": (
        ctypes.c_int,
        [*[_NUMBER] * 3, *[_NUMBERS] * 5, *[ctypes.c_int] * 2, _NUMBER, _SECONDS, *[_NUMBERS] * 3],
    ),
    "fxwrap_sweep": (ctypes.c_int, [*[_NUMBER] * 2, *[_NUMBERS] * 3, *[_NUMBER] * 3, _SECONDS, *[_NUMBERS] * 2]),
    "fxwrap_blocks_create": (_HANDLE, [_NUMBER, *[_NUMBERS] * 3, _NUMBER, _NUMBER, ctypes.POINTER(ctypes.c_double)]),
    "fxwrap_blocks_destroy": (None, [_HANDLE]),
    "fxwrap_blocks_improve": (None, [_HANDLE, _NUMBER, _SECONDS]),
    "fxwrap_blocks_steps": (_NUMBER, [_HANDLE]),
    "fxwrap_blocks_roots": (_NUMBER, [_HANDLE, *[_NUMBERS] * 3]),
    "fxwrap_blocks_expand": (None, [_HANDLE, *[_NUMBERS] * 2]),
}
"""The results and arguments of the functions of planner.cpp."""


@cache
def load_planner(builds: bool = True) -> ctypes.CDLL | None:
    """Returns the library with the functions of planner.cpp; None, with a log entry, where it cannot be built.

    If it `builds` no library, it is also None where there is none yet.
    """
    try:
        path = build_planner() if builds else find_planner()
        if path is None:
            return None
        library = ctypes.CDLL(str(path))
    except (NativeBuildError, CacheError, OSError) as error:
        log.info("memory planning searches in Python: %s", error)
        return None
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
