"""The state of DDP and FSDP2 modules that a traced step reads.

Why: the process groups, policies and parameters of these modules, and limits of theirs, have no public accessors.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.utils import _to_kwargs
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from fxwrap.torch_compat.distributed import ProcessGroup


def is_ddp(module: nn.Module) -> bool:
    """Whether a module is DistributedDataParallel."""
    return isinstance(module, DistributedDataParallel)


def is_fsdp2(module: nn.Module) -> bool:
    """Whether a module is a unit of `fully_shard`; torch imports its class on demand only."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def ddp_limit(module: Any) -> str:
    """Returns a feature of a DDP module that its functional form lacks, "" for none."""
    if module._comm_hooks:
        return "a communication hook"
    if getattr(module, "mixed_precision", None) is not None:
        return "mixed_precision"
    if hasattr(module, "buffer_hook"):
        return "a hook for buffers"
    return "join" if module._join_config.enable else ""


def input_device(module: Any) -> torch.device | None:
    """Returns the device that a DDP module, or the outermost FSDP2 unit, moves its inputs to; None for neither."""
    if is_ddp(module):
        return torch.device(module.device_type, module.device_ids[0]) if module.device_ids else None
    device: torch.device = module._get_fsdp_state()._device
    return None if device.type == "cpu" else device


def moved_inputs(
    device: torch.device | None, arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns a module's arguments with tensors on a device, as DDP and FSDP2 move them; None leaves them alone."""
    if device is None or not (arguments or keywords):
        return arguments, keywords
    [moved], [named] = _to_kwargs(arguments, keywords, device, False)
    return moved, named


def ddp_buffers(module: Any) -> list[Tensor]:
    """Returns the buffers that rank 0 sends to the others before each forward, as they are now."""
    if not module.will_sync_module_buffers():
        return []
    return [item for name, item in module.module.named_buffers() if name not in module.parameters_to_ignore]


def ddp_parameters(module: Any) -> list[nn.Parameter]:
    """Returns the parameters whose gradients are averaged, as they are now."""
    named = module.module.named_parameters()
    return [item for name, item in named if item.requires_grad and name not in module.parameters_to_ignore]


# --- FSDP2 ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FsdpParameter:
    """A parameter of an FSDP2 unit.

    Fields:
        places: modules and attributes that hold it.
        dim: the dimension that ranks split; `rows` is its whole size, `shard_rows` that of the first rank.
        group, replicate_group: process groups that split it, and that have copies (None for none); `ranks` are all.
        dtype, reduce_dtype: dtypes of the gathered parameter and of the reduction of its gradient; None for its own.
        wrap: returns the gathered tensor as modules read it: a DTensor with tensor parallelism.
    """

    places: tuple[tuple[nn.Module, str], ...]
    dim: int
    rows: int
    shard_rows: int
    group: ProcessGroup
    replicate_group: ProcessGroup | None
    ranks: int
    dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    wrap: Callable[[Tensor], Tensor]

    def sharded(self) -> Tensor:
        """Returns the DTensor of the parameter that its modules hold now."""
        owner, name = self.places[0]
        parameter = owner._parameters[name]
        assert parameter is not None
        return parameter


def fsdp_limit(module: Any) -> str:
    """Returns a feature of an FSDP2 unit that its functional form lacks, "" for none."""
    for group in _groups(module):
        if getattr(group, "gradient_divide_factor", None) is not None:
            return "set_gradient_divide_factor"
        if not group.reduce_grads or not getattr(group, "all_reduce_grads", True):
            return "set_requires_gradient_sync(False)"
        if getattr(group, "_all_reduce_hook", None) is not None:
            return "set_all_reduce_hook"
        for parameter in group.fsdp_params:
            if parameter.offload_to_cpu:
                return "an offload policy"
            if getattr(parameter.mesh_info, "is_spmd_mesh", False):
                return "dp_mesh_dims"
            if hasattr(parameter.sharded_param.to_local(), "fsdp_pre_all_gather"):
                return "parameters with an all-gather of their own"
    return ""


def fsdp_hooks(module: Any) -> Iterator[RemovableHandle]:
    """Yields the handles of the forward hooks of an FSDP2 unit."""
    state = module._get_fsdp_state()
    for handle in (state._pre_forward_hook_handle, state._post_forward_hook_handle):
        yield from getattr(handle, "handles", (handle,))


def fsdp_parameters(module: Any) -> list[FsdpParameter]:
    """Returns the parameters of an FSDP2 unit."""
    return [_parameter(item) for group in _groups(module) for item in group.fsdp_params]


def fsdp_casts(module: Any) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """Returns the functions by which the mixed precision policy of a unit casts inputs and outputs of its forward."""
    policy = module._get_fsdp_state()._mp_policy
    return _cast(policy.param_dtype if policy.cast_forward_inputs else None), _cast(policy.output_dtype)


def _cast(dtype: torch.dtype | None) -> Callable[[Any], Any]:
    def cast(tree: Any) -> Any:
        if dtype is None:
            return tree
        return tree_map_only(Tensor, lambda item: item.to(dtype) if item.is_floating_point() else item, tree)

    return cast


def _groups(module: Any) -> list[Any]:
    """Returns the parameter groups of an FSDP2 unit: torch before 2.13 has one at most."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    return list(groups) if groups is not None else [item for item in [state._fsdp_param_group] if item is not None]


def _parameter(item: Any) -> FsdpParameter:
    info, mesh = item._module_info, item.mesh_info
    shared = zip(info.shared_modules, info.shared_param_names, strict=True)
    rows, group = item._orig_size[item.fsdp_placement.dim], mesh.shard_process_group
    replicate_group = getattr(mesh, "replicate_process_group", None)
    ranks = group.size() * (1 if replicate_group is None else replicate_group.size())
    policy = item.mp_policy
    return FsdpParameter(
        ((info.module, info.param_name), *shared), item.fsdp_placement.dim, rows, -(-rows // group.size()), group,
        replicate_group, ranks, policy.param_dtype, policy.reduce_dtype, _wrapper(item),
    )  # fmt: skip


def _wrapper(item: Any) -> Callable[[Tensor], Tensor]:
    if not item.is_dtensor:
        return lambda whole: whole
    from torch.distributed.tensor import DTensor

    spec = getattr(item, "_unsharded_dtensor_spec", None) or item._tp_spec
    return lambda whole: DTensor.from_local(
        whole, spec.mesh, spec.placements, run_check=False, shape=spec.shape, stride=spec.stride
    )
