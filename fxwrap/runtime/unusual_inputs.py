"""Emitted graphs on unusual inputs: fake tensors, inputs that are not plain tensors, and torch.vmap.

Allocations of a graph are fake only inside the fake mode of its inputs. Under torch.vmap the graph runs once per slice,
like operators without a batching rule: its kernels write into memory that the graph allocated for one slice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from fxwrap.errors import JitTraceError
from fxwrap.runtime import tensors
from fxwrap.runtime.plain_inputs import needs_plain_inputs, run_on_plain_inputs
from fxwrap.torch_compat import find_fake_mode, is_jit_tracing, is_vmapped, tree_map

Run = Callable[..., object]

InputCheck = Callable[[Sequence[object]], None]
"""Raises InputError for the first wrong one of a graph's inputs."""


def support_unusual_inputs(ordinary: Run, *, boxed: bool = False, check: InputCheck | None = None) -> Run:
    """Returns `ordinary(module, *inputs)` as a function that also supports fake and unplain tensors and torch.vmap.

    With `boxed` both take the inputs in a list, which they empty. `check` checks the inputs first: fake and meta
    tensors pass the operators that check. Raises JitTraceError under torch.jit.trace.
    """

    def run(module: torch.nn.Module, *inputs: Any) -> object:
        if torch.compiler.is_dynamo_compiling():
            return ordinary(module, *inputs)
        if is_jit_tracing():
            raise JitTraceError
        flat = tuple(inputs[0]) if boxed else inputs
        if is_vmapped():
            if boxed:
                inputs[0].clear()
            return _VmapFallback.apply(module, _as_boxed(run) if boxed else run, *flat)  # type: ignore[no-untyped-call]
        if check is not None:
            check(flat)
        if needs_plain_inputs(flat):
            if boxed:
                inputs[0].clear()
            return run_on_plain_inputs(lambda plain: ordinary(module, *([plain] if boxed else plain)), [*flat])
        fake_mode = find_fake_mode(flat)
        del flat
        with fake_mode or nullcontext():
            return ordinary(module, *inputs)

    return run


def _as_boxed(run: Run) -> Run:
    return lambda module, *inputs: run(module, [*inputs])


class _VmapFallback(torch.autograd.Function):
    """Runs a graph under torch.vmap; it is not differentiable."""

    generate_vmap_rule = False

    @staticmethod
    def forward(module: torch.nn.Module, run: Run, *inputs: object) -> object:
        """Runs the graph without batched inputs."""
        return run(module, *inputs)

    @staticmethod
    def setup_context(ctx: object, inputs: object, output: object) -> None:
        """Saves nothing: there is no backward."""

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[int | None], module: torch.nn.Module, run: Run, *inputs: Any) -> object:
        """Runs the graph for each slice of the batched inputs and stacks the results."""
        dims = in_dims[2:]
        shared = [item for item, dim in zip(inputs, dims, strict=True) if dim is None]
        shared = [item for item in (*shared, *module.buffers()) if isinstance(item, torch.Tensor)]
        before = [item.clone() for item in shared]
        states = _random_states([item for item in inputs if isinstance(item, torch.Tensor)])
        results = []
        for index in range(info.batch_size):
            if info.randomness == "same":
                for device, state in states.items():
                    tensors.set_random_state(device, state)
            slices = [item if dim is None else item.select(dim, index) for item, dim in zip(inputs, dims, strict=True)]
            results.append(_run_slice(run, module, slices))
        if info.randomness == "error":
            _check_rng_unused(states)
        if not is_vmapped():  # values cannot be read inside another level
            _check_not_mutated(shared, before)
        stacked = tree_map(lambda *items: torch.stack(items) if _is_tensor(items[0]) else items[0], *results)
        return stacked, tree_map(lambda item: 0 if _is_tensor(item) else None, stacked)


def _is_tensor(item: object) -> bool:
    return isinstance(item, torch.Tensor)


def _run_slice(run: Run, module: torch.nn.Module, slices: Sequence[Any]) -> object:
    """Runs a graph on slices in dense layout; copies mutations back."""
    dense = [_dense(item) for item in slices]
    results = run(module, *dense)
    for item, copied in zip(slices, dense, strict=True):
        if copied is not item and (is_vmapped() or not _equal_with_nan(item, copied)):
            item.copy_(copied)
    return results


def _dense(item: object) -> Any:
    if not isinstance(item, torch.Tensor):
        return item
    dense = torch.empty_like(item)
    return item if dense.stride() == item.stride() else dense.copy_(item)


def _equal_with_nan(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(((one == other) | ((one != one) & (other != other))).all())


def _random_states(inputs: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    devices = dict.fromkeys(["cpu", *[str(item.device) for item in inputs if item.device.type != "meta"]])
    return {device: tensors.random_state(device) for device in devices}


def _check_rng_unused(states: dict[str, torch.Tensor]) -> None:
    if any(not torch.equal(tensors.random_state(device), state) for device, state in states.items()):
        raise RuntimeError(
            "vmap: the emitted graph draws random numbers, which randomness='error' forbids; call vmap with "
            "randomness='same' or 'different'"
        )


def _check_not_mutated(shared: Sequence[torch.Tensor], before: Sequence[torch.Tensor]) -> None:
    """Raises if the graph mutated a tensor that all slices share, and restores its content."""
    changed = [
        (item, old) for item, old in zip(shared, before, strict=True) if not _equal_with_nan(item, old)
    ]  # fmt: skip
    for item, old in changed:
        item.copy_(old)
    if changed:
        raise RuntimeError(
            "vmap: the emitted graph mutates a tensor that is not batched (in_dims is None, or it is a buffer); "
            "pass it as a batched input"
        )
