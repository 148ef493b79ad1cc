"""Functions whose nested functions have no annotations to evaluate, as in Python 3.14."""

from __future__ import annotations
import __future__

import inspect
import textwrap
from collections.abc import Callable
from typing import Any


def without_annotations(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function compiled again from its source; calls do not evaluate annotations of nested functions."""
    source = textwrap.dedent(inspect.getsource(function))
    flags = __future__.annotations.compiler_flag
    namespace: dict[str, Any] = {}
    exec(compile(source, inspect.getfile(function), "exec", flags), function.__globals__, namespace)
    compiled: Callable[..., Any] = namespace[function.__name__]
    return compiled
