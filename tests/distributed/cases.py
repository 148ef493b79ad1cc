"""Programs of two ranks: DTensors as inputs and outputs, tensor and sequence parallelism, FSDP as parametrisation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from tests.support.long_form import LONG

WORLD_SIZE = 2
EXAMPLE = Path(__file__).parents[2] / "examples" / "rewrite_serving_passes.py"
"""An example whose function `run(rank, group)` both ranks run."""


class Mlp(nn.Module):
    """A block whose linear layers are split over the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down(torch.relu(self.up(self.norm(x))))
        return down


@dataclass(frozen=True)
class Case:
    """A function with its inputs on one rank; `parameters` get gradients, none for inference."""

    function: Callable[..., Any]
    inputs: tuple[Any, ...]
    parameters: tuple[Tensor, ...] = ()


def _inputs() -> Tensor:
    return torch.randn(2, 4, 8)


def init_mesh() -> DeviceMesh:
    """Returns a mesh of all ranks."""
    return init_device_mesh("cpu", (WORLD_SIZE,))


def _dtensor_in(rank: int) -> Case:
    return Case(lambda x: (x.to_local() * 2 + 1).sin(), (distribute_tensor(_inputs(), init_mesh(), [Shard(0)]),))


def _dtensor_out(rank: int) -> Case:
    def function(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return (x * 2 + 1).redistribute(placements=[Replicate()]).cos(), DTensor.from_local(y.exp(), mesh, [Shard(0)])

    mesh = init_mesh()
    return Case(function, (distribute_tensor(_inputs(), mesh, [Shard(0)]), _inputs()))


# --- tensor parallel --------------------------------------------------------------------------------------------------

COLUMNS_AND_ROWS = {"up": ColwiseParallel(), "down": RowwiseParallel()}
_SEQUENCE = {
    "norm": SequenceParallel(),
    "up": ColwiseParallel(input_layouts=Shard(1)),
    "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
}


def _tensor_parallel(rank: int, training: bool) -> Case:
    model = parallelize_module(Mlp(), init_mesh(), COLUMNS_AND_ROWS)
    return Case(model, (_inputs(),), tuple(model.parameters()) if training else ())


def _sequence_parallel(rank: int) -> Case:
    mesh = init_mesh()
    model = parallelize_module(Mlp(), mesh, _SEQUENCE)
    return Case(model, (distribute_tensor(_inputs(), mesh, [Shard(1)]),), tuple(model.parameters()))


# --- FSDP as a parametrisation, as torchtitan's simple_fsdp -----------------------------------------------------------


def _gather(mesh: DeviceMesh, parameter: DTensor) -> Tensor:
    """Returns a parameter of all data-parallel ranks; its gradient is averaged and split again."""
    # A DTensor of one dimension knows its whole size, which `from_local` takes for a multiple of the local one.
    local = parameter
    if parameter.device_mesh.ndim > 1:
        local = DTensor.from_local(parameter.to_local(), mesh, [Shard(0)], run_check=False)
    whole = local.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial("avg")])
    if parameter.device_mesh.ndim == 1:
        return whole
    return DTensor.from_local(whole, parameter.device_mesh["tp"], parameter.placements[1:], run_check=False)


def simple_fsdp(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Splits the parameters of a model over a mesh, and gathers each where a module reads it."""
    for module in list(model.modules()):
        names = list(dict(module.named_parameters(recurse=False)))
        for name in names:
            module._parameters[name] = nn.Parameter(_split(module._parameters[name], mesh))
        getters = {name: property(partial(_gather_named, mesh, name)) for name in names}
        module.__class__ = type(f"Fsdp{type(module).__name__}", (type(module),), getters)
    return model


def _split(parameter: Any, mesh: DeviceMesh) -> DTensor:
    if not isinstance(parameter, DTensor):
        return distribute_tensor(parameter.detach(), mesh, [Shard(0)])
    local = distribute_tensor(parameter.detach().to_local(), mesh, [Shard(0)]).to_local()
    return DTensor.from_local(local, mesh._get_root_mesh(), [Shard(0), *parameter.placements], run_check=False)


def _gather_named(mesh: DeviceMesh, name: str, module: nn.Module) -> Tensor:
    return _gather(mesh, module._parameters[name])  # type: ignore[arg-type]


def _fsdp(rank: int, training: bool) -> Case:
    model = simple_fsdp(Mlp(), init_mesh())
    return Case(model, (_inputs() + rank,), tuple(model.parameters()) if training else ())


def _fsdp_and_tensor_parallel(rank: int) -> Case:
    mesh = init_device_mesh("cpu", (WORLD_SIZE, 1), mesh_dim_names=("dp", "tp"))
    plan = {**COLUMNS_AND_ROWS, "norm": SequenceParallel(), "up": ColwiseParallel(input_layouts=Shard(1))}
    model = simple_fsdp(parallelize_module(Mlp(), mesh["tp"], plan), mesh["dp"])
    return Case(model, (_inputs() + rank,), tuple(model.parameters()))


CASES: Mapping[str, Callable[[int], Case]] = {
    "dtensor_in": _dtensor_in,
    "dtensor_out": _dtensor_out,
    "tensor_parallel_training": partial(_tensor_parallel, training=True),
    "sequence_parallel_training": _sequence_parallel,
    "fsdp_and_tensor_parallel_training": _fsdp_and_tensor_parallel,
    "fsdp_training": partial(_fsdp, training=True),
    **(
        {
            "tensor_parallel_forward": partial(_tensor_parallel, training=False),
            "fsdp_forward": partial(_fsdp, training=False),
        }
        if LONG
        else {}
    ),
}
"""The cases by name: each returns the part of a rank. The first ones are inference, too."""
