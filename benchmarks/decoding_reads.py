"""The reads of a decoded token without its computing: what its launches leave of the memory's bandwidth.

A token is a chain of launches, each of which waits for the one before. These have launches of the same number that read
as many bytes, start before their predecessor has ended, and load a part of their bytes before they wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import nn

from benchmarks.decoding_models import Decoder, weight_bytes

_BLOCK, _WARPS = 4096, 4
"""The words of a program's load, and its warps."""

_PROGRAMS = 8
"""The programs of a multiprocessor at most: registers suffice for them at once."""

_UNIT = 64
"""The bytes that sizes are multiples of, so that loads are vectors."""


_ATTENTION = 3
"""The launch of a layer that reads its cache."""


@triton.jit  # type: ignore[untyped-decorator]
def _read(pointer, count, totals, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Adds words, of which a program loads a block before it waits."""
    tl.extra.cuda.gdc_launch_dependents()
    first, stride = tl.program_id(0) * BLOCK, tl.num_programs(0) * BLOCK
    positions = first + tl.arange(0, BLOCK)
    words = tl.load(pointer + positions, mask=positions < count, other=0)
    total = tl.zeros((BLOCK // 4,), tl.int32)
    tl.extra.cuda.gdc_wait()
    for _ in range(first + stride, count, stride):
        positions += stride
        total += tl.sum(tl.reshape(words, (BLOCK // 4, 4)), 1)
        words = tl.load(pointer + positions, mask=positions < count, other=0)
    total += tl.sum(tl.reshape(words, (BLOCK // 4, 4)), 1)
    tl.store(totals + tl.program_id(0), tl.sum(total))


def reads_of_token(model: Decoder) -> list[int]:
    """Returns the bytes that each launch of a token reads: weights, and keys and values of the caches.

    A layer has launches for its norms, for queries, keys and values together, their rotation, attention and the sum of
    its parts, the projection, the two halves of the gate together, and the last matmul.
    """
    reads: list[int] = []
    position = int(model.get_buffer("position"))
    for number, block in enumerate(model.blocks):
        assert isinstance(block, nn.Module), "blocks are modules"
        groups = (("norm_1",), ("query", "key", "value"), (), (), (), ("projection",), ("norm_2",), ("gate", "up"),
                  ("down",))  # fmt: skip
        launches = [weight_bytes(nn.ModuleList([block.get_submodule(name) for name in names])) for names in groups]
        launches[_ATTENTION] = model.get_buffer(f"cache_{number}")[:, :, : position + 1].nbytes
        reads += launches
    return [*reads, weight_bytes(nn.ModuleList([model.norm])), weight_bytes(nn.ModuleList([model.head]))]


class Reads:
    """Launches that read so many bytes each, one after another, as a CUDA graph. No byte is read twice."""

    def __init__(self, reads: Sequence[int], device: torch.device) -> None:
        self.sizes = [-(-size // _UNIT) * (_UNIT // torch.int32.itemsize) for size in reads]
        self.words = torch.zeros(sum(self.sizes), dtype=torch.int32, device=device)
        self.limit = _PROGRAMS * torch.cuda.get_device_properties(device).multi_processor_count
        self.totals = torch.empty(self.limit, dtype=torch.int32, device=device)
        self._launch()  # compiles
        torch.cuda.synchronize(device)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._launch()

    def run(self, tokens: int) -> None:
        """Reads what so many tokens read."""
        for _ in range(tokens):
            self.graph.replay()

    def _launch(self) -> None:
        for part, size in zip(self.words.split(self.sizes), self.sizes, strict=True):
            programs = min(max(-(-size // _BLOCK), 1), self.limit)
            _read[(programs,)](part, size, self.totals, BLOCK=_BLOCK, num_warps=_WARPS, launch_pdl=True)
