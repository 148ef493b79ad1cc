"""Emitted graphs on unusual inputs: fake tensors, inputs that are not plain tensors, torch.vmap and derivatives.

Allocations of a graph are fake only inside the fake mode of its inputs. Under torch.vmap the graph runs once per slice,
like operators without a batching rule: its kernels write into memory that the graph allocated for one slice. Kernels
have no derivatives: where operators would record some, a graph with kernels is one call whose derivatives raise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NoReturn

import torch

from fxwrap.errors import JitTraceError
from fxwrap.runtime import tensors
from fxwrap.runtime.gradients import raise_without_gradient
from fxwrap.runtime.plain_inputs import needs_plain_inputs, run_on_plain_inputs
from fxwrap.torch_compat import (
    HigherOrderOperator,
    OpOverload,
    find_fake_mode,
    is_jit_tracing,
    is_vmapped,
    records_derivatives,
    torch_schema,
    tree_map,
)

Run = Callable[..., object]

InputCheck = Callable[[Sequence[object]], None]
"""Raises InputError for the first wrong one of a graph's inputs."""


def support_unusual_inputs(ordinary: Run, *, boxed: bool = False, check: InputCheck | None = None) -> Run:
    """Returns `ordinary(module, *inputs)` as a function that also supports fake and unplain tensors and torch.vmap.

    With `boxed` both take the inputs in a list, which they empty. `check` checks the inputs first: fake and meta
    tensors pass the operators that check. Raises JitTraceError under torch.jit.trace, and FxwrapError for forward-mode
    derivatives of a graph with kernels; those of reverse mode raise it in the backward.
    """

    def run(module: torch.nn.Module, *inputs: Any) -> object:
        if torch.compiler.is_dynamo_compiling():
            return ordinary(module, *inputs)
        if is_jit_tracing():
            raise JitTraceError
        flat = tuple(inputs[0]) if boxed else inputs
        if is_vmapped() or (records_derivatives((*flat, *module.parameters())) and _has_kernels(module)):
            if boxed:
                inputs[0].clear()
            return _call_as_operator(module, _as_boxed(run) if boxed else run, flat)
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


def _has_kernels(module: torch.nn.Module) -> bool:
    """Whether a graph or a submodule launches kernels or calls fxwrap's operators, which have no derivatives."""
    graphs = [item.graph for item in module.modules() if isinstance(item, torch.fx.GraphModule)]
    return any(_lacks_derivatives(node.target) for graph in graphs for node in graph.nodes)


def _lacks_derivatives(target: object) -> bool:
    if isinstance(target, OpOverload):
        schema = torch_schema(target)
        return target.namespace == "fxwrap" and (schema.is_mutable or bool(schema.returns and schema.arguments))
    return isinstance(target, HigherOrderOperator) and str(target).startswith("triton_kernel_wrapper")


def _call_as_operator(module: torch.nn.Module, run: Run, inputs: Sequence[object]) -> object:
    """Returns the results of a graph that runs as one operator. Those that are inputs are the same tensors."""
    returned: dict[int, int] = {}  # positions of results that are inputs
    results: Any = _GraphCall.apply(module, run, returned, *inputs)  # type: ignore[no-untyped-call]
    if not returned:
        return results
    return type(results)(inputs[returned[position]] if position in returned else item
                         for position, item in enumerate(results))  # fmt: skip


class _GraphCall(torch.autograd.Function):
    """The call of a graph as one operator: torch.vmap runs it per slice, and derivatives raise FxwrapError."""

    generate_vmap_rule = False

    @staticmethod
    def forward(module: torch.nn.Module, run: Run, returned: dict[int, int], *inputs: object) -> object:
        """Runs the graph; a result that is an input is None, and its position is noted."""
        results = run(module, *inputs)
        if not isinstance(results, tuple | list):
            return results
        positions = {id(item): position for position, item in enumerate(inputs) if _is_tensor(item)}
        returned.update({index: positions[id(item)] for index, item in enumerate(results) if id(item) in positions})
        return type(results)(None if index in returned else item for index, item in enumerate(results))

    @staticmethod
    def setup_context(ctx: object, inputs: object, output: object) -> None:
        """Saves nothing: there are no derivatives."""

    @staticmethod
    def backward(_context: object, *_gradients: object) -> NoReturn:
        """Raises FxwrapError."""
        raise_without_gradient()

    @staticmethod
    def jvp(_context: object, *_tangents: object) -> NoReturn:
        """Raises FxwrapError."""
        raise_without_gradient()

    @staticmethod
    def vmap(
        info: Any,
        in_dims: Sequence[int | None],
        module: torch.nn.Module,
        run: Run,
        _returned: dict[int, int],
        *inputs: Any,
    ) -> object:
        """Runs the graph for each slice of the batched inputs and stacks the results."""
        dims = in_dims[3:]
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
