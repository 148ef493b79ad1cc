"""Compiled functions of Dynamo: who compiled a graph, and the graphs that a function runs.

Why: torch has no public way from the result of `torch.compile` to its graphs. All imports of Dynamo are inside
functions (see `dynamo.py`).
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch._guards import CompileContext, TracingContext

_GRAPH_PREFIX, _RESUME_PREFIX = "__compiled_fn", "__resume_at"
"""The prefixes of the global names by which Dynamo's code calls compiled graphs, and continues after graph breaks."""

_ATTRIBUTE = "_fxwrap_compile"


def generated_kernels() -> int | None:
    """Returns how many kernels TorchInductor generated in this process; None if it was not used.

    Why: it has no public counter. It is read only where the user's own `torch.compile(backend="inductor")` imported it.
    """
    metrics = sys.modules.get("torch._inductor.metrics")
    return None if metrics is None else int(metrics.generated_kernel_count)


@dataclass(frozen=True)
class DynamoCompile:
    """A compile of Dynamo: its id ("0/0"), the global name of its graph, and the compiled functions that called it.

    `owners` are weak references, to modules and functions; "" and () outside torch.compile.
    """

    compile_id: str = ""
    graph_id: str = ""
    owners: tuple[weakref.ref[Any], ...] = ()


@dataclass(frozen=True)
class DynamoFunction:
    """A function or module that torch.compile wrapped, its backend, and the name of that."""

    root: Any
    backend: Any
    backend_name: str

    def owns(self, compile_: DynamoCompile) -> bool:
        """Whether a call of this function led to the compile."""
        return any(owner() is self.root for owner in compile_.owners)


def begin_dynamo_compile(graph_module: torch.fx.GraphModule) -> None:
    """Notes the id and the callers of the graph that Dynamo compiles now, for `current_dynamo_compile`.

    The note is on torch's own context of the compile, which AOTAutograd restores where it compiles the backward later.
    """
    context = TracingContext.try_get()
    if context is not None:
        graph_id = str(graph_module.meta.get("backend_id", ""))
        note = DynamoCompile(str(CompileContext.current_compile_id() or ""), graph_id, tuple(_calling_owners()))
        setattr(context, _ATTRIBUTE, note)


def guard_forward_mode() -> None:
    """Makes the function that Dynamo compiles depend on the level of torch.autograd.forward_ad, which it may not know.

    Why: Dynamo has this guard, but adds it nowhere, and AOTAutograd's graphs drop the tangents of their inputs.
    """
    context = TracingContext.try_get()
    if context is not None:
        from torch._dynamo.guards import GuardBuilder
        from torch._dynamo.source import GlobalStateSource

        context.guards_context.dynamo_guards.add(GlobalStateSource().make_guard(GuardBuilder.DUAL_LEVEL))


def current_dynamo_compile() -> DynamoCompile:
    """Returns the compile of Dynamo that is running."""
    return getattr(TracingContext.try_get(), _ATTRIBUTE, None) or DynamoCompile()


class CompileObserver:
    """Calls functions when Dynamo begins to compile a frame, with the backend that will compile it, and when it ends.

    Why: the handler of such functions is public, but it does not know the backend.
    """

    def __init__(self, begin: Callable[[Any], None], end: Callable[[], None]) -> None:
        self._begin, self._end = begin, end

    def register(self) -> None:
        """Lets Dynamo call the functions until `torch.compiler.reset()`; only once if it does so already."""
        from torch._dynamo.callback import callback_handler

        if self._on_start not in callback_handler.start_callbacks:
            callback_handler.register_start_callback(self._on_start)
            callback_handler.register_end_callback(self._on_end)

    def register_if_imported(self) -> None:
        """Does `register` if this process has imported Dynamo."""
        if hasattr(sys.modules.get("torch._dynamo"), "callback_handler"):
            self.register()

    def _on_start(self, _arguments: object) -> None:
        from torch._dynamo.eval_frame import innermost_backend

        callback = next(_calling_frames(), {}).get("callback")
        backend = innermost_backend(callback) if callable(callback) else None
        self._begin(getattr(backend, "compiler_fn", backend))

    def _on_end(self, _arguments: object) -> None:
        self._end()


def _calling_frames() -> Iterator[Mapping[str, Any]]:
    """Yields the variables of frames of this thread that call compiled functions, the innermost first."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "compile_wrapper" and frame.f_code.co_filename.endswith("eval_frame.py"):
            yield frame.f_locals
        frame = frame.f_back  # type: ignore[assignment]


def _calling_owners() -> Iterator[weakref.ref[Any]]:
    """Yields the roots of the compiled functions that are being called."""
    for variables in _calling_frames():
        root = _root_of(variables.get("fn"))
        if root is not None:
            with suppress(TypeError):  # of a callable without weak references
                yield weakref.ref(root)


def _root_of(function: Any) -> Any:
    """Returns the module of a method of a module, and the function inside of Dynamo's own wrapper."""
    if isinstance(function, MethodType):
        return function.__self__
    if isinstance(function, FunctionType) and function.__code__.co_filename.endswith("external_utils.py"):
        return _root_of(getattr(function, "__wrapped__", function))
    return function


def compiled_function(function: Any) -> DynamoFunction | None:
    """Returns the root and backend of a result of torch.compile, or of a module after `compile()`; else None."""
    wrapper = function
    if isinstance(function, torch.nn.Module):
        wrapper = vars(function).get("forward") if hasattr(function, "_orig_mod") else function._compiled_call_impl
    inner = getattr(wrapper, "_torchdynamo_orig_callable", None)
    if inner is None:
        return None
    from torch._dynamo.eval_frame import innermost_backend, innermost_fn

    cells = dict(zip(wrapper.__code__.co_freevars, wrapper.__closure__ or (), strict=True))
    callback = cells["callback"].cell_contents if "callback" in cells else None
    backend = innermost_backend(callback) if callable(callback) else None
    name = getattr(backend, "compiler_name", None) or getattr(backend, "__name__", str(backend))
    root = function._orig_mod if hasattr(function, "_orig_mod") else innermost_fn(inner)
    return DynamoFunction(_root_of(root), getattr(backend, "compiler_fn", backend), str(name))


def dynamo_graph_ids(compiled: DynamoFunction) -> set[str]:
    """Returns the global names of the graphs in Dynamo's code for a function, its graph breaks and its submodules."""
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list

    pending = list(_functions_of(compiled.root))
    ids, seen = set[str](), set[CodeType]()
    while pending:
        function = pending.pop()
        if function.__code__ in seen:
            continue
        seen.add(function.__code__)
        for entry in _debug_get_cache_entry_list(function.__code__):
            for name in entry.code.co_names:
                if name.startswith(_GRAPH_PREFIX):
                    ids.add(name)
                elif name.startswith(_RESUME_PREFIX):
                    resumed = function.__globals__.get(name)
                    pending += [resumed] if isinstance(resumed, FunctionType) else []
    return ids


def _functions_of(root: Any) -> Iterator[FunctionType]:
    """Yields the Python functions whose frames Dynamo compiles for a root."""
    candidates: list[Callable[..., Any]] = [root]
    if isinstance(root, torch.nn.Module):
        candidates = [module.forward for module in root.modules()]
    for candidate in candidates:
        function = getattr(candidate, "__func__", candidate)
        if isinstance(function, FunctionType):
            yield function
