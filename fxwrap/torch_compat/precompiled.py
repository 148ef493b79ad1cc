"""Classes of torch's precompilation that a backend derives from; imported only where Dynamo is.

`OutputCode` is TorchInductor's, which AOTAutograd requires of each backend whose graphs it caches. It is reached
through AOTAutograd, which has imported it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import cache, wraps
from typing import Any

import torch
from torch._dynamo.aot_compile_types import BundledAOTAutogradSerializableCallable, SerializableCallable
from torch._functorch import config
from torch._functorch._aot_autograd.aot_autograd_result import OutputCode  # type: ignore[attr-defined]
from torch._functorch._aot_autograd.autograd_cache import (
    AOTAutogradCache,
    AOTAutogradCacheDetails,
    AOTAutogradCachePickler,
    log,
)

from fxwrap.torch_compat.tensors import without_traced_class

Entry = Callable[[list[object]], object]


class PrecompiledGraph(OutputCode):
    """A compiled graph for AOTAutograd's cache: a boxed entry, and bytes from which another process loads it."""

    def __init__(
        self, build: Callable[[], Entry], content: Callable[[], bytes], load: Callable[[bytes], PrecompiledGraph]
    ) -> None:
        self._boxed_call = True
        self._build = build
        self._content = content
        self._load = load
        self._entry: Entry | None = None
        # Why: AOTAutograd saves graphs that have a key of another cache, or all if `bundled_autograd_cache` is set. The
        # setting is the caller's; a backward is compiled and saved at its first call, where no code of ours is around.
        self._fx_graph_cache_key = "bundled"

    def __call__(self, inputs: Any) -> Any:
        if self._entry is None:
            self._entry = self._build()
        return self._entry(inputs)

    def prepare_for_serialization(self) -> None:
        """Makes the bytes, so that errors appear here: torch reports those of its pickling otherwise."""
        content = self._content()
        self._content = lambda: content

    def post_compile(self, example_inputs: object, constants: object, graph_kwargs: Any) -> None:
        """Builds the entry of a loaded graph; that of a backward at its first call, which may never come."""
        if not graph_kwargs.get("is_backward"):
            self._entry = self._build()

    def set_triton_bundle(self, triton_bundle: object) -> None:
        """Ignores Inductor's compiled kernels: the bytes contain a program's own."""

    def __reduce__(self) -> tuple[Callable[[bytes], PrecompiledGraph], tuple[bytes]]:
        return self._load, (self._content(),)

    def __copy__(self) -> PrecompiledGraph:
        return PrecompiledGraph(self._build, self._content, self._load)

    def __deepcopy__(self, _memo: object) -> PrecompiledGraph:
        return self.__copy__()


@cache
def bundle_precompiled_graphs() -> None:
    """Lets entries of AOTAutograd's cache contain the graphs themselves, for graphs of this class; once a process.

    Why: AOTAutograd has a setting for it, which it reads in this function; set for longer, it would change the entries
    of other backends, and would have to be reset after a backward's first compile, which torch does not report.
    """
    make_entry: Callable[..., object] = AOTAutogradCache.make_entry

    @wraps(make_entry)
    def make_bundled_entry(*arguments: Any, **keywords: Any) -> object:
        graph = arguments[0] if arguments else keywords["compiled_fw_func"]
        while hasattr(graph, "__wrapped__"):
            graph = graph.__wrapped__
        if not isinstance(graph, PrecompiledGraph):
            return make_entry(*arguments, **keywords)
        with config.patch(bundled_autograd_cache=True):
            return make_entry(*arguments, **keywords)

    AOTAutogradCache.make_entry = staticmethod(make_bundled_entry)  # type: ignore[method-assign, assignment]


@cache
def hash_no_inductor_backends(key_attribute: str) -> None:
    """Leaves Inductor's code generators out of AOTAutograd's keys of graph modules with this attribute; once a process.

    Why: the key hashes passes that are registered for them, and choices of their configuration, and imports them all
    for that, which takes a third of the time until a compiled graph is loaded. Graphs of another backend reach neither.
    """
    make: Callable[..., None] = AOTAutogradCacheDetails.__init__
    inductor: dict[str, Any] = getattr(vars(AOTAutogradCacheDetails.__mro__[1]).get("__init__"), "__globals__", {})
    register = inductor.get("init_backend_registration")
    if register is None:  # another release
        return
    is_ours: ContextVar[bool] = ContextVar("is_ours", default=False)

    def register_for_inductor() -> None:
        if not is_ours.get():
            register()

    @wraps(make)
    def make_details(details: Any, graph_module: torch.fx.GraphModule, *arguments: Any, **keywords: Any) -> None:
        if not hasattr(graph_module, key_attribute):
            make(details, graph_module, *arguments, **keywords)
            return
        token = is_ours.set(True)
        try:
            make(details, graph_module, *arguments, **keywords)
        finally:
            is_ours.reset(token)
        details.custom_backend_passes, details.custom_backend_codegen_configs = (), {}

    settings = vars(inductor["config"])
    serialize: Callable[[object], None] = settings.get("_cache_config_serializer", lambda _values: None)

    def serialize_for_inductor(values: object) -> None:
        if not is_ours.get():
            serialize(values)

    inductor["init_backend_registration"] = register_for_inductor
    settings["_cache_config_serializer"] = serialize_for_inductor  # torch before 2.15 does not call it
    AOTAutogradCacheDetails.__init__ = make_details  # type: ignore[method-assign, assignment]


@cache
def describe_no_keys(key_attribute: str) -> None:
    """Does not describe the parts of AOTAutograd's keys of graph modules with this attribute; once a process.

    Why: torch 2.11 hashes each of them again for a debug message, whether it is logged or not, and others do not.
    """
    describe: Callable[..., list[str]] = AOTAutogradCachePickler.debug_lines

    @wraps(describe)
    def debug_lines(pickler: AOTAutogradCachePickler, details: Any) -> list[str]:
        is_ours = hasattr(getattr(details, "gm", None), key_attribute)
        return [] if is_ours and not log.isEnabledFor(logging.DEBUG) else describe(pickler, details)

    AOTAutogradCachePickler.debug_lines = debug_lines


class PrecompiledCallable(SerializableCallable):
    """AOTAutograd's function of a whole graph, for `aot_compile`, which passes plain tensors for some inputs.

    Why: `aot_compile` saves what a backend returns only if it is of this class; torch 2.11 does not wrap it itself.
    """

    def __init__(self, function: Callable[..., Any], plain_inputs: Sequence[int] = ()) -> None:
        self._function = function
        self._plain_inputs = tuple(plain_inputs)

    def __call__(self, *inputs: Any) -> Any:
        if not self._plain_inputs:
            return self._function(*inputs)
        arguments = list(inputs)
        for position in self._plain_inputs:
            arguments[position] = without_traced_class(arguments[position])
        return self._function(*arguments)

    @classmethod
    def serialize_compile_artifacts(cls, fn: PrecompiledCallable) -> bytes:
        """Returns the positions of plain inputs in a line of JSON, then torch's bytes."""
        function = BundledAOTAutogradSerializableCallable(fn._function)
        content: bytes = BundledAOTAutogradSerializableCallable.serialize_compile_artifacts(function)
        return json.dumps(fn._plain_inputs).encode() + b"\n" + content

    @classmethod
    def deserialize_compile_artifacts(cls, data: bytes) -> PrecompiledCallable:
        """Returns the function of `serialize_compile_artifacts`."""
        plain_inputs, _, content = data.partition(b"\n")
        function = BundledAOTAutogradSerializableCallable.deserialize_compile_artifacts(content)
        return cls(function.compiled_fn, json.loads(plain_inputs))
