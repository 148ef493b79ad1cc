"""Inputs of programs, in every emitter: rejected ones with their errors, and unusual ones that are accepted."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap.errors import GraphError, InputError
from fxwrap.options import EMITTERS, Options
from fxwrap.runtime.plain_inputs import plain_tensor
from fxwrap.testing import assert_emitters_agree
from fxwrap.torch_compat import negated_view
from tests.support.traced_classes import Redefined, RedefinedParameter

emitters = pytest.mark.parametrize("emitter", EMITTERS)


def random(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*sizes, dtype=dtype, generator=torch.Generator().manual_seed(len(sizes)))


def direct(function: Callable[..., Any], *inputs: Any, emitter: str, symbolic: bool = False) -> fxwrap.Compiled:
    graph = make_fx(function, tracing_mode="symbolic" if symbolic else "real")(*inputs)
    return fxwrap.compile_graph(graph, None if symbolic else inputs, options=Options(emitter=emitter))  # type: ignore[arg-type]


# --- wrong inputs -----------------------------------------------------------------------------------------------------


X = random(3, 4)
PLAIN = "f32[3, 4] on cpu with strides (4, 1)"

WRONG: dict[str, tuple[Any, str, str]] = {  # the input, and the texts for static and for symbolic sizes
    "nothing": (None, f"{PLAIN}, got None", "a tensor of 2 dimensions, got None"),
    "a number": (7, "a torch.Tensor, got int", "a torch.Tensor, got int"),
    "a list": ([1.0], "a torch.Tensor, got list", "a torch.Tensor, got list"),
    "a text": ("x", "a torch.Tensor, got str", "a torch.Tensor, got str"),
    "another dtype": (X.double(), f"{PLAIN}, got f64[3, 4] on cpu with strides (4, 1)", ""),
    "a complex dtype": (X.to(torch.complex64).conj(), f"{PLAIN}, got c64[3, 4] on cpu with strides (4, 1)", ""),
    "another rank": (X[0], f"{PLAIN}, got f32[4] on cpu with strides (1,)",
                     "a tensor of 2 dimensions, got f32[4] on cpu with strides (1,)"),
    "another size": (random(3, 5), f"{PLAIN}, got f32[3, 5] on cpu with strides (5, 1)", "accepted"),
    "other strides": (random(4, 3).t(), f"{PLAIN}, got f32[3, 4] on cpu with strides (1, 3)", ""),
    "on meta": (X.to("meta"), f"{PLAIN}, got f32[3, 4] on meta with strides (4, 1)", ""),
    "sparse": (X.to_sparse(), f"{PLAIN}, got a tensor of another layout than torch.strided", ""),
    "sparse CSR": (X.to_sparse_csr(), f"{PLAIN}, got a tensor of another layout than torch.strided", ""),
    "mkldnn": (X.to_mkldnn(), f"{PLAIN}, got a tensor of another layout than torch.strided", ""),
    "a subclass": (X.as_subclass(Redefined), "a torch.Tensor, got Redefined", "a torch.Tensor, got Redefined"),
    "a subclass's lazy bit": (negated_view(X.double()), f"{PLAIN}, got f64[3, 4] on cpu with strides (4, 1)", ""),
}  # fmt: skip


@pytest.mark.every_combination
@emitters
@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
def test_wrong_inputs_raise_the_same_error(emitter: str, symbolic: bool) -> None:
    compiled = direct(lambda x, y: x.sin() + y.sum(), X, random(6, 7), emitter=emitter, symbolic=symbolic)
    for entry in (compiled, lambda *inputs: compiled.boxed([*inputs])):
        for wrong, static_text, symbolic_text in WRONG.values():
            text = (symbolic_text or static_text) if symbolic else static_text
            if text == "accepted":
                continue
            with pytest.raises(InputError, match=f"^{re.escape(f'input {chr(39)}x_1{chr(39)}: expected {text}')}$"):
                entry(wrong, random(6, 7))
        for count in (0, 1, 3):
            with pytest.raises(InputError, match=f"^program 'program' takes 2 inputs, got {count}$"):
                entry(*[X] * count)
    torch.testing.assert_close(compiled(X, random(6, 7))[0], X.sin() + random(6, 7).sum())


@emitters
def test_wrong_numbers_raise_the_same_error(emitter: str) -> None:
    compiled = direct(lambda x, n: x.reshape(n, -1) * n, X, 3, emitter=emitter, symbolic=True)
    for wrong, kind in ((1.5, "float"), ("3", "str"), (None, "NoneType"), (X, "Tensor")):
        with pytest.raises(InputError, match=rf"^input 's\d+': expected an int, got {kind}$"):
            compiled(X, wrong)


@emitters
def test_unchecked_inputs_of_an_unchecked_program(emitter: str) -> None:
    graph = make_fx(lambda x: torch.mm(x, x))(random(3, 3))
    compiled = fxwrap.compile_graph(graph, [random(3, 3)], options=Options(emitter=emitter, check_inputs=False))  # type: ignore[arg-type]
    torch.testing.assert_close(compiled(random(3, 3))[0], random(3, 3) @ random(3, 3))


# --- negative and conjugate bits --------------------------------------------------------------------------------------

Z = random(3, 4, dtype=torch.complex64)

BITS: dict[str, tuple[Callable[..., Any], Callable[[], Tensor]]] = {  # the function, and its input
    "a negative view": (lambda x: x.sin() + 1, lambda: negated_view(random(3, 4))),
    "imag of a conjugate": (lambda x: x.sin() + 1, lambda: random(3, 4, dtype=torch.complex64).conj().imag),
    "an expanded view": (lambda x: x.sin() + 1, lambda: negated_view(random(3, 1)).expand(3, 4)),
    "an empty view": (lambda x: x.sin() + 1, lambda: negated_view(random(0, 4))),
    "a library call": (lambda x: torch.mm(x, x.t()), lambda: negated_view(random(3, 4))),
    "a written input": (lambda x: (x.add_(1), x * 2)[1], lambda: negated_view(random(3, 4))),
    "a written view": (lambda x: (x[1].copy_(x[0].exp()), x.sum())[1], lambda: negated_view(random(3, 4))),
    "a returned input": (lambda x: (x, x.cos()), lambda: negated_view(random(3, 4))),
    "a returned view": (lambda x: (x.t(), x[1:].cos()), lambda: negated_view(random(3, 4))),
    "a negated result": (lambda x: (negated_view(x.sin())[1:], x * 2), lambda: negated_view(random(3, 4))),
    "a written negation": (lambda x: (negated_view(x).copy_(x.cos()), x * 2), lambda: random(3, 4)),
    "a conjugate": (lambda z: z * 2, lambda: Z.clone().conj()),
    "a returned conjugate": (lambda z: (z.t(), z.conj()), lambda: Z.clone().conj()),
    "a written conjugate": (lambda z: (z.mul_(2j), z + 1)[1], lambda: Z.clone().conj()),
    "imag of an input": (lambda z: z.imag * 2, lambda: Z.clone().conj()),
    "imag of a view": (lambda z: z.t()[1:].imag * 2, lambda: Z.clone().conj()),
    "strides that depend on the bit": (
        lambda z: torch.linalg.solve_triangular(z, torch.eye(3, dtype=z.dtype), upper=True).t().clone(),
        lambda: (Z[:, :3].tril() + 3 * torch.eye(3)).mH,
    ),
    "a negative conjugate": (lambda z: z.real.sin() + z.imag, lambda: negated_view(Z.clone().conj())),
}


def assert_same_call(run: Callable[..., Any], function: Callable[..., Any], make_input: Callable[[], Tensor]) -> None:
    """Asserts equal results, mutation, and aliasing of the input."""
    own_input, wanted_input = make_input(), make_input()
    results, wanted = run(own_input), function(wanted_input)
    results, wanted = [item if isinstance(item, tuple) else (item,) for item in (results, wanted)]
    torch.testing.assert_close([*results, own_input], [*wanted, wanted_input])
    for result, expected in zip(results, wanted, strict=True):
        aliases = expected.untyped_storage().data_ptr() == wanted_input.untyped_storage().data_ptr()
        assert (result.untyped_storage().data_ptr() == own_input.untyped_storage().data_ptr()) is aliases


@emitters
@pytest.mark.parametrize("name", BITS)
def test_a_negative_or_conjugate_bit(emitter: str, name: str) -> None:
    function, make_input = BITS[name]
    for example in (plain_tensor(make_input()), make_input()):  # traced without the bit, and with it
        assert_same_call(direct(function, example, emitter=emitter), function, make_input)
    compiled = direct(function, plain_tensor(make_input()), emitter=emitter)
    assert_same_call(lambda item: compiled.boxed([item]), function, make_input)
    assert_same_call(compiled, function, lambda: plain_tensor(make_input()))


@emitters
@pytest.mark.parametrize("name", [name for name in BITS if "empty" not in name])
def test_a_bit_under_torch_compile(emitter: str, name: str) -> None:
    function, make_input = BITS[name]
    assert_same_call(torch.compile(function, backend="fxwrap", options={"emitter": emitter}), function, make_input)


@pytest.mark.sampled(2)
@emitters
def test_bits_inside_a_graph(emitter: str) -> None:
    def function(z: Tensor) -> tuple[Tensor, ...]:
        imag = z.conj().imag
        flipped = negated_view(negated_view(z.real))
        rows = imag[1:].t().exp(), imag.sum(), (imag * z.real).view(-1)
        copied = imag.clone()
        negated_view(copied).mul_(3).add_(1)
        return *rows, flipped.sin(), imag, torch.view_as_real(z.conj() * 2).sin(), copied

    assert_emitters_agree(function, (Z,))
    results = torch.compile(function, backend="fxwrap", options={"emitter": emitter})(Z)
    torch.testing.assert_close(results, function(Z))
    assert results[4].is_neg()


class Constants(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(negated_view(random(3, 4)), requires_grad=False)
        self.register_buffer("state", negated_view(random(3, 4)))

    def forward(self, x: Tensor) -> Tensor:
        result = x * self.weight + self.state.exp()
        self.state.add_(x)
        return result


@emitters
def test_constants_with_a_negative_bit(emitter: str) -> None:
    options: Any = Options(emitter=emitter)  # type: ignore[arg-type]
    expected = Constants()
    wanted = [expected(X), expected(X)]
    module, exported = Constants(), Constants()
    compiled = torch.compile(module, backend="fxwrap", options={"emitter": emitter})
    program = fxwrap.compile_graph(torch.export.export(exported, (X,)), options=options)
    for result in wanted:
        torch.testing.assert_close(compiled(X), result)
        torch.testing.assert_close(program(X), result)
    torch.testing.assert_close(module.state, expected.state)
    torch.testing.assert_close(exported.state, expected.state)


@emitters
def test_gradients_with_a_bit(emitter: str) -> None:
    def function(z: Tensor) -> Tensor:
        return (z.conj().imag.sin() * z.real).exp()

    expected, actual = [Z.clone().requires_grad_() for _ in range(2)]
    gradient = negated_view(random(3, 4))
    function(expected).backward(gradient)
    torch.compile(function, backend="fxwrap", options={"emitter": emitter})(actual).backward(gradient)
    torch.testing.assert_close(actual.grad, expected.grad)


# --- plain subclasses -------------------------------------------------------------------------------------------------


class Tagged(Tensor):
    pass


class OwnParameter(torch.nn.Parameter):
    pass


SUBCLASSES: dict[str, Callable[[Tensor], Tensor]] = {
    "Tensor": lambda item: item.as_subclass(Tagged),
    "Parameter": lambda item: OwnParameter(item, requires_grad=False),
    "Buffer": lambda item: torch.nn.Buffer(item),
    "Parameter with a gradient": OwnParameter,
}


def functions_of_two(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return x @ y, x.sin() + y, x


def writes(x: Tensor, y: Tensor) -> Tensor:
    x.add_(y.sin())
    return x @ y


@emitters
@pytest.mark.parametrize("name", SUBCLASSES)
def test_a_subclass_that_defines_nothing(emitter: str, name: str) -> None:
    make, y = SUBCLASSES[name], random(4, 4)
    compiled = torch.compile(functions_of_two, backend="fxwrap", options={"emitter": emitter})
    for function, run in ((functions_of_two, compiled), (writes, torch.compile(writes, backend="fxwrap"))):
        if function is writes and "gradient" in name:
            continue
        x, expected = make(random(4, 4)), make(random(4, 4))
        wanted, results = function(expected, y), run(x, y)
        wanted, results = [item if isinstance(item, tuple) else (item,) for item in (wanted, results)]
        assert [type(item) for item in results] == [type(item) for item in wanted]
        torch.testing.assert_close([*map(plain, results), plain(x)], [*map(plain, wanted), plain(expected)])
        x, program = make(random(4, 4)), direct(function, random(4, 4), y, emitter=emitter)
        with torch.no_grad():  # a direct call records no gradients
            results = program(x, y)
        torch.testing.assert_close([*map(plain, results), plain(x)], [*map(plain, wanted), plain(expected)])
        assert function is writes or results[2] is x


def plain(item: Tensor) -> Tensor:
    return item.detach().as_subclass(Tensor)


@emitters
@pytest.mark.parametrize("requires_grad", [False, True])
def test_torch_compile_takes_a_subclass_whose_functions_dynamo_traces(emitter: str, requires_grad: bool) -> None:
    """Also with gradients, for which torch's own backends fail; a direct call rejects such a tensor."""

    def call(run: Callable[..., Any], leaf: Tensor) -> tuple[Any, Tensor]:
        x = leaf.as_subclass(Redefined)
        results = (*run(x, random(4, 4)), x)
        if requires_grad:
            results[0].as_subclass(Tensor).sum().backward()
        return results, x

    leaves = [random(4, 4).requires_grad_(requires_grad) for _ in range(2)]
    compiled = torch.compile(functions_of_two, backend="fxwrap", options={"emitter": emitter})
    (results, x), (wanted, _) = call(compiled, leaves[0]), call(functions_of_two, leaves[1])
    assert [type(item) for item in results] == [type(item) for item in wanted] and results[2] is x
    torch.testing.assert_close([*map(plain, results)], [*map(plain, wanted)])
    torch.testing.assert_close(leaves[0].grad, leaves[1].grad)
    if not requires_grad:
        compiled = torch.compile(writes, backend="fxwrap", options={"emitter": emitter})
        torch.testing.assert_close(plain(compiled(x, random(4, 4))), writes(leaves[1], random(4, 4)))
        torch.testing.assert_close(*leaves)


@emitters
@pytest.mark.parametrize("requires_grad", [False, True])
def test_torch_compile_takes_parameters_whose_functions_dynamo_traces(emitter: str, requires_grad: bool) -> None:
    layers = [torch.nn.Linear(4, 4) for _ in range(2)]
    for layer, kind in zip(layers, (torch.nn.Parameter, RedefinedParameter), strict=True):
        layer.weight, layer.bias = kind(random(4, 4), requires_grad), kind(random(4), requires_grad)
    layers[1] = torch.compile(layers[1], backend="fxwrap", options={"emitter": emitter})
    expected, result = [layer(X).sin() for layer in layers]
    torch.testing.assert_close(result, expected)
    if requires_grad:
        torch.cat([expected, result]).sum().backward()
    for name in ("weight", "bias"):
        torch.testing.assert_close(*[getattr(layer, name).grad for layer in layers])


@emitters
def test_constants_of_an_exported_program_whose_functions_are_traced(emitter: str, tmp_path: Path) -> None:
    layer = torch.nn.Linear(4, 4)
    layer.weight = RedefinedParameter(random(4, 4))
    program = torch.export.export(layer, (X,))
    compiled = fxwrap.compile_graph(program, options=Options(emitter=emitter))
    compiled.save(tmp_path / "saved.fxw")
    with torch.no_grad():
        expected = layer(X)
        torch.testing.assert_close(compiled(X), expected)
        layer.weight.mul_(2)
        torch.testing.assert_close(compiled(X), layer(X))  # it reads the parameter, and the file has the former content
        torch.testing.assert_close(fxwrap.load(tmp_path / "saved.fxw")(X), expected)


# --- version counters -------------------------------------------------------------------------------------------------


class Counter(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.zeros(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        self.state.copy_(self.state + x.sin())
        return self.state * 2


WRITES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "a copy": lambda x, y: x.copy_(y.sin()),
    "in place": lambda x, y: x.add_(y.sin()),
    "a view": lambda x, y: x[1].copy_(y[0].sin()),
    "a transposed view": lambda x, y: x.t().mul_(y.t()),
    "both": lambda x, y: (x.copy_(y.sin()), y.copy_(x.cos())),
    "neither": lambda x, y: x.clone().add_(y),
}


@emitters
@pytest.mark.parametrize("name", WRITES)
def test_version_counters_of_written_inputs(emitter: str, name: str) -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        WRITES[name](x, y)
        return x * y

    expected = [random(3, 4), random(3, 4)]
    function(*expected)
    compiled = direct(function, random(3, 4), random(3, 4), emitter=emitter)
    runs = [compiled, lambda *inputs: compiled.boxed([*inputs])]
    runs += [compiled.graph_module] if emitter == "fx" else []
    for run in runs:
        inputs = [random(3, 4), random(3, 4)]
        run(*inputs)
        assert [item._version > 0 for item in inputs] == [item._version > 0 for item in expected]
        base = random(3, 8)
        compiled(base.view(6, 4)[:3], random(3, 4))  # a view shares the counter of its base
        assert (base._version > 0) is (expected[0]._version > 0)


@pytest.mark.sampled(2)
@emitters
def test_autograd_sees_that_a_saved_tensor_was_written(emitter: str) -> None:
    write = direct(lambda x, y: x.copy_(y.sin()), random(3, 4), random(3, 4), emitter=emitter)
    leaf, saved = random(3, 4).requires_grad_(), random(3, 4)
    result = (leaf * saved).sum()
    write(saved, random(3, 4))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()
    module = Counter()
    program = fxwrap.compile_graph(torch.export.export(module, (X,)), options=Options(emitter=emitter))  # type: ignore[arg-type]
    result = (leaf * module.state).sum()
    program(X)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()


@emitters
def test_inference_tensors_have_no_version_counter(emitter: str) -> None:
    write = direct(lambda x, y: x.copy_(y.sin()), random(3, 4), random(3, 4), emitter=emitter)
    with torch.inference_mode():
        x = random(3, 4).clone()
        write(x, random(3, 4))
        torch.testing.assert_close(x, random(3, 4).sin())


def test_a_written_real_view_of_an_input_traced_with_its_bit() -> None:
    graph = make_fx(lambda z: z.imag.add_(1) * 2)(Z.clone().conj())
    with pytest.raises(GraphError, match=r"view_as_real.*had a conjugate bit when it was traced.*resolve_conj"):
        fxwrap.compile_graph(graph, [Z.clone().conj()])
