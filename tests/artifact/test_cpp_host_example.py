"""The C++ hosts in examples/ are built with `find_package(fxwrap)` and return what Python returns."""

from __future__ import annotations

import runpy
import shutil
import signal
import socket
import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import fxwrap
from fxwrap.cli import main
from fxwrap.runtime.native import find_compiler
from tests.conftest import NO_CMAKE, NO_PKG_CONFIG

EXAMPLE = Path(__file__).parents[2] / "examples" / "cpp_host"

pytestmark = pytest.mark.skipif(shutil.which("cmake") is None, reason=NO_CMAKE)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the built hosts and the model's file."""
    folder = tmp_path_factory.mktemp("hosts")
    configure = ["cmake", "-S", EXAMPLE, "-B", folder, f"-DCMAKE_PREFIX_PATH={fxwrap.cmake_prefix_path}"]
    subprocess.run(configure, check=True, capture_output=True)
    subprocess.run(["cmake", "--build", folder], check=True, capture_output=True)
    runpy.run_path(str(EXAMPLE / "save_model.py"))["save"](str(folder / "model.fxw"))
    return folder


def expected(x: torch.Tensor) -> torch.Tensor:
    model: Any = runpy.run_path(str(EXAMPLE / "save_model.py"))["make_model"]()
    with torch.no_grad():
        return model(x)


def test_the_host_prints_the_results_of_python(built: Path) -> None:
    done = subprocess.run([built / "host", built / "model.fxw"], capture_output=True, text=True, check=True)
    first, *rows = done.stdout.splitlines()
    assert first == "input input: f32 of rank 2 on cpu"
    wanted = expected(torch.stack([torch.arange(8.0), torch.arange(8.0).flip(0)]))
    got = torch.tensor([[float(number) for number in row.split()] for row in rows])
    torch.testing.assert_close(got, wanted, atol=2e-6, rtol=0)


def request(path: Path, x: torch.Tensor) -> torch.Tensor:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(path))
        connection.sendall(struct.pack("8f", *x.tolist()))
        return torch.tensor(struct.unpack("3f", connection.recv(12, socket.MSG_WAITALL)))


def test_the_server_answers_and_replaces_its_weights(built: Path) -> None:
    from safetensors.torch import save_file

    names = list(fxwrap.load(built / "model.fxw").program.store.tensors)
    command = [built / "server", built / "model.fxw", built / "socket"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == "serving classifier\n"
        x = torch.arange(8.0)
        torch.testing.assert_close(request(built / "socket", x), expected(x[None])[0], atol=2e-6, rtol=0)
        save_file({names[-1]: torch.zeros(2)}, built / "model.safetensors")
        server.send_signal(signal.SIGHUP)
        assert "of another type" in server.stdout.readline()
        bias = torch.tensor([50.0, 0.0, 0.0])
        save_file({name: bias for name in names if name.endswith("2_bias")}, built / "model.safetensors")
        server.send_signal(signal.SIGHUP)
        assert server.stdout.readline() == "replaced the weights\n"
        assert request(built / "socket", x)[0] > 0.999
        server.send_signal(signal.SIGTERM)
    assert server.returncode == 0


@pytest.mark.skipif(shutil.which("pkg-config") is None, reason=NO_PKG_CONFIG)
def test_a_host_is_built_with_pkg_config(built: Path) -> None:
    prefix = Path(fxwrap.cmake_prefix_path)
    done = subprocess.run(
        ["pkg-config", "--cflags", "--libs", "fxwrap"], check=True, capture_output=True, text=True,
        env={"PKG_CONFIG_PATH": str(prefix / "lib" / "pkgconfig"), "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    compiler = find_compiler()
    host = built / "by_pkg_config"
    command = [*compiler.command, "-std=c++17", EXAMPLE / "host.cpp", *done.stdout.split(), "-o", host]
    subprocess.run(command, check=True, capture_output=True)
    run = subprocess.run([host, built / "model.fxw"], capture_output=True, text=True, check=True)
    assert run.stdout.startswith("input input: f32 of rank 2 on cpu\n")


def test_the_runtime_is_installed_into_a_prefix(built: Path, tmp_path: Path) -> None:
    assert main(["build", "--runtime", str(tmp_path / "prefix")]) == 0
    configure = ["cmake", "-S", EXAMPLE, "-B", tmp_path / "build", f"-DCMAKE_PREFIX_PATH={tmp_path / 'prefix'}"]
    subprocess.run(configure, check=True, capture_output=True)
    subprocess.run(["cmake", "--build", tmp_path / "build", "--target", "host"], check=True, capture_output=True)
    done = subprocess.run(
        [tmp_path / "build" / "host", built / "model.fxw"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("input input: f32")
    assert (
        str(tmp_path / "prefix")
        in subprocess.run(["ldd", tmp_path / "build" / "host"], capture_output=True, text=True, check=True).stdout
    )
