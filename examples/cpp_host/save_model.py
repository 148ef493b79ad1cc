"""Saves the model that the C++ hosts of this folder run: `python save_model.py model.fxw`."""

from __future__ import annotations

import sys

import torch

import fxwrap


def make_model() -> torch.nn.Module:
    """A classifier of 8 numbers into 3 classes."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 3), torch.nn.Softmax(-1))


def save(path: str) -> None:
    """Compiles the model for batches of any size and saves it for hosts without Python."""
    batch = torch.export.Dim("batch", min=1, max=1024)
    with torch.no_grad():
        program = torch.export.export(make_model(), (torch.randn(4, 8),), dynamic_shapes=({0: batch},))
        compiled = fxwrap.compile_graph(program, name="classifier", options=fxwrap.Options(emitter="cpp"))
    compiled.save(path, target="native")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python save_model.py model.fxw")
    save(sys.argv[1])
