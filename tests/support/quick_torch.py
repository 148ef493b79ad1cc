"""Leaves out work of torch that no test reads, or that it repeats: imported in pytest's and in forked processes."""

from __future__ import annotations

import functools
import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch._dynamo.config
import torch._dynamo.guards
import torch._dynamo.symbolic_convert
import torch._dynamo.utils
import torch._export.utils
import torch._functorch.config
import torch._ops
import torch._subclasses.fake_tensor
import torch.fx._symbolic_trace
from torch._decomp.decompositions_for_rng import PhiloxStateTracker
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import PythonKeyTracer

from tests.support.annotations import without_annotations

# After each compile Dynamo empties the processor's caches to time the guards, for its log: 25 ms nobody here reads.
assert callable(torch._dynamo.guards.profile_guard_manager)
torch._dynamo.guards.profile_guard_manager = lambda *_guards: 0.0

# For a line of its log that is off, Dynamo finds the name of each function by splitting its file into tokens; and for
# metrics that nobody collects, it prints all settings after each compile: 3 ms.
assert callable(torch._dynamo.symbolic_convert.get_funcname)
torch._dynamo.symbolic_convert.get_funcname = lambda _file, _line: None
for _name in ("_get_dynamo_config_for_logging", "_scrubbed_inductor_config_for_logging"):
    assert callable(getattr(torch._dynamo.utils, _name))
    setattr(torch._dynamo.utils, _name, lambda: None)

# For random numbers by a setting that is off, AOTAutograd makes twelve empty tensors under its fake mode: 4 ms a graph.
_reset_random_states = PhiloxStateTracker.reset
_reset_random_states()


def _reset_used_random_states() -> None:
    if torch._functorch.config.functionalize_rng_ops:
        _reset_random_states()


PhiloxStateTracker.reset = staticmethod(_reset_used_random_states)

# Garbage is collected by its amount (tests/conftest.py), not after each compile.
assert torch._dynamo.config.run_gc_after_compile
torch._dynamo.config.run_gc_after_compile = False

# torch.export lists all composite operators for each of 28 namespaces, twice a program: 70 ms. A graph's operators are
# listed without it. It also evaluates the annotations of a nested function for each of 500 operators: 50 ms.
torch._export.utils._materialize_cpp_cia_ops = functools.cache(torch._export.utils._materialize_cpp_cia_ops)
torch._ops.OperatorBase.py_impl = without_annotations(torch._ops.OperatorBase.py_impl)

# Each fake mode keeps the stack that it was made from, for an error of two modes that meet: 5 ms with pytest's frames.
assert torch._subclasses.fake_tensor.traceback is traceback
torch._subclasses.fake_tensor.traceback = SimpleNamespace(extract_stack=list, format_list=traceback.format_list)

# Fake tensors cache what operators return. Few operators with symbolic sizes are called twice, and an entry takes
# longer than the operator: a quarter of a trace.
_cached_dispatch = FakeTensorMode._cached_dispatch_impl


def _dispatch(mode: FakeTensorMode, func: Any, types: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    if any(map(_is_symbolic, args)):
        return mode._dispatch_impl(func, types, args, kwargs)
    return _cached_dispatch(mode, func, types, args, kwargs)


def _is_symbolic(argument: object) -> bool:
    if isinstance(argument, FakeTensor):
        return argument._has_symbolic_sizes_strides
    if isinstance(argument, list | tuple):
        return any(map(_is_symbolic, argument))
    return isinstance(argument, torch.SymInt)


FakeTensorMode._cached_dispatch_impl = _dispatch

# The tracer of make_fx replaces two methods of all modules by functions that do the same. To set attributes of a
# class with thousands of subclasses takes milliseconds, and transformers has so many.
_patch_method = torch.fx._symbolic_trace._Patcher.patch_method


def _patch_other_methods(patcher: Any, owner: type, name: str, function: Callable[..., Any], **flags: bool) -> None:
    variables = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    if owner is torch.nn.Module and type(variables["self"].cell_contents) is PythonKeyTracer:
        return
    _patch_method(patcher, owner, name, function, **flags)


torch.fx._symbolic_trace._Patcher.patch_method = _patch_other_methods

# Files of the cache are synced, so that they survive a machine that stops: 7 ms each. Those of tests need not.
os.fsync = lambda _file: None

# For a device that is not there, torch.manual_seed keeps the stack that it was called from as text: a millisecond each.
for _devices in (torch.cuda, torch.xpu, torch.mtia):
    if not _devices.is_available():
        _devices.manual_seed_all = lambda _seed: None
