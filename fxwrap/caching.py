"""In-memory caches with a bound. `clear_caches` empties all of them; `torch.compiler.reset()` calls it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache, wraps
from typing import ParamSpec, TypeVar
from weakref import WeakValueDictionary

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_clear_functions: list[Callable[[], None]] = []


def bounded_cache(size: int) -> Callable[[Callable[_Arguments, _Result]], Callable[_Arguments, _Result]]:
    """Returns a decorator that caches the results of the last `size` distinct arguments, which must be hashable."""

    def decorate(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
        cached = lru_cache(maxsize=size)(function)
        _clear_functions.append(cached.cache_clear)
        return cached  # type: ignore[return-value]  # lru_cache drops the types of parameters

    return decorate


def shared_cache(size: int) -> Callable[[Callable[_Arguments, _Result]], Callable[_Arguments, _Result]]:
    """Returns a decorator for constructors of shared objects: equal arguments return one object while it is in use.

    The cache holds weak references, and strong ones to the last `size` objects. Objects without support for weak
    references are shared only while they are among the last `size`.
    """

    def decorate(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
        in_use: WeakValueDictionary[tuple[object, ...], _Result] = WeakValueDictionary()

        @bounded_cache(size)
        @wraps(function)
        def find_or_create(*arguments: _Arguments.args, **keywords: _Arguments.kwargs) -> _Result:
            key = (*arguments, *keywords.items())
            existing = in_use.get(key)
            if existing is not None:
                return existing
            created = function(*arguments, **keywords)
            with suppress(TypeError):
                in_use[key] = created
            return created

        return find_or_create

    return decorate


def clear_caches() -> None:
    """Empties the caches of this process; objects in use stay valid and shared."""
    for clear in _clear_functions:
        clear()
