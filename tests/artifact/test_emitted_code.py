"""Entries of caches with emitted code: they run without reading the IR, in processes that would emit the same."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import Library

import fxwrap
from fxwrap.artifact import emitted_code, load_content, loading, program_content
from fxwrap.errors import ArtifactError
from fxwrap.wrapper_ir import Program
from tests.artifact.test_native_graphs import expected, graphs
from tests.support.samples import SAMPLES

EMITTERS = pytest.mark.parametrize("emitter", ("python", "cpp"))


class Gate(nn.Module):
    """A product, an operator call, and a fused kernel, with a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randn(16, 16, generator=torch.Generator().manual_seed(0)))

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (nn.functional.gelu(x @ self.weight.to(x.dtype) + 1).softmax(-1),)


def content_of(program: Program, emitter: str, **described: Any) -> bytes:
    described = {"options": "", "plan": None, "call": {}} | described
    return program_content(program, "an entry", emitter=emitter, **described)


@cache
def entry(emitter: str) -> tuple[fxwrap.Compiled, bytes]:
    """The module compiled, and the content of its entry."""
    x = torch.randn(8, 16)
    compiled = fxwrap.compile_graph(make_fx(Gate())(x), [x], options=fxwrap.Options(emitter=emitter))
    return compiled, content_of(compiled.program, emitter, options=compiled.options.text(), plan=compiled.plan)


@EMITTERS
def test_the_program_is_read_when_it_is_asked_for(emitter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, content = entry(emitter)
    read: list[object] = []

    def parse(*arguments: Any, **keywords: Any) -> Program:
        read.append(arguments)
        return parse_texts(*arguments, **keywords)

    parse_texts = loading.parse_texts
    monkeypatch.setattr(loading, "parse_texts", parse)
    loaded, module = load_content(content, "an entry"), Gate()
    for _ in range(2):
        x = torch.randn(8, 16)
        ((result,), (eager,), (exact,)) = loaded.flat(x), module(x), module(x.double())
        assert (result - exact).norm() <= 2 * (eager - exact).norm() + 1e-7 * exact.norm()
    inputs = [x]
    torch.testing.assert_close(loaded.boxed(inputs)[0], result, rtol=0, atol=0)
    assert inputs == [] and loaded.source == compiled.source
    assert not read
    assert str(loaded.program) == str(compiled.program) and loaded.plan == compiled.plan
    assert loaded.key == compiled.key and len(read) == 1


@EMITTERS
@pytest.mark.parametrize("part", ("code", "program", "weights"))
def test_a_damaged_byte_is_found(emitter: str, part: str) -> None:
    compiled, content = entry(emitter)
    (weight,) = compiled.program.store.tensors.values()
    marks = {"code": compiled.source.encode(), "program": b"program @", "weights": weight.numpy().tobytes()}
    damaged = bytearray(content)
    assert content.count(marks[part]) == 1
    damaged[content.index(marks[part]) + 7] ^= 1
    with pytest.raises(ArtifactError, match=r"is damaged|hash"):
        load_content(bytes(damaged), "an entry")


@EMITTERS
def test_other_sources_or_machines_emit_again(emitter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, content = entry(emitter)
    monkeypatch.setattr(emitted_code, "code_identity", lambda: "another")
    monkeypatch.setattr(emitted_code, "load_cpp", None)
    monkeypatch.setattr(emitted_code, "EmittedPython", None)
    x, loaded = torch.randn(8, 16), load_content(content, "an entry")
    torch.testing.assert_close(loaded.flat(x), compiled.flat(x), rtol=0, atol=0)


@EMITTERS
def test_an_operator_that_is_not_registered_any_more(emitter: str) -> None:
    library = Library("fxwrap_test_entry", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
    program = fxwrap.parse("""
program @calls(%x: borrowed f32[4]@cpu) {
  %y = extern.call @fxwrap_test_entry.twice.default(%x) : f32[4]@cpu
  control.return(%y)
}
""")
    content, x = content_of(program, emitter), torch.randn(4)
    torch.testing.assert_close(load_content(content, "an entry").flat(x)[0], x * 2)
    library._destroy()
    with pytest.raises(ArtifactError, match=r"operators that are not registered: fxwrap_test_entry\.twice\.default"):
        load_content(content, "an entry")


@EMITTERS
@pytest.mark.parametrize("name", ("collectives", "collectives_into_buffers"))
def test_programs_with_collectives_are_read(emitter: str, name: str) -> None:
    program = SAMPLES[name].program()
    loaded = load_content(content_of(program, emitter), "an entry")
    assert loaded.metadata["emitted"] == {} and loaded.program == program


@EMITTERS
def test_captured_functions(emitter: str) -> None:
    """Those of C++ are libraries of their own, so the program is read; the Python text has them."""
    loaded = load_content(content_of(graphs(), emitter), "an entry")
    assert (loaded.metadata["emitted"] == {}) == (emitter == "cpp")
    for rows in (4, 8):
        x, state = torch.arange(4.0 * rows).reshape(rows, 4), torch.ones(4)
        results = loaded.flat(x, state)
        torch.testing.assert_close(torch.cat([item.flatten() for item in (*results, state)]), expected(rows, 1.0))


@EMITTERS
def test_lines_of_vendors_are_refused(emitter: str) -> None:
    """A later process does not know their classes."""
    with pytest.raises(ArtifactError, match=r"the line 'vendor\.copy' is of a class that loading processes do not"):
        content_of(SAMPLES["extension"].program(), emitter)
