"""Writes in functional form: of inputs, parts of memory, in branches; and the way back to the compiled program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives  # the rules for fake tensors of its operators
from torch._ops import OpOverload
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap.compile.steps import plan_program
from fxwrap.errors import FxImportError, UnsupportedError
from fxwrap.wrapper_ir import Program
from tests.support.jobs import fake_job
from tests.support.program_equality import assert_equal
from tests.support.samples import SAMPLES

_ATEN = torch.ops.aten
Tensors = tuple[torch.Tensor, ...]


def _slice_of_cache(x: torch.Tensor, cache: torch.Tensor, w: torch.Tensor) -> Tensors:
    new = _ATEN.slice_scatter.default(cache, x @ w, 0, 1, 4)
    out = torch.softmax(new, -1)
    cache.copy_(new)
    return (out,)


def _columns_of_cache(x: torch.Tensor, cache: torch.Tensor, w: torch.Tensor) -> Tensors:
    cache[:, 1:4].copy_(torch.tanh(x @ w).t()[:5])
    cache[:, 0].add_(1)
    return (cache.sum(1),)


def _rows(x: torch.Tensor, y: torch.Tensor, _z: torch.Tensor) -> Tensors:
    y[0].copy_(x[0])
    y[1].copy_(x[1] * 2)
    y[2:].copy_(torch.softmax(y[2:], -1))
    return ()


def _whole(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> Tensors:
    y.mul_(2)
    y[:3].add_(x)
    z.copy_(y + 1)
    return (y + z,)


def _exchanged(_x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> Tensors:
    first, second = y + 1, z + 1
    y.copy_(second)
    z.copy_(first)
    return ()


def _returned(_x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> Tensors:
    y.mul_(2)
    return y, y.t(), z


def _indices(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> Tensors:
    y[:, torch.tensor([0, 2])] += 1
    z.index_add_(0, torch.tensor([1, 1]), x[:2])
    return (y.sum(),)


def _branches(x: torch.Tensor, y: torch.Tensor, _z: torch.Tensor) -> Tensors:
    def then(a: torch.Tensor) -> Tensors:
        return (a.sin() + 1,)

    def otherwise(a: torch.Tensor) -> Tensors:
        new = torch.zeros_like(a)
        new[0] = a[1]
        return (new,)

    (result,) = torch.cond(x.sum() > 0, then, otherwise, (x,))
    y[:3].copy_(result)
    return (result,)


CASES: dict[str, Callable[..., Tensors]] = {
    function.__name__.strip("_"): function
    for function in (
        _slice_of_cache, _columns_of_cache, _rows, _whole, _exchanged, _returned, _indices, _branches,
    )
}  # fmt: skip
OPTIONS = {
    "cpp": fxwrap.Options(memory_planning="none", compile_cache=False),
    "triton": fxwrap.Options(memory_planning="none", compile_cache=False, cpu_kernels="triton"),
    "pools": fxwrap.Options(memory_planning="auto", compile_cache=False),
    "reuse": fxwrap.Options(memory_planning="reuse", compile_cache=False),
}


def _inputs() -> list[torch.Tensor]:
    return [torch.randn(3, 5), torch.randn(5, 5), torch.randn(5, 5)]


def _run(function: Callable[..., Any], inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the results and the inputs after a call."""
    copies = [item.clone() for item in inputs]
    with torch.no_grad():
        return [*function(*copies), *copies]


def _assert_same(wanted: list[torch.Tensor], actual: list[torch.Tensor]) -> None:
    for one, other in zip(wanted, actual, strict=True):
        assert one.stride() == other.stride()
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", CASES)
def test_writes_come_back(name: str, options: str) -> None:
    graph = make_fx(CASES[name], tracing_mode="fake")(*_inputs())
    program = fxwrap.compile_graph(graph, _inputs(), options=OPTIONS[options]).program
    module = fxwrap.to_fx(program, form="functional").graph_module
    inputs = _inputs()
    wanted = _run(fxwrap.to_python(program), inputs)
    _assert_same(wanted, _run(module, inputs))
    imported = plan_program(fxwrap.from_fx(module), OPTIONS[options].resolve_devices())
    assert_equal(program, imported)
    _assert_same(wanted, _run(fxwrap.to_python(imported), inputs))


@pytest.mark.parametrize("name", ["slice_of_cache", "columns_of_cache", "whole"])
def test_writes_with_symbolic_sizes_come_back(name: str) -> None:
    graph = make_fx(CASES[name], tracing_mode="symbolic")(*_inputs())
    program = fxwrap.compile_graph(graph, _inputs(), options=OPTIONS["cpp"]).program
    module = fxwrap.to_fx(program, form="functional").graph_module
    assert_equal(program, fxwrap.from_fx(module))


NOT_RUNNING = {"types", "devices_and_streams", "collectives", "collectives_into_buffers", "owned_inputs"}
RUNNING_SAMPLES = sorted(set(SAMPLES) - NOT_RUNNING)


@pytest.mark.filterwarnings("ignore:The reduce argument of torch.scatter")
@pytest.mark.parametrize("name", RUNNING_SAMPLES)
def test_every_line_has_a_functional_form(name: str) -> None:
    sample = SAMPLES[name]
    program = sample.program()
    module = fxwrap.to_fx(program, form="functional").graph_module
    for function in (module, fxwrap.to_python(fxwrap.from_fx(module)), fxwrap.fx.in_place(module)):
        torch.manual_seed(0)
        inputs, own = sample.inputs(3), sample.inputs(3)
        wanted = fxwrap.to_python(program)(*inputs)
        torch.manual_seed(0)
        with torch.no_grad():
            results = function(*own)
        for one, other in zip([*wanted, *inputs], [*results, *own], strict=True):
            if isinstance(one, torch.Tensor):
                torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_collectives_into_buffers_have_no_functional_form() -> None:
    with pytest.raises(fxwrap.errors.UnsupportedError, match="the collective writes its operands; use the in-place"):
        fxwrap.to_fx(SAMPLES["collectives_into_buffers"].program(), form="functional")


def test_collectives_in_place_have_a_functional_form() -> None:
    module = fxwrap.to_fx(SAMPLES["collectives"].program(), form="functional").graph_module
    targets = [str(node.target) for node in module.graph.nodes]
    assert targets.count("_c10d_functional.all_reduce.default") == 2
    assert not [target for target in targets if "_." in target]


def test_results_of_collectives_in_place() -> None:
    """Each result is waited for twice, and read through views; with the group's ranks, all_reduces change nothing."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        c10d = torch.ops._c10d_functional
        first, second = c10d.all_reduce_coalesced([x.sin(), x.cos()], "sum", "0")
        view, total = c10d.wait_tensor(first).view(2, 4), c10d.wait_tensor(second) + 1
        return view.t() + 1, c10d.wait_tensor(first).exp(), total

    x = torch.linspace(-1, 1, 8)
    program = fxwrap.compile_graph(make_fx(function, tracing_mode="fake")(x), [x], options=OPTIONS["cpp"]).program
    assert "all_reduce_coalesced_.default" in str(program)
    module = fxwrap.to_fx(program, form="functional").graph_module
    with fake_job(2):
        wanted = fxwrap.to_python(program)(x)
        for form in (module, fxwrap.fx.in_place(module)):
            torch.testing.assert_close(list(form(x)), list(wanted), rtol=0, atol=0)


# --- final writes of inputs -------------------------------------------------------------------------------------------


def test_inputs_are_written_at_the_end() -> None:
    module = fxwrap.to_fx(_compiled(_whole), form="functional").graph_module
    nodes = [node for node in module.graph.nodes if node.op == "call_function"]
    assert [node.target for node in nodes[-2:]] == [_ATEN.copy_.default, _ATEN.copy_.default]
    assert [node.args[0].op for node in nodes[-2:]] == ["placeholder", "placeholder"]


@pytest.mark.every_combination
@pytest.mark.parametrize("import_graph", [fxwrap.from_fx, fxwrap.fx.in_place])
@pytest.mark.parametrize("through_view", [False, True])
def test_a_read_after_the_final_write_is_rejected(
    import_graph: Callable[[GraphModule], Any], through_view: bool
) -> None:
    """A rewrite reads an input, or a view of it, where its content is new; a view that is only returned is no read."""
    module = fxwrap.to_fx(_compiled(_whole), form="functional").graph_module
    output = module.graph.output_node()
    (read,) = [node for node in module.graph.find_nodes(op="placeholder") if node.name == "y_1"]
    (write,) = [node for node in read.users if node.target is _ATEN.copy_.default]
    with module.graph.inserting_before(output):
        if through_view:
            read = module.graph.call_function(_ATEN.unsqueeze.default, (read, 0))
    output.args = ((*output.args[0], read),)  # type: ignore[misc]
    fxwrap.from_fx(module)
    with module.graph.inserting_before(output):
        read = module.graph.call_function(_ATEN.sum.default, (read,))
    output.args = ((*output.args[0], read),)  # type: ignore[misc]
    text = rf"node '{read.name}' .*it reads 'y_1' after '{write.name}', the final write of it, and so its new content"
    remedy = f"Move it before '{write.name}' for the old content, or read '{write.args[1]}'"
    with pytest.raises(FxImportError, match=f"(?s){text}.*{remedy}"):
        import_graph(module)


def test_a_read_of_the_old_content_keeps_its_copy() -> None:
    """A rewrite may read an input before the end, where the kernel would overwrite it: then it stays a copy."""
    module = fxwrap.to_fx(_compiled(_whole), form="functional").graph_module
    output = module.graph.output_node()
    (placeholder,) = [node for node in module.graph.find_nodes(op="placeholder") if node.name == "y_1"]
    first = next(node for node in module.graph.nodes if node.target is _ATEN.copy_.default)
    with module.graph.inserting_before(first):
        read = module.graph.call_function(_ATEN.sum.default, (placeholder,))
    output.args = ((*output.args[0], read),)  # type: ignore[misc]
    module.recompile()
    inputs = _inputs()
    wanted = _run(module, inputs)
    torch.testing.assert_close(wanted[1], inputs[1].sum())
    _assert_same(wanted, _run(fxwrap.to_python(fxwrap.from_fx(module)), inputs))


def _compiled(function: Callable[..., Tensors]) -> Program:
    return fxwrap.compile_graph(make_fx(function)(*_inputs()), _inputs(), options=OPTIONS["cpp"]).program


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "extern.mutate @aten.squeeze_.default(%x) writes=(%x)",
            r"squeeze_.*changes the shape of its operand, .*; call the operator that returns a view",
        ),
        (
            "%p = memory.view(%x) : f32[3, 4 | 0, 1]@cpu\n  extern.mutate @aten.neg_.default(%p) writes=(%p)",
            r"neg_.*several elements of %p are one element of %x; write the tensor that it expands",
        ),
    ],
)
def test_writes_without_a_functional_form_are_named(line: str, message: str) -> None:
    program = fxwrap.parse(f"program @written(%x: mutable f32[4]@cpu) {{\n  {line}\n  control.return()\n}}\n")
    with pytest.raises(UnsupportedError, match=message):
        fxwrap.to_fx(program, form="functional")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layouts": [2, 3]}, "layouts has the rank, sizes and strides"),
        ({"layouts": [1, 3, 1], "dtypes": []}, "more results than the 0 of dtypes"),
        ({"dtypes": ["float31"]}, "float31"),
    ],
)
def test_layouts_that_describe_no_results_are_rejected(changes: dict[str, Any], message: str) -> None:
    module = fxwrap.to_fx(SAMPLES["cpp_kernel_with_two_outputs"].program(), form="functional").graph_module
    launch, *_ = module.graph.find_nodes(op="call_function", target=torch.ops.fxwrap.cpp_kernel_functional.default)
    launch.kwargs = {**launch.kwargs, **changes}
    with pytest.raises(FxImportError, match=rf"layouts and dtypes do not describe the results.*{message}"):
        fxwrap.from_fx(module)


# --- functions --------------------------------------------------------------------------------------------------------

WRITING_FUNCTION = """
program @writing(%x: borrowed f32[4]@cpu, %m: mutable f32[8]@cpu) {
  %low = memory.view(%m) : f32[4]@cpu
  %a = control.call @step(%x, %low) writes=(%low) : f32[]@cpu
  %high = memory.view(%m) : f32[4 | 1 | 4]@cpu
  %b = control.call @step(%x, %high) writes=(%high) : f32[]@cpu
  control.return(%a, %b)
}
function @step(%y: f32[4]@cpu, %n: f32[4]@cpu) {
  extern.mutate @aten.add_.Tensor(%n, %y) writes=(%n)
  %sum = extern.call @aten.sum.default(%n) : f32[]@cpu
  control.yield(%sum)
}
"""


ADD = "extern.mutate @aten.add_.Tensor(%n, %y) writes=(%n)"
INNER = """function @inner(%k: f32[4]@cpu, %l: f32[4]@cpu) {
  extern.mutate @aten.add_.Tensor(%l, %k) writes=(%l)
  %s = extern.call @aten.sum.default(%l) : f32[]@cpu
  control.yield(%s)
}
"""


def _with_options(options: str) -> str:
    text = WRITING_FUNCTION.replace("writes=(%low)", f"writes=(%low) {options}")
    return text.replace("writes=(%high)", f"writes=(%high) {options}".replace("%low", "%high"))


def _with_body(*lines: str) -> str:
    return WRITING_FUNCTION.replace(ADD, "\n  ".join(lines))


WRITING_FUNCTIONS = {
    "plain": WRITING_FUNCTION,
    "captured": _with_options("max_captures=4"),
    "captured_at_fixed_addresses": _with_options("max_captures=4 static_operands=(%low)"),
    "twice": _with_body(ADD, "extern.mutate @aten.mul_.Tensor(%n, %y) writes=(%n)"),
    "whole": _with_body("extern.mutate @aten.copy_.default(%n, %y) writes=(%n)"),
    "part": _with_body(
        "%p = memory.view(%n) : f32[2 | 1 | 1]@cpu", "extern.mutate @aten.mul_.Scalar(%p, 2.0) writes=(%p)"
    ),
    "old_content": _with_body(
        "%old = extern.call @aten.clone.default(%n) : f32[4]@cpu",
        ADD,
        "extern.mutate @aten.mul_.Tensor(%n, %old) writes=(%n)",
        "memory.free(%old)",
    ),
    "both_operands": _with_body(ADD, "extern.mutate @aten.mul_.Tensor(%y, %n) writes=(%y)")
    .replace("%x: borrowed", "%x: mutable")
    .replace("writes=(%low)", "writes=(%x, %low)")
    .replace("writes=(%high)", "writes=(%x, %high)"),
    "nested": _with_body("%q = control.call @inner(%y, %n) writes=(%n) : f32[]@cpu", "memory.free(%q)").replace(
        "function @step", f"{INNER}function @step"
    ),
    "memory_of_the_program": WRITING_FUNCTION.replace("%m: mutable f32[8]@cpu", "%z: borrowed f32[8]@cpu")
    .replace("%low = memory.view", "%m = extern.call @aten.clone.default(%z) : f32[8]@cpu\n  %low = memory.view")
    .replace("return(%a, %b)", "return(%a, %b, %m)"),
}


def _without_metadata(module: GraphModule) -> GraphModule:
    """Leaves the types of values, as torch's tracing does."""
    for part in module.modules():
        for node in part.graph.nodes if isinstance(part, GraphModule) else ():
            node.meta = {"val": node.meta["val"]} if "val" in node.meta else {}
    return module


@pytest.mark.parametrize("name", WRITING_FUNCTIONS)
def test_functions_that_write_return_new_contents_and_come_back(name: str) -> None:
    program = fxwrap.verify(fxwrap.parse(WRITING_FUNCTIONS[name]))
    module = fxwrap.to_fx(program, form="functional").graph_module
    assert not _writing_nodes(module)
    inputs = [torch.randn(4), torch.randn(8)]
    wanted = _run(fxwrap.to_python(program), inputs)
    _assert_same(wanted, _run(module, inputs))
    imported = fxwrap.from_fx(module)
    _assert_same(wanted, _run(fxwrap.to_python(imported), inputs))
    assert_equal(program, imported)
    _assert_same(wanted, _run(fxwrap.to_python(fxwrap.from_fx(_without_metadata(module))), inputs))


def _writing_nodes(module: GraphModule) -> list[Node]:
    """Returns the nodes that write, without the final copies into inputs."""
    graphs = [part.graph for part in module.modules() if isinstance(part, GraphModule)]
    writing = [node for graph in graphs for node in graph.nodes if _is_mutable(node)]
    return [node for node in writing if node.target is not _ATEN.copy_.default or node.args[0].op != "placeholder"]  # type: ignore[union-attr]


def _is_mutable(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


# --- in-place operators without metadata ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "lines",
    [
        ["extern.mutate @aten.add_.Tensor(%x, %y, alpha=2) writes=(%x)"],
        ["extern.mutate @aten.relu_.default(%x) writes=(%x)", "extern.mutate @aten.mul_.Tensor(%x, %y) writes=(%x)"],
        ["%p = memory.view(%x) : f32[4 | 2 | 1]@cpu", "extern.mutate @aten.mul_.Scalar(%p, 2.0) writes=(%p)"],
        ["%a = extern.call @aten.add.Tensor(%x, %x) : f32[8]@cpu",
         "extern.mutate @aten.copy_.default(%x, %a) writes=(%x)", "memory.free(%a)"],
        ["%a = extern.call @aten.add.Tensor(%x, %y) : f32[8]@cpu",
         "extern.mutate @aten.mul_.Tensor(%x, %a) writes=(%x)", "memory.free(%a)"],
    ],
)  # fmt: skip
def test_in_place_operators_come_back_without_metadata(lines: list[str]) -> None:
    body = "".join(f"  {line}\n" for line in lines)
    text = f"program @program(%x: mutable f32[8]@cpu, %y: borrowed f32[8]@cpu) {{\n{body}  control.return()\n}}\n"
    program = fxwrap.verify(fxwrap.parse(text))
    module = fxwrap.to_fx(program, form="functional").graph_module
    assert_equal(program, fxwrap.from_fx(module))
    assert_equal(program, fxwrap.from_fx(_without_metadata(module)))


# --- lines without a functional operator ------------------------------------------------------------------------------

RATES = "lr=0.1, beta1=0.9, beta2=0.9, weight_decay=0.0, eps=0.1, amsgrad=false, maximize=false"
LINES_ON_COPIES = {
    "a strided write": [
        "%p = memory.view(%x) : f32[2, 2 | 3, 2 | 1]@cpu", "extern.mutate @aten.neg_.default(%p) writes=(%p)"
    ],
    "two written operands": [
        "%n = extern.call @aten.ones_like.default(%x) : f32[8]@cpu",
        "extern.mutate @aten.rrelu_with_noise_.default(%x, %n) writes=(%x, %n)",
        "memory.free(%n)",
    ],
    "a list of parts": [
        "%p = memory.view(%x) : f32[4]@cpu", "%q = memory.view(%x) : f32[4 | 1 | 4]@cpu",
        "extern.mutate @aten._foreach_mul_.Scalar([%p, %q], 3.0) writes=(%p, %q)",
    ],
    "an optimizer": [
        "%s = extern.call @aten.sum.default(%y) : f32[]@cpu",
        "%a = extern.call @aten.zeros_like.default(%y) : f32[8]@cpu",
        "%b = extern.call @aten.zeros_like.default(%y) : f32[8]@cpu",
        "extern.mutate @aten._fused_adam_.default([%x], [%y], [%a], [%b], [], [%s], RATES) writes=(%x, %a, %b, %s)",
        "memory.free(%s)", "memory.free(%a)", "memory.free(%b)",
    ],
    "an out variant": ["extern.call @aten.full.out([8], 3.0) outs=(%x)"],
    "an out variant into new memory": [
        "%a = memory.alloc() : f32[8]@cpu", "extern.call @aten.full.out([8], 3.0) outs=(%a)",
        "extern.mutate @aten.mul_.Tensor(%x, %a) writes=(%x)", "memory.free(%a)",
    ],
    "a kernel that reads another part": [
        "%p = memory.view(%x) : f32[4]@cpu", "%q = memory.view(%x) : f32[4 | 1 | 4]@cpu",
        "kernel.launch @relu(%q, 4) outs=(%p)",
    ],
    "a Triton kernel that reads another part": [
        "%p = memory.view(%x) : f32[4]@cpu", "%q = memory.view(%x) : f32[4 | 1 | 4]@cpu",
        "kernel.launch @relu(%q, 4) outs=(%p) grid=(1, 1, 1)",
    ],
}  # fmt: skip


def _program_of(lines: list[str]) -> Program:
    body = "".join(f"  {line}\n" for line in lines).replace("RATES", RATES)
    head = "program @program(%x: mutable f32[8]@cpu, %y: borrowed f32[8]@cpu) {\n"
    kernels = SAMPLES["triton_kernel" if "grid=" in body else "mlp"].kernels if "@relu" in body else ()
    return fxwrap.verify(fxwrap.parse(f"{head}{body}  control.return()\n}}\n").replace(kernels=kernels))


@pytest.mark.parametrize("name", LINES_ON_COPIES)
def test_lines_run_on_copies_of_their_operands(name: str) -> None:
    program = _program_of(LINES_ON_COPIES[name])
    module = fxwrap.to_fx(program, form="functional").graph_module
    assert not [node for node in module.graph.nodes if _is_mutable(node) and node.target is not _ATEN.copy_.default]
    inputs = [torch.randn(8), torch.rand(8)]
    wanted = _run(fxwrap.to_python(program), inputs)
    traced = make_fx(module, tracing_mode="fake")(*inputs)
    for function in (module, traced, fxwrap.to_python(fxwrap.from_fx(traced))):
        _assert_same(wanted, _run(function, inputs))
    assert_equal(program, fxwrap.from_fx(module))


# --- out variants -----------------------------------------------------------------------------------------------------

OUT_VARIANTS = {
    "symbolic strides": """
program @out(%x: borrowed f32[s0, 3]@cpu) {
  s0 = symbol.size(%x) range=(0, inf) dim=0
  %y = memory.alloc() : f32[s0, 3 | 1, max(1, s0)]@cpu
  extern.call @aten.sin.out(%x) outs=(%y)
  control.return(%y)
}
""",
    "memory with content": """
program @out(%x: borrowed f32[5, 3]@cpu) {
  %y = memory.alloc() : f32[5, 3 | 1, 5]@cpu
  extern.call @aten.sin.out(%x) outs=(%y)
  %z = extern.call @aten.sum.default(%y) : f32[]@cpu
  extern.call @aten.cos.out(%x) outs=(%y)
  control.return(%y, %z)
}
""",
}


@pytest.mark.parametrize("name", OUT_VARIANTS)
def test_out_variants_of_another_layout_come_back(name: str) -> None:
    program = fxwrap.verify(fxwrap.parse(OUT_VARIANTS[name]))
    module = fxwrap.to_fx(program, form="functional").graph_module
    inputs = [torch.randn(5, 3)]
    _assert_same(_run(fxwrap.to_python(program), inputs), _run(module, inputs))
    assert_equal(program, fxwrap.from_fx(module))


@pytest.mark.parametrize("name", ["slice", "select", "as_strided"])
def test_scatters_into_expanded_tensors_write_a_copy_without_repetitions(name: str) -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        base = x.expand(3, 4)
        match name:
            case "slice":
                return _ATEN.slice_scatter.default(base, y, 1, 0, 2)
            case "select":
                return _ATEN.select_scatter.default(base, y[:, 0], 1, 2)
            case _:
                return _ATEN.as_strided_scatter.default(base, y, [3, 2], [4, 1], 0)

    inputs = [torch.randn(3, 1), torch.randn(3, 2)]
    program = fxwrap.from_fx(make_fx(function, tracing_mode="fake")(*inputs))
    for emit in (fxwrap.to_python, fxwrap.to_cpp, fxwrap.to_fx):
        _assert_same([function(*inputs)], list(emit(program)(*inputs)))  # type: ignore[operator]
