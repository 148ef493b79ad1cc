"""DDP and FSDP2 modules in a traced step: functional collectives in place of those of their hooks.

The hooks of these modules call collectives that no graph contains. While a step is traced, `module.forward` and other
hooks do the same by functional collectives: DDP averages each gradient when it is complete; FSDP2 gathers parameters
before the forward of their module, and scatters the sum of their gradients. Buckets and overlap are the program's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils.hooks import RemovableHandle

from fxwrap.torch_compat import (
    FsdpParameter,
    all_gather_single,
    ddp_buffers,
    ddp_parameters,
    fsdp_casts,
    fsdp_hooks,
    fsdp_parameters,
    functional_collectives,
    input_device,
    is_ddp,
    moved_inputs,
    reduce_scatter_single,
)


@contextmanager
def with_functional_collectives(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Replaces the hooks of DDP and FSDP2 modules while a step is traced."""
    with ExitStack() as stack:
        running: list[nn.Module] = []
        for module in modules:
            if is_ddp(module):
                _replace_ddp(module, stack)
            else:
                _replace_fsdp(module, running, stack)
        yield


# --- DDP --------------------------------------------------------------------------------------------------------------


def _replace_ddp(module: Any, stack: ExitStack) -> None:
    """Makes a DDP module call its module alone, and average the gradients of that forward's backward."""
    group, size = module.process_group, module.process_group.size()
    device = input_device(module)
    averages, sends_buffers = [False], module.require_forward_param_sync

    def forward(*arguments: Any, **keywords: Any) -> Any:
        with torch.no_grad():
            for buffer in ddp_buffers(module):
                buffer.copy_(functional_collectives().broadcast(buffer, 0, group))
        averages[0] = torch.is_grad_enabled() and module.require_backward_grad_sync  # False in `no_sync`
        module.require_forward_param_sync = averages[0]  # as DDP does: buffers are sent before the next forward
        arguments, keywords = moved_inputs(device, arguments, keywords)
        return module.module(*arguments, **keywords)

    def average(parameter: Tensor) -> None:
        if averages[0] and parameter.grad is not None:
            parameter.grad = functional_collectives().all_reduce(parameter.grad / size, "sum", group)

    module.forward = forward
    stack.callback(delattr, module, "forward")
    stack.callback(setattr, module, "require_forward_param_sync", sends_buffers)
    for parameter in ddp_parameters(module):
        handle = parameter.register_post_accumulate_grad_hook(average)  # type: ignore[no-untyped-call]
        stack.callback(handle.remove)


# --- FSDP2 ------------------------------------------------------------------------------------------------------------


class _Gather(torch.autograd.Function):
    """A parameter of all ranks; its gradient is summed over the ranks, divided, and scattered."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, parameter: FsdpParameter) -> Tensor:
        ctx.parameter, ctx.rows, ctx.dtype = parameter, local.size(parameter.dim), local.dtype
        shard = _padded(local.to(parameter.dtype or local.dtype), parameter.dim, parameter.shard_rows)
        whole = all_gather_single(shard, parameter.dim, parameter.group)
        return whole.narrow(parameter.dim, 0, parameter.rows).contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        parameter: FsdpParameter = ctx.parameter
        gradient = gradient.to(parameter.reduce_dtype or gradient.dtype)
        overflows = gradient.dtype is torch.float16
        if overflows:
            gradient = gradient / parameter.ranks
        gradient = _padded(gradient, parameter.dim, parameter.shard_rows * parameter.group.size())
        gradient = reduce_scatter_single(gradient, "sum", parameter.dim, parameter.group)
        if parameter.replicate_group is not None:
            gradient = functional_collectives().all_reduce(gradient, "sum", parameter.replicate_group)
        if not overflows:
            gradient = gradient / parameter.ranks
        return gradient.narrow(parameter.dim, 0, ctx.rows).to(ctx.dtype).contiguous(), None


def _padded(tensor: Tensor, dim: int, rows: int) -> Tensor:
    missing = rows - tensor.size(dim)
    return pad(tensor, (*[0, 0] * (tensor.dim() - 1 - dim), 0, missing)) if missing else tensor.contiguous()


def _replace_fsdp(module: nn.Module, running: list[nn.Module], stack: ExitStack) -> None:
    """Makes the modules of an FSDP2 unit gather their parameters before their forward.

    `running` are the units whose forward runs: the outermost one moves its inputs to its device.
    """
    for handle in fsdp_hooks(module):
        _disable(handle, stack)
    parameters = fsdp_parameters(module)
    cast_inputs, cast_output = fsdp_casts(module)

    def gather(_module: nn.Module, arguments: Any, keywords: Any) -> Any:
        if not running:
            arguments, keywords = moved_inputs(input_device(module), arguments, keywords)
        running.append(module)
        for parameter in parameters:
            _gather_into_modules(parameter)
        return cast_inputs(arguments), cast_inputs(keywords)

    def release(_module: nn.Module, _arguments: Any, output: Any) -> Any:
        running.remove(module)
        for parameter in parameters:
            for owner, name in parameter.places:
                vars(owner).pop(name, None)
        return cast_output(output)

    stack.callback(module.register_forward_pre_hook(gather, prepend=True, with_kwargs=True).remove)
    stack.callback(module.register_forward_hook(release).remove)


def _gather_into_modules(parameter: FsdpParameter) -> None:
    """Sets attributes with the gathered parameter, which hide the sharded one in the module's table."""
    sharded: Any = parameter.sharded()
    local = sharded.to_local(grad_placements=sharded.placements)
    whole = parameter.wrap(_Gather.apply(local, parameter))  # type: ignore[no-untyped-call]
    for owner, name in parameter.places:
        vars(owner)[name] = whole


def _disable(handle: RemovableHandle, stack: ExitStack) -> None:
    """Removes a hook until the end of the stack, which restores the order of hooks."""
    hooks = handle.hooks_dict_ref()
    if hooks is None or handle.id not in hooks:
        return
    before = dict(hooks)
    hooks.pop(handle.id)

    def restore() -> None:
        hooks.clear()
        hooks.update(before)

    stack.callback(restore)
