"""Errors of device assertions in kernels, with the lines of the model that the kernel computes."""

from __future__ import annotations

import re
from dataclasses import replace

from fxwrap.devices.kernel_names import find_function_name
from fxwrap.lines import Launch
from fxwrap.wrapper_ir import Origin, Program

_ASSERTED = re.compile(r"(?:, in (?P<operator>[\w.]+))?, in kernel (?P<function>\w+)$")


def locate_kernel_error(error: Exception, program: Program) -> None:
    """Adds to a failed device assertion's message the lines of the model that it checks; other errors stay as they are.

    These are the lines of the assertion's operator, or all that the kernel computes if it belongs to none of them.
    """
    match = _ASSERTED.search(str(error))
    if match is None:
        return
    names = {item.name for item in program.kernels if find_function_name(item.source) == match["function"]}
    launches = [line for line in program.lines() if isinstance(line, Launch) and line.kernel in names]
    origins = [line.origin for line in launches if line.origin is not None]
    operator = (match["operator"] or "").removesuffix(".default")
    checked = [_of_operator(origin, operator) for origin in origins]
    lines = [line for origin in checked for line in origin.source_lines]
    if not any(lines):
        lines = [line for origin in origins for line in origin.source_lines]
    if lines:
        places = ", ".join(dict.fromkeys(lines))
        error.args = (f"{error}, which computes {places}: check the values that are read there", *error.args[1:])


def _of_operator(origin: Origin, operator: str) -> Origin:
    """Returns an origin with the nodes of one operator only."""
    return replace(origin, sources=tuple([source for source in origin.sources if source.operator == operator]))
