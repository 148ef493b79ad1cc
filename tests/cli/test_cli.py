"""The command line: its output, its files, and its errors for wrong arguments."""

from __future__ import annotations

import html
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import load_file, save_file

import fxwrap
from fxwrap.cli import main
from fxwrap.cli.tables import coverage_table
from fxwrap.cli.target import random_inputs
from fxwrap.comparison import Arguments
from fxwrap.compile import DYNAMO_PASSES, EMISSION_STEPS, PROGRAM_STEPS
from fxwrap.errors import CommandError
from fxwrap.fx_passes import EXPORTED_GRAPH_PASSES, FX_PASSES, JOINT_GRAPH_PASSES, SOURCE_PASSES
from fxwrap.lowering import RULES, NodeCoverage
from fxwrap.wrapper_ir import print_program
from tests.conftest import NO_PYGMENTS

MODEL = """
import torch
from torch import nn

def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU()), (torch.randn(2, 4),)

def with_inputs(x, index):
    return torch.softmax(x, -1)[index]

with_inputs.example_inputs = (torch.arange(12.0).view(3, 4), torch.tensor([0, 2]))

class Layers:
    @staticmethod
    def double(x):
        return x * 2

def scale(x):
    return x * 3

def weighted(x, *, weight):
    return x * weight

def make_weighted():
    return weighted, (torch.ones(2),), {"weight": torch.ones(2)}

def make_by_name():
    return weighted, {"weight": torch.ones(2), "x": torch.ones(2)}

def make_wrong():
    return weighted, torch.ones(2), {"weight": torch.ones(2)}

def scale_example_inputs():
    return {"x": torch.ones(2)}

def nothing():
    return torch.zeros(3) + 1

def fails(x):
    return x @ x

fails.example_inputs = (torch.ones(2, 3),)
number = 3
"""


@pytest.fixture
def model(tmp_path: Path) -> str:
    """The path of a file with functions to compile."""
    path = tmp_path / "model_for_command_line.py"
    path.write_text(MODEL)
    return str(path)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Runs a command line in this process; returns its exit code, stdout and stderr."""
    code = main(arguments)
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize("arguments", [["--help"], []])
def test_help_has_examples(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 0
    output = capsys.readouterr().out
    for text in ("MODULE:NAME", "FILE.pt2", "examples:", "python -m fxwrap compare", "exit codes:"):
        assert text in output


@pytest.mark.parametrize("command", ["show", "emit", "compare"])
def test_every_command_has_help_with_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    assert stopped.value.code == 0
    assert f"python -m fxwrap {command} " in capsys.readouterr().out


def test_show_prints_a_program_that_parses(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "show", f"{model}:make_model")
    assert code == 0
    program = fxwrap.verify(fxwrap.parse(out))
    assert [kernel.name for kernel in program.kernels] == ["relu_0"]
    assert "@aten.addmm.default" in out and "kernel.launch @relu_0" in out
    assert "#" not in out.partition("\nkernel @")[0]  # lines say no origin unless they are asked to


def test_show_prints_origins_and_stages(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "show", f"{model}:with_inputs", "--origins", "--stages")
    assert code == 0
    assert out.startswith("--- after lower\n")
    assert "  # _softmax, index: aten._softmax, aten.index.Tensor" in out


def test_coverage_lists_fused_operators_and_decline_reasons(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "show", f"{model}:make_model", "--training", "--coverage")
    forward, backward = out.rstrip().split("\n\n")
    assert code == 0
    assert forward.splitlines() == [
        "forward: 3 operators: 1 fused, 1 view, 1 call",
        "  fused     1 x aten.relu.default",
        "  view      1 x aten.t.default",
        "  call      1 x aten.addmm.default  a library call, by design: matmul: addmm",
    ]
    assert backward.startswith("backward: ") and "  fused     1 x aten.threshold_backward.default" in backward


def test_a_coverage_row_names_three_nodes_and_their_locations() -> None:
    called = [NodeCoverage(f"sort_{number}", "aten.sort.default", "call", "no rule", "m.py:7") for number in range(4)]
    numbers = [NodeCoverage("size", "aten.sym_size.int", "number")]
    assert coverage_table("inference", [*called, *numbers]) == (
        "inference: 4 operators: 0 fused, 0 view, 4 call\n"
        "  call      4 x aten.sort.default  no rule: sort_0 (m.py:7), sort_1 (m.py:7), sort_2 (m.py:7), ...\n"
    )


def test_training_shows_forward_and_backward_and_one_can_be_chosen(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, both, _ = run(capsys, "show", f"{model}:make_model", "--training")
    assert code == 0 and "program @forward" in both and "program @backward" in both
    code, one, _ = run(capsys, "show", f"{model}:make_model", "--training", "--graph", "1")
    assert code == 0 and "program @forward" not in one and "program @backward" in one
    code, _, err = run(capsys, "show", f"{model}:make_model", "--training", "--graph", "2")
    assert code == 2 and err == "fxwrap: unknown graph 2; known graphs: 0 (forward), 1 (backward)\n"


@pytest.mark.parametrize(
    ("emitter", "text"),
    [
        ("python", "def inference(arguments):"),
        ("cpp", '#include "bridge.h"'),
        ("fx", "def forward(self"),
        ("interpreter", "program @inference("),
    ],
)
def test_emit_prints_the_text_of_an_emitter(
    emitter: str, text: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(capsys, "emit", f"{model}:make_model", "--emitter", emitter)
    assert code == 0 and text in out


def test_emit_writes_files_atomically(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    code, out, _ = run(capsys, "emit", f"{model}:make_model", "-o", str(folder / "module.py"))
    assert code == 0 and out == ""
    compile((folder / "module.py").read_text(), "module.py", "exec")
    assert [path.name for path in folder.iterdir()] == ["module.py"]
    code, _, err = run(capsys, "emit", f"{model}:make_model", "--training", "-o", str(folder / "both.py"))
    assert code == 2 and "select one with --graph: 0 (forward), 1 (backward)" in err
    code, _, err = run(capsys, "emit", f"{model}:make_model", "-o", str(folder / "missing" / "module.py"))
    assert code == 2 and "missing' does not exist; create it first" in err
    assert [path.name for path in folder.iterdir()] == ["module.py"]


def test_compare_prints_the_table(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "compare", f"{model}:make_model", "--training", "--repeats", "1", "--emitter", "python")
    assert code == 0
    assert "Sequential: 2 graphs" in out and "all emitters agree with eager" in out and "cpp" not in out


def test_compare_exits_with_1_on_disagreement(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    # Nothing is within a negative tolerance.
    code, out, _ = run(
        capsys, "compare", f"{model}:make_model", "--repeats", "0", "--emitter", "python", "--tolerance", "-1"
    )
    assert code == 1 and "the emitters do not agree with eager:" in out


def test_compare_writes_files_and_takes_backends(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = tmp_path / "report.json", tmp_path / "report.html"
    code, out, _ = run(
        capsys, "compare", f"{model}:make_model", "--repeats", "0", "--emitter", "python",
        "--backends", "aot_eager,eager", "--json", str(paths[0]), "--html", str(paths[1]),
    )  # fmt: skip
    assert code == 0 and "aot_eager" in out
    names = [item["name"] for item in json.loads(paths[0].read_text())["outcomes"]]
    assert names == ["eager", "float64", "python", "aot_eager", "backend eager"] and "<table>" in paths[1].read_text()


def test_bisect_names_the_line_and_writes_a_file(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, _ = run(capsys, "bisect", f"{model}:make_model", "--option", "emitter=python")
    assert code == 0 and "all values of 1 graph agree with eager" in out
    monkeypatch.setitem(RULES, "aten.relu.default", RULES["aten.neg.default"])
    path = tmp_path / "repro.py"
    flags = ["--option", "emitter=python", "--json", "--repro", str(path)]
    code, out, _ = run(capsys, "bisect", f"{model}:make_model", *flags)
    assert code == 1 and json.loads(out)["divergence"]["part"] == "lowering" and "aten.relu" in path.read_text()


def test_an_exported_program_is_a_target(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "exported.pt2"
    torch.export.save(torch.export.export(torch.nn.Linear(4, 3), (torch.randn(2, 4),)), path)
    code, out, _ = run(capsys, "show", str(path))
    assert code == 0 and "aten.addmm" in out and "constant %" in out
    code, out, _ = run(capsys, "compare", str(path), "--repeats", "0", "--emitter", "python")
    assert code == 0 and "all emitters agree" in out


def test_command_line_inputs_take_precedence(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "show", f"{model}:with_inputs", "--inputs", "f64[8, 5 | 1, 8], i64[6]")
    assert code == 0 and "f64[8, 5 | 1, 8]" in out and "i64[6]" in out


def test_inputs_beside_a_function_members_and_functions_of_nothing(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "f32[2]" in run(capsys, "show", f"{model}:scale")[1]
    assert "f32[3]" in run(capsys, "show", f"{model}:Layers.double", "--inputs", "f32[3]")[1]
    assert "f32[3]" in run(capsys, "show", f"{model}:nothing")[1]


def test_a_module_by_name(model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(Path(model).parent)
    code, out, _ = run(capsys, "show", f"{Path(model).stem}:make_model")
    assert code == 0 and "aten.relu" in out


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("{model}:absent", "has no 'absent'; it has make_model, with_inputs"),
        ("{model}:number", "is an object of type int; name a function, a module or a factory"),
        ("{model}:Layers.double", "'{model}:Layers.double' has no example inputs; pass --inputs"),
        ("{model}", "is not MODULE:NAME, FILE.py:NAME or FILE.pt2"),
        ("no_such_module:f", "'no_such_module' cannot be imported: ModuleNotFoundError"),
        ("no_such_file.py:f", "file 'no_such_file.py' does not exist"),
        ("no_such_file.pt2", "file 'no_such_file.pt2' does not exist"),
    ],
)
def test_missing_targets_are_named(target: str, message: str, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "show", target.format(model=model))
    assert code == 2 and out == ""
    assert err.startswith("fxwrap: ") and message.format(model=model) in err


def test_a_function_that_fails_is_reported(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "show", f"{model}:fails")
    assert code == 3 and err.startswith("fxwrap: ") and "Traceback" not in err
    code, _, err = run(capsys, "compare", f"{model}:fails")
    assert code == 3 and err.startswith("fxwrap: CompareError: the function fails in eager mode: RuntimeError")


def test_a_broken_exported_program_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "broken.pt2"
    path.write_bytes(b"not a program")
    code, _, err = run(capsys, "show", str(path))
    assert code == 2 and f"'{path}' is not an exported program that this torch can load" in err


def test_random_inputs_have_the_types_asked_for() -> None:
    real, index, flag, number, half, transposed = random_inputs(
        "f32[4, 8], i64[2]@cpu, bool[3], c64[2], bf16[5], f32[2, 3 | 1, 2]", seed=0
    ).positional
    assert real.shape == (4, 8) and real.dtype == torch.float32 and real.std() > 0.5
    assert index.dtype == torch.int64 and int(index.min()) >= 0 and int(index.max()) < 8
    assert flag.dtype == torch.bool and number.dtype == torch.complex64 and half.dtype == torch.bfloat16
    assert transposed.stride() == (1, 2)
    assert random_inputs("int, float, bool", seed=0) == Arguments((2, 0.5, True), {})
    assert random_inputs("int, size=int, scale = float", seed=0) == Arguments((2,), {"size": 2, "scale": 0.5})
    first, second = (random_inputs("f32[3], y=f32[3]", seed=7) for _ in range(2))
    assert torch.equal(first.positional[0], second.positional[0])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("f31[4]", "is not a list of types such as .*: unknown dtype 'f31'"),
        ("f32[4", "is not a list of types"),
        ("f32[s0]", "takes sizes that are numbers"),
        ("token", "takes tensors and numbers"),
        ("x=f32[2], f32[3]", "has a positional argument after a keyword argument"),
        ("x=f32[2], x=f32[3]", "has a keyword argument twice"),
        ("x=f31[2]", "is not a list of types such as .*: unknown dtype 'f31'"),
    ],
)
def test_wrong_types_of_inputs_are_named(text: str, message: str) -> None:
    with pytest.raises(CommandError, match=message):
        random_inputs(text, seed=0)


def test_passes_lists_every_step_with_its_option(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "passes")
    steps = [*DYNAMO_PASSES, *JOINT_GRAPH_PASSES, *SOURCE_PASSES, *FX_PASSES, *PROGRAM_STEPS, *EMISSION_STEPS]
    assert code == 0 and {line.split()[0] for line in out.splitlines()} >= {step.name for step in steps}
    exported = out.partition("exported program, before the user's passes:\n")[2].partition("graph with fake values:")[0]
    names = [step.name for step in EXPORTED_GRAPH_PASSES]
    assert [line.split()[0] for line in exported.splitlines()] == names
    (combo,) = [line for line in out.splitlines() if line.split()[0] == "combo_kernels"]
    assert combo.endswith("(horizontal fusion) [combo_kernels]")


# --- saved programs -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    class Scaled(torch.nn.Module):
        def forward(self, x: torch.Tensor, *, mask: torch.Tensor, flag: bool) -> dict[str, torch.Tensor]:
            return {"scaled": x * 2 + mask, "rows": mask.sum(0)}

    path, x = tmp_path_factory.mktemp("saved") / "scaled.fxw", torch.randn(3, 4)
    shapes = {"x": {0: torch.export.Dim("rows", max=9)}, "mask": {0: torch.export.Dim("rows", max=9)}, "flag": None}
    exported = torch.export.export(Scaled(), (x,), {"mask": torch.ones(3, 4), "flag": True}, dynamic_shapes=shapes)
    options = fxwrap.Options(emitter="interpreter", fuse=False)
    fxwrap.compile_graph(exported, options=options, name="scaled").save(path)
    return path


def test_inspect_and_show_saved_programs(saved_program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(saved_program)]) == 0
    text = capsys.readouterr().out
    assert "LoadedProgram 'scaled', from" in text and "emitter 'interpreter'" in text
    assert "  mask: borrowed f32[" in text and "  flag: true\n" in text and "  rows: f32[4]@cpu\n" in text
    assert "written by: fxwrap" in text and "kernels: none" in text and "program.ir" in text
    assert main(["show", str(saved_program)]) == 0
    assert capsys.readouterr().out.startswith("program @scaled(%x: ")
    assert main(["show", str(saved_program), "--coverage"]) == 2
    assert "was compiled before it was saved" in capsys.readouterr().err


@pytest.mark.parametrize("suffix", [".pt", ".safetensors", ".npz"])
def test_run_saved_programs(suffix: str, saved_program: Path, tmp_path: Path, capsys: Any) -> None:
    tensors = {"x": torch.randn(5, 4), "mask": torch.ones(5, 4)}
    inputs, outputs = tmp_path / f"inputs{suffix}", tmp_path / f"outputs{suffix}"
    write(inputs, tensors)
    assert main(["run", str(saved_program), "--inputs", str(inputs), "-o", str(outputs)]) == 0
    assert "scaled: float32[5, 4] on cpu, mean" in capsys.readouterr().out
    read = read_values(outputs)
    torch.testing.assert_close(read["scaled"], tensors["x"] * 2 + 1)
    torch.testing.assert_close(read["rows"], torch.full((4,), 5.0))
    write(inputs, {"x": tensors["x"], "masks": tensors["mask"]})
    assert main(["run", str(saved_program), "--inputs", str(inputs)]) == 2
    assert "misses 'mask'; the inputs are x, mask" in capsys.readouterr().err


def test_run_with_random_inputs_and_wrong_files(saved_program: Path, tmp_path: Path, capsys: Any) -> None:
    assert main(["run", str(saved_program), "--seed", "1"]) == 0
    assert "rows: float32[4] on cpu" in capsys.readouterr().out
    (tmp_path / "bad.pt").write_bytes(b"no tensors")
    for path, text in (
        ("bad.pt", "cannot be read"),
        ("absent.pt", "does not exist"),
        ("bad.csv", "is not one of *.pt"),
    ):
        if path == "bad.csv":
            (tmp_path / path).touch()
        assert main(["run", str(saved_program), "--inputs", str(tmp_path / path)]) == 2
        assert text in capsys.readouterr().err
    assert main(["inspect", str(tmp_path / "absent.fxw")]) == 2
    assert main(["inspect", str(tmp_path / "bad.pt")]) == 3
    assert "ArtifactError" in capsys.readouterr().err


def write(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    if path.suffix == ".pt":
        torch.save(tensors, path)
    elif path.suffix == ".npz":
        numpy.savez(path, **{name: tensor.numpy() for name, tensor in tensors.items()})
    else:
        save_file(tensors, path)


def read_values(path: Path) -> dict[str, torch.Tensor]:
    if path.suffix == ".npz":
        return {name: torch.from_numpy(array) for name, array in numpy.load(path).items()}
    read: dict[str, torch.Tensor] = torch.load(path) if path.suffix == ".pt" else load_file(path)
    return read


def test_report_writes_one_page_of_all_graphs(capsys: pytest.CaptureFixture[str], model: str, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    arguments = ["report", f"{model}:make_model", "--training", "--option", "fuse=false", "-o", str(path)]
    assert run(capsys, *arguments) == (0, f"{path}: 2 graphs\n", "")
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', path.read_text(), re.DOTALL)
    assert data is not None
    graphs = json.loads(data[1])["graphs"]
    assert [graph["name"] for graph in graphs] == ["forward 0/0", "backward 0/0"]
    assert all(graph["graph"] and graph["stages"][0]["name"] == "lower" for graph in graphs)
    assert any(Path(file["name"]).name == Path(model).name for file in graphs[0]["files"]) or graphs[0]["modules"]


def test_report_needs_a_graph_and_a_folder(capsys: pytest.CaptureFixture[str], model: str, tmp_path: Path) -> None:
    missing = tmp_path / "missing" / "report.html"
    code, _, error = run(capsys, "report", f"{model}:scale", "--option", "fuse=false", "-o", str(missing))
    assert code == 2 and f"the folder '{missing.parent}' does not exist; create it first" in error


@pytest.mark.parametrize(
    "arguments", [("make_weighted",), ("make_by_name",), ("weighted", "--inputs", "f32[2], weight=f32[2]")]
)
def test_keyword_inputs(arguments: tuple[str, ...], model: str, capsys: pytest.CaptureFixture[str]) -> None:
    name, *flags = arguments
    code, out, _ = run(capsys, "show", f"{model}:{name}", *flags)
    assert code == 0 and "aten.mul" in str(fxwrap.parse(out).kernels) and len(fxwrap.parse(out).inputs) == 2
    code, out, _ = run(capsys, "compare", f"{model}:{name}", *flags, "--repeats", "0", "--emitter", "python")
    assert code == 0 and "agree" in out


def test_a_factory_with_wrong_inputs_is_named(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "show", f"{model}:make_wrong")
    assert code == 2
    assert err == (
        "fxwrap: 'make_wrong' returns a function and (Tensor, dict); return (function, inputs), or (function, args, "
        "kwargs) with a tuple and a dict\n"
    )


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    out = capsys.readouterr().out
    assert stopped.value.code == 0
    assert re.fullmatch(r"fxwrap \S+, torch \S+, triton \S+, sympy \S+, Python \S+\n", out.replace("\n ", " "))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("show", "TARGET", "--cover"), "unrecognized arguments: --cover"),
        (("show", "TARGET", "--coverage", "--stages"), "--stages: not allowed with argument --coverage"),
        (("show", "TARGET", "--origins", "--json"), "--json: not allowed with argument --origins"),
        (("passes", "--json"), "unrecognized arguments: --json"),
    ],
)
def test_unknown_and_contradictory_flags_are_refused(
    arguments: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2 and text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("target", "flags", "text"),
    [
        (
            "saved.fxw",
            ("--training", "--seed", "3"),
            "--training, --seed: 'saved.fxw' was compiled before it was saved",
        ),
        ("saved.fxw", ("--stages",), "--stages: 'saved.fxw' was compiled before it was saved, so it has no effect"),
        ("exported.pt2", ("--dynamic",), "--dynamic: 'exported.pt2' is an exported program, so it has no effect"),
    ],
)
def test_flags_without_a_meaning_are_refused(
    target: str, flags: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(capsys, "show", target, *flags)
    assert code == 2 and err.startswith(f"fxwrap: {text}") and err.endswith("; leave it out\n")


def test_show_json_has_lines_with_types_and_origins(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "show", f"{model}:make_model", "--json")
    (graph,) = json.loads(out)
    assert code == 0 and graph["name"] == "inference"
    launch = next(line for line in graph["lines"] if line["opcode"] == "kernel.launch")
    assert launch["handle"] == "relu_0:1" and launch["operators"] == ["aten.relu"]
    assert launch["writes"] and graph["lines"][launch["number"]] == launch
    assert graph["kernels"][0]["loops"].startswith("kernel(")
    assert graph["inputs"][0]["type"].startswith("f32[")
    defined = [line["defines"] for line in graph["lines"] if line["defines"]]
    assert defined == [{"t": "f32[4, 8 | 1, 4]@cpu"}, {"addmm": "f32[2, 8]@cpu"}]


def test_show_draws_a_program_for_graphviz(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "show", f"{model}:make_model", "--dot")
    assert code == 0 and out.startswith('digraph "inference" {') and "relu_0:1" in out
    code, _, err = run(capsys, "show", f"{model}:make_model", "--dot", "--origins")
    assert code == 2 and "--origins: a drawing has a form of its own" in err


def test_coverage_and_stages_as_json(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "show", f"{model}:make_model", "--coverage", "--json", "--training")
    forward, backward = json.loads(out)
    assert (forward["name"], backward["name"]) == ("forward", "backward")
    assert {"node": "relu", "operator": "aten.relu.default", "kind": "fused"}.items() <= forward["coverage"][-1].items()
    _, out, _ = run(capsys, "show", f"{model}:make_model", "--stages", "--json")
    assert json.loads(out)[0]["stages"][0]["step"] == "lower"


def test_saved_programs_as_json(saved_program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "show", str(saved_program), "--json")
    assert code == 0 and json.loads(out)[0]["lines"]


@pytest.mark.parametrize("emitter", ["python", "cpp", "interpreter"])
def test_colours_change_nothing_but_colours(emitter: str, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("pygments", reason=NO_PYGMENTS)
    arguments = ("emit", f"{model}:make_model", "--emitter", emitter)
    _, plain, _ = run(capsys, *arguments)
    _, coloured, _ = run(capsys, *arguments, "--color", "always")
    assert "\033" not in plain and coloured.count("\033[") > 20
    assert re.sub(r"\033\[[\d;]*m", "", coloured).strip() == plain.strip()


@pytest.mark.parametrize(("terminal", "environment", "expected"), [(True, {}, True), (False, {}, False),
                                                                    (True, {"NO_COLOR": "1"}, False)])  # fmt: skip
def test_colours_are_those_of_a_terminal(
    terminal: bool, environment: dict[str, str], expected: bool, model: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal, raising=False)
    _, out, _ = run(capsys, "show", f"{model}:scale")
    assert ("\033[35mmemory.alloc\033[0m" in out) == expected


def test_notebooks_show_programs(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "show", f"{model}:scale", "--origins")
    program = fxwrap.parse(out)
    text = program._repr_html_()
    assert text.startswith("<pre") and '<span style="color:#8250df">memory.alloc</span>' in text
    assert html.unescape(re.sub(r"<[^>]+>", "", text)) == print_program(program, origins=True)
