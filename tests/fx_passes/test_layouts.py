"""Layouts: graphs with convolutions compute channels-last where that pays, and nobody can see it but by the time."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import fxwrap
from fxwrap.compile import Compiled, compile_graph
from fxwrap.devices import CPU, ConvolutionLayoutCosts
from fxwrap.errors import GraphError
from fxwrap.fx_passes.convolutions.pointwise_results import _UNTAGGED, pointwise_results
from fxwrap.fx_passes.graph_copy import run_on_fakes, same_layout
from fxwrap.lines import ExternCall
from fxwrap.lowering import RULES
from fxwrap.options import EMITTERS, Options
from fxwrap.wrapper_ir import Program, TensorType, Value, defined
from tests.support.capture import recording_backend
from tests.support.golden import check_golden, sections
from tests.support.long_form import LONG, long_only, sampled

GOLDENS = Path(__file__).parent / "golden"
aten = torch.ops.aten
IMAGES = (2, 3, 16, 16)
KEEP = Options(layout="preserve")


class Block(nn.Module):
    """A residual net of 3 by 3 convolutions: batch norm, pooling of three kinds, an addition, a flattening."""

    def __init__(self, channels: int = 8, groups: int = 1) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1, bias=False)
        self.first, self.second = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.middle = nn.Conv2d(channels, channels, 3, padding=1, groups=groups)
        self.point = nn.Conv2d(channels, channels, 1, bias=False)
        self.last = nn.Linear(channels, 5)
        with torch.no_grad():
            for norm in (self.first, self.second):
                norm.weight.uniform_(0.5, 1.5)
                norm.bias.normal_()
                norm.running_mean.normal_()  # type: ignore[union-attr, operator]
                norm.running_var.uniform_(0.5, 1.5)  # type: ignore[union-attr, operator]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.pool(self.first(self.stem(x)).relu())
        x = torch.relu(self.second(self.middle(x)) + self.point(x))
        pooled = nn.functional.avg_pool2d(x, 2)
        return self.last(torch.flatten(nn.functional.adaptive_avg_pool2d(pooled, 1), 1)), x


def block(seed: int = 0, **options: Any) -> Block:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Block(**options).eval()


def traced(function: Callable[..., Any], *inputs: Any) -> GraphModule:
    return make_fx(function, tracing_mode="fake")(*inputs)


def traced_module(model: nn.Module, x: Tensor) -> tuple[GraphModule, list[Tensor]]:
    """Returns a module's graph, its parameters and buffers as inputs, and these inputs."""
    state = {name: item.detach() for name, item in (*model.named_parameters(), *model.named_buffers())}

    def function(x: Tensor, *items: Tensor) -> Any:
        return torch.func.functional_call(model, dict(zip(state, items, strict=True)), (x,))

    inputs = [x, *state.values()]
    return traced(function, *inputs), inputs


def fake_inputs(graph: GraphModule, *inputs: Tensor) -> list[Tensor]:
    """Returns fake tensors like the inputs, which the graph may have been traced for with other strides."""
    mode = next(iter(graph.graph.nodes)).meta["val"].fake_mode
    return [mode.from_tensor(item) for item in inputs]


def has_images(program: Program) -> bool:
    """Whether a program computes a tensor that is channels-last and nothing else."""
    types = [item.type for line in program.body.lines for item in defined(line)]
    return any(_is_channels_last(type_) for type_ in types)


def _is_channels_last(type_: Any) -> bool:
    if not isinstance(type_, TensorType) or len(type_.sizes) != 4 or 1 in type_.sizes:
        return False
    return type_.strides[1] == 1 and type_.strides[3] == type_.sizes[1]


def close(actual: Any, expected: Any, tolerance: float = 1e-5) -> None:
    """Compares results with those in float64: by relative norm, and by strides."""
    for one, other in zip(actual, expected, strict=True):
        assert one.stride() == other.stride()
        assert (one.double() - other.double()).norm() <= tolerance * other.double().norm()


def in_float64(model: nn.Module, x: Tensor) -> Any:
    twin = block()
    twin.load_state_dict(model.state_dict())
    twin.train(model.training)
    with torch.no_grad():
        return twin.double()(x.double())


# --- what is seen of it ---------------------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize("emitter", EMITTERS)
def test_results_and_strides_match_eager(emitter: str) -> None:
    """One output is an intermediate result, which the graph itself has channels-last."""
    model, x = block(), torch.randn(IMAGES)
    graph, inputs = traced_module(model, x)
    compiled = compile_graph(graph, inputs, options=Options(emitter=emitter))
    assert has_images(compiled.program)
    close(compiled(*inputs), in_float64(model, x))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.03), (torch.float32, 1e-5)])
def test_without_and_with_the_option(dtype: torch.dtype, tolerance: float) -> None:
    model, x = block().to(dtype), torch.randn(IMAGES).to(dtype)
    graph, inputs = traced_module(model, x)
    auto, keep = compile_graph(graph, inputs), compile_graph(graph, inputs, options=KEEP)
    assert has_images(auto.program) and not has_images(keep.program)
    expected = in_float64(block().to(dtype).float(), x)
    close(auto(*inputs), expected, tolerance)
    close(keep(*inputs), expected, tolerance)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("options", [{"groups": 8}, {"groups": 2}, {"channels": 1}, {"channels": 24, "groups": 3}])
def test_groups_and_single_channels(options: dict[str, int]) -> None:
    model, x = block(**options), torch.randn(IMAGES)
    graph, inputs = traced_module(model, x)
    actual = compile_graph(graph, inputs)(*inputs)
    with torch.no_grad():
        close(actual, block(**options).double()(x.double()))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("size", [1, 2, 5])
def test_sizes_of_images_and_batches(size: int) -> None:
    """Strides of dimensions of one element are eager's too."""
    weight = torch.randn(6, 2, 3, 3)

    def function(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        y = nn.functional.conv2d(x, weight, padding=1, groups=2).relu()
        return nn.functional.conv2d(y[:, :4] * 2, weight, padding=1, groups=2), y.flatten(2)

    for batch in (1, 3):
        x = torch.randn(batch, 4, size, size)
        actual = compile_graph(traced(function, x, weight), [x, weight])(x, weight)
        close(actual, function(x.double(), weight.double()))


def test_a_dynamic_batch() -> None:
    model, seen = block(), []
    compiled = torch.compile(model, backend=recording_backend(seen), dynamic=True)
    with torch.no_grad():
        for batch in (2, 5):
            x = torch.randn(batch, *IMAGES[1:])
            close(compiled(x), in_float64(model, x))
    assert any(has_images(item.program) for item in seen)


def test_an_exported_batch_has_its_whole_range() -> None:
    """Also numbers of images for which torch asks for another library than for the example's."""
    model, x = block(), torch.randn(IMAGES)
    dims = ({0: torch.export.Dim("images", max=100)},)
    compiled = compile_graph(torch.export.export(model, (x,), dynamic_shapes=dims))
    assert has_images(compiled.program)
    with torch.no_grad():
        for images in (2, 1, 40):
            x = torch.randn(images, *IMAGES[1:])
            close(compiled(x), in_float64(model, x))


# --- training -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("emitter", "dynamic"), [("cpp", False), long_only("python", True)])
def test_a_step_of_training(emitter: str, dynamic: bool) -> None:
    """Activations are saved channels-last, gradients and running statistics are eager's."""
    model, twin, seen = block().train(), block().train().double(), []
    torch.compiler.reset()
    compiled = torch.compile(model, backend=recording_backend(seen, Options(emitter=emitter)), dynamic=dynamic)
    x = torch.randn(IMAGES)
    for run, inputs in ((compiled, x), (twin, x.double())):
        scores, images = run(inputs)
        (scores.square().mean() + images.square().mean()).backward()
    assert {item.program.name: has_images(item.program) for item in seen} == {"forward": True, "backward": True}
    actual = dict(model.named_parameters())
    for name, parameter in twin.named_parameters():
        gradient, expected = actual[name].grad, parameter.grad
        assert gradient is not None and expected is not None
        assert (gradient - expected).norm() <= 1e-4 * max(expected.norm(), 1e-2), name
    for name, buffer in twin.named_buffers():
        torch.testing.assert_close(dict(model.named_buffers())[name].double(), buffer.double(), rtol=1e-5, atol=1e-6)


def test_the_backward_receives_the_saved_layouts() -> None:
    """The types of saved activations agree: the forward's last outputs are inputs of the backward, in order."""
    seen: list[Compiled] = []
    torch.compiler.reset()
    model = block().train()
    model_out = torch.compile(model, backend=recording_backend(seen))(torch.randn(IMAGES))
    (model_out[0].sum() + model_out[1].sum()).backward()
    forward, backward = [item.program for item in seen]
    inputs = [item.value.type for item in backward.inputs if isinstance(item.value, Value)]
    saved = [item.type for item in forward.body.lines[-1].values[2:] if isinstance(item, Value)]  # type: ignore[attr-defined]
    assert any(map(_is_channels_last, saved))
    shapes = [(type_.sizes, type_.strides) for type_ in inputs if isinstance(type_, TensorType)]
    assert all((type_.sizes, type_.strides) in shapes for type_ in saved if isinstance(type_, TensorType))


# --- what stays -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("base_is_saved", [True, False])
def test_copies_of_images_are_saved_unless_their_memory_is_saved_anyway(base_is_saved: bool) -> None:
    """Words without the first one, which a class token is, are an image: nearly channels-last, but not dense."""

    def function(words: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        base = words.exp()
        image = base[:, 1:].transpose(1, 2).unflatten(2, (16, 16))
        return torch.conv2d(image, weight, padding=1), image, base if base_is_saved else words

    inputs = [torch.randn(2, 257, 16), torch.randn(16, 16, 3, 3)]
    compiled = compile_graph(traced(function, *inputs), inputs, flexible_stride_outputs=(1, 2))
    result, image, base = compiled(*inputs)
    expected = function(*inputs)
    torch.testing.assert_close((result, image, base), expected)
    assert image.is_contiguous(memory_format=torch.channels_last) != base_is_saved
    assert (image.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()) == base_is_saved


def test_graphs_without_convolutions_are_unchanged() -> None:
    x = torch.randn(IMAGES)
    graph = traced(lambda x: nn.functional.max_pool2d(x.relu(), 2) * 2, x)
    assert fxwrap.lower(graph).body == fxwrap.lower(graph, options=KEEP).body


def test_the_input_graph_is_not_modified() -> None:
    model, x = block(), torch.randn(IMAGES)
    graph, _ = traced_module(model, x)
    before = [(node.name, node.args, node.meta["val"]) for node in graph.graph.nodes if "val" in node.meta]
    fxwrap.lower(graph)
    after = [(node.name, node.args, node.meta["val"]) for node in graph.graph.nodes if "val" in node.meta]
    assert len(before) == len(after)
    assert all(one[0] == other[0] and one[1] == other[1] and one[2] is other[2]
               for one, other in zip(before, after, strict=True))  # fmt: skip


@pytest.mark.parametrize("frozen", [False, True])
def test_large_weights_are_not_converted_at_each_call(frozen: bool) -> None:
    """The last two convolutions have weights of 1 MB beside images of 64 KB; frozen ones are converted once."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        last = nn.Conv2d(64, 512, 3, padding=1), nn.ReLU(), nn.Conv2d(512, 512, 1)
        model = nn.Sequential(nn.Conv2d(16, 64, 3, padding=1), nn.MaxPool2d(8), *last).requires_grad_(False)
        x = torch.randn(2, 16, 32, 32)
    graph, inputs = traced_module(model, x)
    compiled = compile_graph(graph, inputs, options=Options(freeze=frozen), static_inputs=range(1, len(inputs)))
    calls = [line for line in compiled.program.body.lines if isinstance(line, ExternCall)]
    layouts = [_is_channels_last(item.type) for line in calls for item in defined(line)]
    assert layouts == [True, frozen, frozen]  # the pooling is kernels
    (result,) = compiled(*inputs)
    assert result.is_contiguous()
    torch.testing.assert_close(result, model(x))


def test_devices_set_the_costs_of_copies() -> None:
    """An image is copied once for a convolution, and its result once for the output."""
    graph, inputs = traced_module(nn.Conv2d(16, 16, 3, padding=1), torch.randn(2, 16, 32, 32))
    costs = ConvolutionLayoutCosts(copied_byte=1e3)
    costly = replace(CPU, convolutions=replace(CPU.convolutions, layout_costs=costs))
    assert has_images(fxwrap.lower(graph, inputs))
    assert not has_images(fxwrap.lower(graph, inputs, options=Options(devices=(costly,))))


def test_stride_dependent_operators_get_the_original_layout() -> None:
    def function(x: Tensor, weight: Tensor) -> Tensor:
        y = nn.functional.conv2d(nn.functional.conv2d(x, weight, padding=1).relu(), weight, padding=1)
        return aten.as_strided.default(y, [3, 16], [16, 1], 5) * 2

    x, weight = torch.randn(2, 8, 16, 16), torch.randn(8, 8, 3, 3)
    compiled = compile_graph(traced(function, x, weight), [x, weight])
    assert has_images(compiled.program)
    torch.testing.assert_close(compiled(x, weight)[0], function(x, weight), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("emitter", EMITTERS)
def test_inputs_whose_traced_strides_were_padded(emitter: str) -> None:
    """The graph was traced with rows of 100, and is compiled for another order; a library call accepts dense ones."""
    traced_x, y = torch.randn(2, 100, 4)[:, :68].transpose(1, 2), torch.randn(2, 68, 5)
    graph = traced(lambda x, y: torch.bmm(x, y) + 1, traced_x, y)
    x = torch.randn(2, 4, 100)[..., :68]
    compiled = compile_graph(graph, fake_inputs(graph, x, y), options=Options(emitter=emitter))
    (actual,) = compiled(x, y)
    torch.testing.assert_close(actual, torch.bmm(x, y) + 1)


def test_strides_that_cannot_be_restored_are_named() -> None:
    traced_x = torch.randn(2, 100, 4)[:, :68].transpose(1, 2)
    graph = traced(lambda x: aten.as_strided.default(x, [3, 3], [400, 1], 5), traced_x)
    with pytest.raises(GraphError, match=r"reads 'x_1', whose strides are not those.*Trace the graph"):
        compile_graph(graph, fake_inputs(graph, torch.randn(2, 4, 100)[..., :68]))


def test_strided_pointwise_convolutions_of_few_channels_keep_their_images() -> None:
    """oneDNN computes their weight's gradient outside its buffers if the image is channels-last."""

    class Stem(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.pointwise = nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.Conv2d(3, 16, 1, 2, bias=False)
            self.last = nn.Conv2d(16, 16, 5, 1, 2, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.last((self.wide(x) + self.pointwise(x)).relu()).relu()

    seen: list[Compiled] = []
    torch.compiler.reset()
    torch.compile(Stem().train(), backend=recording_backend(seen))(torch.randn(2, 3, 64, 64)).sum().backward()
    images = {}
    for line in seen[1].program.body.lines:
        if isinstance(line, ExternCall) and line.target == "aten.convolution_backward.default":
            _, image, weight = [item.tensor_type for item in line.arguments[:3] if isinstance(item, Value)]
            images[weight.sizes[2:]] = _is_channels_last(image)
    assert images == {(5, 5): True, (3, 3): True, (1, 1): False}


def test_a_mutated_weight_is_converted_at_its_use() -> None:
    def function(x: Tensor, weight: Tensor) -> Tensor:
        first = nn.functional.conv2d(x, weight, padding=1).relu()
        weight.mul_(0.5)
        return nn.functional.conv2d(first, weight, padding=1)

    x, weight = torch.randn(2, 8, 16, 16), torch.randn(8, 8, 3, 3)
    compiled = compile_graph(traced(function, x, weight.clone()), [x, weight])
    assert has_images(compiled.program)
    twin = weight.clone()
    expected, (actual,) = function(x, twin), compiled(x, weight)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(weight, twin)


def test_channels_last_inputs_stay_channels_last() -> None:
    def function(x: Tensor, weight: Tensor) -> Tensor:
        return nn.functional.conv2d(x, weight, padding=1).relu()

    x, weight = torch.randn(2, 8, 16, 16), torch.randn(8, 8, 3, 3)
    x, weight = [item.to(memory_format=torch.channels_last) for item in (x, weight)]
    graph = traced(function, x, weight)
    (actual,) = compile_graph(graph, [x, weight])(x, weight)
    expected = function(x, weight)
    assert actual.stride() == expected.stride() and actual.is_contiguous(memory_format=torch.channels_last)
    assert "clone" not in str(fxwrap.lower(graph))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


# --- exported programs ----------------------------------------------------------------------------------------------


def test_constants_of_exported_programs_are_converted_once() -> None:
    """Their weights are other tensors of the same numbers; running statistics are those of the model."""
    model, x = block(), torch.randn(IMAGES)
    compiled = compile_graph(torch.export.export(model, (x,)))
    types = [constant.value.tensor_type for constant in compiled.program.constants]
    assert sum(map(_is_channels_last, types)) == 2  # those of 3 by 3
    copied = [line for line in str(compiled.program).splitlines() if "launch @clone" in line]
    assert len(copied) == 1  # the images, not the weights
    with torch.no_grad():
        close(compiled(x), in_float64(model, x))


# --- torch ----------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@torch.backends.mkldnn.flags(enabled=False)  # type: ignore[untyped-decorator]
def test_convolution_strides_match_fake_tensors(dtype: torch.dtype) -> None:
    """What results of channels-last convolutions are like is torch's word; dimensions of one element are not asked.

    Without oneDNN, in which some of these abort the process on an AMD EPYC with AVX2.
    """
    for batch, channels, size, width, step in itertools.product((1, 2), (1, 3, 8), (1, 2, 8), (1, 3), (1, 2)):
        x, weight = torch.randn(batch, channels, size, size), torch.randn(6, channels, width, width)
        x, weight = [item.to(dtype).contiguous(memory_format=torch.channels_last) for item in (x, weight)]
        rest = ([step, step], [width // 2, width // 2], [1, 1], False, [0, 0], 1)
        real = aten.convolution.default(x, weight, None, *rest)
        gradient = torch.randn_like(real)
        with FakeTensorMode() as mode:
            fakes = [mode.from_tensor(item) for item in (x, weight, gradient)]
            fake = aten.convolution.default(*fakes[:2], None, *rest)
            mask = ([True, True, False],)
            fake_gradients = aten.convolution_backward.default(fakes[2], *fakes[:2], None, *rest, *mask)
        gradients = aten.convolution_backward.default(gradient, x, weight, None, *rest, *mask)
        for one, other in zip((real, *gradients[:2]), (fake, *fake_gradients[:2]), strict=True):
            wide = [dim for dim, extent in enumerate(one.shape) if extent != 1]
            assert [one.stride(dim) for dim in wide] == [other.stride(dim) for dim in wide]


def test_golden_program_of_a_small_network(update_golden: bool) -> None:
    """Images and weights are converted, tensors between are channels-last, and results have their original layout."""

    def net(x: Tensor, weight: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        y = nn.functional.conv2d(x, weight, padding=1).relu()
        z = nn.functional.conv2d(y, other, padding=1, stride=2) + 1
        return z.mean((2, 3)), z

    inputs = [torch.zeros(2, 3, 32, 32), torch.zeros(16, 3, 3, 3), torch.zeros(16, 16, 3, 3)]
    graph = traced(net, *inputs)
    program = fxwrap.lower(graph, options=Options(check_inputs=False))
    lines = str(program).partition("\n}\n")[0] + "\n}\n"
    check_golden(GOLDENS / "net.txt", sections([("input", str(graph.graph)), ("after lower", lines)]), update_golden)


def _pointwise_calls(symbolic: bool) -> list[tuple[Node, dict[Node, Tensor], dict[Node, Tensor]]]:
    """Returns calls of the pointwise operators with rules, with contiguous operands, and with permuted ones."""
    mode, calls = FakeTensorMode(shape_env=ShapeEnv() if symbolic else None), []
    a, b, c, d = mode.from_tensor(torch.empty(2, 3, 4, 5)).shape
    for name in sorted(name for name in RULES if name.startswith("aten.")):
        operator = getattr(getattr(aten, name.split(".")[1]), name.split(".")[2])
        if torch.Tag.pointwise not in operator.tags and str(operator) not in _UNTAGGED:
            continue
        graph, arguments = Graph(), list[Any]()
        contiguous, permuted = dict[Node, Tensor](), dict[Node, Tensor]()
        for argument in [item for item in operator._schema.arguments if not item.kwarg_only]:
            if "Tensor" in str(argument.type):
                operand = graph.placeholder(argument.name)
                with mode:
                    contiguous[operand] = torch.empty(a, b, c, d, device="cuda")
                    permuted[operand] = torch.empty(d, b, a, c, device="cuda").permute(2, 1, 3, 0).detach()
                arguments.append(operand)
            else:
                arguments.append(argument.default_value if argument.has_default_value() else 2)
        calls.append((graph.call_function(operator, tuple(arguments)), contiguous, permuted))
    return calls


@pytest.mark.parametrize("symbolic", [False, True])
def test_fake_results_of_pointwise_calls(symbolic: bool) -> None:
    """The pass knows the strides that torch computes for pointwise results, for every operator with a rule.

    Outside the long form one half of them has symbolic sizes, the other one does not.
    """
    known = 0
    for node, contiguous, permuted in sampled(_pointwise_calls(symbolic), int(symbolic), part=2):
        try:
            like, expected = run_on_fakes(node, contiguous), run_on_fakes(node, permuted)
        except (RuntimeError, TypeError, ValueError):  # other dtypes or arguments
            continue
        result = pointwise_results(node, permuted, like)
        if result is not None:
            known += 1
            assert type(result.stride(0)) is type(expected.stride(0)) is (torch.SymInt if symbolic else int)
            assert same_layout(result, expected), node
            assert result.dtype == expected.dtype, node
    assert known > (65 if LONG else 30)


def test_fake_results_in_layouts_of_symbolic_sizes_install_no_guards() -> None:
    node, contiguous, permuted = next(
        call for call in _pointwise_calls(symbolic=True) if call[0].target is aten.hardswish.default
    )
    like = run_on_fakes(node, contiguous)
    environment = like.fake_mode.shape_env
    guards = len(environment.guards)
    assert pointwise_results(node, permuted, like) is not None and len(environment.guards) == guards
