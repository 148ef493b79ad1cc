"""A wheel with native libraries in a fresh environment, without fxwrap's sources and without the network."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from fxwrap.cli import main
from tests.conftest import NO_HATCHLING

ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.skipif(importlib.util.find_spec("hatchling") is None, reason=NO_HATCHLING)


def run(*command: object, cwd: Path, **variables: str) -> str:
    """Runs a command that must succeed, in an environment without the checkout; returns its output and errors."""
    environment = {name: text for name, text in os.environ.items() if name not in ("PYTHONPATH", "CXX")} | variables
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel with the libraries of this torch."""
    folder = tmp_path_factory.mktemp("wheel")
    assert main(["build", "--package", str(folder / "libraries")]) == 0
    variables = {"FXWRAP_WHEEL_LIBRARIES": str(folder / "libraries")}
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=ROOT, **variables)
    (path,) = folder.glob("*.whl")
    return path


class Installation:
    """An environment with the wheel, and torch's packages from this one."""

    def __init__(self, root: Path) -> None:
        self.root, self.cache, self.python = root, root / "cache", root / "bin" / "python"

    @property
    def package(self) -> Path:
        (folder,) = self.root.glob("lib/python*/site-packages/fxwrap")
        return folder

    def run(self, *arguments: object, **variables: str) -> str:
        """Runs Python there with a cache folder of its own and no compile cache."""
        variables = {"FXWRAP_CACHE_DIR": str(self.cache), "FXWRAP_COMPILE_CACHE": "0", **variables}
        return run(self.python, *arguments, cwd=self.root, **variables)


@pytest.fixture(scope="module")
def installation(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installation:
    root = tmp_path_factory.mktemp("installation")
    run(sys.executable, "-m", "venv", "--without-pip", root, cwd=root)
    installed = Installation(root)
    options = ("--no-deps", "--no-index", "--ignore-installed", "--quiet")
    run(sys.executable, "-m", "pip", "--python", installed.python, "install", *options, wheel, cwd=root)
    # The environment is fresh but for torch and what that needs, which are not copied.
    (installed.package.parent / "torch.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    return installed


QUICKSTART = re.search(r"## Use it\n\n```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


LOG = """
import logging, sys
logging.getLogger("fxwrap.native").addHandler(logging.StreamHandler(sys.stdout))
logging.getLogger("fxwrap.native").setLevel("INFO")
"""

SAVE = """
exported = torch.export.export(model, (x,))
fxwrap.compile_graph(exported, options=fxwrap.Options(emitter="cpp")).save("model.fxw")
torch.save((x, model(x)), "expected.pt")
print(fxwrap.__file__)
"""

WITHOUT_COMPILER = f"""{LOG}
import warnings
import torch, fxwrap
from fxwrap.errors import FusionWarning, NativeBuildError
from fxwrap.runtime.native import find_compiler
try:
    find_compiler()
except NativeBuildError:
    print("there is no compiler")
x, expected = torch.load("expected.pt")
loaded = fxwrap.load("model.fxw", binaries="required")(x)
torch.testing.assert_close(loaded, expected)

def function(x):
    return (x.sin() + 1).relu()

eager = torch.compile(function, backend="fxwrap", options={{"emitter": "python", "fuse": False}})(x)
torch.testing.assert_close(eager, function(x))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    fused = torch.compile(lambda x: function(x), backend="fxwrap", options={{"emitter": "python"}})(x)
torch.testing.assert_close(fused, function(x))
print([item.category.__name__ for item in caught])
"""


@pytest.mark.long  # `test_packaged.py` has the libraries without an installation
def test_the_wheel_runs_the_readme_and_then_a_machine_without_a_compiler(
    installation: Installation, tmp_path: Path
) -> None:
    """Neither compiles the bridge."""
    assert QUICKSTART is not None and 'backend="fxwrap", options={"emitter": "cpp"}' in QUICKSTART[1]
    text = installation.run("-c", f"{LOG}{QUICKSTART[1]}{SAVE}")
    assert text.splitlines() == [str(installation.package / "__init__.py")]
    packaged = {path.name for path in (installation.package / "runtime/native/compiled").glob("bridge-*")}
    assert {path.name for path in installation.cache.glob("bridge-*")} == packaged and len(packaged) == 1

    fresh = {"FXWRAP_CACHE_DIR": str(tmp_path / "fresh"), "PATH": str(tmp_path)}
    text = installation.run("-c", WITHOUT_COMPILER, **fresh)
    assert text.splitlines() == ["there is no compiler", "['FusionWarning']"]


def test_the_wheel_names_its_platform_and_no_path_of_this_machine(wheel: Path) -> None:
    assert re.fullmatch(r"fxwrap-[\d.]+-py3-none-manylinux_2_\d+_\w+\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        libraries = [name for name in archive.namelist() if name.endswith(".so")]
        assert sorted(name.rsplit("/", 1)[1] for name in libraries) == [
            "_fxwrap_binding.so", "libfxwrap_bridge.so", "libfxwrap_planner.so", "libfxwrap_runtime.so",
        ]  # fmt: skip
        for name in libraries:
            content = archive.read(name)
            assert str(ROOT).encode() not in content and str(Path(torch.__file__).parent).encode() not in content


HIDDEN = """
import importlib.util, hatch_build
assert importlib.util.find_spec("torch") is None
environment = hatch_build._environment_with_torch()
assert environment is not None and "PYTHONPATH" not in environment and environment["KEPT"] == "1"
"""


def test_a_build_finds_the_torch_that_pip_hides_from_it(tmp_path: Path) -> None:
    """pip's build isolation runs the environment's Python with a sitecustomize that hides what is installed there."""
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['torch'] = None\n")
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "PYTHONNOUSERSITE": "1", "KEPT": "1"}
    done = subprocess.run([sys.executable, "-c", HIDDEN], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
