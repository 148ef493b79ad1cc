"""Random programs of collectives and other operators, equal on all ranks for one seed."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from fxwrap.devices import CPU
from fxwrap.options import Options
from tests.distributed.cases import WORLD_SIZE
from tests.support.versions import is_before

C10D = torch.ops._c10d_functional
_SIZES = ((4, 4), (2, 4), (4, 2), (8, 4))
_DTYPES = (torch.float32, torch.float64)
_ROWS_ARE_SPLIT = ("reduce_scatter", "all_to_all")


class RandomProgram:
    """A function of tensors that a seed determines, with its inputs on each rank."""

    def __init__(self, seed: int, groups: tuple[str, ...]) -> None:
        self.seed = seed
        self.groups = groups

    def inputs(self, rank: int) -> list[Tensor]:
        """Returns the inputs of a rank: the same shapes on all, other numbers."""
        generator = torch.Generator().manual_seed(self.seed * WORLD_SIZE + rank)
        choose = random.Random(self.seed)
        shapes = [(choose.choice(_SIZES), choose.choice(_DTYPES)) for _ in range(choose.randint(2, 5))]
        return [torch.rand(sizes, generator=generator, dtype=dtype) + 0.5 for sizes, dtype in shapes]

    def graph(self) -> GraphModule:
        """Returns the function as a graph."""
        return make_fx(self._function, tracing_mode="fake")(*self.inputs(0))

    def options(self) -> Options:
        """Returns options with buckets and overlap: random limits of buckets and of memory, any emitter but C++."""
        choose = random.Random(self.seed)
        limit = choose.choice((0, 100, 300, 1 << 20))
        spec = dataclasses.replace(
            CPU, collectives=dataclasses.replace(CPU.collectives, latency_s=limit / 10, bytes_per_s=1.0)
        )
        return Options(
            emitter=choose.choice(("python", "fx", "interpreter")), devices=(spec,), fuse=False, compile_cache=False,
            overlap_memory_slack=choose.choice((0.0, 0.5)), reorder_for_peak_memory=choose.random() < 0.3,
            memory_planning=choose.choice(("none", "reuse", "auto")), check_memory=choose.random() < 0.2,
        )  # fmt: skip

    def _function(self, *inputs: Tensor) -> list[Tensor]:
        choose = random.Random(self.seed + 1)
        ready = list(inputs)
        in_flight: list[Tensor] = []
        for _ in range(choose.randint(6, 30)):
            match choose.randrange(4):
                case 0 | 1:
                    started = self._start(choose, ready)
                    in_flight += started
                    if choose.random() < 0.4:
                        ready += [C10D.wait_tensor(in_flight.pop()) for _ in started]
                case 2 if in_flight:
                    pending = in_flight.pop(choose.randrange(len(in_flight)))
                    ready.append(C10D.wait_tensor(pending))
                case _:
                    ready.append(self._compute(choose, ready))
        ready += [C10D.wait_tensor(item) for item in in_flight]
        returned = choose.sample(range(len(inputs), len(ready)), max(1, (len(ready) - len(inputs)) * 2 // 3))
        return [ready[index] for index in sorted(returned)]

    def _start(self, choose: random.Random, ready: list[Tensor]) -> list[Tensor]:
        group, reduction = choose.choice(self.groups), choose.choice(("sum", "max", "avg"))
        source = choose.choice(ready)
        if is_before("2.12"):
            source = source.contiguous()  # torch's collectives refuse other layouts
        splits = [source.shape[0] // WORLD_SIZE] * WORLD_SIZE
        starts: list[Callable[[], Tensor | list[Tensor]]] = [
            lambda: C10D.all_reduce(source, reduction, group),
            lambda: C10D.all_gather_into_tensor(source, WORLD_SIZE, group),
            lambda: C10D.reduce_scatter_tensor(source, reduction, WORLD_SIZE, group),
            lambda: C10D.all_reduce_coalesced([source, source.cos()], reduction, group),
            lambda: C10D.broadcast(source, choose.randrange(WORLD_SIZE), group),
            lambda: C10D.all_to_all_single(source, splits, splits, group),
            lambda: self._exchange(source.contiguous(), group, choose.random() < 0.5),
        ]
        weights = [
            4,
            4,
            4 if source.shape[0] % WORLD_SIZE == 0 else 0,
            1,
            1,
            1 if source.shape[0] % WORLD_SIZE == 0 else 0,
            2 if hasattr(C10D, "batch_p2p_ops") else 0,
        ]
        if source.shape[0] > 64:
            weights[1] = 0
        started = choose.choices(starts, weights)[0]()
        return list(started) if isinstance(started, list | tuple) else [started]

    def _exchange(self, source: Tensor, group: str, waits: bool) -> list[Tensor]:
        """Sends a tensor to the other rank and receives its one; the graph may have no wait for the former."""
        received, peer = torch.empty_like(source), 1 - torch.distributed.get_rank()
        sent, pending = C10D.batch_p2p_ops(["isend", "irecv"], [peer, peer], [0, 0], [source, received], group)
        if waits:
            C10D.wait_tensor(sent)
        return [pending]

    @staticmethod
    def _compute(choose: random.Random, ready: list[Tensor]) -> Tensor:
        one = choose.choice(ready)
        others = [item for item in ready if item.shape == one.shape and item.dtype == one.dtype]
        match choose.randrange(5):
            case 0:
                return one + choose.choice(others)
            case 1:
                return torch.mm(one, choose.choice(others).t()).tanh()
            case 2:
                return torch.cat([one, choose.choice(others)])[: one.shape[0]]
            case 3:
                return one.sin() * 2
            case _:
                return one.t().contiguous().t()
