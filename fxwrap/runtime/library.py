"""The torch library `fxwrap::`: operators that emitted FX graphs call where ATen has none.

Each operator has a schema with its mutations and aliases, one implementation for all devices, a fake implementation
and, where it mutates or aliases memory, a functionalisation rule. Operators with an effect outside their schema are
declared to have side effects, so that dead-code elimination keeps them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fxwrap import torch_compat
from fxwrap.runtime import collectives, devices, native, symmetric_memory, tensors
from fxwrap.runtime.checks import check_alignment, check_rank, raise_error
from fxwrap.runtime.checks import check_layout as check_tensor
from fxwrap.runtime.device_operators import (
    enter_device,
    exchange_random_state,
    exit_device,
    random_state_fake,
    record_event,
    record_event_fake,
    set_random_state,
    synchronize,
    synchronize_device,
    wait_event,
)
from fxwrap.runtime.kernel_operators import (
    cpp_kernel,
    cpp_kernel_fake,
    cpp_kernel_functional,
    cpp_kernel_functional_autograd,
    cpp_kernel_functional_fake,
    cpp_kernel_functionalised,
)
from fxwrap.runtime.kernel_table import register_kernel_texts
from fxwrap.runtime.matmuls import (
    gelu_matmul,
    gelu_matmul_fake,
    grouped_matmul,
    grouped_matmul_fake,
    grouped_products,
    grouped_products_fake,
    to_host,
    to_host_fake,
)
from fxwrap.runtime.prepacked_weights import (
    biased_linear,
    forget_forms,
    frozen_convolution,
    frozen_convolution_,
    frozen_convolution_fake,
    frozen_grouped_mm,
    frozen_grouped_mm_fake,
    linear_fake,
    prepacked_int8_linear,
    prepacked_int8_linear_fake,
    prepacked_linear,
)

_LIBRARY: Any = torch.library.Library("fxwrap", "DEF")  # type: ignore[no-untyped-call]

# --- memory ---------------------------------------------------------------------------------------------------------


def _allocate_symmetric_fake(
    sizes: Sequence[int], strides: Sequence[int], dtype: torch.dtype, device: torch.device, _group: str
) -> torch.Tensor:
    return torch.empty_strided(sizes, strides, dtype=dtype, device=device)


def _reuse(memory: torch.Tensor, *layout: Any) -> torch.Tensor:
    return _pool_slice(memory, 0, *layout)


def _pool_slice(
    pool: torch.Tensor, offset: int, sizes: Sequence[int], strides: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    return tensors.reinterpret(pool, sizes, strides, dtype, offset)


def _reuse_functionalised(memory: torch.Tensor, *layout: Any) -> torch.Tensor:
    """Returns a new tensor: the old content is dead and the new one is not written yet."""
    return _pool_slice_functionalised(memory, 0, *layout)


def _pool_slice_functionalised(
    pool: torch.Tensor, offset: int, sizes: Sequence[int], strides: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """Returns a new tensor: a slice starts uninitialised, and live slices never overlap."""
    return torch.empty_strided(sizes, strides, dtype=dtype, device=pool.device)


def _pool(size: int, device: torch.device) -> torch.Tensor:
    return torch.empty([size], dtype=torch.uint8, device=device)


def _workspace(size: int, zeroed: bool, device: torch.device) -> torch.Tensor:
    make = torch.zeros if zeroed else torch.empty
    return make([size], dtype=torch.uint8, device=device)


# --- checks ---------------------------------------------------------------------------------------------------------


def _check_layout(
    tensor: torch.Tensor | None,
    name: str,
    dtype: torch.dtype,
    sizes: Sequence[int],
    strides: Sequence[int],
    device: torch.device,
    alignment: int,
) -> None:
    check_tensor(tensor, name, dtype, sizes, strides, device)
    if tensor is not None and alignment != 1:
        check_alignment(tensor, name, alignment)


def _require(condition: float, message: str, error: str, shown: int | None) -> None:
    if not condition:
        raise_error(error, message, shown)


# --- collectives ----------------------------------------------------------------------------------------------------


def _all_gather_functionalised(inputs: Sequence[torch.Tensor], *arguments: Any) -> list[torch.Tensor]:
    return _collective_functionalised("all_gather_into_tensor_coalesced", inputs, arguments)


def _reduce_scatter_functionalised(inputs: Sequence[torch.Tensor], *arguments: Any) -> list[torch.Tensor]:
    return _collective_functionalised("reduce_scatter_tensor_coalesced", inputs, arguments)


def _collective_functionalised(name: str, inputs: Sequence[torch.Tensor], arguments: Sequence[Any]) -> list[Any]:
    """Awaits the results, since nothing else may read them before; later waits have no effect."""
    outs, operators = arguments[-1], torch.ops._c10d_functional
    contents = [torch_compat.unwrap_functional_tensor(tensor) for tensor in inputs]
    with torch_compat.exclude_functionalisation():
        results = [operators.wait_tensor(item) for item in getattr(operators, name)(contents, *arguments[:-1])]
    for out, content in zip(outs, results, strict=True):
        torch_compat.replace_functional_tensor(out, content)
    return list(outs)


# --- frozen weights -------------------------------------------------------------------------------------------------


def _frozen_convolution_functionalised(residual: torch.Tensor, *arguments: Any) -> None:
    """Replaces the residual by the sum, which is a new tensor."""

    def content_of(item: Any) -> Any:
        return torch_compat.unwrap_functional_tensor(item) if isinstance(item, torch.Tensor) else item

    content, *numbers, activation = torch_compat.tree_map(content_of, (residual, *arguments))
    with torch_compat.exclude_functionalisation():
        total = torch.ops.fxwrap.frozen_convolution(*numbers, content, activation, list(content.stride()))
    torch_compat.replace_functional_tensor(residual, total)


# --- registration ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Operator:
    """One operator: schema, implementation, fake implementation, rules of functionalisation and autograd.

    Without a fake implementation it has no results. `is_native` if the bridge has an implementation, too.
    """

    schema: str
    run: Callable[..., object]
    fake: Callable[..., object] | None = None
    functionalised: Callable[..., object] | None = None
    autograd: Callable[..., object] | None = None
    has_side_effect: bool = False
    is_native: bool = False

    @property
    def name(self) -> str:
        """The name in its library."""
        return self.schema.partition("(")[0]


_NUMBERS = "SymInt[] sizes, float[] numbers, SymInt[] grid"
_CONVOLUTION = (
    "Tensor image, Tensor weight, Tensor? bias, Tensor[] norm, float epsilon, int[] stride, int[] padding, "
    "int[] dilation, int groups"
)
_TYPE = "SymInt[] sizes, SymInt[] strides, ScalarType dtype"

_OPERATORS = (
    _Operator(
        f"cpp_kernel(str kernel, Tensor[] ins, *, Tensor(a!)[] outs, {_NUMBERS}) -> ()",
        cpp_kernel, cpp_kernel_fake, cpp_kernel_functionalised, has_side_effect=True,
    ),
    _Operator(
        "cpp_kernel_functional(str kernel, Tensor[] ins, *, Tensor?[] outs, SymInt[] layouts, str[] dtypes, "
        f"Device device, {_NUMBERS}) -> Tensor[]",
        cpp_kernel_functional, cpp_kernel_functional_fake, autograd=cpp_kernel_functional_autograd,
    ),
    _Operator("register_kernels(Tensor texts) -> ()", register_kernel_texts, has_side_effect=True),
    _Operator(
        f"allocate_symmetric({_TYPE}, Device device, str group) -> Tensor",
        symmetric_memory.allocate, _allocate_symmetric_fake,
    ),
    _Operator(
        "all_gather_into_tensors(Tensor[] inputs, int group_size, Any group_name, Tensor(a!)[] outs) -> Tensor(a!)[]",
        collectives.all_gather_into_tensors, collectives.into_tensors_fake, _all_gather_functionalised,
        has_side_effect=True,
    ),
    _Operator(
        "reduce_scatter_into_tensors(Tensor[] inputs, str reduce_op, int group_size, Any group_name, "
        "Tensor(a!)[] outs) -> Tensor(a!)[]",
        collectives.reduce_scatter_into_tensors, collectives.into_tensors_fake, _reduce_scatter_functionalised,
        has_side_effect=True,
    ),
    _Operator(f"reuse(Tensor(a) memory, {_TYPE}) -> Tensor(a)", _reuse, _reuse, _reuse_functionalised),
    _Operator("pool(SymInt size, Device device) -> Tensor", _pool, _pool),
    _Operator(
        f"pool_slice(Tensor(a) pool, SymInt offset, {_TYPE}) -> Tensor(a)",
        _pool_slice, _pool_slice, _pool_slice_functionalised,
    ),
    _Operator("workspace(SymInt size, bool zeroed, Device device) -> Tensor", _workspace, _workspace),
    _Operator(
        "check_layout(Tensor? tensor, str name, ScalarType dtype, SymInt[] sizes, SymInt[] strides, Device device, "
        "int alignment) -> ()",
        _check_layout, has_side_effect=True,
    ),
    _Operator("check_rank(Tensor? tensor, str name, int rank) -> ()", check_rank, has_side_effect=True),
    _Operator("require(Scalar condition, str message, str error, SymInt? shown) -> ()", _require, has_side_effect=True),
    _Operator("random_state(Device device) -> Tensor", devices.random_state, random_state_fake, has_side_effect=True),
    _Operator("set_random_state(Tensor state, Device device) -> ()", set_random_state, has_side_effect=True),
    _Operator(
        "exchange_random_state(Generator generator, Device device) -> ()", exchange_random_state, has_side_effect=True
    ),
    _Operator("enter_device(Device device, int stream=0) -> ()", enter_device, has_side_effect=True),
    _Operator("exit_device(Device device, int stream=0) -> ()", exit_device, has_side_effect=True),
    _Operator("stream_id(Device device, int stream) -> int", devices.stream_id, lambda *_: 0, has_side_effect=True),
    _Operator(
        "record_event(Device device, int stream, int event=0) -> Tensor", record_event, record_event_fake,
        has_side_effect=True,
    ),
    _Operator("wait_event(Tensor event, Device device, int stream) -> ()", wait_event, has_side_effect=True),
    _Operator(
        "record_stream(Tensor tensor, Device device, int stream) -> ()", devices.record_stream, has_side_effect=True
    ),
    _Operator(
        "prepacked_linear(Tensor left, Tensor weight, Tensor? bias, bool transposed, int? rows=None) -> Tensor",
        prepacked_linear, linear_fake, is_native=True,
    ),
    _Operator(
        "prepacked_int8_linear(Tensor rows, Tensor weight, bool transposed) -> Tensor",
        prepacked_int8_linear, prepacked_int8_linear_fake, is_native=True,
    ),
    _Operator(
        "biased_linear(Tensor left, Tensor weight, Tensor bias, bool transposed) -> Tensor",
        biased_linear, linear_fake, is_native=True,
    ),
    _Operator(
        f"frozen_convolution({_CONVOLUTION}, Tensor? residual, str activation, SymInt[] strides) -> Tensor",
        frozen_convolution, frozen_convolution_fake, is_native=True,
    ),
    _Operator(
        f"frozen_convolution_(Tensor(a!) residual, {_CONVOLUTION}, str activation) -> ()",
        frozen_convolution_, None, _frozen_convolution_functionalised, is_native=True,
    ),
    _Operator(
        "frozen_grouped_mm(Tensor rows, Tensor[] matrices, bool transposed, Tensor ends) -> Tensor",
        frozen_grouped_mm, frozen_grouped_mm_fake, is_native=True,
    ),
    _Operator(
        "gelu_matmul(Tensor left, Tensor right, Tensor? bias) -> (Tensor, Tensor)", gelu_matmul, gelu_matmul_fake
    ),
    _Operator("to_host(Tensor tensor) -> Tensor", to_host, to_host_fake),
    _Operator(
        "grouped_matmul(Tensor rows, Tensor[] matrices, bool transposed, Tensor? biases, Tensor ends) -> Tensor",
        grouped_matmul, grouped_matmul_fake,
    ),
    _Operator(
        "grouped_products(Tensor left, Tensor right, Tensor ends) -> Tensor", grouped_products, grouped_products_fake
    ),
    _Operator("synchronize(int place) -> ()", synchronize, has_side_effect=True),
    _Operator("synchronize_device(Device? device=None) -> ()", synchronize_device, has_side_effect=True),
)  # fmt: skip


class _NativeFirst:
    """The implementation of an operator that the bridge has, too: the bridge's, as soon as that need not be compiled.

    Until then, and where it does not compile, which the log says, Python's.
    """

    def __init__(self, operator: _Operator) -> None:
        self._operator = operator
        self._run: Callable[..., object] = self._first_call

    def __call__(self, *arguments: object) -> object:
        return self._run(*arguments)

    def _first_call(self, *arguments: object) -> object:
        return self.loaded()(*arguments)

    def loaded(self) -> Callable[..., object]:
        """Returns the bridge's function if that need not be compiled, else this object, which it replaces later."""
        if self._run == self._first_call:
            if native.find_bridge() is not None:
                self._use_bridge()
            else:
                self._run = self._operator.run
                native.after_bridge(self._use_bridge)
        return self if self._run == self._operator.run else self._run

    def _use_bridge(self) -> None:
        self._run = native.native_operator(self._operator.name)
        forget_forms()


_IMPLEMENTATIONS: dict[str, Callable[..., object]] = {
    operator.name: _NativeFirst(operator) if operator.is_native else operator.run for operator in _OPERATORS
}


def implementation(operator: torch_compat.OpOverload) -> Callable[..., object]:
    """Returns the implementation of an operator of this library, for any device."""
    implementation = _IMPLEMENTATIONS[torch_compat.torch_schema(operator).name.partition("::")[2]]
    return implementation.loaded() if isinstance(implementation, _NativeFirst) else implementation


def _no_fake_result(*_arguments: object, **_keywords: object) -> None:
    """The fake implementation of operators without results."""


def _register(operator: _Operator) -> None:
    name = operator.name
    _LIBRARY.define(operator.schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))
    _LIBRARY.impl(name, _IMPLEMENTATIONS[name], "CompositeExplicitAutograd")
    torch.library.register_fake(f"fxwrap::{name}", operator.fake or _no_fake_result, lib=_LIBRARY)
    if operator.functionalised is not None:
        _LIBRARY.impl(name, operator.functionalised, "Functionalize")
    if operator.autograd is not None:
        _LIBRARY.impl(name, operator.autograd, "Autograd", with_keyset=True)
    if operator.has_side_effect:
        torch_compat.declare_side_effect(getattr(torch.ops.fxwrap, name).default)


for _operator in _OPERATORS:
    _register(_operator)

cpp_kernel_operator: Any = torch.ops.fxwrap.cpp_kernel.default
cpp_kernel_functional_operator: Any = torch.ops.fxwrap.cpp_kernel_functional.default
