"""What a process that runs tests has beside `tests/conftest.py`: settings of torch, and fixtures that watch it."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Iterator
from contextlib import suppress
from zlib import crc32

import hypothesis
import pytest
import torch
from torch._dynamo.utils import counters
from torch._functorch._aot_autograd import runtime_wrappers

import tests.support.quick_torch  # noqa: F401
from fxwrap.errors import NativeBuildError
from fxwrap.runtime.native import KERNEL_FLAGS_ENV, find_compiler
from fxwrap.runtime.native.precompiled_headers import precompile_program_headers
from tests.support.long_form import LONG
from tests.support.process_settings import settings_unchanged

# No deadline: a test shares its core with compilers, and an example that builds a kernel takes seconds once.
# In CI the same examples and inputs each time, whatever ran before: a change is judged by what it changed.
# Elsewhere new ones, to find what is left.
hypothesis.settings.register_profile("fxwrap", deadline=None, derandomize="CI" in os.environ)
hypothesis.settings.load_profile("fxwrap")

torch.set_num_threads(1)

# pytest gives its handlers to each logger that does not propagate; where torch's trace has any, it is written out.
logging.getLogger("torch.__trace").propagate = True


@pytest.fixture(autouse=True)
def no_backend_failures() -> Iterator[None]:
    """Fail a test in which Dynamo took an error of the backend for a graph break and ran the graph in eager mode."""
    counters["unimplemented"].clear()
    yield
    breaks = [reason for reason in counters["unimplemented"] if "Backend compiler" in reason]
    assert not breaks, f"the backend failed, and Dynamo ran the graph itself: {breaks}"


@pytest.fixture(autouse=True)
def unchanged_settings() -> Iterator[None]:
    """Fail a test that leaves a setting of the process changed, which decides what other tests test."""
    with settings_unchanged():
        yield


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """Forget what torch.compile has compiled, before each test and after it: 15 microseconds where that is nothing.

    A module whose tests share a compiled function has a fixture of this name that does nothing.
    """
    torch.compiler.reset()
    yield
    torch.compiler.reset()
    # In torch 2.15, storing streams replaces Dynamo's list, and AOTAutograd goes on with the replaced one.
    replaced = getattr(runtime_wrappers, "index_to_external_object_weakref", [])
    replaced.clear()


@pytest.fixture
def exact_convolutions() -> Iterator[None]:
    """The same cuDNN algorithm each time, in full float32: eager and compiled code then agree to rounding."""
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False):
        yield


# Their subject is the code of kernels, which has the flags of a user's kernels. Those of other tests compile in a third
# of the time, with loops that are no vectors; in the long form all have the flags of a user's.
_TESTS_OF_KERNELS = ("printers", "lowering/rules", "opinfo")
_FLAGS = "-Og"
_SETS_FLAGS = not LONG and KERNEL_FLAGS_ENV not in os.environ


@pytest.fixture(scope="session", autouse=True)
def precompiled_headers() -> None:
    """Precompiles the headers of kernels with these flags too, where the cache does not have them."""
    if _SETS_FLAGS:
        with pytest.MonkeyPatch.context() as patch, suppress(NativeBuildError):  # there is no compiler
            patch.setenv(KERNEL_FLAGS_ENV, _FLAGS)
            precompile_program_headers(find_compiler())


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Sets the flags of C++ kernels and, in CI, seeds the generators of inputs, before the fixtures of a test."""
    if _SETS_FLAGS:
        of_kernels = any(f"/tests/{folder}/" in item.path.as_posix() for folder in _TESTS_OF_KERNELS)
        os.environ[KERNEL_FLAGS_ENV] = "" if of_kernels else _FLAGS
    if "CI" in os.environ:
        seed = crc32(item.nodeid.encode())
        torch.manual_seed(seed)
        random.seed(seed)
