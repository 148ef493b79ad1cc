"""Saves a program for GPUs that this process has not: python -m tests.artifact.cross_compile FILE ARCHITECTURE..."""

from __future__ import annotations

import sys

import torch
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap.torch_compat import FakeTensorMode

SHAPE = (64, 128)


def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two kernels."""
    return torch.softmax(x.exp(), -1), (x * 2).sum(0)


def fake_gpu_program() -> fxwrap.Compiled:
    """The function, compiled for bfloat16 tensors of a GPU."""
    with FakeTensorMode():
        x = torch.empty(SHAPE, device="cuda", dtype=torch.bfloat16)
        graph = make_fx(function)(x)
    return fxwrap.compile_graph(graph, [x], options=fxwrap.Options(emitter="cpp"))


if __name__ == "__main__":
    fake_gpu_program().save(sys.argv[1], target="native", architectures=tuple(sys.argv[2:]))
