"""Training on several ranks: DDP, FSDP2, tensor parallelism and their combinations, compiled beside eager.

A case is a function of a `Compile`: it builds its model, trains it and returns what it computed. It runs twice on each
rank, in eager and compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.distributed.checkpoint as checkpoint
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy, silu
from torch.nn.parallel import DistributedDataParallel

import fxwrap
from tests.distributed.cases import Mlp, simple_fsdp
from tests.fx_passes.expert_layers import SORTING
from tests.support.long_form import LONG

Compile = Callable[[Any], Any]
"""Returns a function or module compiled, or as it is."""

TRACES_MESSAGES = hasattr(torch._dynamo.config, "enable_p2p_compilation")
"""Whether Dynamo can trace point-to-point messages: torch 2.11 cannot."""

BATCHES = (4, 6, 8)
"""Batch sizes of three steps: the second one makes Dynamo compile for symbolic sizes."""


BLOCKS = 4 if LONG else 2
"""Blocks of each model; with two there are groups, and a next block to prefetch."""


class Blocks(nn.Module):
    """Blocks in sequence; `last` makes the last one."""

    def __init__(self, last: Callable[[], nn.Module] = Mlp) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([*[Mlp() for _ in range(BLOCKS - 1)], last()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


class Mixture(nn.Module):
    """A loop over experts, two of each token; their weights are in one tensor, or in modules."""

    def __init__(self, stacked: bool = False, experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(8, experts)
        if stacked:
            self.up, self.down = [nn.Parameter(torch.randn(experts, *size) / 4) for size in ((16, 8), (8, 16))]
        else:
            layers = [(nn.Linear(8, 16, bias=False), nn.SiLU(), nn.Linear(16, 8, bias=False)) for _ in range(experts)]
            self.experts = nn.ModuleList([nn.Sequential(*items) for items in layers])

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, 8)
        factors, chosen = torch.topk(self.router(tokens).float().softmax(-1), 2, dim=-1)
        result = torch.zeros_like(tokens)
        for number in range(self.router.out_features):
            token, position = torch.where(chosen == number)
            rows = self._expert(number, tokens[token]) * factors[token, position, None]
            result = result.index_add(0, token, rows.to(tokens.dtype))
        return result.view(x.shape)

    def _expert(self, number: int, rows: Tensor) -> Tensor:
        if hasattr(self, "experts"):
            result: Tensor = self.experts[number](rows)
            return result
        return silu(rows @ self.up[number].t()) @ self.down[number].t()


def inputs(batch: int, rank: int | None = None) -> Tensor:
    """Returns inputs, equal on all ranks without `rank`."""
    generator = torch.Generator("cpu").manual_seed(100 * batch + (0 if rank is None else rank + 1))
    return torch.randn(batch, 4, 8, generator=generator, device="cpu").to(torch.get_default_device())


def local(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a tensor, copied."""
    part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return part.detach().clone()


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """Returns the optimizer; it loops over parameters of which some are DTensors: foreach operators mix none."""
    mixed = len({type(parameter.data) for parameter in model.parameters()}) > 1
    return torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False if mixed else None)


def train(model: nn.Module, forward: Any, batches: Callable[[int], Tensor], context: Any = nullcontext) -> list[Tensor]:
    """Trains a model for three steps; returns losses, gradients and parameters."""
    optimizer = adamw(model)
    results = []
    for batch in BATCHES:
        with context():
            loss = forward(batches(batch)).square().mean()
            loss.backward()
        results += [local(loss), *[local(item.grad) for item in model.parameters() if item.grad is not None]]
        optimizer.step()
        optimizer.zero_grad()
    return results + [local(item) for item in model.parameters()]


def rank_inputs(batch: int) -> Tensor:
    """Returns inputs of this rank."""
    return inputs(batch, dist.get_rank())


def device_type() -> str:
    """Returns the type of the default device, on which each case runs."""
    return torch.get_default_device().type


def whole_mesh() -> DeviceMesh:
    """Returns a mesh of all ranks."""
    return init_device_mesh(device_type(), (dist.get_world_size(),))


# --- data parallel ----------------------------------------------------------------------------------------------------


def ddp(compile_: Compile) -> list[Tensor]:
    model = DistributedDataParallel(Blocks())
    return train(model, compile_(model), rank_inputs)


def ddp_python_reducer(compile_: Compile) -> list[Tensor]:
    model = DistributedDataParallel(Blocks())
    with torch._dynamo.config.patch(optimize_ddp="python_reducer", compiled_autograd=compile_ is not identity):
        return train(model, compile_(model), rank_inputs)


def fsdp(
    compile_: Compile, blocks: int, reshard: bool = True, mixed: bool = False, last: Callable[[], nn.Module] = Mlp
) -> list[Tensor]:
    """FSDP2 over groups of this many blocks, 0 for the whole model."""
    model = fsdp_model(blocks, reshard, mixed, last)
    return train(model, compile_(model), rank_inputs)


def fsdp_model(
    blocks: int, reshard: bool = True, mixed: bool = False, last: Callable[[], nn.Module] = Mlp
) -> nn.Module:
    """Returns a model with FSDP2 over groups of this many blocks, 0 for the whole model."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if mixed else None
    options: dict[str, Any] = {"mesh": whole_mesh(), "reshard_after_forward": reshard}
    if policy is not None:
        options["mp_policy"] = policy
    model = Blocks(last)
    for first in range(0, BLOCKS if blocks else 0, blocks or 1):
        group = list(model.blocks[first : first + blocks])
        fully_shard(group if blocks > 1 else group[0], **options)
    fully_shard(model, **options)
    return model


def simple(compile_: Compile, last: Callable[[], nn.Module] = Mlp) -> list[Tensor]:
    """FSDP as a parametrisation, without graph breaks."""
    model = simple_fsdp(Blocks(last), whole_mesh())
    return train(model, compile_(model), rank_inputs)


class Uneven(nn.Module):
    """Layers, of which one has rows that do not divide by the number of ranks: the last rank pads its part."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 7), nn.Linear(7, 8)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(self.up(self.first(x).relu()).relu())
        return result


def uneven(compile_: Compile, parametrised: bool) -> list[Tensor]:
    if parametrised:
        model = simple_fsdp(Uneven(), whole_mesh())
    else:
        model = Uneven()
        fully_shard(model, mesh=whole_mesh())
    return train(model, compile_(model), rank_inputs)


# --- tensor parallel --------------------------------------------------------------------------------------------------


def _parallel_plan(sequence: bool) -> dict[str, Any]:
    plan: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if sequence:
        plan = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        }
    return {f"blocks.{number}.{name}": style for number in range(BLOCKS) for name, style in plan.items()}


def tensor_parallel(compile_: Compile, sequence: bool) -> list[Tensor]:
    mesh = whole_mesh()
    model = parallelize_module(Blocks(), mesh, _parallel_plan(sequence))
    part = 4 // mesh.size()
    rank = dist.get_rank()

    def batches(batch: int) -> Tensor:
        return inputs(batch)[:, part * rank : part * (rank + 1)] if sequence else inputs(batch)

    return train(model, compile_(model), batches)


def fsdp_and_tensor_parallel(compile_: Compile) -> list[Tensor]:
    mesh = init_device_mesh(device_type(), (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(Blocks(), mesh["tp"], _parallel_plan(sequence=False))
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    number = mesh["dp"].get_local_rank()
    return train(model, compile_(model), lambda batch: inputs(batch, number))


def parallel_loss(compile_: Compile) -> list[Tensor]:
    mesh = whole_mesh()
    head = parallelize_module(nn.Linear(8, 16), mesh, ColwiseParallel(output_layouts=Shard(-1), use_local_output=False))

    def loss(x: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(head(x).flatten(0, 1), labels)

    compiled, results = compile_(loss), []
    for batch in BATCHES:
        labels = torch.arange(batch * 4) % 16
        with loss_parallel():
            result = compiled(inputs(batch), labels)
            result.backward()
        results += [local(result), *[local(item.grad) for item in head.parameters()]]
    return results


def context_parallel(compile_: Compile) -> list[Tensor]:
    """Attention over a sequence that is split over the ranks: each gathers keys and values."""
    torch.manual_seed(0)
    projection = nn.Linear(8, 24)
    world, rank = dist.get_world_size(), dist.get_rank()

    def attention(x: Tensor) -> Tensor:
        query, key, value = projection(x).chunk(3, -1)
        gathered = [collectives.all_gather_tensor_autograd(item.contiguous(), 1, dist.group.WORLD)
                    for item in (key, value)]  # fmt: skip
        positions = torch.arange(4 * world, device=x.device)  # Dynamo ignores the default device in torch 2.11
        mask = positions[4 * rank : 4 * rank + 4, None] >= positions
        return nn.functional.scaled_dot_product_attention(query, *gathered, attn_mask=mask)

    return train(projection, compile_(attention), rank_inputs)


def torch_context_parallel(compile_: Compile) -> list[Tensor]:
    """Attention in torch's own `context_parallel`, whose operators are those of GPUs.

    Each rank has two chunks of 32 rows: the efficient kernel pads the logsumexp to a multiple of 32, and torch splits
    it like the rows.
    """
    from torch.distributed.tensor.experimental import context_parallel as context
    from torch.nn.attention import SDPBackend, sdpa_kernel

    torch.manual_seed(0)
    projection, results = nn.Linear(8, 24), list[Tensor]()

    def attention(x: Tensor) -> Tensor:
        heads = [item.unflatten(-1, (2, 4)).transpose(1, 2) for item in projection(x).chunk(3, -1)]
        return nn.functional.scaled_dot_product_attention(*heads, is_causal=True)

    compiled, mesh = compile_(attention), whole_mesh()
    for batch in BATCHES:
        x = inputs(batch).repeat(1, 16 * mesh.size(), 1)
        with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION]), context(mesh, buffers=[x], buffer_seq_dims=[1]):
            loss = compiled(x).square().mean()
            loss.backward()
        results += [local(loss), *[local(item.grad) for item in projection.parameters() if item.grad is not None]]
        projection.zero_grad()
    return results


# --- experts ----------------------------------------------------------------------------------------------------------


def experts(compile_: Compile) -> list[Tensor]:
    """A mixture of experts, one on each rank: tokens travel by sizes that are read from the routing."""
    torch.manual_seed(0)
    world = dist.get_world_size()
    router, expert = nn.Linear(8, world), nn.Linear(8, 8)
    model = nn.ModuleList([router, expert])

    def layer(x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        scores = router(tokens).softmax(-1)
        weight, choice = scores.max(-1)
        order = choice.argsort(stable=True)
        sent = torch.bincount(choice, minlength=world)
        received = collectives.all_to_all_single(sent, None, None, dist.group.WORLD)
        sent_sizes, received_sizes = sent.tolist(), received.tolist()
        for size in (*sent_sizes, *received_sizes):
            torch._check(size >= 0)
        arrived = collectives.all_to_all_single_autograd(tokens[order], received_sizes, sent_sizes, dist.group.WORLD)
        returned = collectives.all_to_all_single_autograd(
            expert(arrived).relu(), sent_sizes, received_sizes, dist.group.WORLD
        )
        return torch.zeros_like(tokens).index_copy(0, order, returned) * weight[:, None]

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        return train(model, compile_(layer), rank_inputs)


# --- collectives as eager calls them ----------------------------------------------------------------------------------


def in_place_all_reduce(compile_: Compile) -> list[Tensor]:
    def function(x: Tensor) -> Tensor:
        y = x * 2
        dist.all_reduce(y)
        return y.sin()

    compiled = compile_(function)
    return [compiled(rank_inputs(batch)) for batch in BATCHES]


def point_to_point(compile_: Compile) -> list[Tensor]:
    world, rank = dist.get_world_size(), dist.get_rank()

    def function(x: Tensor) -> Tensor:
        y, received = x * 2, torch.empty_like(x)
        operations = [
            dist.P2POp(dist.isend, y, (rank + 1) % world),
            dist.P2POp(dist.irecv, received, (rank - 1) % world),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return received + y

    compiled = compile_(function)
    return [compiled(rank_inputs(batch)) for batch in BATCHES]


def point_to_point_in_the_graph(compile_: Compile) -> list[Tensor]:
    """Dynamo traces the messages, whose operators declare no writes."""
    with torch._dynamo.config.patch(enable_p2p_compilation=True):
        return point_to_point(compile_)


def saved_state(compile_: Compile) -> list[Tensor]:
    """A distributed checkpoint of a compiled model's state goes on in another model."""
    folder = [TemporaryDirectory().name if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    mesh = whole_mesh()
    first, second = simple_fsdp(Blocks(), mesh), simple_fsdp(Blocks(), mesh)
    compiled = compile_(first)
    train(first, compiled, rank_inputs)
    checkpoint.save(compiled.state_dict(), checkpoint_id=folder[0])
    state = compile_(second).state_dict()
    checkpoint.load(state, checkpoint_id=folder[0])
    second.load_state_dict({name.removeprefix("_orig_mod."): value for name, value in state.items()})
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(local(one), local(other))
    return train(second, compile_(second), rank_inputs)


# --- whole steps ------------------------------------------------------------------------------------------------------


def with_loops(case: Callable[[Compile], list[Tensor]]) -> Callable[[Compile], list[Tensor]]:
    """Returns a case whose graphs have calls with sizes that depend on data, such as loops over experts."""

    def run(compile_: Compile) -> list[Tensor]:
        with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
            return case(compile_)

    return run


def whole_step(compile_: Compile, make: Callable[[], nn.Module], options: fxwrap.Options | None = None) -> list[Tensor]:
    """`compile_step` of a model that ranks share, with other batch sizes in each call.

    Gradients are clipped where they are all on one mesh, or all plain.
    """
    model = make()
    clips = len({getattr(parameter, "device_mesh", None) for parameter in model.parameters()}) == 1
    optimizer = adamw(model)

    def step(x: Tensor) -> Tensor:
        loss: Tensor = model(x).square().mean()
        loss.backward()
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    run = step if compile_ is identity else fxwrap.compile_step(step, (rank_inputs(4),), dynamic=True, options=options)
    losses = [local(run(rank_inputs(batch))) for batch in BATCHES]
    if isinstance(model, FSDPModule):
        model.reshard()
    state = [value for items in optimizer.state.values() for value in items.values()]
    return [*losses, *[local(item) for item in model.parameters()], *[local(item) for item in state]]


class Normalised(nn.Module):
    """Blocks with buffers, which DDP sends from rank 0 to the others."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.blocks = nn.BatchNorm1d(4), Blocks()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.blocks(self.norm(x))
        return result


def whole_step_without_sync(compile_: Compile) -> list[Tensor]:
    """DDP over two backwards, of which the second one averages."""
    model = DistributedDataParallel(Normalised())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        with model.no_sync():
            first = model(x).square().mean()
        first.backward()
        second: Tensor = model(x + 1).square().mean()
        second.backward()
        optimizer.step()
        optimizer.zero_grad()
        return first.detach() + second.detach()

    run = step if compile_ is identity else fxwrap.compile_step(step, (rank_inputs(4),), dynamic=True)
    losses = [run(rank_inputs(batch)) for batch in BATCHES]
    return [*losses, *map(local, model.parameters()), *map(local, model.buffers())]


def _fsdp_of_tensor_parallel() -> nn.Module:
    mesh = init_device_mesh(device_type(), (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(Blocks(), mesh["tp"], _parallel_plan(sequence=False))
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def _uneven_fsdp() -> nn.Module:
    return fully_shard(Uneven(), mesh=whole_mesh())


def identity(function: Any) -> Any:
    """The `Compile` of eager."""
    return function


CASES: Mapping[str, Callable[[Compile], list[Tensor]]] = {
    "ddp": ddp,
    "ddp_python_reducer": ddp_python_reducer,
    "fsdp": partial(fsdp, blocks=0),
    "fsdp_of_blocks": partial(fsdp, blocks=1),
    "fsdp_of_blocks_without_reshard": partial(fsdp, blocks=1, reshard=False),
    "fsdp_of_groups": partial(fsdp, blocks=2),
    "fsdp_mixed_precision": partial(fsdp, blocks=1, mixed=True),
    "simple_fsdp": simple,
    "fsdp_of_experts": with_loops(partial(fsdp, blocks=1, last=Mixture)),
    "fsdp_of_stacked_experts_mixed_precision": with_loops(
        partial(fsdp, blocks=1, mixed=True, last=partial(Mixture, stacked=True))
    ),
    "simple_fsdp_of_experts": with_loops(partial(simple, last=Mixture)),
    "uneven_fsdp": partial(uneven, parametrised=False),
    "uneven_simple_fsdp": partial(uneven, parametrised=True),
    "tensor_parallel": partial(tensor_parallel, sequence=False),
    "sequence_parallel": partial(tensor_parallel, sequence=True),
    "parallel_loss": parallel_loss,
    "context_parallel": context_parallel,
    "experts": experts,
    "in_place_all_reduce": in_place_all_reduce,
    "point_to_point": point_to_point,
    **({"point_to_point_in_the_graph": point_to_point_in_the_graph} if TRACES_MESSAGES else {}),
    "saved_state": saved_state,
    "whole_step_of_simple_fsdp": partial(whole_step, make=lambda: simple_fsdp(Blocks(), whole_mesh())),
    "whole_step_of_tensor_parallel": partial(
        whole_step, make=lambda: parallelize_module(Blocks(), whole_mesh(), _parallel_plan(sequence=False))
    ),
    "whole_step_of_ddp": partial(whole_step, make=lambda: DistributedDataParallel(Normalised())),
    "whole_step_without_sync": whole_step_without_sync,
    "whole_step_of_fsdp": partial(whole_step, make=lambda: fsdp_model(blocks=1)),
    "whole_step_of_fsdp_and_experts": with_loops(
        partial(
            whole_step,
            make=lambda: fsdp_model(blocks=1, last=partial(Mixture, experts=3)),
            options=fxwrap.Options(devices=(SORTING,)),
        )
    ),
    "whole_step_of_fsdp_groups": partial(whole_step, make=lambda: fsdp_model(blocks=2, reshard=False)),
    "whole_step_of_fsdp_mixed": partial(whole_step, make=lambda: fsdp_model(blocks=1, mixed=True)),
    "whole_step_of_uneven_fsdp": partial(whole_step, make=_uneven_fsdp),
    "whole_step_of_fsdp_and_tensor_parallel": partial(whole_step, make=_fsdp_of_tensor_parallel),
    "fsdp_and_tensor_parallel": fsdp_and_tensor_parallel,
}
"""The cases by name."""

GPU_CASES: Mapping[str, Callable[[Compile], list[Tensor]]] = {**CASES, "torch_context_parallel": torch_context_parallel}
"""The cases on GPUs."""
