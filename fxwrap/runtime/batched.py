"""The ordinary code of an emitted graph, where it needs help: on fake tensors, and under torch.vmap.

What a graph allocates is fake only while the fake mode of its inputs is on. Under torch.vmap it is run for one slice
after the other, as torch does with operators it has no rule for: a kernel writes into memory that the graph allocated
for one slice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from fxwrap.runtime import tensors
from fxwrap.torch_compat import FakeTensor, is_vmapped, tree_map

Run = Callable[..., Any]


def with_help(ordinary: Run, *, boxed: bool = False) -> Run:
    """Returns `ordinary(module, *inputs)` as a function that also works on fake tensors and under torch.vmap.

    With `boxed` both take the inputs in a list, which they empty.
    """

    def run(module: torch.nn.Module, *inputs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return ordinary(module, *inputs)
        given = tuple(inputs[0]) if boxed else inputs
        if is_vmapped():
            if boxed:
                inputs[0].clear()
            return _Slices.apply(module, _boxing(run) if boxed else run, *given)  # type: ignore[no-untyped-call]
        fake = next((item for item in given if isinstance(item, FakeTensor)), None)
        del given
        with nullcontext() if fake is None else fake.fake_mode:
            return ordinary(module, *inputs)

    return run


def _boxing(run: Run) -> Run:
    return lambda module, *inputs: run(module, [*inputs])


class _Slices(torch.autograd.Function):
    """Runs a graph under a level of torch.vmap; gradients end here."""

    generate_vmap_rule = False

    @staticmethod
    def forward(module: torch.nn.Module, run: Run, *inputs: Any) -> Any:
        """Runs the graph where no input is batched."""
        return run(module, *inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keeps nothing: there is no backward."""

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[int | None], module: torch.nn.Module, run: Run, *inputs: Any) -> Any:
        """Runs the graph for each slice of the batched inputs, and stacks the results."""
        dims = in_dims[2:]
        shared = [item for item, dim in zip(inputs, dims, strict=True) if dim is None]
        shared = [item for item in (*shared, *module.buffers()) if isinstance(item, torch.Tensor)]
        before = [item.clone() for item in shared]
        states = _random_states([item for item in inputs if isinstance(item, torch.Tensor)])
        results = []
        for index in range(info.batch_size):
            if info.randomness == "same":
                _set_random_states(states)
            slices = [item if dim is None else item.select(dim, index) for item, dim in zip(inputs, dims, strict=True)]
            results.append(_run_on(run, module, slices))
        if info.randomness == "error":
            _check_no_randomness(states)
        if not is_vmapped():  # values cannot be looked at inside of another level
            _check_unwritten(shared, before)
        stacked = tree_map(lambda *items: torch.stack(items) if _is_tensor(items[0]) else items[0], *results)
        return stacked, tree_map(lambda item: 0 if _is_tensor(item) else None, stacked)


def _is_tensor(item: Any) -> bool:
    return isinstance(item, torch.Tensor)


def _run_on(run: Run, module: torch.nn.Module, slices: Sequence[Any]) -> Any:
    """Runs a graph on slices, laid out as tensors are that were not cut out of larger ones; what it writes stays."""
    given = [_dense(item) for item in slices]
    results = run(module, *given)
    for item, copied in zip(slices, given, strict=True):
        if copied is not item and (is_vmapped() or not _same(item, copied)):
            item.copy_(copied)
    return results


def _dense(item: Any) -> Any:
    if not isinstance(item, torch.Tensor):
        return item
    made = torch.empty_like(item)
    return item if made.stride() == item.stride() else made.copy_(item)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(((one == other) | ((one != one) & (other != other))).all())


def _random_states(given: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    devices = dict.fromkeys(["cpu", *[str(item.device) for item in given if item.device.type != "meta"]])
    return {device: tensors.random_state(device) for device in devices}


def _set_random_states(states: dict[str, torch.Tensor]) -> None:
    for device, state in states.items():
        tensors.set_random_state(device, state)


def _check_no_randomness(states: dict[str, torch.Tensor]) -> None:
    if any(not torch.equal(tensors.random_state(device), state) for device, state in states.items()):
        raise RuntimeError(
            "vmap: the emitted graph draws random numbers, and vmap was called with randomness='error'; call it with "
            "randomness='same' or 'different'"
        )


def _check_unwritten(shared: Sequence[torch.Tensor], before: Sequence[torch.Tensor]) -> None:
    """Raises where the graph wrote a tensor that all slices share, and puts back what was in it."""
    changed = [
        (item, old) for item, old in zip(shared, before, strict=True) if not _same(item, old)
    ]  # fmt: skip
    for item, old in changed:
        item.copy_(old)
    if changed:
        raise RuntimeError(
            "vmap: the emitted graph writes a tensor that is not batched (in_dims is None, or it is a buffer); pass it "
            "as a batched input"
        )
