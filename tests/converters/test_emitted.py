"""The emitted programs of converters, without their content."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fxwrap.converters.base import METHODS, Converter
from fxwrap.converters.cpp.converter import CppConverter
from fxwrap.converters.emitted_program import EmittedProgram
from fxwrap.converters.fx.converter import FxConverter
from fxwrap.converters.interpreter import Interpreter
from fxwrap.converters.python import PythonConverter
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
