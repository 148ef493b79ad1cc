"""Programs that were read back from FX graphs, compared with those that the graphs were emitted from."""

from __future__ import annotations

import torch

from fxwrap.lines import ExtensionLine
from fxwrap.wrapper_ir import Block, Program, canonical


def in_core_lines(program: Program) -> Program:
    """The program with vendors' lines as what they expand to, which is what an FX graph holds of them."""
    lines = [
        inner for line in program.body.lines for inner in (line.expand() if isinstance(line, ExtensionLine) else [line])
    ]
    return program.replace(body=Block((), tuple(lines)))


def assert_equal(program: Program, other: Program, copied: bool = False) -> None:
    """Both are one program up to names, with payloads of constants that are the same tensors, or copies of them."""
    wanted, got = canonical(in_core_lines(program)), canonical(other)
    assert str(got) == str(wanted)
    assert got == wanted
    for name, tensor in wanted.store.tensors.items():
        found = got.store.tensors[name]
        assert torch.equal(found, tensor) if copied else found is tensor
