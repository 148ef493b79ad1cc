"""Graphs that differ in anything that matters have different keys; equal ones have equal keys in all processes."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap import Options
from fxwrap.artifact import environment
from fxwrap.compile_cache import key as key_module
from fxwrap.compile_cache.graph_serializer import GraphSerializer, NotCacheable
from fxwrap.devices import CPU, CUDA, scoped_registration
from fxwrap.runtime.devices import CUDA_RUNTIME
from fxwrap.torch_compat import sympy_functions
from fxwrap.wrapper_ir import Ownership
from tests.compile_cache.graphs import CALLS, dynamic_layer, hand_written_graph, key_of, plain_layer
from tests.support.child_processes import run_python
from tests.support.long_form import sample_size

_ATEN = torch.ops.aten


def _node(module: GraphModule, name: str) -> Node:
    return next(node for node in module.graph.nodes if node.name == name)


def _argument(name: str, place: int, item: Any) -> Callable[[GraphModule], None]:
    return lambda module: _node(module, name).update_arg(place, item)


def _value(name: str, make: Callable[[], Tensor]) -> Callable[[GraphModule], None]:
    def change(module: GraphModule) -> None:
        node = _node(module, name)
        with node.meta["val"].fake_mode:
            node.meta["val"] = make()

    return change


def _rename(module: GraphModule) -> None:
    _node(module, "mul").name = "product"


def _reorder_nodes(module: GraphModule) -> None:
    _node(module, "sub").prepend(_node(module, "mul"))


def _other_operator(module: GraphModule) -> None:
    _node(module, "sub").target = _ATEN.add.Tensor


def _keyword(name: str, item: Any) -> Callable[[GraphModule], None]:
    def change(module: GraphModule) -> None:
        (node,) = [node for node in module.graph.nodes if name in node.kwargs]
        node.update_kwarg(name, item)

    return change


def _with_fresh_storage(module: GraphModule) -> None:
    node = _node(module, "view")
    with node.meta["val"].fake_mode:
        node.meta["val"] = torch.empty(2, 12)


def _set_attribute(tensor: Tensor) -> Callable[[GraphModule], None]:
    def change(module: GraphModule) -> None:
        module.held = tensor

    return change


def _output(module: GraphModule) -> None:
    (output,) = module.graph.find_nodes(op="output")
    output.args = (output.args[0][::-1],)


def _trace(module: GraphModule) -> None:
    _node(module, "mul").meta["stack_trace"] = '  File "model.py", line 7, in forward\n'


def _in_module(module: GraphModule) -> None:
    _node(module, "mul").meta["nn_module_stack"] = {"layer": ("layers.0", torch.nn.Module)}


CHANGES: dict[str, Callable[[GraphModule], None]] = {
    "operator": _other_operator,
    "an int of a list": _argument("view", 1, [4, 6]),
    "a bool": _argument("sum_1", 2, False),
    "1 for True": _argument("sum_1", 2, 1),
    "1 for 1.0": _argument("mul", 1, 1),
    "a negative zero": _argument("mul", 1, -1.0),
    "a text for a dtype": _keyword("dtype", "torch.float64"),
    "a dtype": _keyword("dtype", torch.float32),
    "a keyword": _keyword("alpha", 3),
    "name": _rename,
    "order": _reorder_nodes,
    "dtype of an input": _value("x", lambda: torch.empty(4, 6, dtype=torch.float16)),
    "sizes": _value("x", lambda: torch.empty(4, 6, 1)),
    "strides": _value("y", lambda: torch.empty(4, 6)),
    "offset": _value("x", lambda: torch.empty(25)[1:].view(4, 6)),
    "device": _value("x", lambda: torch.empty(4, 6, device="meta")),
    "a conjugate": _value("x", lambda: torch.empty(4, 6, dtype=torch.complex64).conj()),
    "a complex number": _value("x", lambda: torch.empty(4, 6, dtype=torch.complex64)),
    "gradients": _value("x", lambda: torch.empty(4, 6, requires_grad=True)),
    "which memory a view is on": _with_fresh_storage,
    "layout": _value("x", lambda: torch.empty(4, 6, layout=torch.sparse_coo)),
    "content of a small constant": _set_attribute(torch.zeros(6)),
    "strides of a constant": _set_attribute(torch.arange(12.0)[::2]),
    "order of outputs": _output,
    "place in the model's source": _trace,
    "module": _in_module,
}


def test_any_graph_difference_changes_the_key() -> None:
    keys = {"": key_of(hand_written_graph())}
    for what, change in CHANGES.items():
        module = hand_written_graph()
        change(module)
        keys[what] = key_of(module)
    equal = [(a, b) for a in keys for b in keys if a < b and keys[a] == keys[b]]
    assert not equal
    assert key_of(hand_written_graph()) == keys[""]


def test_aliased_and_equal_constants_have_different_keys() -> None:
    def module(shared: bool) -> GraphModule:
        first = torch.ones(3)
        held = {"a": first, "b": first if shared else first.clone()}
        fx_graph = Graph()
        nodes = [fx_graph.get_attr(name) for name in held]
        fx_graph.output((fx_graph.call_function(_ATEN.add.Tensor, tuple(nodes)),))
        return GraphModule(held, fx_graph)

    assert key_of(module(True)) != key_of(module(False))


def _arguments() -> st.SearchStrategy[Any]:
    plain = st.one_of(
        st.none(), st.booleans(), st.integers(-3, 3), st.sampled_from([0.0, -0.0, 1.0, float("nan"), float("inf")]),
        st.sampled_from(["", "a", "1", "None", "a,b", "%x", "torch.float32"]), st.sampled_from([1j, 1 + 0j]),
        st.sampled_from([torch.float32, torch.float64, torch.strided, torch.device("cpu"), torch.preserve_format]),
    )  # fmt: skip
    return st.recursive(plain, lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner), max_leaves=6)


def _same(a: Any, b: Any) -> bool:
    """Whether two arguments are one to an operator: also in type, and in the sign of zero."""
    if isinstance(a, list | tuple) and type(a) is type(b):
        return len(a) == len(b) and all(map(_same, a, b))
    return type(a) is type(b) and repr(a) == repr(b)


@hypothesis.given(a=_arguments(), b=_arguments())
@hypothesis.settings(max_examples=sample_size(60))
def test_equal_arguments_have_equal_text(a: Any, b: Any) -> None:
    def text(item: Any) -> str:
        fx_graph = Graph()
        fx_graph.output((fx_graph.call_function(_ATEN.add.Tensor, (item,)),))
        serializer = GraphSerializer()
        serializer.add(GraphModule({}, fx_graph), None)
        return serializer.text()

    assert (text(a) == text(b)) == _same(a, b)


def test_all_compile_options_are_part_of_the_key() -> None:
    module = hand_written_graph()
    keys = [
        key_of(module), key_of(module, Options()), key_of(module, CALLS.replace(emitter="cpp")),
        key_of(module, CALLS.replace(layout="preserve")), key_of(module, CALLS.replace(memory_planning="auto")),
        key_of(module, ownership={0: Ownership.OWNED}), key_of(module, ownership={1: Ownership.OWNED}),
        key_of(module, ownership={0: Ownership.SHARED}), key_of(module, name="other"),
        key_of(module, flexible_stride_outputs=(0,)), key_of(module, flexible_stride_outputs=(1,)),
    ]  # fmt: skip
    assert len(set(keys)) == len(keys)
    assert key_of(module, CALLS.replace(compile_cache=False)) == keys[0]


def test_settings_of_torch_are_part_of_the_key() -> None:
    module = hand_written_graph()
    keys = [key_of(module)]
    torch.use_deterministic_algorithms(True)
    try:
        keys.append(key_of(module))
    finally:
        torch.use_deterministic_algorithms(False)
    torch.set_default_dtype(torch.float64)
    try:
        keys.append(key_of(module))
    finally:
        torch.set_default_dtype(torch.float32)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium" if before != "medium" else "high")
    try:
        keys.append(key_of(module))
    finally:
        torch.set_float32_matmul_precision(before)
    assert len(set(keys)) == 4
    assert key_of(module) == keys[0]


@contextmanager
def _clear_memoised() -> Iterator[None]:
    """Clears the memoised environment of the process, before and after the scope."""
    memoised = key_module.process_environment, environment.code_identity
    for function in memoised:
        function.cache_clear()
    yield
    for function in memoised:
        function.cache_clear()


@pytest.mark.parametrize("package", ["fxwrap", "torch", "triton"])
def test_a_new_version_changes_the_key(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, version = hand_written_graph(), environment.version
    before = key_of(module)
    with _clear_memoised(), monkeypatch.context() as changed:
        changed.setattr(environment, "version", lambda name: "9.9.9" if name == package else version(name))
        assert key_of(module) != before


def test_an_edit_of_fxwrap_changes_the_key(tmp_path: Path) -> None:
    package = tmp_path / "fxwrap"
    package.mkdir()
    edited = package / "lowering.py"
    edited.write_text("a = 1\n")
    before = environment.sources_hash(package)
    stamp = edited.stat().st_mtime_ns
    edited.write_text("a = 2\n")
    os.utime(edited, ns=(stamp, stamp))
    assert environment.sources_hash(package) != before


def test_symbol_information_is_part_of_the_key() -> None:
    cases: list[dict[str, int]] = [{}, {"hint": 6}, {"low": 3}, {"guard": 9}, {"guard": 10}]
    keys = [key_of(dynamic_layer(**case)) for case in cases]
    assert len(set(keys)) == len(keys)
    assert key_of(dynamic_layer(guard=9)) == keys[3]


def test_expressions_that_sympy_computes_for_ever_have_keys() -> None:
    """It computes constant terms to put them into its order of printing."""
    keys = []
    for constant in (3, 4):
        traced = dynamic_layer()
        (size, *_) = traced.graph.find_nodes(op="placeholder")[0].meta["val"].shape
        odd = size.node.expr + sympy_functions.Min(2, sympy_functions.Identity(constant))
        _node(traced, "output").meta["val"] = size.node.shape_env.create_symintnode(odd, hint=6)
        keys.append(key_of(traced))
    assert keys[0] != keys[1]


def test_symbols_of_other_graphs_are_not_part_of_the_key() -> None:
    traced = dynamic_layer()
    before = key_of(traced)
    (size, *_) = traced.graph.find_nodes(op="placeholder")[0].meta["val"].shape
    size.node.shape_env.create_unbacked_symint()
    assert key_of(traced) == before


def _not_cacheable_reason(graph_module: Any, options: Options = CALLS) -> str:
    with pytest.raises(NotCacheable) as raised:
        key_of(graph_module, options)
    return str(raised.value)


def test_graphs_without_a_textual_form_are_not_cached() -> None:
    module = hand_written_graph()
    _node(module, "mul").update_arg(1, object())
    assert "an argument is a object" in _not_cacheable_reason(module)
    module = hand_written_graph()
    _node(module, "mul").target = lambda x: x
    assert "which has no text form" in _not_cacheable_reason(module)


def test_functions_in_options_are_not_cached() -> None:
    module = hand_written_graph()
    with pytest.warns(fxwrap.errors.PassWarning):
        unnamed = CALLS.replace(passes=(fxwrap.verify,))
    assert "a pass has no key" in _not_cacheable_reason(module, unnamed)
    assert "functions" in _not_cacheable_reason(module, CALLS.replace(lowerings={"aten.add.Tensor": lambda call: "no"}))
    assert "functions" in _not_cacheable_reason(module, CALLS.replace(decompositions={}))
    on_graph = fxwrap.Pass(lambda graph: graph, key="1", at="fx_before_lowering")
    assert "metadata" in _not_cacheable_reason(module, CALLS.replace(passes=(on_graph,)))
    emitted = fxwrap.Pass(lambda graph: graph, key="1", at="fx_emitted")
    assert "changes the emitted graph" in _not_cacheable_reason(module, CALLS.replace(passes=(emitted,), emitter="fx"))
    on_program = fxwrap.Pass(lambda program: program, key="1")
    assert key_of(module, CALLS.replace(passes=(on_program,))) != key_of(module)


def test_out_of_tree_devices_are_not_cached() -> None:
    module = hand_written_graph()
    with scoped_registration(dataclasses.replace(CPU, alignment=128)):
        assert "a vendor's" in _not_cacheable_reason(module)


SCRIPT = """
import torch, fxwrap
from tests.compile_cache.graphs import CALLS, hand_written_graph, dynamic_layer, graph, key_of, plain_layer
compiled = plain_layer()
print(compiled.cached, compiled.key, compiled.source == open("SOURCE").read(), hash("seed"))
"""


def test_another_process_hits_this_ones_entry(cache_folder: Path) -> None:
    """It has another hash seed, as each process that Python starts: the forked one has that of its server."""
    program = plain_layer()
    (cache_folder / "source").write_text(program.source)
    done = run_python(["-c", SCRIPT.replace("SOURCE", str(cache_folder / "source"))])
    assert done.returncode == 0, done.stderr
    *result, seed = done.stdout.split()
    assert result == ["True", program.key, "True"]
    assert int(seed) != hash("seed") or "PYTHONHASHSEED" in os.environ


@pytest.mark.usefixtures("cache_folder")
def test_graphs_that_differ_in_the_index_of_a_device_share_an_entry() -> None:
    """Each rank of a job has a device of its own."""

    def graph_on(device: str) -> GraphModule:
        def function(x: Tensor) -> Tensor:
            return torch.sort(x + 1)[0]

        x = FakeTensor(FakeTensorMode(), torch.empty(8, device="meta"), torch.device(device))
        return make_fx(function)(x)

    options = Options(emitter="python", fuse=False)
    first, second = [fxwrap.compile_graph(graph_on(f"cuda:{number}"), options=options) for number in (0, 1)]
    assert second.cached
    assert str(second.program) == str(first.program).replace("cuda:0", "cuda:1")
    assert key_of(graph_on("cuda:0")) != key_of(graph_on("cpu"))


def test_a_gpu_without_an_index_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator with `device="cuda"` in a graph names no index; one that the machine lacks counts as the first."""
    fields = ["name", "major", "minor", "multi_processor_count", "shared_memory_per_block_optin"]
    properties = dataclasses.make_dataclass("Properties", fields)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda item: properties(f"GPU of {item}", 9, 0, 132, 1 << 17)
    )
    devices = {"cuda": "cuda", "cuda:1": "cuda:1", "cuda:5": "0"}
    for device, used in devices.items():
        assert key_module._device_text(torch.device(device), "input") == f"input GPU of {used} 9.0 132"
    assert CUDA_RUNTIME.read_limits is not None
    limits: Any = CUDA_RUNTIME.read_limits(torch.device("cuda", 5))
    assert dataclasses.replace(CUDA, **limits) == dataclasses.replace(
        CUDA, multiprocessors=132, shared_memory_bytes=1 << 17
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda item: properties(f"{item}", 8, 0, 108, 1 << 17))
    assert not CUDA_RUNTIME.read_limits(torch.device("cuda"))["supports_tensor_descriptors"]
