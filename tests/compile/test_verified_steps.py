"""A step that breaks the program is named by the error, whatever later steps do with that program."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap.compile import compiler, steps
from fxwrap.errors import VerifyError
from fxwrap.lines import Free
from fxwrap.wrapper_ir import Block, Program, verify
from tests.support.seeded_bugs import replaced_step


def compile_once(**options: Any) -> fxwrap.Compiled:
    arguments = [torch.randn(5, 5), torch.randn(5, 5)]
    graph = make_fx(lambda x, w: (x.relu() @ w).sum(0))(*arguments)
    return fxwrap.compile_graph(graph, arguments, options=fxwrap.Options(compile_cache=False, **options))


def leaking(step: Any, state: Any, context: Any) -> Any:
    """Runs a step, and removes what frees memory from its result."""
    program: Program = step.run(state, context).program
    lines = tuple([line for line in program.body.lines if not isinstance(line, Free)])
    return dataclasses.replace(state, program=program.replace(body=Block((), lines)))


def failing(_step: Any, _state: Any, _context: Any) -> Any:
    raise KeyError("a later step's")


def renamed(step: Any, state: Any, context: Any) -> Any:
    program: Program = step.run(state, context).program
    return dataclasses.replace(state, program=program.replace(name=f"{program.name}_{step.name}"))


def patched(monkeypatch: pytest.MonkeyPatch, **runs: Any) -> None:
    table = steps.PROGRAM_STEPS
    for name, run in runs.items():
        table = replaced_step(table, name, run)
    monkeypatch.setattr(steps, "PROGRAM_STEPS", table)


@pytest.mark.parametrize(
    "later", [{}, {"insert_device_guards": failing}], ids=["later steps pass", "a later step fails"]
)
def test_the_step_that_broke_the_program_is_named(monkeypatch: pytest.MonkeyPatch, later: dict[str, Any]) -> None:
    patched(monkeypatch, fold_views=leaking, **later)
    with pytest.raises(VerifyError, match="after pass 'fold_views': "):
        compile_once()


def test_a_step_that_fails_on_a_correct_program_has_its_own_error(monkeypatch: pytest.MonkeyPatch) -> None:
    patched(monkeypatch, insert_device_guards=failing)
    with pytest.raises(KeyError, match="a later step's"):
        compile_once()


def test_the_first_and_the_last_program_are_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    verified = list[Program]()
    monkeypatch.setattr(compiler, "verify", lambda program: verified.append(program) or verify(program))
    patched(monkeypatch, combo_kernels=renamed, fold_views=renamed)
    programs = [stage.program for stage in compile_once().stages]
    assert len(programs) == 3 and verified == [programs[0], programs[2]]
