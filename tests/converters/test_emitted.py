"""The emitted programs of converters, without their content."""

from __future__ import annotations

import copy
import pickle
import re
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap.converters.base import METHODS, Converter
from fxwrap.converters.cpp.converter import CppConverter
from fxwrap.converters.emitted_program import EmittedProgram
from fxwrap.converters.fx.converter import FxConverter
from fxwrap.converters.interpreter import Interpreter
from fxwrap.converters.python import PythonConverter
from fxwrap.errors import GraphModuleError, InputError, PickleError, UnsupportedError
from fxwrap.lines import CORE_LINES
from fxwrap.torch_compat import FakeTensorMode


def test_objects_built_under_fake_mode_hold_real_tensors() -> None:
    """torch.compile asks a backend for a callable while it traces; what that is bound to must not be fake."""

    def entry(_inputs: list[Any], *, buffer: torch.Tensor) -> torch.Tensor:
        return buffer

    def build() -> Any:
        buffer = torch.zeros(2)
        return lambda *inputs: entry([*inputs], buffer=buffer)

    with FakeTensorMode():
        assert type(torch.zeros(2)) is not torch.Tensor
        emitted = EmittedProgram("", build, build)
        assert type(emitted.boxed([])) is torch.Tensor
        assert type(emitted.flat()) is torch.Tensor


@pytest.mark.parametrize("converter", [CppConverter, FxConverter, Interpreter, PythonConverter])
def test_every_converter_has_a_method_for_each_core_line(converter: type[Converter]) -> None:
    assert set(METHODS) == set(CORE_LINES)
    assert [name for name in METHODS.values() if not callable(getattr(converter, name, None))] == []


EMITTERS = (fxwrap.to_python, fxwrap.to_cpp, fxwrap.to_fx)


@pytest.mark.parametrize("emit", EMITTERS)
def test_names_of_inputs_need_not_be_identifiers(emit: Any) -> None:
    """They were a SyntaxError of the FX graph's code."""
    program = fxwrap.verify(
        fxwrap.parse("""
program @p(%4: borrowed f32[3]@cpu, %class: borrowed f32[3]@cpu, %a.b: borrowed f32[3]@cpu, %a_b: borrowed f32[3]@cpu) {
  %5 = extern.call @aten.sub.Tensor(%4, %class) : f32[3]@cpu
  %in = extern.call @aten.div.Tensor(%a.b, %a_b) : f32[3]@cpu
  control.return(%5, %in)
}
""")
    )
    a, b, c, d = inputs = torch.rand(4, 3)
    for one, other in zip(emit(program).flat(*inputs), (a - b, c / d), strict=True):
        torch.testing.assert_close(one, other)


def test_an_unknown_operator_is_named() -> None:
    """It was a LookupError."""
    program = fxwrap.parse("""
program @p(%x: borrowed f32[3]@cpu) {
  %y = extern.call @vendor.mixed.default(%x) : f32[3]@cpu
  control.return(%y)
}
""")
    with pytest.raises(UnsupportedError, match=r"cannot express .*: torch has no operator 'vendor\.mixed\.default'"):
        fxwrap.to_fx(program)


@pytest.mark.parametrize("emitter", ["cpp", "fx", "python"])
def test_programs_cannot_be_pickled_or_deep_copied(emitter: str) -> None:
    """The errors were of a lock, of a lambda, or of the memory of a fake tensor."""
    model = torch.nn.Linear(3, 2).requires_grad_(False)
    exported = torch.export.export(model, (x := torch.rand(4, 3),))
    compiled = fxwrap.compile_graph(exported, options=fxwrap.Options(emitter=emitter))
    torch.testing.assert_close(copy.copy(compiled)(x), model(x))
    for action in (copy.deepcopy, pickle.dumps):
        with pytest.raises(PickleError, match=r"a Compiled cannot be .* fxwrap\.save, read that with fxwrap\.load"):
            action(compiled)
        with pytest.raises((PickleError, GraphModuleError), match="cannot be pickled"):
            action(fxwrap.to_python(compiled.program))


@pytest.mark.parametrize("emit", [fxwrap.to_python, fxwrap.to_cpp, fxwrap.to_fx])
def test_a_text_does_not_contain_constants(emit: Any) -> None:
    """They were a NameError or a KeyError of their names."""
    x = torch.rand(2, 3)
    program = fxwrap.lower(make_fx(lambda x: x * torch.tensor([1.0, 2.0, 3.0]))(x), [x])
    parsed = fxwrap.parse(str(program))
    message = "program 'program' has no content for its constant '_tensor_constant0': a text does not contain it. Use"
    with pytest.raises(InputError, match=re.escape(message)):
        emit(parsed).flat(x)
    with pytest.raises(InputError, match=re.escape(message)):
        fxwrap.run(parsed, [x])
    (result,) = emit(parsed.replace(store=program.store)).flat(x)
    torch.testing.assert_close(result, x * torch.tensor([1.0, 2.0, 3.0]))
