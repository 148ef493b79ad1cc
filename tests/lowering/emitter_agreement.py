"""Programs of functions as they are traced, once every emitter agrees with eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap import Options
from fxwrap.testing import assert_emitters_agree


def agreed_program(function: Callable[..., Any], arguments: tuple[Any, ...], options: Options) -> fxwrap.Program:
    """Returns the program of a function, in-place calls included. Raises AssertionError if an emitter disagrees."""
    graph = make_fx(function, tracing_mode="fake")(*arguments)
    assert_emitters_agree(graph, arguments, options=options)
    return fxwrap.compile_graph(graph, arguments, options=options.replace(emitter="interpreter")).program
