"""The operators that launch a kernel in emitted FX graphs: on existing tensors, and on new results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch

from fxwrap import torch_compat
from fxwrap.devices import find_language
from fxwrap.runtime import tensors
from fxwrap.runtime.gradients import run_without_gradient
from fxwrap.runtime.kernel_table import find_launcher, find_registered_kernel, own_kernel
from fxwrap.runtime.plain_inputs import is_plain_call


def order_scalar_arguments(
    signature: tuple[str, ...], sizes: Sequence[Any], numbers: Sequence[Any], to_bool: Callable[[Any], Any] = bool
) -> list[Any]:
    """Returns a kernel's scalar arguments in signature order: "f..." entries are floats, "i1" entries bools.

    `to_bool` converts a size to a bool. Raises ValueError when there are too few or too many.
    """
    next_size, next_number = iter(sizes).__next__, iter(numbers).__next__
    kinds = [entry for entry in signature if not entry.startswith("*")]
    if not kinds:
        return [*sizes, *numbers]
    floats = sum(kind.startswith("f") for kind in kinds)
    if (len(kinds) - floats, floats) != (len(sizes), len(numbers)):
        raise ValueError(f"the kernel takes {len(kinds) - floats} sizes and {floats} numbers")
    return [
        next_number() if kind.startswith("f") else to_bool(next_size()) if kind == "i1" else next_size()
        for kind in kinds
    ]


def cpp_kernel(
    kernel: str,
    ins: Sequence[torch.Tensor],
    *,
    outs: Sequence[torch.Tensor],
    sizes: Sequence[int],
    numbers: Sequence[float],
    grid: Sequence[int],
) -> None:
    """Launches a kernel, named by its hash, which reads `ins` and writes `outs`.

    `sizes` and `numbers` are its scalar arguments, integers and floats. Raises ValueError for another number of them.
    """
    registered = own_kernel(kernel)
    launch = find_launcher(kernel, find_language(registered.language))
    launch(tuple(grid), *ins, *outs, *order_scalar_arguments(registered.signature, sizes, numbers))
    tensors.increment_versions(outs)


def _own_registered_kernel(kernel: str) -> None:
    if find_registered_kernel(kernel) is not None:
        own_kernel(kernel)


def cpp_kernel_fake(kernel: str, _ins: object, *, outs: Sequence[torch.Tensor], **_keywords: object) -> None:
    """The fake of a launch: its results are written."""
    _own_registered_kernel(kernel)
    tensors.increment_versions(outs)  # fake tensors remember the symbols of their items while they are not written


def cpp_kernel_functional(
    kernel: str,
    ins: Sequence[torch.Tensor],
    *,
    outs: Sequence[torch.Tensor | None],
    layouts: Sequence[int],
    dtypes: Sequence[str],
    device: torch.device,
    **numbers: Any,
) -> list[torch.Tensor]:
    """Launches a kernel on new results: copies of the tensors in `outs`, and new memory where it has None.

    An input that is also in `outs` is the copy: the kernel reads what it writes.
    `layouts` has the rank, sizes and strides of each new result, `dtypes` their dtypes.
    """
    results = [_new_result(out, *new, device) for out, new in _results(outs, layouts, dtypes)]
    result_of = {id(out): result for out, result in zip(outs, results, strict=True) if out is not None}
    cpp_kernel(kernel, [result_of.get(id(item), item) for item in ins], outs=results, **numbers)
    return results


def cpp_kernel_functional_autograd(
    keys: Any, kernel: str, ins: Sequence[torch.Tensor], *, outs: Sequence[torch.Tensor | None], **keywords: Any
) -> list[torch.Tensor]:
    """Launches a kernel on new results, which have no derivatives. `keys` are the dispatch keys of the call."""
    operands = (*ins, *[out for out in outs if out is not None])
    if is_plain_call(operands):  # the dispatcher takes as long as the launch
        return cpp_kernel_functional(kernel, ins, outs=outs, **keywords)

    def launch() -> list[torch.Tensor]:
        operator = torch.ops.fxwrap.cpp_kernel_functional.default
        results = torch_compat.call_below_autograd(operator, keys, kernel, ins, outs=outs, **keywords)
        return list[torch.Tensor](results)

    return run_without_gradient(launch, operands)


def cpp_kernel_functional_fake(
    kernel: str,
    _ins: Sequence[torch.Tensor],
    *,
    outs: Sequence[torch.Tensor | None],
    layouts: Sequence[int],
    dtypes: Sequence[str],
    device: torch.device,
    **_numbers: object,
) -> list[torch.Tensor]:
    """The fakes of the results of `cpp_kernel_functional`."""
    _own_registered_kernel(kernel)
    return [
        torch.empty_strided(sizes, strides, dtype=dtype, device=device) if out is None
        else torch.empty_strided(out.shape, out.stride(), dtype=out.dtype, device=out.device)
        for out, (sizes, strides, dtype) in _results(outs, layouts, dtypes)
    ]  # fmt: skip


NewLayout: TypeAlias = tuple[Sequence[Any], Sequence[Any], "torch.dtype | None"]
"""Sizes, strides and dtype of a new result; empty for a copy."""


def _results(outs: Sequence[Any], layouts: Sequence[Any], dtypes: Sequence[str]) -> Iterator[tuple[Any, NewLayout]]:
    new = iter(result_layouts(layouts, dtypes))
    for out in outs:
        yield out, ((), (), None) if out is not None else next(new)


def result_layouts(layouts: Sequence[Any], dtypes: Sequence[str]) -> list[NewLayout]:
    """Returns sizes, strides and dtype of each new result of `cpp_kernel_functional`.

    Raises ValueError if there are too few or too many numbers.
    """
    position, results = 0, []
    for dtype in dtypes:
        rank = layouts[position] if position < len(layouts) else 0
        numbers = layouts[position + 1 : position + 1 + 2 * rank]
        if position >= len(layouts) or len(numbers) < 2 * rank:
            raise ValueError("layouts has the rank, sizes and strides of each new result")
        results.append((numbers[:rank], numbers[rank:], getattr(torch, dtype)))
        position += 1 + 2 * rank
    if position != len(layouts):
        raise ValueError(f"layouts has more results than the {len(dtypes)} of dtypes")
    return results


def _new_result(
    out: torch.Tensor | None,
    sizes: Sequence[int],
    strides: Sequence[int],
    dtype: torch.dtype | None,
    device: torch.device,
) -> torch.Tensor:
    if out is not None:
        return tensors.copy_with_strides(out)
    return torch.empty_strided(sizes, strides, dtype=dtype, device=device)


def cpp_kernel_functionalised(
    kernel: str, ins: Sequence[torch.Tensor], *, outs: Sequence[torch.Tensor], **numbers: Sequence[float]
) -> None:
    """Launches a kernel on functional tensors, whose contents new results replace."""
    contents = [[torch_compat.unwrap_functional_tensor(tensor) for tensor in group] for group in (ins, outs)]
    device = contents[1][0].device if outs else torch.device("cpu")
    with torch_compat.exclude_functionalisation():
        results = torch.ops.fxwrap.cpp_kernel_functional(
            kernel, contents[0], outs=contents[1], layouts=[], dtypes=[], device=device, **numbers
        )
    for out, content in zip(outs, results, strict=True):
        torch_compat.replace_functional_tensor(out, content)
