"""Kernels in the language "fx": the operators of a region, called one by one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import sympy
import torch

from fxwrap.lines import ExternCall
from fxwrap.regions.region import parse_region
from fxwrap.symbolic import Number, evaluate
from fxwrap.torch_compat import operator_overload
from fxwrap.wrapper_ir import Value


def load_region(source: str, _signature: tuple[str, ...], _options: tuple[tuple[str, Any], ...]) -> Callable[..., None]:
    """Returns `function(*tensors, *outs, *symbols)`, which calls the operators of a region and fills `outs`.

    Raises ParseError for text that is no region, FxwrapError for an operator that torch does not have.
    """
    region = parse_region(source)
    calls = [_prepare(call) for call in region.calls]
    reads, results = len(region.reads), len(region.results)

    def run(*arguments: Any) -> None:
        outs = arguments[reads : reads + results]
        env = dict(zip([value.name for value in region.reads], arguments[:reads], strict=True))
        env |= {value.name: outs[position] for position, value in region.overwritten.items()}
        numbers = dict(zip(region.symbols, arguments[reads + results :], strict=True))
        with torch.no_grad():
            for call in calls:
                call(env, numbers)
            for out, result in zip(outs, region.results, strict=True):
                out.copy_(env[result.name])

    return run


def _prepare(call: ExternCall) -> Callable[[dict[str, Any], Mapping[str, Number]], None]:
    overload = operator_overload(call.target)
    (result,) = call.results

    def run(env: dict[str, Any], numbers: Mapping[str, Number]) -> None:
        arguments = [_argument(item, env, numbers) for item in call.arguments]
        keywords = {name: _argument(item, env, numbers) for name, item in call.keywords}
        value = overload(*arguments, **keywords)
        pairs = zip(result, value, strict=True) if isinstance(result, tuple) else [(result, value)]
        env.update({name.name: item for name, item in pairs if isinstance(name, Value)})

    return run


def _argument(item: object, env: Mapping[str, Any], numbers: Mapping[str, Number]) -> Any:
    if isinstance(item, Value):
        return env[item.name]
    if isinstance(item, tuple):
        return [_argument(part, env, numbers) for part in item]
    return evaluate(item, numbers) if isinstance(item, sympy.Basic) else item
