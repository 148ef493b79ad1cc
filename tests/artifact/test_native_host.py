"""Saved programs in a process without Python: the C runtime opens, runs and changes them as Python does."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fxwrap
from fxwrap.artifact import SavedContent, save_program
from fxwrap.artifact.archive import ArchiveWriter
from fxwrap.errors import ArtifactError, OptionError
from fxwrap.lines import ExternCall, Launch
from fxwrap.runtime.native import build_runtime
from tests.artifact.native_host import described, drive, driver, read_result, tensor_commands
from tests.artifact.programs import batch, exported
from tests.conftest import HAS_CUDA


class Affine(torch.nn.Module):
    """A weight and a bias, and the same weight again."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = torch.nn.Parameter(torch.randn(16, 16, generator=generator))
        self.bias = torch.nn.Parameter(torch.randn(16, generator=generator))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(x @ self.weight + self.bias) @ self.weight.t()


def compile_affine(batch_size: Any = 4) -> fxwrap.Compiled:
    shapes = {"x": {0: torch.export.Dim("batch", min=2, max=64)}} if batch_size is None else None
    program = torch.export.export(Affine(), (torch.randn(4, 16),), dynamic_shapes=shapes)
    return fxwrap.compile_graph(program, name="affine", options=fxwrap.Options(emitter="cpp"))


@pytest.fixture(scope="module")
def affine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The file of a program for batches of any size."""
    path = tmp_path_factory.mktemp("affine") / "affine.fxw"
    compile_affine(None).save(path, target="native")
    yield path


def expected(path: Path, *inputs: Any) -> torch.Tensor:
    """The first result of the program in Python."""
    with torch.no_grad():
        result = fxwrap.load(path).flat(*inputs)
    return result[0]


# --- results ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", (2, 7))
def test_results_are_those_of_python(affine: Path, tmp_path: Path, size: int) -> None:
    done = drive("open", affine, *tensor_commands(tmp_path, [batch(size)]), "run", tmp_path / "out", "alive")
    assert done.code == 0 and done.lines == ("alive 0",), (done.lines, done.errors)
    wanted = expected(affine, batch(size))
    assert torch.equal(read_result(tmp_path / "out.0", wanted), wanted)


class Strided(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x.sin()
        return y.t(), y[1:, 1::3], y.sum(0).expand(3, 16), y.view(-1, 4, 4).permute(2, 0, 1), x.t() @ x.half().float()


def test_results_have_the_strides_of_eager_mode(tmp_path: Path) -> None:
    program = torch.export.export(Strided(), (batch(4),))
    compiled = fxwrap.compile_graph(program, name="strided", options=fxwrap.Options(emitter="cpp"))
    compiled.save(tmp_path / "strided.fxw", target="native")
    words = tensor_commands(tmp_path, [batch(4)])
    done = drive("open", tmp_path / "strided.fxw", *words, "run", tmp_path / "out")
    assert done.code == 0, done.errors
    wanted = Strided()(batch(4))
    assert not any(item.is_contiguous() for item in wanted[:4])
    for number, item in enumerate(wanted):
        torch.testing.assert_close(read_result(tmp_path / f"out.{number}", item), item)


def test_a_host_links_neither_python_nor_torch(affine: Path) -> None:
    linked = subprocess.run(["ldd", driver()], capture_output=True, text=True, check=True).stdout
    assert "libfxwrap_runtime" in linked and "libpython" not in linked and "libtorch" not in linked
    for library in ("libfxwrap_runtime.so", "libfxwrap_bridge.so"):
        needed = subprocess.run(["ldd", build_runtime() / library], capture_output=True, text=True, check=True).stdout
        assert "libpython" not in needed and "libtorch_python" not in needed, needed


def test_programs_that_write_their_inputs_and_count_calls(tmp_path: Path) -> None:
    compiled = fxwrap.compile_graph(exported(False), name="small", options=fxwrap.Options(emitter="cpp"))
    compiled.save(tmp_path / "small.fxw", target="native")
    x = batch()
    done = drive(
        "open", tmp_path / "small.fxw", *tensor_commands(tmp_path, [x]), "run", tmp_path / "a", "run", tmp_path / "b"
    )
    assert done.code == 0, done.lines
    first = expected(tmp_path / "small.fxw", x)
    assert torch.equal(read_result(tmp_path / "a.0", first), first)
    second = read_result(tmp_path / "b.0", first)
    assert torch.allclose(second, first + 1)  # the counter is memory of the model


def test_numbers_and_control_flow(tmp_path: Path) -> None:
    graph = torch.export.export(
        Numbers(), (torch.ones(3), 5), dynamic_shapes={"x": None, "n": torch.export.Dim.DYNAMIC}
    )
    compiled = fxwrap.compile_graph(graph, name="numbers", options=fxwrap.Options(emitter="cpp"))
    compiled.save(tmp_path / "numbers.fxw", target="native")
    for x in (torch.ones(3), -torch.ones(3)):
        done = drive(
            "open", tmp_path / "numbers.fxw", *tensor_commands(tmp_path, [x]), "int", 7, "run", tmp_path / "out"
        )
        assert done.code == 0, done.lines
        assert "result 1 int 8" in done.lines, done.lines
        wanted = (x * 2 if x.sum() > 0 else x - 1) + 7
        assert torch.equal(read_result(tmp_path / "out.0", wanted), wanted)


def test_inputs_by_name(tmp_path: Path) -> None:
    """In any order; those that are left out are None."""
    graph = torch.export.export(
        Numbers(), (torch.ones(3), 5), dynamic_shapes={"x": None, "n": torch.export.Dim.DYNAMIC}
    )
    compiled = fxwrap.compile_graph(graph, name="numbers", options=fxwrap.Options(emitter="cpp"))
    compiled.save(tmp_path / "numbers.fxw", target="native")
    x = tensor_commands(tmp_path, [torch.ones(3)])
    done = drive("open", tmp_path / "numbers.fxw", "named", "n", "int", 7, "named", "x", *x, "run", tmp_path / "out")
    assert done.code == 0 and "result 1 int 8" in done.lines, done.lines
    assert torch.equal(read_result(tmp_path / "out.0", torch.ones(3)), torch.full((3,), 9.0))
    done = drive("open", tmp_path / "numbers.fxw", "named", "y", *x, "run", tmp_path / "out")
    assert done.code == 3 and done.lines == (
        "InputError: program 'numbers': it takes no input 'y'; its inputs are (x, n)", "alive 0",
    ), done.lines  # fmt: skip
    done = drive("open", tmp_path / "numbers.fxw", "named", "n", "int", 7, "run", tmp_path / "out")
    with pytest.raises(fxwrap.errors.InputError) as error:
        fxwrap.load(tmp_path / "numbers.fxw").flat(None, 7)
    assert done.code == 3 and done.lines == (f"InputError: {error.value}", "alive 0")


class Numbers(torch.nn.Module):
    def forward(self, x: torch.Tensor, n: int) -> tuple[torch.Tensor, int]:
        y = torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x - 1, (x,))
        return y + n, n + 1


def test_inputs_outputs_and_constants_are_listed(affine: Path) -> None:
    lines = tuple([re.sub(r"\bs\d+\b", "s0", line) for line in drive("open", affine, "leaves").lines])
    assert lines == (
        "input x tensor f32 cpu borrowed s0/16 16/1",
        "output output tensor f32 cpu  s0/16 16/1",
        "constant p_weight tensor f32 cpu borrowed 16/16 16/1",
        "constant p_bias tensor f32 cpu borrowed 16/1",
        "symbol s0 0 64",
    )


def test_lines_are_reported_to_a_callback(affine: Path, tmp_path: Path) -> None:
    """Operators and kernels, in the order of the program."""
    done = drive("open", affine, *tensor_commands(tmp_path, [batch()]), "lines")
    names = [line.target if isinstance(line, ExternCall) else line.kernel
             for line in fxwrap.load(affine).program.body.lines if isinstance(line, ExternCall | Launch)]  # fmt: skip
    assert [name.startswith("aten.mm") for name in names] == [True, False, True], names
    names = [f"aten::{name.split('.')[1]}" if "." in name else name for name in names]
    assert done.code == 0 and done.lines == tuple([f"{word} {name}" for name in names for word in ("begin", "end")])


def test_a_kernel_without_code_for_the_device(tmp_path: Path) -> None:
    """A Triton kernel that has code for GPUs alone, and tensors of the CPU."""
    options = fxwrap.Options(emitter="cpp", cpu_kernels="triton")
    program = torch.export.export(Doubled(), (torch.ones(3),))
    compiled = fxwrap.compile_graph(program, options=options)
    compiled.save(tmp_path / "triton.fxw", target="native", architectures=("sm_80", "sm_90"))
    words = tensor_commands(tmp_path, [torch.ones(3)])
    done = drive("open", tmp_path / "triton.fxw", *words, "run", tmp_path / "out")
    (kernel,) = compiled.program.kernels
    assert done.code == 3 and done.lines[0].startswith(
        f"RuntimeError: kernel '{kernel.name}' has no compiled form for these arguments on this device (it has code "
        "for sm_80, sm_90), and only Python compiles another: save the file with the GPU's architecture"
    ), done.lines


class Doubled(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


STREAMS = """
program @streams(%x: borrowed f32[4]@cpu) {
  %t = extern.call @aten.sin.default(%x) : f32[4]@cpu
  %begun = device.record() device="cpu" event=7 : opaque<Event>
  device.wait(%begun) device="cpu" stream=1
  %b = memory.alloc() stream=1 : f32[4]@cpu
  extern.call @aten.exp.out(%t) outs=(%b) stream=1
  %c = extern.call @aten.neg.default(%b) stream=1 : f32[4]@cpu
  memory.free(%b) stream=1
  memory.free(%t) stream=1
  %done = device.record() device="cpu" stream=1 : opaque<Event>
  device.wait(%done) device="cpu"
  %y = extern.call @aten.add.Tensor(%c, %x) : f32[4]@cpu
  memory.free(%c)
  control.return(%y)
}
"""


def test_streams_and_events(tmp_path: Path) -> None:
    save_program(SavedContent(fxwrap.parse(STREAMS), "cpp"), tmp_path / "streams.fxw", target="native")
    x = torch.randn(4)
    done = drive("open", tmp_path / "streams.fxw", *tensor_commands(tmp_path, [x]), "run", tmp_path / "out")
    assert done.code == 0, done.lines
    assert torch.equal(read_result(tmp_path / "out.0", x), x + -x.sin().exp())


# --- bad calls --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "x",
    (torch.randn(4, 17), torch.randn(4, 16).double(), torch.randn(4, 16, 2), torch.randn(1, 16), torch.zeros(0, 16)),
    ids=("shape", "dtype", "rank", "range", "empty"),
)
def test_wrong_inputs_have_the_words_of_python(affine: Path, tmp_path: Path, x: torch.Tensor) -> None:
    done = drive("open", affine, *tensor_commands(tmp_path, [x]), "run", tmp_path / "out")
    try:
        with torch.no_grad():
            fxwrap.load(affine).flat(x)
    except Exception as error:  # noqa: BLE001  the same error is expected
        assert done.code == 3 and "\n".join(done.lines) == f"{type(error).__name__}: {error}\nalive 0"
    else:
        assert done.code == 0


@pytest.mark.parametrize("words", (["int", "3"], ["none"], ["float", "2.5"]), ids=("int", "none", "float"))
def test_wrong_kinds_have_the_words_of_python(affine: Path, tmp_path: Path, words: list[str]) -> None:
    done = drive("open", affine, *words, "run", tmp_path / "out")
    value = {"int": 3, "none": None, "float": 2.5}[words[0]]
    with pytest.raises(fxwrap.errors.InputError) as error:
        fxwrap.load(affine).flat(value)
    assert done.code == 3 and done.lines[0] == f"InputError: {error.value}"


def test_a_wrong_number_of_inputs(affine: Path, tmp_path: Path) -> None:
    done = drive("open", affine, *tensor_commands(tmp_path, [batch(), batch()]), "run", tmp_path / "out")
    with pytest.raises(fxwrap.errors.InputError) as error:
        fxwrap.load(affine).flat(batch(), batch())
    assert done.code == 3 and done.lines == (f"InputError: {error.value}", "alive 0")


class Scaled(torch.nn.Module):
    def forward(self, x: torch.Tensor, scale: float, repeats: int, negate: bool) -> torch.Tensor:
        return (-x if negate else x) * scale * repeats


def test_numbers_that_the_model_was_exported_with(tmp_path: Path) -> None:
    """Another one is refused in the words of Python; none at all stands for it."""
    x, path = torch.randn(3), tmp_path / "scaled.fxw"
    graph = torch.export.export(Scaled(), (x, 0.5, 3, True))
    fxwrap.compile_graph(graph, name="scaled", options=fxwrap.Options(emitter="cpp")).save(path, target="native")
    loaded, words = fxwrap.load(path), tensor_commands(tmp_path, [x])
    right = (["float", "0.5"], ["int", "3"], ["bool", "true"])
    for chosen in (right, (["none"], ["none"], ["none"])):
        passed = [word for item in chosen for word in item]
        done = drive("open", path, *words, *passed, "run", tmp_path / "out", "alive")
        assert done.code == 0 and done.lines == ("alive 0",), done.lines
        torch.testing.assert_close(read_result(tmp_path / "out.0", x), -x * 1.5)
    for position, (word, value) in enumerate([(["float", "2.5"], 2.5), (["int", "4"], 4), (["bool", "false"], False)]):
        passed, values = list(right), [0.5, 3, True]
        passed[position], values[position] = word, value
        done = drive("open", path, *words, *[word for item in passed for word in item], "run", tmp_path / "out")
        with pytest.raises(fxwrap.errors.InputError) as error:
            loaded(x, *values)
        assert done.code == 3 and done.lines == (f"InputError: {error.value}", "alive 0")
    done = drive("open", path, *words, "int", "2", *right[1], *right[2], "run", tmp_path / "out")
    with pytest.raises(fxwrap.errors.InputError) as error:
        loaded(x, 2, 3, True)
    assert done.lines[0] == f"InputError: {error.value}"


def test_a_tensor_of_another_version_of_dlpack(affine: Path, tmp_path: Path) -> None:
    done = drive("open", affine, *tensor_commands(tmp_path, [batch()], "tensor2"), "run", tmp_path / "out")
    assert done.code == 3 and done.lines[1] == "alive 0"
    assert done.lines[0].startswith("InputError: input 'x': its DLPack version is 2, expected 1.")


# --- bad files --------------------------------------------------------------------------------------------------------


def damaged(affine: Path, target: Path, kind: str) -> Path:
    content = bytearray(affine.read_bytes())
    match kind:
        case "truncated":
            content = content[: len(content) // 2]
        case "foreign":
            content = bytearray(b"not a zip file at all")
        case "empty":
            content = bytearray()
        case "flipped":
            content[content.index(b"\x7fELF") + 5000] ^= 1
        case "weights":
            content[content.index(b'"data_offsets"') + 600] ^= 1
        case "manifest":
            content[content.index(b'"format_version"') + 3] ^= 1
        case "newer":
            with target.open("wb") as file, ArchiveWriter(file) as writer:
                writer.close({"format_version": 99, "written_by": {"fxwrap": "9.0"}})
            return target
    target.write_bytes(content)
    return target


@pytest.mark.parametrize(
    "kind", ("truncated", "foreign", "empty", "flipped", "weights", "manifest", "newer", "absent", "folder")
)
def test_bad_files_have_the_words_of_python(affine: Path, tmp_path: Path, kind: str) -> None:
    path = tmp_path if kind == "folder" else tmp_path / "bad.fxw"
    if kind not in ("absent", "folder"):
        damaged(affine, path, kind)
    with pytest.raises(ArtifactError) as error:
        fxwrap.load(path)
    assert drive("open", path).lines[0] == f"ArtifactError: {error.value}"


def rewritten(source: Path, target: Path, devices: list[str] | None = None, **changes: Any) -> Path:
    """Writes a file again with another description of its binaries, or other devices; its hashes are right."""
    from fxwrap.artifact.archive import Archive

    with Archive(source) as archive, target.open("wb") as file, ArchiveWriter(file) as writer:
        manifest = json.loads(json.dumps(dict(archive.manifest)))
        for name in manifest.pop("entries"):
            writer.add_bytes(name, archive.read(name))
        for key in ("format", "format_version"):
            manifest.pop(key)
        for key, value in changes.items():
            section, _, name = key.partition("_")
            manifest["binaries"][section][name] = value
        manifest["devices"] = devices or manifest["devices"]
        writer.close(manifest)
    return target


@pytest.mark.parametrize(
    ("changes", "text"),
    (
        ({"target_interface": "0"}, "it is for interface '0', not '"),
        ({"target_machine": "Linux vax"}, "it is for machine 'Linux vax', not '"),
        ({"target_libc": "99.9"}, "it is for the C library 99.9, not "),
        ({"target_instructions": ["sse9"]}, "it uses instructions that this processor lacks: sse9"),
    ),
)
def test_code_for_another_machine_is_refused(affine: Path, tmp_path: Path, changes: dict[str, Any], text: str) -> None:
    path = rewritten(affine, tmp_path / "other.fxw", **changes)
    (line, _) = drive("open", path).lines
    assert line.startswith(f"ArtifactError: {path}: {text}"), line
    with pytest.raises(ArtifactError) as error:
        fxwrap.load(path, binaries="required")
    assert line.split(": ", 2)[2].split(". Save")[0] == error.value.reason


def test_an_operator_that_is_not_registered(affine: Path, tmp_path: Path) -> None:
    path = rewritten(
        affine,
        tmp_path / "custom.fxw",
        native_operators=[{"name": "mylib::scale", "overload": "", "schema": "mylib::scale(Tensor x) -> Tensor"}],
    )
    assert drive("open", path).lines[0] == (
        f"ArtifactError: {path}: its operator 'mylib::scale' is not registered in this process. "
        "Pass the library that registers it as an option, or load it first"
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason=HAS_CUDA)
def test_a_file_for_a_gpu_on_a_machine_without_one(affine: Path, tmp_path: Path) -> None:
    path = rewritten(affine, tmp_path / "gpu.fxw", devices=["cuda:0"])
    assert drive("open", path).lines[0] == (
        f"ArtifactError: {path}: it was compiled for cuda:0, and this libtorch has no CUDA, or finds no GPU. "
        "Run it on a machine with that device, or compile it for another"
    )


@pytest.mark.parametrize(
    ("schema", "fits"),
    (
        ("aten::addmm(Tensor self, Tensor mat1, Tensor mat2) -> Tensor", True),  # of a version without the options
        ("aten::addmm(Tensor self, Tensor mat1, Tensor mat2, *, Scalar gamma) -> Tensor", False),
        ("not a schema", False),
    ),
)
def test_operators_of_another_version_of_torch(affine: Path, tmp_path: Path, schema: str, fits: bool) -> None:
    described_operators = [{"name": "aten::addmm", "overload": "", "schema": schema}]
    path = rewritten(affine, tmp_path / "other.fxw", native_operators=described_operators)
    done = drive("open", path)
    if fits:
        assert done.code == 0, done.lines
        return
    assert done.lines[0] == (
        f"ArtifactError: {path}: its operator 'aten::addmm' has another signature in this libtorch: "
        f"{torch.ops.aten.addmm.default._schema}, not {schema}. Save the program with this version of torch"
    )


def test_a_file_without_code_for_cpp(tmp_path: Path) -> None:
    fxwrap.save(compile_affine(), tmp_path / "bare.fxw", emitters=())
    assert drive("open", tmp_path / "bare.fxw").lines[0] == (
        f"ArtifactError: {tmp_path / 'bare.fxw'}: the file has no compiled code for the emitter 'cpp'. "
        "Save it again with target='native'"
    )


# --- constants --------------------------------------------------------------------------------------------------------


def constant(folder: Path, name: str, tensor: torch.Tensor, command: str = "constant") -> list[str]:
    return [command, name, *described(folder, tensor)]


def test_replaced_constants_are_those_of_one_instance(affine: Path, tmp_path: Path) -> None:
    weight, bias = torch.randn(16, 16), torch.randn(16)
    words = [*constant(tmp_path, "weight", weight), *constant(tmp_path, "p_bias", bias)]
    done = drive(
        "open", affine, *tensor_commands(tmp_path, [batch()]), *words, "share", "replace", "run", tmp_path / "new",
        "first", "run", tmp_path / "old", "alive",
    )  # fmt: skip
    assert done.code == 0, done.lines
    old = expected(affine, batch())
    loaded = fxwrap.load(affine)
    loaded.load_constants({"weight": weight, "bias": bias})
    with torch.no_grad():
        new = loaded.flat(batch())[0]
    assert torch.equal(read_result(tmp_path / "new.0", new), new) and not torch.equal(new, old)
    assert torch.equal(read_result(tmp_path / "old.0", old), old)


@pytest.mark.parametrize("kind", ("shape", "dtype", "name", "twice"))
def test_constants_that_do_not_fit_leave_the_old_ones(affine: Path, tmp_path: Path, kind: str) -> None:
    bias = {"shape": torch.randn(17), "dtype": torch.randn(16).double()}.get(kind, torch.randn(16))
    name = "nonsense" if kind == "name" else "bias"
    tensors = {"weight": torch.randn(16, 16), name: bias, **({"p_bias": bias} if kind == "twice" else {})}
    words = [word for key, tensor in tensors.items() for word in constant(tmp_path, key, tensor)]
    done = drive("open", affine, *words, "replace")
    with pytest.raises(ArtifactError) as error:
        fxwrap.load(affine).update_constants(tensors)
    assert done.code == 3 and done.lines == (f"ArtifactError: {error.value}", "alive 0")


def test_a_file_without_constants(tmp_path: Path) -> None:
    compiled = compile_affine()
    compiled.save(tmp_path / "bare.fxw", constants=False, target="native")
    x = tensor_commands(tmp_path, [batch()])
    with pytest.raises(ArtifactError) as error:
        fxwrap.load(tmp_path / "bare.fxw").flat(batch())
    done = drive("open", tmp_path / "bare.fxw", *x, "run", tmp_path / "out")
    assert done.code == 3 and done.lines[0] == f"ArtifactError: {error.value}"
    from safetensors.torch import save_file

    save_file({"weight": compiled.program.store.tensors["p_weight"]}, tmp_path / "part.safetensors")
    with pytest.raises(ArtifactError) as missing:
        fxwrap.load(tmp_path / "bare.fxw").load_constants(tmp_path / "part.safetensors")
    done = drive("open", tmp_path / "bare.fxw", "replace_file", tmp_path / "part.safetensors")
    assert done.lines[0] == f"ArtifactError: {missing.value}"
    save_file(
        {name: tensor.detach() for name, tensor in compiled.program.store.tensors.items()}, tmp_path / "all.safetensors"
    )
    done = drive(
        "open", tmp_path / "bare.fxw", "replace_file", tmp_path / "all.safetensors", *x, "run", tmp_path / "out"
    )
    with torch.no_grad():
        wanted = compiled.flat(batch())[0]
    assert done.code == 0 and torch.equal(read_result(tmp_path / "out.0", wanted), wanted), done.lines


# --- threads ----------------------------------------------------------------------------------------------------------


def test_threads_call_one_program_while_its_constants_change(affine: Path, tmp_path: Path) -> None:
    old = fxwrap.load(affine).program.store.tensors
    words = [
        *constant(tmp_path, "weight", torch.randn(16, 16)), *constant(tmp_path, "bias", torch.randn(16)),
        *constant(tmp_path, "weight", old["p_weight"].detach(), "old_constant"),
        *constant(tmp_path, "bias", old["p_bias"].detach(), "old_constant"),
    ]  # fmt: skip
    # The last two constants that were passed are in use without a copy, all others are released.
    done = drive(
        "open",
        affine,
        *tensor_commands(tmp_path, [batch()]),
        *words,
        "call_in_threads",
        8,
        250,
        "alive",
        OMP_NUM_THREADS="1",
    )
    assert done.code == 0 and done.lines == ("calls 2000 wrong 0 differs 1 swapped 1", "alive 2"), (
        done.lines,
        done.errors,
    )


def test_threads_open_files_in_parallel(affine: Path, tmp_path: Path) -> None:
    x = tensor_commands(tmp_path, [batch()])
    done = drive(*x, "open_in_threads", 32, affine, "alive", OMP_NUM_THREADS="1")
    assert done.code == 0 and done.lines == ("opened 32 wrong 0", "alive 0"), (done.lines, done.errors)


# --- what needs Python ------------------------------------------------------------------------------------------------


def test_an_operator_in_python_is_refused_by_name(tmp_path: Path) -> None:
    @torch.library.custom_op("native_host_test::scale", mutates_args=())
    def scale(x: torch.Tensor) -> torch.Tensor:
        return x * 3

    scale.register_fake(torch.empty_like)

    class Scaled(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.ops.native_host_test.scale(x + 1)

    compiled = fxwrap.compile_graph(
        torch.export.export(Scaled(), (torch.ones(3),)), name="scaled", options=fxwrap.Options(emitter="cpp")
    )
    reason = "the program does not run without Python: the operator 'native_host_test::scale' is implemented in Python"
    with pytest.raises(ArtifactError, match=reason):
        compiled.save(tmp_path / "scaled.fxw", target="native")
    assert not (tmp_path / "scaled.fxw").exists()
    compiled.save(tmp_path / "scaled.fxw")
    assert drive("open", tmp_path / "scaled.fxw").lines[0] == (
        f"ArtifactError: {tmp_path / 'scaled.fxw'}: {reason}. Save it with target='native', which lists all reasons"
    )


def test_an_unknown_target(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="unknown target 'c'; known: any, native"):
        compile_affine().save(tmp_path / "x.fxw", target="c")


def test_the_environment_has_no_python(affine: Path, tmp_path: Path) -> None:
    """The host finds everything by its own path: nothing in its environment leads to Python or torch."""
    done = subprocess.run(
        [driver(), "open", affine, *tensor_commands(tmp_path, [batch()]), "run", tmp_path / "out"],
        env={"HOME": str(tmp_path), "PATH": ""}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and (tmp_path / "out.0").exists(), done.stdout + os.linesep + done.stderr
