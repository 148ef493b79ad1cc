"""The joint graph of training: tensors that are cheap to recompute are not saved for the backward."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import functorch.compile
import pytest
import torch
from torch import Tensor
from torch._functorch import partitioners
from torch.nn import functional as F

import fxwrap
from fxwrap.errors import GraphError
from fxwrap.fx_passes.training import joint_graph
from fxwrap.lines import Return
from fxwrap.options import Step
from fxwrap.torch_compat import min_cut_partitioner
from fxwrap.wrapper_ir import Ownership, TensorType, Value

ROWS, WIDTH, CLASSES = 6, 5, 9


def cross_entropy(x: Tensor, w: Tensor, labels: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy((x @ w).float(), labels, **options).sum()


def mean_reduction(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(x, w, labels)


def sum_reduction(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(x, w, labels, reduction="sum", ignore_index=3)


def no_reduction(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    return (F.cross_entropy(x @ w, labels, reduction="none") * torch.arange(ROWS)).sum()


def weighted(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(x, w, labels, weight=torch.linspace(0.5, 2, CLASSES))


def log_softmax_of_columns(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    """A softmax is contiguous whatever its operand is, so that it has this view."""
    return (F.log_softmax((x @ w).t(), 1).view(ROWS * CLASSES) * torch.arange(ROWS * CLASSES)).sum()


def softmax_in_float32(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    return (torch.softmax((x @ w).float(), -1) * torch.arange(CLASSES)).sum()


def factored_attention(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    """Linear attention: a softmax of keys over positions, in float32 as under autocast."""
    queries, keys, values = (x @ w).view(ROWS, 3, CLASSES // 3).unbind(1)
    weights = keys.transpose(0, 1).softmax(1, dtype=torch.float32).view(-1).to(x.dtype)
    return (queries @ (weights.view(CLASSES // 3, ROWS) @ values)).sum()


def tangents(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    return (torch.tanh(x @ w) * torch.sigmoid(x @ w) * 3).sum()


def norms(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    """A norm of a norm, as of a patch embedding before the first layer, and an activation."""
    scale = torch.linspace(1, 2, CLASSES, dtype=x.dtype)
    return F.layer_norm(F.layer_norm(x @ w, [CLASSES], scale, scale / 2), [CLASSES]).sin().sum()


SAVED: dict[Callable[..., Tensor], int] = {
    mean_reduction: 1, sum_reduction: 1, no_reduction: 1, tangents: 1, norms: 1,
}  # fmt: skip
"""Functions whose forward saves one tensor as large as the product alone, the product itself."""
FUNCTIONS = (*SAVED, weighted, log_softmax_of_columns)


def collecting_pass(programs: list[fxwrap.Program]) -> Callable[[fxwrap.Program], fxwrap.Program]:
    """A pass that changes nothing and keeps each program that it is given."""

    def keep(program: fxwrap.Program) -> fxwrap.Program:
        programs.append(program)
        return program

    return keep


def run(
    function: Callable[..., Tensor], dtype: torch.dtype, options: dict[str, Any] | None
) -> tuple[list[Tensor], list[fxwrap.Program]]:
    """The loss and the gradients, eagerly or compiled, and the programs of forward and backward."""
    programs: list[fxwrap.Program] = []
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, WIDTH, generator=generator).to(dtype).requires_grad_()
    w = torch.randn(WIDTH, CLASSES, generator=generator).to(dtype).requires_grad_()
    labels = torch.tensor([0, 3, -100, 8, 3, 1] if function is mean_reduction else [0, 3, 2, 8, 3, 1])
    if options is not None:
        torch._dynamo.reset()
        inputs = {"emitter": "interpreter", "passes": (collecting_pass(programs),), **options}
        loss = torch.compile(function, backend="fxwrap", fullgraph=True, options=inputs)(x, w, labels)
    else:
        loss = function(x, w, labels)
    loss.backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None and w.grad is not None
    return [loss.detach(), x.grad, w.grad], programs


def returned_types(program: fxwrap.Program) -> list[TensorType]:
    """The types of the tensors that a program returns."""
    last = program.body.lines[-1]
    assert isinstance(last, Return)
    types = [item.type for item in last.values if isinstance(item, Value)]
    return [type_ for type_ in types if isinstance(type_, TensorType)]


def returned_names(program: fxwrap.Program) -> list[str]:
    """The names of the values that a program returns."""
    last = program.body.lines[-1]
    assert isinstance(last, Return)
    return [item.name for item in last.values if isinstance(item, Value)]


def count_saved_matmul_sized(program: fxwrap.Program) -> int:
    """How many of a forward's results are as large as the product."""
    return sum(type_.sizes == (ROWS, CLASSES) for type_ in returned_types(program))


def in_double(tensors: list[Tensor]) -> list[Tensor]:
    return [item.double() for item in tensors]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("function", FUNCTIONS, ids=[item.__name__ for item in FUNCTIONS])
def test_gradients(function: Callable[..., Tensor]) -> None:
    """Against float64; without kernels, so that each operator rounds its result."""
    wide, _ = run(function, torch.float64, None)
    actual, programs = run(function, torch.float32, {"fuse": False})
    torch.testing.assert_close(in_double(actual), in_double(wide), rtol=1e-5, atol=1e-5)
    if function in SAVED:
        assert count_saved_matmul_sized(programs[0]) == SAVED[function]
        assert function is tangents or "mm" in returned_names(programs[0]), "the result of a call, not of a kernel"


def test_what_a_caller_may_write_is_not_saved() -> None:
    """A call that is equal to that of an output stays: the backward reads its result."""

    def step(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return x @ w, (x @ w).sin().sum()

    gradients: list[Tensor] = []
    for function in (step, torch.compile(step, backend="fxwrap", options={"emitter": "interpreter"})):
        x, w = torch.linspace(0, 1, 8, dtype=torch.float64).reshape(2, 4), torch.linspace(0, 2, 12).double()
        w = w.reshape(4, 3).requires_grad_()
        output, loss = function(x, w)
        output.detach().zero_()
        loss.backward()  # type: ignore[no-untyped-call]
        assert w.grad is not None
        gradients.append(w.grad)
    torch.testing.assert_close(*gradients)


def relu(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    return (torch.relu(x @ w) * torch.arange(CLASSES)).sum()


HALF: dict[Callable[..., Tensor], torch.dtype] = {
    no_reduction: torch.bfloat16, tangents: torch.bfloat16, softmax_in_float32: torch.bfloat16,
    factored_attention: torch.bfloat16, relu: torch.bool,
}  # fmt: skip
"""The dtype of the one tensor as large as the product that the forward saves."""


@pytest.mark.parametrize(("dtype", "masks"), [(torch.bfloat16, 1), (torch.float32, 2)])
def test_masks_of_relus_are_saved_where_they_save_bytes(dtype: torch.dtype, masks: int) -> None:
    """Not of a relu of a narrow input, nor of one that is returned: these tensors are in memory anyway."""

    def step(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, ...]:
        returned = torch.relu(x * y)
        return returned, torch.relu(z.t()).clone(), torch.relu(x @ y) * 3

    programs: list[fxwrap.Program] = []
    x, y, z = [torch.randn(4, 4, dtype=dtype, requires_grad=True) for _ in range(3)]
    torch._dynamo.reset()
    options = {"emitter": "interpreter", "fuse": False, "passes": (collecting_pass(programs),)}
    results = torch.compile(step, backend="fxwrap", options=options)(x, y, z)
    assert [type_.dtype for type_ in returned_types(programs[0])].count(torch.bool) == masks
    actual = torch.autograd.grad([item.sum() for item in results], [x, y, z])
    expected = torch.autograd.grad([item.sum() for item in step(x, y, z)], [x, y, z])
    torch.testing.assert_close(actual, expected)


def test_elements_that_are_moved_are_not_saved() -> None:
    """The backward reads them where they were: a graph returns its results and its inputs."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        pad = torch.nn.functional.pad(y.exp(), (1, -1))
        return x.roll(1, -1) * y.roll(2, -1) * torch.tril(x) * y.flip(0) + pad * x.roll(-1, 0)

    programs: list[fxwrap.Program] = []
    x, y = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    torch._dynamo.reset()
    options = {"emitter": "interpreter", "fuse": False, "passes": (collecting_pass(programs),)}
    result = torch.compile(step, backend="fxwrap", options=options)(x, y)
    assert len(returned_types(programs[0])) == 3, str(programs[0])
    actual, expected = [torch.autograd.grad(item.sum(), [x, y]) for item in (result, step(x, y))]
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("function", HALF, ids=lambda item: item.__name__)
def test_gradients_in_half_precision(function: Callable[..., Tensor]) -> None:
    """Of tensors as large as the product, the forward saves it alone, or a mask; of softmaxes, row results."""
    eager, _ = run(function, torch.bfloat16, None)
    actual, programs = run(function, torch.bfloat16, {"fuse": False})
    torch.testing.assert_close(actual, eager, rtol=2e-2, atol=2e-2)
    saved = returned_types(programs[0])
    assert [type_.dtype for type_ in saved if type_.sizes == (ROWS, CLASSES)] == [HALF[function]]
    assert all(1 in type_.sizes for type_ in saved if type_.dtype == torch.float32 and type_.sizes)


def test_operators_preserved_by_options_are_saved() -> None:
    _, programs = run(mean_reduction, torch.float32, {"fuse": False, "preserve_ops": ["aten._log_softmax.default"]})
    assert "aten._log_softmax.default" in str(programs[0])


def test_a_custom_partitioner_receives_the_unmodified_graph() -> None:
    from functorch.compile import default_partition

    seen: list[bool] = []

    def partition(joint: torch.fx.GraphModule, *arguments: Any, **keywords: Any) -> Any:
        seen.append(any(node.target is torch.ops.aten.tanh_backward.default for node in joint.graph.nodes))
        return default_partition(joint, *arguments, **keywords)

    run(tangents, torch.float32, {"fuse": False, "partitioner": partition})
    assert seen == [True]


def test_passes_over_the_joint_graph_run_without_a_fake_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """In AOTAutograd's, each tensor that a pass creates would take a dispatch in Python."""
    created: list[Tensor] = []

    def create(joint: torch.fx.GraphModule, _options: fxwrap.Options) -> torch.fx.GraphModule:
        created.append(torch.empty(1))
        return joint

    monkeypatch.setattr(joint_graph, "JOINT_GRAPH_PASSES", (Step("create", "", create),))
    x = torch.rand(3, requires_grad=True)
    torch.compile(lambda x: x.sin(), backend="fxwrap")(x).sum().backward()
    assert [type(item) for item in created] == [Tensor]


def test_threads_partition_with_their_own_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's list of operators is a global: neither another thread's partitioner nor torch's own sees additions."""
    inside, checked, known = threading.Event(), threading.Event(), partitioners.get_default_op_list
    added = {torch.ops.aten.mm, torch.ops.aten.addmm}

    def seen() -> set[Any]:
        return added & {*partitioners.get_default_op_list().fusible_ops}

    def partition() -> set[Any]:
        inside.set()
        assert checked.wait(600)
        return seen()

    monkeypatch.setattr(functorch.compile, "min_cut_rematerialization_partition", partition)
    with ThreadPoolExecutor(len(added)) as threads:
        results = [threads.submit(min_cut_partitioner({operator})) for operator in added]
        assert inside.wait(600)
        meanwhile = seen()
        checked.set()
        assert [item.result() for item in results] == [{operator} for operator in added]
    assert meanwhile == set() and partitioners.get_default_op_list is known


def test_fused() -> None:
    wide, _ = run(mean_reduction, torch.float64, None)
    actual, _ = run(mean_reduction, torch.float32, {"emitter": "python"})
    torch.testing.assert_close(in_double(actual), in_double(wide), rtol=1e-5, atol=1e-5)


def outer_product(x: Tensor, y: Tensor) -> Tensor:
    return (x[:, None] @ y[None, :]).sin().cos()


def repeated(x: Tensor, y: Tensor) -> Tensor:
    return torch.cat([x[:, None] + y[:3]] * 3, -1).sin().cos()


def normalized(x: Tensor, y: Tensor) -> Tensor:
    scale, shift = torch.arange(1.0, CLASSES + 1), torch.arange(CLASSES)
    product = torch.diag(x) @ torch.ones(ROWS, 1).add(y)
    return F.hardswish(F.batch_norm(product, None, None, scale, shift / 4, training=True)).sin()


def normalized_in_groups(x: Tensor, y: Tensor) -> Tensor:
    scale, shift = torch.arange(1.0, CLASSES + 1), torch.arange(CLASSES)
    return F.hardswish(F.group_norm((x[:, None] + y * 2).sin(), 3, scale, shift / 4)).sin()


def half_normalized_in_groups(x: Tensor, y: Tensor) -> Tensor:
    return F.silu(F.group_norm((x[:, None] + y * 2).sin().bfloat16(), 3)).float()


def activated(x: Tensor, y: Tensor) -> Tensor:
    return F.mish(x[:, None] + y * 2)


RETURNED: dict[Callable[..., Tensor], int] = {
    outer_product: 1, repeated: 1, normalized: 2, normalized_in_groups: 1, half_normalized_in_groups: 1, activated: 1,
}  # fmt: skip
"""Functions with the number of tensors as large as the result, and itself, that the forward returns."""


@pytest.mark.parametrize("function", RETURNED, ids=lambda item: item.__name__)
def test_recomputed_tensors(function: Callable[..., Tensor]) -> None:
    programs: list[fxwrap.Program] = []
    options = {"emitter": "interpreter", "fuse": False, "passes": (collecting_pass(programs),)}
    x, y = torch.linspace(-1, 1, ROWS, requires_grad=True), torch.linspace(0, 2, CLASSES)
    torch.compile(function, backend="fxwrap", fullgraph=True, options=options)(x, y).sum().backward()
    actual, x.grad = x.grad, None
    function(x, y).sum().backward()
    error = 2e-2 if function is half_normalized_in_groups else 1e-5
    torch.testing.assert_close(actual, x.grad, rtol=error, atol=error)
    assert count_saved_matmul_sized(programs[0]) == RETURNED[function]


def test_group_norms_of_symbolic_channels() -> None:
    """How many channels a group has is known at run time only."""
    function = torch.compile(F.group_norm, backend="fxwrap", dynamic=True, options={"emitter": "interpreter"})
    for channels in (6, 9):
        x, scale = torch.randn(2, channels, 5, requires_grad=True), torch.randn(channels)
        weights = torch.randn(2, channels, 5)
        results = [torch.autograd.grad((norm(x, 3, scale) * weights).sum(), x) for norm in (function, F.group_norm)]
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


def layer_norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[1:])


def batch_norm(x: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, training=True)


def group_norm(x: Tensor) -> Tensor:
    return F.group_norm(x, 3)


@pytest.mark.parametrize("function", [layer_norm, batch_norm, group_norm], ids=lambda item: item.__name__)
def test_casts_to_float32_are_not_saved(function: Callable[[Tensor], Tensor]) -> None:
    """A normalization casts its operand itself, so that the forward saves the sum in half precision."""
    programs: list[fxwrap.Program] = []
    options = {"emitter": "interpreter", "fuse": False, "passes": (collecting_pass(programs),)}

    def residual(x: Tensor, w: Tensor) -> Tensor:
        total = x @ w + x
        return (function(total.float()).bfloat16() @ w + total).sum()

    x = torch.randn(CLASSES, CLASSES, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
    torch.compile(residual, backend="fxwrap", fullgraph=True, options=options)(
        x, torch.eye(CLASSES).bfloat16()
    ).backward()
    large = [item.dtype for item in returned_types(programs[0]) if item.sizes == (CLASSES, CLASSES)]
    assert large and torch.float32 not in large


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("emitter", ["interpreter", "python", "cpp"])
def test_dropout_saves_its_mask_alone(emitter: str, dtype: torch.dtype) -> None:
    """The backwards of the matmul and of the softmax read the softmax or, in half precision, compute it again."""

    def attend(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        weights = F.dropout(F.softmax((x @ w).float(), -1), 0.25, training=True).to(dtype)
        return weights.t() @ v

    programs: list[fxwrap.Program] = []
    options = {"emitter": emitter, "passes": (collecting_pass(programs),)}
    generator = torch.Generator().manual_seed(3)
    operands = [torch.randn(*sizes, generator=generator) for sizes in ((ROWS, WIDTH), (WIDTH, CLASSES), (ROWS, 2))]
    outcomes = []
    for function in (attend, torch.compile(attend, backend="fxwrap", fullgraph=True, options=options)):
        leaves = [item.to(dtype, copy=True).requires_grad_() for item in operands]
        torch.manual_seed(5)
        function(*leaves).square().sum().backward()
        outcomes.append([item.grad for item in leaves])
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(*outcomes, rtol=tolerance, atol=tolerance)
    saved = [item.dtype for item in returned_types(programs[0]) if sorted(item.sizes) == [ROWS, CLASSES]]
    assert sorted(saved, key=str) == sorted([torch.bool, dtype], key=str)


def test_of_donated_tensors_none_is_a_view_of_another() -> None:
    """AOTAutograd donates a tensor and a view of it, both saved; halves of a tensor share no element."""

    def saved(results: Callable[[Tensor, Tensor], tuple[Tensor, ...]]) -> dict[str, Ownership]:
        x, w, factor = torch.randn(5, 6), torch.randn(6, 8, requires_grad=True), torch.randn(5, 4, requires_grad=True)
        torch._dynamo.reset()
        compiled = torch.compile(lambda x, w, factor: results(x @ w, factor), backend="fxwrap", options={"fuse": False})
        sum([result.sum() for result in compiled(x, w, factor)]).backward()
        backward = fxwrap.inspect(compiled)[-1].program
        return {item.value.name: item.ownership for item in backward.inputs if isinstance(item.value, Value)}

    both = saved(lambda product, factor: ((product**2).mean(-1), product.unfold(1, 4, 4)[:, 1] * factor))
    assert both["mm"] is both["select"] is Ownership.SHARED

    def attention(product: Tensor, factor: Tensor) -> tuple[Tensor, ...]:
        query, key = product.view(1, 1, 5, 8).split(4, -1)
        return (F.scaled_dot_product_attention(query, key, factor.view(1, 1, 5, 4)),)

    halves = saved(attention)
    assert halves["getitem"] is halves["getitem_1"] is Ownership.OWNED


@pytest.mark.sampled(2)
@pytest.mark.parametrize("emitter", ["python", "cpp", "fx", "interpreter"])
def test_a_returned_view_is_not_donated_to_the_backward(emitter: str) -> None:
    """The product is saved and replaced by a multiplication; AOTAutograd must see that a result is a view of it."""

    def function(x: Tensor) -> tuple[Tensor, ...]:
        once = torch.mm(x, x)
        twice = torch.mm(once, x)
        return once.expand(2, 4, 4), torch.where(x.detach() > 0, once, twice).unsqueeze(0)

    x = torch.randn(1, 1, requires_grad=True)
    results = torch.compile(function, backend="fxwrap", options={"emitter": emitter})(x)
    expected = function(x.detach())
    sum([result.sum() for result in results]).backward()
    torch.testing.assert_close(tuple([result.detach() for result in results]), expected)


def test_a_sparse_gradient_is_a_graph_error() -> None:
    """The joint graph's passes asked for storages, which a sparse tensor has not."""
    compiled = torch.compile(torch.nn.Embedding(7, 4, sparse=True), backend="fxwrap")
    with pytest.raises(GraphError, match=r"node '_sparse_coo\w*'.* has the layout torch.sparse_coo. Only strided"):
        compiled(torch.tensor([1, 2, 3, 1])).sum().backward()
