"""Rules that move elements, run without fusion on every dtype of a sample and compared with eager."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.utils._pytree import tree_map

from fxwrap.loop_ir import Kernel, Require, renumbered, without_dead_operations
from fxwrap.lowering.definitions import Definition, Stored
from fxwrap.lowering.rules import RULES, Call
from fxwrap.options import Options
from tests.lowering.evaluate_definitions import Computed

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool)

Make = Callable[..., torch.Tensor]
"""Makes a tensor of these sizes, of the dtype that a sample is tried with."""

Sample = Callable[[Make], tuple[Any, ...]]
"""Returns the arguments of a call; a dict at the end holds the named ones."""


def maker(dtype: torch.dtype, seed: int = 0, transposed: bool = False) -> Make:
    """Returns what makes random tensors of a dtype, with their memory in reverse order of dimensions if asked."""
    generator = torch.Generator().manual_seed(seed)

    def make(*sizes: int) -> torch.Tensor:
        order = sizes[::-1] if transposed else sizes
        found = torch.randint(-9, 10, order, generator=generator)
        if dtype.is_floating_point:
            found = found + torch.randn(order, generator=generator)
        found = found > 0 if dtype is torch.bool else found.to(dtype)
        return found.permute(list(range(len(sizes)))[::-1]) if transposed else found

    return make


def overload(name: str) -> Any:
    """Returns the operator of a rule's name."""
    namespace, operator, variant = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), operator), variant)


def define(
    name: str, arguments: Sequence[Any], device: str = "cpu", fake: Any = None
) -> tuple[Any, dict[Definition, torch.Tensor]]:
    """Returns what a rule gives for these tensors on a device, refusals included, and the tensors by definition.

    `fake` has the sizes and dtypes of the results, where eager is not to be asked for them.
    """
    payloads: dict[Definition, torch.Tensor] = {}

    def stored(item: Any) -> Any:
        if not isinstance(item, torch.Tensor):
            return item
        definition = Stored(tuple(item.shape), item.dtype, torch.device(device))
        payloads[definition] = item
        return definition

    positional, named = split(arguments)
    fake = overload(name)(*positional, **named) if fake is None else fake
    call = Call(
        name, [tree_map(stored, item) for item in positional],
        {key: tree_map(stored, item) for key, item in named.items()}, fake, torch.device(device),
        lambda item: tuple(item.shape), Options().device_specs()[torch.device(device).type],
    )  # fmt: skip
    return RULES[name](call), payloads


def split(arguments: Sequence[Any]) -> tuple[Sequence[Any], dict[str, Any]]:
    """Returns a sample's positional and named arguments."""
    if arguments and isinstance(arguments[-1], dict):
        return arguments[:-1], arguments[-1]
    return arguments, {}


def run_rule(name: str, arguments: Sequence[Any], device: str = "cpu", fake: Any = None) -> Any:
    """Returns the tensors that a rule computes, a tuple where the operator gives several; or its refusal."""
    result, payloads = define(name, arguments, device, fake)
    if isinstance(result, str):
        return result
    computed = Computed(payloads)
    return computed.tensor(result) if isinstance(result, Definition) else tuple([computed.tensor(i) for i in result])


def check_sample(name: str, sample: Sample, make: Make, device: str = "cpu", exact: bool = True) -> bool:
    """Compares a rule with eager on a sample; returns False where eager or kernels do not take the dtype."""
    arguments = sample(make)
    positional, named = split(arguments)
    try:
        wanted = overload(name)(*positional, **named)
    except (NotImplementedError, RuntimeError) as error:
        assert re.search("not implemented|not support|Bool|view size is not compatible", str(error)), error
        return False
    found = run_rule(name, arguments, device)
    if isinstance(found, str):
        assert "atomic" in found, found
        return False
    tolerance = {"rtol": 0, "atol": 0} if exact else {}
    wanted = tuple(wanted) if isinstance(wanted, list) else wanted
    torch.testing.assert_close(found, wanted, equal_nan=True, check_stride=False, **tolerance)
    return True


def registered_names(module: ModuleType) -> set[str]:
    """Returns the overloads that a module names in its source: those that it has rules for."""
    tree = ast.parse(Path(str(module.__file__)).read_text())
    texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return {text for text in texts if re.fullmatch(r"(aten|prims)\.\w+\.\w+", text)}


def without_requirements(kernel: Kernel) -> Kernel:
    """Returns a kernel that runs on where a requirement does not hold."""
    kept = [position for position, item in enumerate(kernel.operations) if not isinstance(item, Require)]
    return without_dead_operations(renumbered(kernel, kept))
