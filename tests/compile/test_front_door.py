"""Wrong arguments of the entry points: each error is one sentence that names the remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap import Options
from fxwrap.cli.command import main
from fxwrap.comparison import COMPARED_EMITTERS
from fxwrap.errors import GraphError, InputError, OptionError
from fxwrap.lowering.graph_definitions import library_call_reason

X = torch.randn(2, 4)

NAMES = [
    ({"preserve_ops": "aten.add.Tensor"}, "takes a set of names, not a string: write {'aten.add.Tensor'}"),
    (
        {"preserve_ops": ["aten.gellu.default"]},
        "unknown operator 'aten.gellu.default' (did you mean 'aten.gelu.default'?)",
    ),
    ({"preserve_ops": ["aten.gelu"]}, "(did you mean 'aten.gelu.default'?)"),
    ({"preserve_ops": ["mylib.op.default"]}, "import the library that registers it first"),
    ({"preserve_ops": [3]}, "takes a set of names such as 'aten.add.Tensor', not [3]"),
    ({"lowerings": {"aten.reluu.default": print}}, "(did you mean 'aten.relu.default'?)"),
    ({"cuda_graph_exclude": "add_0"}, "write {'add_0'}"),
    ({"cuda_graph_exclude": ["aten.mm"]}, "(did you mean 'aten.mm.default'?)"),
    ({"symbol_hints": {"S0": 3}}, "'S0' is not a symbol; symbols look like 's0' or 'u0'"),
    ({"symbol_ranges": {"batch": (1, 2)}}, "'batch' is not a symbol"),
    ({"symbol_ranges": {"s0": 3}}, "takes (lower, upper) of integers, not 3 for 's0'"),
    ({"symbol_ranges": {"s0": (8, 2)}}, "the lower bound of (8, 2) for 's0' is the larger one"),
]


@pytest.mark.parametrize(("options", "message"), NAMES)
def test_names_in_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError) as error:
        Options(**options)
    assert message in str(error.value) and next(iter(options)) in str(error.value)


def test_a_module_is_exported() -> None:
    model = nn.Linear(4, 3).eval()
    torch.testing.assert_close(fxwrap.compile_graph(model, (X,))(X), model(X))
    with pytest.raises(GraphError, match=r"it is an object of type Linear.*Pass example_inputs"):
        fxwrap.compile_graph(model)
    with pytest.raises(GraphError, match=r"it is an object of type function.*make_fx, or call torch.compile"):
        fxwrap.compile_graph(lambda x: x, (X,))  # type: ignore[arg-type]


def test_on_graph_returns_a_function() -> None:
    compiled = torch.compile(nn.Linear(4, 3), backend="fxwrap", options={"on_graph": lambda graph, info: None})
    with torch.no_grad(), pytest.raises(Exception, match="option 'on_graph' returned None for the inference graph"):
        compiled(X)


@pytest.mark.parametrize("emitter", COMPARED_EMITTERS)
def test_direct_calls_refuse_inputs_that_require_gradients(emitter: str) -> None:
    compiled = fxwrap.compile_graph(make_fx(torch.sin)(X), [X], options=Options(emitter=emitter))
    tracked = X.clone().requires_grad_()
    with pytest.raises(InputError, match=r"input 'arg0_1' requires gradients.*torch\.no_grad"):
        compiled(tracked)
    with torch.no_grad():
        torch.testing.assert_close(compiled(tracked)[0], X.sin())


def test_the_command_line_names_wrong_inputs_and_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.py").write_text("import torch\nmodel = torch.nn.Linear(4, 3)\n")
    target = f"{tmp_path}/model.py:model"
    assert main(["show", target, "--inputs", "f32[2, 4], f32[2]"])
    assert 'fails on --inputs "f32[2, 4], f32[2]": ' in capsys.readouterr().err
    assert main(["emit", target, "--inputs", "f32[2, 4]", "-o", str(tmp_path / "none" / "x.py")])
    assert "none' does not exist; create it first" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "reason"),
    [("mm", "matmul"), ("convolution", "convolution"), ("convolution_backward", "convolution"),
     ("_scaled_dot_product_flash_attention_for_cpu", "attention"), ("gcd", None), ("conj", None)],
)  # fmt: skip
def test_library_calls_are_by_design(name: str, reason: str | None) -> None:
    expected = None if reason is None else f"a library call, by design: {reason}"
    assert library_call_reason(f"aten.{name}.default") == expected


def test_the_coverage_of_attention() -> None:
    """torch marks it as random, for its dropout."""
    q = torch.rand(1, 2, 8, 16)
    graph = make_fx(torch.nn.functional.scaled_dot_product_attention)(q, q, q)
    (row,) = fxwrap.compile_graph(graph, [q, q, q], options=Options(emitter="interpreter")).coverage
    assert (row.kind, row.reason) == ("call", "a library call, by design: attention")
