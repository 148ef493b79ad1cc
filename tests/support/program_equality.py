"""Programs that were read back from FX graphs, compared with those that the graphs were emitted from."""

from __future__ import annotations

import torch

from fxwrap.lines import ExtensionLine
from fxwrap.wrapper_ir import Block, Program, canonicalize_program


def expand_extension_lines(program: Program) -> Program:
    """The program with vendors' lines expanded, as in its FX graph."""
    lines = [
        inner for line in program.body.lines for inner in (line.expand() if isinstance(line, ExtensionLine) else [line])
    ]
    return program.replace(body=Block((), tuple(lines)))


def assert_equal(program: Program, other: Program, copied: bool = False) -> None:
    """Both are one program up to names, with payloads of constants that are the same tensors, or copies of them."""
    wanted, got = canonicalize_program(expand_extension_lines(program)), canonicalize_program(other)
    assert str(got) == str(wanted)
    assert got == wanted
    for name, tensor in wanted.store.tensors.items():
        actual = got.store.tensors[name]
        assert torch.equal(actual, tensor) if copied else actual is tensor
