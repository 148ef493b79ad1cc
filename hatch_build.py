"""The build hook that puts native libraries into a wheel.

`make wheels` compiles them for several releases of torch into the folder `build/native`, which this hook adds. Without
that folder, a wheel gets those of the torch that is importable while it is built (`pip install --no-build-isolation .`).
A build that sees neither makes a wheel of sources alone, which compiles the libraries when they are first needed.
"""

from __future__ import annotations

import importlib.util
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PREBUILT = Path("build", "native")
"""The folder of `make wheels`, in the checkout: one folder for each entry of `fxwrap/runtime/native/packaged.py`."""

INSTALLED = "fxwrap/runtime/native/compiled"


class NativeLibraries(BuildHookInterface):  # type: ignore[type-arg]
    """Adds compiled libraries to wheels. Editable installs and source distributions have none."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Adds the libraries and the wheel's platform to the data of a build."""
        if self.target_name != "wheel" or version == "editable":
            return
        folder = Path(self.root, PREBUILT)
        if not folder.is_dir():
            folder = Path(self.directory, "native")
            self._compile(folder)
        files = sorted(path for path in folder.glob("*/*") if path.is_file())
        if not files:
            return
        build_data["force_include"].update({str(path): f"{INSTALLED}/{path.relative_to(folder)}" for path in files})
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{_platform_tag([path for path in files if path.suffix == '.so'])}"

    def _compile(self, folder: Path) -> None:
        if importlib.util.find_spec("torch") is None:
            self.app.display_info("torch is not importable: the wheel has no compiled libraries")
            return
        command = [sys.executable, "-m", "fxwrap", "build", "--package", str(folder)]
        if subprocess.run(command, cwd=self.root, check=False).returncode:
            self.app.display_warning("the native libraries do not compile here: the wheel has none")


def _platform_tag(libraries: list[Path]) -> str:
    """Returns the platform of a wheel: the oldest C library that has all symbols which the libraries use (PEP 600)."""
    minors = [int(minor) for path in libraries for minor in re.findall(rb"GLIBC_2\.(\d+)", path.read_bytes())]
    return f"manylinux_2_{max(minors)}_{platform.machine()}" if minors else f"linux_{platform.machine()}"
