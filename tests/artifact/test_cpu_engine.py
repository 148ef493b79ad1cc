"""Programs that call no operators run in a host without libtorch and the bridge, with the results of Python."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import fxwrap
from fxwrap.artifact.archive import Archive
from fxwrap.converters.cpp.text import DTYPE_NAMES as cpp_names
from fxwrap.runtime.native import build_runtime
from fxwrap.torch_compat import DTYPE_NAMES
from tests.artifact.native_host import described, drive, read_result, tensor_commands

LIBTORCH = f"{torch.__path__[0]}/lib/libtorch_cpu.so"
SOURCES = Path(fxwrap.__file__).parent / "runtime" / "native"


class Scaled(torch.nn.Module):
    """A reduction, views, a constant that is written, and a symbol."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.scale = torch.nn.Parameter(torch.randn(6, generator=generator))
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
        self.calls.add_(1)
        y = torch.softmax(x * self.scale, -1) + self.calls
        return y, y[:, 2:4].transpose(0, 1), x.shape[0] * 2


def save(module: torch.nn.Module, inputs: tuple[Any, ...], path: Path, **options: Any) -> Path:
    exported = torch.export.export(module, inputs, **options)
    compiled = fxwrap.compile_graph(exported, name="small", options=fxwrap.Options(emitter="cpp"))
    compiled.save(path, target="native")
    with Archive(path) as archive:
        assert archive.manifest["binaries"]["native"]["engine"] == "cpu"
    return path


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    batch = torch.export.Dim("batch", min=2, max=64)
    path = tmp_path_factory.mktemp("scaled") / "scaled.fxw"
    return save(Scaled(), (torch.randn(3, 6),), path, dynamic_shapes={"x": {0: batch}})


def loaded_libraries(lines: tuple[str, ...]) -> str:
    return " ".join([line for line in lines if line.startswith("/")])


# --- libraries --------------------------------------------------------------------------------------------------------


def test_a_host_loads_neither_torch_nor_python(scaled: Path, tmp_path: Path) -> None:
    """The folder of the runtime has no bridge and names no libtorch."""
    for name in ("libfxwrap_runtime.so", "libfxwrap_runtime.target"):
        shutil.copy(build_runtime() / name, tmp_path / name)
    target = (tmp_path / "libfxwrap_runtime.target").read_text().splitlines()
    (tmp_path / "libfxwrap_runtime.target").write_text("\n".join([*target[:-1], "/nowhere", ""]))
    (tmp_path / "data").mkdir()
    x = torch.randn(4, 6)
    done = drive(
        "open", scaled, *tensor_commands(tmp_path / "data", [x]), "run", tmp_path / "out", "libraries",
        LD_LIBRARY_PATH=str(tmp_path),
    )  # fmt: skip
    assert done.code == 0, (done.lines, done.errors)
    libraries = loaded_libraries(done.lines)
    assert str(tmp_path / "libfxwrap_runtime.so") in libraries
    assert "torch" not in libraries and "bridge" not in libraries and "libpython" not in libraries
    with torch.no_grad():
        wanted = fxwrap.load(scaled).flat(x)[0]
    assert torch.equal(read_result(tmp_path / "out.0", wanted), wanted)


def test_a_program_has_no_symbols_of_the_bridge(scaled: Path, tmp_path: Path) -> None:
    with Archive(scaled) as archive:
        (tmp_path / "program.so").write_bytes(archive.read(archive.manifest["binaries"]["native"]["library"]))
    symbols = subprocess.run(
        ["nm", "-D", "--undefined-only", tmp_path / "program.so"], capture_output=True, text=True, check=True
    ).stdout
    linked = subprocess.run(["ldd", tmp_path / "program.so"], capture_output=True, text=True, check=True).stdout
    needed = [line.split()[0] for line in linked.splitlines()]  # not the addresses, which are random
    for name in ("fxwrap", "c10", "torch", "Py"):
        assert name not in symbols and not any(name in library for library in needed)


def test_a_program_with_operators_asks_for_libtorch(tmp_path: Path) -> None:
    class Product(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ x

    exported = torch.export.export(Product(), (torch.ones(3, 3),))
    fxwrap.compile_graph(exported, options=fxwrap.Options(emitter="cpp")).save(tmp_path / "p.fxw", target="native")
    done = drive("open", tmp_path / "p.fxw", "libraries")
    assert done.code == 0 and "libtorch_cpu" in loaded_libraries(done.lines)


# --- results ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preloaded", ("", LIBTORCH), ids=("cpu", "torch"))
def test_results_and_written_constants(scaled: Path, tmp_path: Path, preloaded: str) -> None:
    x = torch.randn(5, 6)
    done = drive(
        "open", scaled, *tensor_commands(tmp_path, [x]), "run", tmp_path / "a", "run", tmp_path / "b", "alive",
        "libraries", LD_PRELOAD=preloaded,
    )  # fmt: skip
    assert done.code == 0, (done.lines, done.errors)
    assert ("libtorch_cpu" in loaded_libraries(done.lines)) == bool(preloaded)
    assert done.lines[:3] == ("result 2 int 10", "result 2 int 10", "alive 0")
    program = fxwrap.load(scaled)
    for file in ("a", "b"):
        with torch.no_grad():
            wanted = program.flat(x)
        assert torch.equal(read_result(tmp_path / f"{file}.0", wanted[0]), wanted[0])


@pytest.mark.every_combination
@pytest.mark.parametrize("preloaded", ("", LIBTORCH), ids=("cpu", "torch"))
@pytest.mark.parametrize(
    "x",
    (torch.randn(4, 7), torch.randn(4, 6).double(), torch.randn(4, 6, 2), torch.tensor(1.0), torch.randn(65, 6)),
    ids=("shape", "dtype", "rank", "scalar", "range"),
)
def test_wrong_inputs_have_the_words_of_python(scaled: Path, tmp_path: Path, x: torch.Tensor, preloaded: str) -> None:
    done = drive("open", scaled, *tensor_commands(tmp_path, [x]), "run", tmp_path / "out", LD_PRELOAD=preloaded)
    with torch.no_grad(), pytest.raises(fxwrap.errors.InputError) as error:
        fxwrap.load(scaled).flat(x)
    assert done.code == 3 and "\n".join(done.lines) == f"InputError: {error.value}\nalive 0"


@pytest.mark.parametrize("preloaded", ("", LIBTORCH), ids=("cpu", "torch"))
@pytest.mark.parametrize("size", (0, 1, 64))
def test_sizes_outside_of_the_example_run(scaled: Path, tmp_path: Path, size: int, preloaded: str) -> None:
    x = torch.randn(size, 6)
    done = drive("open", scaled, *tensor_commands(tmp_path, [x]), "run", tmp_path / "out", LD_PRELOAD=preloaded)
    with torch.no_grad():
        wanted = fxwrap.load(scaled).flat(x)
    assert done.code == 0 and done.lines == (f"result 2 int {2 * size}",), done.lines
    assert torch.equal(read_result(tmp_path / "out.0", wanted[0]), wanted[0])


def test_wrong_kinds_and_counts_have_the_words_of_python(scaled: Path, tmp_path: Path) -> None:
    words = tensor_commands(tmp_path, [torch.randn(4, 6)])
    for commands, values in (
        (["int", 3], (3,)),
        (["none"], (None,)),
        ([*words, *words], (torch.randn(4, 6), torch.randn(4, 6))),
    ):
        with pytest.raises(fxwrap.errors.InputError) as error:
            fxwrap.load(scaled).flat(*values)
        assert drive("open", scaled, *commands, "run", tmp_path / "o").lines[0] == f"InputError: {error.value}"


class Steps(torch.nn.Module):
    """A branch, a loop of a number of steps that data decides, and a number of the caller's."""

    def forward(self, x: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x - 1, (x,))
        z = torch.while_loop(lambda v: v.abs().sum() < 100, lambda v: (v * 2,), (y,))[0]
        return z + n, y


@pytest.mark.sampled(2)
@pytest.mark.parametrize("preloaded", ("", LIBTORCH), ids=("cpu", "torch"))
def test_control_flow_and_numbers(tmp_path: Path, preloaded: str) -> None:
    shapes = {"x": None, "n": torch.export.Dim.DYNAMIC}
    path = save(Steps(), (torch.ones(3), 5), tmp_path / "steps.fxw", dynamic_shapes=shapes)
    for x in (torch.ones(3), -torch.ones(3)):
        words = tensor_commands(tmp_path, [x])
        done = drive("open", path, *words, "int", 7, "run", tmp_path / "out", LD_PRELOAD=preloaded)
        assert done.code == 0, done.lines
        for index, wanted in enumerate(fxwrap.load(path).flat(x, 7)):
            assert torch.equal(read_result(tmp_path / f"out.{index}", wanted), wanted)


class Rows(torch.nn.Module):
    def forward(self, table: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return table[rows] * 2


@pytest.mark.parametrize("preloaded", ("", LIBTORCH), ids=("cpu", "torch"))
def test_the_error_of_a_kernel_is_that_of_python(tmp_path: Path, preloaded: str) -> None:
    table, rows = torch.randn(4, 3), torch.tensor([1, 3, 0])
    path = save(Rows(), (table, rows), tmp_path / "rows.fxw")
    for wrong in (False, True):
        inputs = [table, torch.where(rows == 3, 4, rows) if wrong else rows]
        words = tensor_commands(tmp_path, inputs)
        done = drive("open", path, *words, "run", tmp_path / "out", LD_PRELOAD=preloaded)
        if wrong:
            with pytest.raises(IndexError) as error:
                fxwrap.load(path).flat(*inputs)
            assert done.code == 3 and done.lines == (f"IndexError: {error.value}", "alive 0")
            done = drive("open", path, *words, "lines", LD_PRELOAD=preloaded)
            (kernel,) = fxwrap.load(path).program.kernels
            lines = (f"begin {kernel.name}", f"end {kernel.name}", f"IndexError: {error.value}", "alive 0")
            assert done.lines == lines
        else:
            wanted = fxwrap.load(path).flat(*inputs)[0]
            assert torch.equal(read_result(tmp_path / "out.0", wanted), wanted)


class Doubled(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.where(x == x, x, x)[::2], x


NUMBERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool, torch.float16, torch.float64]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", NUMBERS, ids=[DTYPE_NAMES[dtype] for dtype in NUMBERS])
def test_dtypes(tmp_path: Path, dtype: torch.dtype) -> None:
    x = torch.tensor([3, 0, 1, 7, 2, 5]).to(dtype)
    path = save(Doubled(), (x,), tmp_path / "doubled.fxw")
    done = drive("open", path, *tensor_commands(tmp_path, [x]), "run", tmp_path / "out", "alive")
    assert done.code == 0 and done.lines == ("alive 0",), done.lines
    assert torch.equal(read_result(tmp_path / "out.1", x), x)


def test_every_dtype_of_the_ir_is_known_to_the_engine() -> None:
    table = (SOURCES / "engine" / "dtypes.h").read_text()
    assert [dtype for dtype, name in cpp_names.items() if f"{{DType::{name}, " not in table] == []
    names = [DTYPE_NAMES[dtype] for dtype in cpp_names if dtype in DTYPE_NAMES]
    assert [name for name in names if f'"{name}"' not in table] == []


# --- constants and threads --------------------------------------------------------------------------------------------


def test_constants_are_replaced_and_shared(scaled: Path, tmp_path: Path) -> None:
    x, scale = torch.randn(4, 6), torch.randn(6)
    words = ["constant", "scale", *described(tmp_path, scale)]
    done = drive(
        "copy", "open", scaled, *tensor_commands(tmp_path, [x]), *words, "share", "replace", "run", tmp_path / "new",
        "constant", "scale", *described(tmp_path, torch.randn(7)), "try_replace", "run", tmp_path / "again",
    )  # fmt: skip
    assert done.code == 0, done.lines
    program = fxwrap.load(scaled)
    program.update_constants({"scale": scale})
    with torch.no_grad():
        wanted = program.flat(x)[0]
        assert torch.equal(read_result(tmp_path / "new.0", wanted), wanted)
        with pytest.raises(fxwrap.errors.ArtifactError) as error:
            program.update_constants({"scale": torch.randn(7)})
        assert done.lines[1] == f"ArtifactError: {error.value}"
        again = program.flat(x)[0]
    assert torch.equal(read_result(tmp_path / "again.0", again), again)


class Reversed(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.flip(0) * 3


class Shifted(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.roll(1, 0) - 2


@pytest.mark.sampled(2)
@pytest.mark.parametrize("preloaded", ("", LIBTORCH), ids=("cpu", "torch"))
def test_programs_of_one_signature_in_one_process(tmp_path: Path, preloaded: str) -> None:
    """The loader must not take the second library for the first one."""
    x = torch.randn(4, 6)
    commands = tensor_commands(tmp_path, [x])
    modules = [Reversed(), Shifted(), Reversed()]
    for index, module in enumerate(modules):
        path = save(module, (x,), tmp_path / f"{index}.fxw")
        commands += ["open", str(path), "run", str(tmp_path / f"out{index}")]
    done = drive(*commands, LD_PRELOAD=preloaded)
    assert done.code == 0, done.lines
    for index, module in enumerate(modules):
        assert torch.equal(read_result(tmp_path / f"out{index}.0", x), module(x))


def test_threads(scaled: Path, tmp_path: Path) -> None:
    class Pure(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.softmax(x, -1).cumsum(0)

    path = save(Pure(), (torch.randn(8, 6),), tmp_path / "pure.fxw")
    words = tensor_commands(tmp_path, [torch.randn(8, 6)])
    done = drive("threads", 2, "open", path, *words, "call_in_threads", 8, 500, "alive")
    assert done.code == 0 and done.lines == ("calls 4000 wrong 0 differs 0 swapped 0", "alive 0"), done.lines
    done = drive(*words, "open_in_threads", 16, path, "alive")
    assert done.code == 0 and done.lines == ("opened 16 wrong 0", "alive 0"), done.lines
