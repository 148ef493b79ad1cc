"""One rank: programs with bucketed and overlapped collectives beside the same programs without, bit for bit."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed
from torch import Tensor, nn

import fxwrap
from fxwrap.compile.backend import make_backend
from fxwrap.lines import StartCollective
from fxwrap.options import Options
from fxwrap.wrapper_ir import Program
from tests.distributed.cases import WORLD_SIZE, Mlp, init_mesh, simple_fsdp

PLAIN = Options(bucket_collectives=False, overlap_collectives=False, compile_cache=False)
OVERLAPPED = Options(compile_cache=False)


class SameBits:
    """A compiled graph that each call runs with and without buckets and overlap, and compares bit for bit."""

    programs: ClassVar[list[tuple[Program, Program]]] = []
    """The programs without and with them, of all graphs."""

    def __init__(self, graph: Any, inputs: Any, *, options: Options, **arguments: Any) -> None:
        self.compiled = [fxwrap.compile_graph(graph, inputs, options=item, **arguments) for item in (PLAIN, options)]
        self.program = self.compiled[1].program
        self.programs.append((self.compiled[0].program, self.program))

    def boxed(self, inputs: list[Any]) -> Any:
        copies = [item.clone() if isinstance(item, Tensor) else item for item in inputs]
        expected = self.compiled[0].boxed(copies)
        outputs = self.compiled[1].boxed(inputs)
        for one, other in zip(outputs, expected, strict=True):
            assert torch.equal(one, other) if isinstance(one, Tensor) else one == other
        return outputs


def starts(program: Program) -> int:
    """Returns the number of collectives of a program."""
    return sum(isinstance(line, StartCollective) for line in program.lines())


def check_fsdp(rank: int) -> None:
    """A model of 12 blocks: at least 5 times fewer collectives, and the same bits."""
    model = simple_fsdp(nn.Sequential(*[Mlp() for _ in range(12)]), init_mesh())
    SameBits.programs.clear()
    compiled = torch.compile(model, backend=make_backend(OVERLAPPED, SameBits), fullgraph=True)
    compiled(torch.randn(2, 4, 8) + rank).square().mean().backward()
    assert [starts(before) for before, _ in SameBits.programs] == [72, 72]
    for _, after in SameBits.programs:
        assert 1 <= starts(after) <= 72 // 5, starts(after)


CHECKS: Mapping[str, Callable[[int], None]] = {"fsdp": check_fsdp}


def main(arguments: Sequence[str]) -> None:
    """Runs the checks: `overlap_rank.py RANK STORE`."""
    rank, store = int(arguments[0]), torch.distributed.FileStore(arguments[1], WORLD_SIZE)
    timeout = timedelta(seconds=60)  # a rank that failed does not take part in collectives
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=WORLD_SIZE, timeout=timeout)
    for name, check in CHECKS.items():
        error = ""
        torch.manual_seed(0)
        try:
            check(rank)
        except Exception:  # noqa: BLE001  # the other checks run too
            error = traceback.format_exc()
        print(json.dumps({"case": name, "error": error}), flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
