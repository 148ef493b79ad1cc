"""Files of exported programs: without the compiler, without fxwrap, and with kernels missing or changed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from torch.export import ExportedProgram

import fxwrap
from fxwrap.errors import FxImportError, KernelTextError
from fxwrap.runtime import kernel_table
from fxwrap.runtime.kernel_texts import RegisteredKernel, serialize_kernels
from tests.converters.exported.models import CASES, Elementwise, exported_case, reloaded, saved
from tests.support.documents import run_snippets

RUNTIME = ("__init__", "builtin_devices", "caching", "devices", "errors", "runtime", "torch_compat")
"""The parts of fxwrap that a process needs to run an exported program."""

RUN = """
import json, logging, sys
sys.path.insert(0, sys.argv[1])
import torch
try:
    torch.export.load(f"{sys.argv[1]}/gpt2.pt2")
except RuntimeError as error:
    print(f"refused: {error}", file=sys.stderr)
import fxwrap
assert fxwrap.__file__.startswith(sys.argv[1])
for name in json.loads(sys.argv[2]):
    module = torch.export.load(f"{sys.argv[1]}/{name}.pt2").module()
    inputs, keywords = torch.load(f"{sys.argv[1]}/{name}.inputs")
    with torch.no_grad():
        results = module(*inputs, **keywords)
    torch.save(torch.utils._pytree.tree_leaves((results, inputs, module.state_dict())), f"{sys.argv[1]}/{name}.results")
print(json.dumps(sorted(name for name in sys.modules if name.startswith("fxwrap."))))
"""


def _install_runtime(folder: Path) -> None:
    """Makes a package of the runtime's files only."""
    source = Path(fxwrap.__file__).parent
    (folder / "fxwrap").mkdir()
    for name in RUNTIME:
        path = source / name if (source / name).is_dir() else source / f"{name}.py"
        (folder / "fxwrap" / path.name).symlink_to(path)


@torch.no_grad()
def test_files_run_where_only_the_runtime_is_installed(tmp_path: Path) -> None:
    """Before fxwrap is imported, torch refuses the file and asks for the import."""
    names, wanted = ("everything", "branches", "gpt2"), {}
    for name in names:
        case = CASES[name]
        (tmp_path / f"{name}.pt2").write_bytes(saved(exported_case(name)).getvalue())
        torch.manual_seed(3)
        inputs = case.make_inputs(6)
        torch.save((inputs, dict(case.keywords)), tmp_path / f"{name}.inputs")
        module = case.export().module()
        results = module(*inputs, **case.keywords)
        wanted[name] = torch.utils._pytree.tree_leaves((results, inputs, module.state_dict()))
    _install_runtime(tmp_path)
    command = [sys.executable, "-W", "ignore", "-c", RUN, str(tmp_path), json.dumps(names)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "refused:" in done.stderr and "fxwrap.register_kernels" in done.stderr
    assert "name='import_fxwrap_before_torch_export_load'" in done.stderr
    assert "Please import the custom op to register it before deserializing" in done.stderr
    modules = json.loads(done.stdout.splitlines()[-1])
    assert {module.split(".")[1] for module in modules} <= set(RUNTIME)
    for name, leaves in wanted.items():
        torch.testing.assert_close(torch.load(tmp_path / f"{name}.results"), leaves)


# --- kernels that are missing, damaged or changed -------------------------------------------------------------------


def _as_text(texts: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(texts.encode()), dtype=torch.uint8)


def _edited(exported: ExportedProgram, old: str, new: str) -> torch.Tensor:
    text = bytes(exported.constants["fxwrap_kernels"].tolist()).decode()
    assert old in text
    return _as_text(text.replace(old, new))


@cache
def _compiled() -> fxwrap.Compiled:
    return fxwrap.compile_graph(torch.export.export(Elementwise(), (torch.randn(3, 11),)))


def _never_launched() -> ExportedProgram:
    """A program with a kernel that no test launches: a process finds again what it has launched once."""
    return reloaded(fxwrap.fx.export(_compiled()))


DAMAGES: dict[str, tuple[Callable[[ExportedProgram], torch.Tensor], str]] = {
    "changed source": (
        lambda exported: _edited(exported, "1.0f", "2.0f"),
        r"kernel 'sigmoid_mul_add_0': its text was changed: it differs from its content hash. Export the program again",
    ),
    "changed language": (
        lambda exported: _edited(exported, '"language": "cpp"', '"language": "triton"'),
        "kernel 'sigmoid_mul_add_0': its text was changed",
    ),
    "missing entry": (
        lambda exported: _edited(exported, '"signature"', '"sign"'),
        r"kernel '\w{64}': its entry is damaged: 'signature'. Export the program again",
    ),
    "truncated": (
        lambda exported: exported.constants["fxwrap_kernels"][:-4].clone(),
        "kernels: the kernels' texts are damaged: .*. Export the program again",
    ),
    "not text": (
        lambda _exported: torch.full((9,), 255, dtype=torch.uint8),
        "kernels: the kernels' texts are damaged",
    ),
    "other format": (
        lambda exported: _edited(exported, '"format": 1', '"format": 2'),
        r"the kernels' texts have the format 2, and this version of fxwrap reads 1. Install the version",
    ),
    "other dtype": (
        lambda exported: exported.constants["fxwrap_kernels"].to(torch.int32),
        r"the kernels' texts are a 1-dimensional tensor of torch.int32, not bytes",
    ),
    "no kernels": (
        lambda _exported: serialize_kernels([]),
        r"kernel '\w{64}': no kernel with this content hash is loaded in this process. .* export it again",
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_missing_and_changed_kernels_are_refused(damage: str) -> None:
    change, message = DAMAGES[damage]
    exported = _never_launched()
    exported.constants["fxwrap_kernels"] = change(exported)
    module = (exported if damage == "other dtype" else reloaded(exported)).module()
    with kernel_table.empty_kernel_table(), pytest.raises(KernelTextError, match=message):
        module(torch.randn(3, 11))


def test_a_changed_kernel_is_refused_where_the_right_one_is_loaded() -> None:
    torch.testing.assert_close(exported_case("elementwise").module()(torch.zeros(3, 5)), torch.ones(3, 5))
    exported = exported_case("elementwise")
    exported.constants["fxwrap_kernels"] = _edited(exported, "1.0f", "2.0f")
    with pytest.raises(KernelTextError, match="its text was changed"):
        reloaded(exported).module()(torch.randn(3, 5))


def test_a_damaged_file_is_not_imported() -> None:
    exported = exported_case("elementwise")
    exported.constants["fxwrap_kernels"] = _edited(exported, "1.0f", "2.0f")
    with pytest.raises(FxImportError, match=r"register_kernels.* its text was changed"):
        fxwrap.compile_graph(exported)


def test_kernels_live_as_long_as_their_texts() -> None:
    kernel = RegisteredKernel("cpp", 'extern "C" void kernel(float* out0) { out0[0] = 1; }', ("*f32",), (), "one", 1)
    with kernel_table.empty_kernel_table():
        texts = serialize_kernels([kernel])
        torch.ops.fxwrap.register_kernels(texts)
        torch.ops.fxwrap.register_kernels(texts)
        assert kernel_table.get_registered_kernel(kernel.hash) == kernel
        del texts
        assert kernel_table.find_registered_kernel(kernel.hash) is None


@torch.no_grad()
def test_the_snippets_of_the_chapter_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = run_snippets("docs/exported_programs.md")
    torch.testing.assert_close(names["result"].shape, torch.Size((10, 16)))  # type: ignore[attr-defined]
