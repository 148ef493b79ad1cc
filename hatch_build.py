"""The build hook that puts native libraries into a wheel.

`FXWRAP_WHEEL_LIBRARIES` names a folder that `python -m fxwrap build --package` has written, for one or more releases of
torch: `make wheels` does. Without it, as with `pip install .`, a wheel gets the libraries of the environment's torch.
A wheel of sources alone is the result where there is none, or where they do not compile; its libraries are compiled
when they are first needed.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER_ENV = "FXWRAP_WHEEL_LIBRARIES"

INSTALLED = "fxwrap/runtime/native/compiled"


class NativeLibraries(BuildHookInterface):  # type: ignore[type-arg]
    """Adds compiled libraries to wheels. Editable installs and source distributions have none."""

    _temporary: tempfile.TemporaryDirectory[str] | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Adds the libraries and the wheel's platform to the data of a build."""
        if self.target_name != "wheel" or version == "editable":
            return
        folder = os.environ.get(FOLDER_ENV) or self._compile()
        files = {path.relative_to(folder): path.resolve() for path in sorted(Path(folder).glob("*/*"))}
        if not files:
            return
        build_data["force_include"].update({str(path): f"{INSTALLED}/{name}" for name, path in files.items()})
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{_platform_tag([path for path in files.values() if path.suffix == '.so'])}"

    def _compile(self) -> str:
        """Returns the folder with the libraries of the environment's torch, which is empty if they do not compile."""
        self._temporary = tempfile.TemporaryDirectory()
        environment = _environment_with_torch()
        if environment is None:
            self.app.display_info("torch is not importable: the wheel has no compiled libraries")
            return self._temporary.name
        command = [sys.executable, "-m", "fxwrap", "build", "--package", self._temporary.name]
        if subprocess.run(command, cwd=self.root, env=environment, check=False).returncode:
            self.app.display_warning("the native libraries do not compile here: the wheel has none")
        return self._temporary.name

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Removes the compiled libraries, which the wheel now holds."""
        if self._temporary is not None:
            self._temporary.cleanup()


def _environment_with_torch() -> dict[str, str] | None:
    """Returns the variables with which Python imports torch, or None.

    pip runs build backends with the Python of the environment into which it installs, and hides what is installed there
    by PYTHONPATH.
    """
    if importlib.util.find_spec("torch") is not None:
        return dict(os.environ)
    visible = {name: text for name, text in os.environ.items() if name not in ("PYTHONPATH", "PYTHONNOUSERSITE")}
    probe = [sys.executable, "-c", "import importlib.util; assert importlib.util.find_spec('torch')"]
    found = subprocess.run(probe, env=visible, stderr=subprocess.DEVNULL, check=False)
    return visible if found.returncode == 0 else None


def _platform_tag(libraries: list[Path]) -> str:
    """Returns the platform of a wheel: the oldest C library that has all symbols which the libraries use (PEP 600)."""
    minors = [int(minor) for path in libraries for minor in re.findall(rb"GLIBC_2\.(\d+)", path.read_bytes())]
    return f"manylinux_2_{max(minors)}_{platform.machine()}" if minors else f"linux_{platform.machine()}"
