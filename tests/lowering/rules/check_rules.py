"""Rules that move elements, run without fusion on each dtype of a sample and compared with eager."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch.utils._pytree import tree_map

from fxwrap.loop_ir import DeviceAssert, Kernel, eliminate_dead_operations, reorder_operations
from fxwrap.lowering.fusion.definitions import Definition, Stored
from fxwrap.lowering.rules import RULES, Declined, OperatorCall
from fxwrap.options import Options
from fxwrap.torch_compat import operator_overload
from tests.lowering.evaluate_definitions import Computed, fuses

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool)

Make = Callable[..., torch.Tensor]
"""Creates a tensor of these sizes, of the dtype under test."""

Sample = Callable[[Make], tuple[Any, ...]]
"""Returns the arguments of a call; a dict at the end holds the named ones."""


def maker(dtype: torch.dtype, seed: int = 0, transposed: bool = False) -> Make:
    """Returns a function that creates random tensors of a dtype, optionally with reversed strides."""
    generator = torch.Generator().manual_seed(seed)

    def make(*sizes: int) -> torch.Tensor:
        order = sizes[::-1] if transposed else sizes
        tensor = torch.randint(-9, 10, order, generator=generator)
        if dtype.is_floating_point:
            tensor = tensor + torch.randn(order, generator=generator)
        tensor = tensor > 0 if dtype is torch.bool else tensor.to(dtype)
        return tensor.permute(list(range(len(sizes)))[::-1]) if transposed else tensor

    return make


def same_samples(names: str, *samples: Sample) -> dict[str, list[Sample]]:
    """Returns the samples of each of some overloads of ATen, whose names are words."""
    return {f"aten.{name}": list(samples) for name in names.split()}


def define(
    name: str, arguments: Sequence[Any], device: str = "cpu", fake: Any = None
) -> tuple[Any, dict[Definition, torch.Tensor]]:
    """Returns a rule's result for these tensors on a device, and the tensors by definition.

    `fake` has the sizes and dtypes of the results, where eager cannot compute them.
    """
    payloads: dict[Definition, torch.Tensor] = {}

    def stored(item: Any) -> Any:
        if not isinstance(item, torch.Tensor):
            return item
        definition = Stored(tuple(item.shape), item.dtype, torch.device(device))
        payloads[definition] = item
        return definition

    positional, named = split(arguments)
    fake = operator_overload(name)(*positional, **named) if fake is None else fake
    call = OperatorCall(
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
    """Returns the tensors that a rule computes, one or a tuple; or the reason why it declines the call."""
    try:
        result, payloads = define(name, arguments, device, fake)
    except Declined as declined:
        return str(declined)
    computed = Computed(payloads)
    return computed.tensor(result) if isinstance(result, Definition) else tuple([computed.tensor(i) for i in result])


def check_sample(name: str, sample: Sample, make: Make, device: str = "cpu", exact: bool = True) -> bool:
    """Compares a rule with eager on a sample; returns False where eager or kernels do not support the dtype."""
    arguments = sample(make)
    positional, named = split(arguments)
    try:
        wanted = operator_overload(name)(*positional, **named)
    except (NotImplementedError, RuntimeError) as error:
        assert re.search("not implemented|not support|Bool|view size is not compatible", str(error)), error
        if "view size" not in str(error):  # torch's rule for fake tensors accepts some of these
            assert not fuses(operator_overload(name), *positional, **named), f"eager raises for {positional} {named}"
        return False
    result = run_rule(name, arguments, device)
    if isinstance(result, str):
        assert re.search("atomic|rounds once|eager raises", result), result
        return False
    tolerance = {"rtol": 0, "atol": 0} if exact else {}
    wanted = tuple(wanted) if isinstance(wanted, list) else wanted
    torch.testing.assert_close(result, wanted, equal_nan=True, check_stride=False, **tolerance)
    return True


def registered_names(module: ModuleType) -> set[str]:
    """Returns the overloads whose rules a module defines."""
    return {name for name, rule in RULES.items() if rule.__module__ == module.__name__}


def without_requirements(kernel: Kernel) -> Kernel:
    """Returns a kernel without its device assertions."""
    others = [position for position, item in enumerate(kernel.operations) if not isinstance(item, DeviceAssert)]
    return eliminate_dead_operations(reorder_operations(kernel, others))
