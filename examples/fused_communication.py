"""Asynchronous tensor parallelism: collectives become part of the matmuls beside them.

The function is a block of a sequence-parallel model as one of two ranks runs it. The graph is made with a fake process
group, so that it needs one process and no GPU: the report states what would be fused, and why the rest is not.

    python examples/fused_communication.py
"""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # the rules for fake tensors of its operators
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore

from fxwrap.fused_communication import CommunicationFusion

RANKS, GROUP = 2, "0"


def gather(x: torch.Tensor) -> torch.Tensor:
    """The whole sequence, of whose rows each rank has a part."""
    operators = torch.ops._c10d_functional
    return operators.wait_tensor(operators.all_gather_into_tensor(x, RANKS, GROUP))


def scatter(x: torch.Tensor) -> torch.Tensor:
    """This rank's rows of the sum over all ranks."""
    operators = torch.ops._c10d_functional
    return operators.wait_tensor(operators.reduce_scatter_tensor(x, "sum", RANKS, GROUP))


def block(x: torch.Tensor, query: torch.Tensor, key: torch.Tensor, projection: torch.Tensor) -> torch.Tensor:
    """Two matmuls of one gathered tensor, one whose result is scattered, and a scatter of something else."""
    whole = gather(x)
    y = scatter((whole @ query * (whole @ key)) @ projection)
    return y + scatter(gather(y).exp())


def main() -> None:
    """Prints the report."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    inputs = [torch.rand(8, 16), torch.rand(16, 16), torch.rand(16, 16), torch.rand(16, 16)]
    graph = make_fx(block, tracing_mode="fake")(*inputs)
    fusion = CommunicationFusion(decline=lambda device, group: "")  # as if there were symmetric memory
    print(fusion.fuse(graph).report())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
