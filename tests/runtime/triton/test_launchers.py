"""Launchers that Triton compiles for signatures: several threads load them."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import triton
from torch.torch_version import TorchVersion
from triton.runtime import build

from fxwrap.runtime.triton.compile import import_triton
from fxwrap.torch_compat import load_separately

NAME = "__triton_launcher"
SOURCE = """
#include <Python.h>
static PyObject* launch(PyObject* self, PyObject* args) { return PyLong_FromLong(NUMBER); }
static PyMethodDef methods[] = {{"launch", launch, METH_NOARGS, ""}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "__triton_launcher", NULL, -1, methods};
PyMODINIT_FUNC PyInit___triton_launcher(void) { return PyModule_Create(&definition); }
"""


def test_launchers_share_no_module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two threads may load one each before either reads its function."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    import_triton()
    if TorchVersion(triton.__version__) >= "3.7":  # it has one launcher for all signatures
        monkeypatch.setattr(build, "_load_module_from_path", load_separately(build._load_module_from_path))

    def load(number: int) -> ModuleType:
        module: ModuleType = build.compile_module_from_src(SOURCE.replace("NUMBER", str(number)), NAME)
        return module

    modules = [load(number) for number in (1, 2, 1, 2)]
    assert [module.launch() for module in modules] == [1, 2, 1, 2]
    assert len({id(module) for module in modules}) == 4
