"""Compiled and loaded programs take the arguments of the model and return its result, in every emitter."""

from __future__ import annotations

import json
import zipfile
from collections import namedtuple
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap.errors import ArtifactError, GraphError, InputError
from fxwrap.options import EMITTERS, Options
from fxwrap.wrapper_ir import Ownership
from tests.artifact.archives import archive_of, entries_of, with_manifest
from tests.support.child_processes import run_python

emitters = pytest.mark.parametrize("emitter", EMITTERS)
X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
Point = namedtuple("Point", ["first", "second"])


@dataclass
class Output:
    """A result that torch.export knows as a dataclass; it has no name for files but that of its class."""

    scores: Tensor
    hidden: tuple[Tensor, ...]
    loss: Tensor | None = None


torch.export.register_dataclass(Output)


class Model(nn.Module):
    """Nested arguments, keywords, constants, and a dataclass, a named tuple and a dict in the result."""

    def forward(self, x: Tensor, scale: float = 2.0, *, cache: dict[str, Any], mask: Tensor, mode: str = "none") -> Any:
        hidden = x * scale + cache["keys"][0]
        cache["count"].add_(1)
        return Output(hidden.softmax(-1), (hidden, x)), Point(mask.sum(), x.shape[0]), {"none": None, 5: [mask]}


def arguments(rows: int = 3) -> tuple[tuple[Any, ...], dict[str, Any]]:
    x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(rows))
    cache = {"keys": [x.cos()], "count": torch.zeros(2)}
    return (x, 2.0), {"cache": cache, "mask": x > 0, "mode": "none"}


@cache
def exported() -> ExportedProgram:
    args, kwargs = arguments()
    rows = Dim("rows", min=2, max=50)
    shapes = {
        "x": {0: rows},
        "scale": None,
        "cache": {"keys": [{0: rows}], "count": None},
        "mask": {0: rows},
        "mode": None,
    }
    return torch.export.export(Model(), args, kwargs, dynamic_shapes=shapes)


def check(program: Any, rows: int) -> None:
    (args, kwargs), (other_args, other_kwargs) = arguments(rows), arguments(rows)
    wanted = Model()(*other_args, **other_kwargs)
    for call in (
        lambda: program(*args, **kwargs),
        lambda: program(**{"mask": kwargs["mask"], "scale": 2.0, **kwargs, "x": args[0]}),  # all by name, in any order
    ):
        output, point, rest = call()
        assert type(output) is Output and type(point) is Point and output.loss is None
        torch.testing.assert_close((output.scores, output.hidden), (wanted[0].scores, wanted[0].hidden))
        torch.testing.assert_close((*point, rest[5], rest["none"]), (*wanted[1], wanted[2][5], None))
        assert list(rest) == ["none", 5] and output.hidden[1] is args[0]
    assert kwargs["cache"]["count"].tolist() == [2.0, 2.0]


@emitters
def test_calls_take_and_return_what_the_model_does(emitter: str, tmp_path: Path) -> None:
    program = exported()
    compiled = fxwrap.compile_graph(program, options=Options(emitter=emitter))
    compiled.save(tmp_path / "model.fxw")
    loaded = fxwrap.load(tmp_path / "model.fxw")
    for subject in (compiled, loaded):
        for rows in (3, 7):
            check(subject, rows)
        (x, scale), kwargs = arguments(5)
        flat = [x, scale, kwargs["cache"]["keys"][0], kwargs["cache"]["count"], kwargs["mask"], "none"]
        torch.testing.assert_close(subject.boxed([*flat])[1], subject(x, scale, **kwargs)[0].hidden[0])
        assert len(subject.flat(*flat)) == 7
    loaded.save(tmp_path / "again.fxw")
    assert (tmp_path / "again.fxw").read_bytes() == (tmp_path / "model.fxw").read_bytes()


def test_inputs_and_outputs_have_names_types_and_ranges(tmp_path: Path) -> None:
    compiled = fxwrap.compile_graph(exported(), name="model")
    compiled.save(tmp_path / "model.fxw")
    names = ["x", "scale", "cache.keys.0", "cache.count", "mask", "mode"]
    results = [
        "output.0.scores", "output.0.hidden.0", "output.0.hidden.1", "output.1.first", "output.1.second",
        "output.2.none", "output.2.5.0",
    ]  # fmt: skip
    for subject in (compiled, fxwrap.load(tmp_path / "model.fxw")):
        assert [item.name for item in subject.inputs] == names
        assert [item.name for item in subject.outputs] == results
        assert [item.ownership for item in subject.inputs][3] is Ownership.MUTABLE
        assert [item.constant for item in subject.inputs if item.is_constant] == [2.0, "none"]
        (symbol,) = subject.inputs[0].symbols
        assert (symbol.lower, symbol.upper) == (0, 50)
        assert [item.aliases for item in subject.outputs[:3]] == ["", "", "x"]
        assert repr(subject.inputs[0]) == f"<ProgramInput x: borrowed f32[{symbol.name}, 4]@cpu>"
        assert repr(subject.outputs[2]).startswith("<ProgramOutput output.0.hidden.1: f32[")
        text = repr(subject)
        assert f"  x: borrowed f32[{symbol.name}, 4]@cpu\n" in text
        assert "  cache.count: mutable f32[2]@cpu\n" in text and '  mode: "none"\n' in text
        assert "  output.0.hidden.1: f32[" in text and f"  {symbol.name}: int range=(0, 50)" in text
        assert "returns (Output(scores=*, hidden=(*, *)), Point(first=*, second=*), {'none': *, 5: [*]})" in text


def test_the_manifest_describes_each_leaf(tmp_path: Path) -> None:
    fxwrap.compile_graph(exported()).save(tmp_path / "model.fxw")
    with zipfile.ZipFile(tmp_path / "model.fxw") as archive:
        signature = json.loads(archive.read("manifest.json"))["signature"]
    inputs, outputs = signature["inputs"], signature["outputs"]
    symbol = inputs[0]["shape"][0]
    assert inputs[0] == {
        "name": "x", "value": "x", "kind": "tensor", "dtype": "f32", "shape": [symbol, 4], "strides": [4, 1],
        "device": "cpu", "ownership": "borrowed",
    }  # fmt: skip
    assert inputs[1] == {"name": "scale", "value": "scale", "kind": "float", "constant": 2.0}
    assert inputs[5]["constant"] == "none" and inputs[3]["ownership"] == "mutable"
    assert outputs[4] == {"name": "output.1.second", "kind": "int", "expression": symbol}
    assert outputs[5] == {"name": "output.2.none", "kind": "none", "constant": None}
    assert outputs[2]["aliases"] == "x"


WRONG: dict[str, tuple[Any, str]] = {
    "too many": (lambda a, k: ((*a, X), k),
                 r"takes 2 positional arguments, got 3; .*\(x, scale, \*, cache, mask, mode\)"),
    "missing": (lambda a, k: (a[:1], k), "the argument 'scale' is missing"),
    "unexpected": (lambda a, k: (a, {**k, "labels": X}), "it takes no argument 'labels'"),
    "twice": (lambda a, k: (a, {**k, "x": X}), "the argument 'x' is passed by position and by name"),
    "another key": (lambda a, k: (a, {**k, "cache": {"key": 1, "count": X}}),
                    r"the argument 'cache' has another structure.*missing key.*pass \{'keys': \[\*\], 'count': \*\}"),
    "another length": (lambda a, k: (a, {**k, "cache": {**k["cache"], "keys": []}}), "'cache' has another structure"),
    "another constant": (lambda a, k: ((a[0], 3.0), k), "'scale' is 2.0 in this program.*got 3.0"),
    "another type of constant": (lambda a, k: ((a[0], 2), k), "'scale' is 2.0 in this program.*got 2"),
    "another dtype": (lambda a, k: ((a[0].double(), 2.0), k), "input 'x'.*expected f32"),
    "gradients": (lambda a, k: ((a[0].clone().requires_grad_(), 2.0), k), "input 'x' requires gradients"),
}  # fmt: skip


@emitters
def test_wrong_arguments(emitter: str) -> None:
    compiled = fxwrap.compile_graph(exported(), options=Options(emitter=emitter))
    for change, text in WRONG.values():
        args, kwargs = change(*arguments())
        with pytest.raises(InputError, match=text):
            compiled(*args, **kwargs)


@emitters
def test_a_graph_module_takes_and_returns_flat_values(emitter: str) -> None:
    compiled = fxwrap.compile_graph(
        make_fx(lambda x, y: (x - y,))(X, X.cos()), [X, X], options=Options(emitter=emitter)
    )
    assert [item.name for item in compiled.inputs] == ["x_1", "y_1"] and compiled.outputs[0].name == "output.0"
    torch.testing.assert_close(compiled(y_1=X, x_1=X * 3), (X * 3 - X,))
    with pytest.raises(InputError, match="takes 2 inputs, got 1"):
        compiled(X)


def test_examples_are_the_arguments_of_the_export() -> None:
    program, (args, kwargs) = exported(), arguments()
    assert str(fxwrap.lower(program, args, example_kwargs=kwargs)) == str(fxwrap.lower(program))
    fxwrap.compile_graph(program, args, example_kwargs=kwargs)
    with pytest.raises(GraphError, match="examples are not arguments of the exported program: the argument 'cache'"):
        fxwrap.lower(program, args)
    with pytest.raises(GraphError, match="a GraphModule has no keyword arguments"):
        fxwrap.lower(make_fx(torch.sin)(X), [X], example_kwargs={"x": X})
    compiled = fxwrap.compile_graph(Model(), args, example_kwargs=kwargs)
    torch.testing.assert_close(compiled(*args, **kwargs)[0].scores, Model()(*args, **kwargs)[0].scores)


class Typed(nn.Module):
    """A dataclass, a named tuple and a dict in the result, of tensors alone: strangers' programs check all inputs."""

    def forward(self, x: Tensor) -> Any:
        return Output(x.relu(), (x + 1,)), Point(x * 2, x * 3), {"none": None, 5: [x * 4]}


OTHER_PROCESS = """
import sys, torch, fxwrap
for trust in ("full", "none"):
    program = fxwrap.load(sys.argv[1], trust=trust)
    result = program(torch.ones(3, 4))
    print([type(item).__name__ for item in result], list(result[0]), list(result[2]), program.convention.unknown_types)
"""


def test_unknown_types_become_dicts_and_tuples(tmp_path: Path) -> None:
    path, options = tmp_path / "model.fxw", Options(emitter="interpreter", fuse=False)
    fxwrap.compile_graph(Typed(), (X,), options=options).save(path)
    run = run_python(["-c", OTHER_PROCESS, path])
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert len(lines) == 2
    for line in lines:
        assert line.startswith("['dict', 'dict', 'dict'] ['scores', 'hidden'] ['none', 5] ")
        assert f"'{__name__}.Output', '{__name__}.Point'" in line


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda signature: signature.clear(), "KeyError"),
        (lambda signature: signature["call"].update(positional=9), "9 of 5 arguments are positional"),
        (lambda signature: signature["call"].update(trees=[]), "its trees have|there are 0 trees"),
        (lambda signature: signature["call"]["result"].update(labels=[1]), "a node has 3 children, and the labels"),
        (lambda signature: signature["call"].update(result=None), r"its trees have \(6, 1\) inputs and outputs"),
    ],
)
def test_a_manifest_with_another_signature(change: Any, text: str, tmp_path: Path) -> None:
    path = tmp_path / "model.fxw"
    fxwrap.compile_graph(exported(), options=Options(emitter="interpreter")).save(path)
    entries = with_manifest(entries_of(path.read_bytes()), lambda manifest: change(manifest["signature"]))
    path.write_bytes(archive_of(entries))
    with pytest.raises(ArtifactError, match=f"it does not describe the inputs and outputs: .*({text})"):
        fxwrap.load(path)


@pytest.mark.long  # others return dataclasses
def test_gpt2_with_a_model_output(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 32, "n_positions": 32}
    model = GPT2LMHeadModel(GPT2Config(**sizes, use_cache=False, bos_token_id=0, eos_token_id=0)).eval()
    tokens, mask = torch.arange(12).reshape(2, 6), torch.ones(2, 6, dtype=torch.int64)
    dynamic = {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}
    shapes = {"input_ids": dynamic, "attention_mask": dynamic}
    graph = torch.export.export(model, (tokens,), {"attention_mask": mask}, dynamic_shapes=shapes)
    assert str(fxwrap.lower(graph, (tokens,), example_kwargs={"attention_mask": mask})) == str(fxwrap.lower(graph))
    compiled = fxwrap.compile_graph(graph)
    compiled.save(tmp_path / "gpt2.fxw")
    other, other_mask = torch.arange(21).reshape(3, 7), torch.ones(3, 7, dtype=torch.int64)
    other_mask[1, 5:] = 0
    with torch.no_grad():
        wanted = model(other, attention_mask=other_mask)
        for program in (compiled, fxwrap.load(tmp_path / "gpt2.fxw")):
            result = program(input_ids=other, attention_mask=other_mask)
            assert type(result) is type(wanted)
            torch.testing.assert_close(result.logits, wanted.logits, rtol=1e-4, atol=1e-4)
    assert [item.name for item in compiled.outputs] == ["logits"]
