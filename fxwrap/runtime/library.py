"""The torch library `fxwrap::`: operators that emitted FX graphs call where ATen has none.

Each operator has a schema with its mutations and aliases, one implementation for all devices, a fake implementation
and, where it mutates or aliases memory, a functionalisation rule. Operators with an effect outside their schema are
declared to have side effects, so that dead-code elimination keeps them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias
from weakref import WeakSet, WeakValueDictionary

import torch
from torch.utils.weak import WeakIdKeyDictionary

from fxwrap import torch_compat
from fxwrap.caching import bounded_cache
from fxwrap.devices import Launcher, RegisteredLanguage, find_language, missing_function_error, registered_spec
from fxwrap.errors import KernelTextError
from fxwrap.runtime import collectives, devices, symmetric_memory, tensors
from fxwrap.runtime.checks import check_alignment, check_rank, raise_error
from fxwrap.runtime.checks import check_layout as check_tensor
from fxwrap.runtime.cpp_kernels import KernelText
from fxwrap.runtime.gradients import run_without_gradient
from fxwrap.runtime.kernel_texts import RegisteredKernel as RegisteredKernel
from fxwrap.runtime.kernel_texts import parse_kernels
from fxwrap.runtime.kernels import load_kernel, prepare_kernels

_LIBRARY: Any = torch.library.Library("fxwrap", "DEF")  # type: ignore[no-untyped-call]

# --- kernels --------------------------------------------------------------------------------------------------------


_KERNELS: WeakValueDictionary[str, RegisteredKernel] = WeakValueDictionary()
"""Kernels by content hash. Emitted graphs own them in their metadata. Those of graphs that only have their hashes are
owned by `_own_kernel`'s cache, from the first launch or fake propagation on, and Triton kernels by torch's table."""

_UNPREPARED: WeakSet[RegisteredKernel] = WeakSet()
"""Kernels registered since the last first launch. Those of a graph are registered, and compile faster, together."""

_TABLE_LOCK = threading.RLock()
"""Held while a table is changed or iterated: threads register and launch kernels at the same time."""


@contextmanager
def empty_kernel_table() -> Iterator[None]:
    """Runs without registered kernels and restores the table afterwards: for tests."""
    before, unprepared = dict(_KERNELS), set(_UNPREPARED)
    _KERNELS.clear()
    _UNPREPARED.clear()
    try:
        yield
    finally:
        _KERNELS.clear()
        _KERNELS.update(before)
        _UNPREPARED.clear()
        _UNPREPARED.update(unprepared)


def register_kernel(kernel_hash: str, kernel: RegisteredKernel) -> RegisteredKernel:
    """Registers a kernel under its content hash and returns it, or the equal one that is registered.

    It remains available while the result is referenced.
    """
    with _TABLE_LOCK:
        registered = _KERNELS.setdefault(kernel_hash, kernel)
        if registered is kernel:
            _UNPREPARED.add(kernel)
    return registered


def find_registered_kernel(kernel_hash: object) -> RegisteredKernel | None:
    """Returns the kernel with a content hash; None for an unknown hash or an object of another type."""
    return _KERNELS.get(kernel_hash) if isinstance(kernel_hash, str) else None


def get_registered_kernel(kernel_hash: str) -> RegisteredKernel:
    """Returns the kernel with a content hash. Raises KernelTextError for an unknown one."""
    kernel = _KERNELS.get(kernel_hash)
    if kernel is None:
        reason = "no kernel with this content hash is loaded in this process"
        remedy = (
            "Emit the program with fxwrap.to_fx in this process first; in an exported program, run the node of "
            "fxwrap::register_kernels first, and export it again if the texts there lack this kernel"
        )
        raise KernelTextError(kernel_hash, reason, remedy)
    return kernel


def order_scalar_arguments(
    signature: tuple[str, ...], sizes: Sequence[Any], numbers: Sequence[Any], to_bool: Callable[[Any], Any] = bool
) -> list[Any]:
    """Returns a kernel's scalar arguments in signature order: "f..." entries are floats, "i1" entries bools.

    `to_bool` converts a size to a bool. Raises ValueError when there are too few or too many.
    """
    next_size, next_number = iter(sizes).__next__, iter(numbers).__next__
    kinds = [entry for entry in signature if not entry.startswith("*")]
    if not kinds:
        return [*sizes, *numbers]
    floats = sum(kind.startswith("f") for kind in kinds)
    if (len(kinds) - floats, floats) != (len(sizes), len(numbers)):
        raise ValueError(f"the kernel takes {len(kinds) - floats} sizes and {floats} numbers")
    return [
        next_number() if kind.startswith("f") else to_bool(next_size()) if kind == "i1" else next_size()
        for kind in kinds
    ]


@bounded_cache(4096)
def _launcher(kernel_hash: str, _language: RegisteredLanguage | None) -> Launcher:
    """Returns the launcher of a kernel for the current registration of its language."""
    kernel = get_registered_kernel(kernel_hash)
    with _TABLE_LOCK:
        unprepared = list(_UNPREPARED)
        _UNPREPARED.difference_update(unprepared)
    prepare_kernels(tuple([KernelText(item.language, *item.text) for item in unprepared]))
    return load_kernel(kernel.language, *kernel.text)


@bounded_cache(4096)
def _own_kernel(kernel_hash: str) -> RegisteredKernel:
    """Keeps a kernel available for graphs that were traced through the operator and only have its hash."""
    return get_registered_kernel(kernel_hash)


def _cpp_kernel(
    kernel: str,
    ins: Sequence[torch.Tensor],
    *,
    outs: Sequence[torch.Tensor],
    sizes: Sequence[int],
    numbers: Sequence[float],
    grid: Sequence[int],
) -> None:
    registered = _own_kernel(kernel)
    launch = _launcher(kernel, find_language(registered.language))
    launch(tuple(grid), *ins, *outs, *order_scalar_arguments(registered.signature, sizes, numbers))
    tensors.increment_versions(outs)


def _own_registered_kernel(kernel: str) -> None:
    if find_registered_kernel(kernel) is not None:
        _own_kernel(kernel)


def _cpp_kernel_fake(kernel: str, _ins: object, *, outs: Sequence[torch.Tensor], **_keywords: object) -> None:
    _own_registered_kernel(kernel)
    tensors.increment_versions(outs)  # fake tensors remember the symbols of their items while they are not written


def _cpp_kernel_functional(
    kernel: str,
    ins: Sequence[torch.Tensor],
    *,
    outs: Sequence[torch.Tensor | None],
    layouts: Sequence[int],
    dtypes: Sequence[str],
    device: torch.device,
    **numbers: Any,
) -> list[torch.Tensor]:
    """Launches a kernel on new results: copies of the tensors in `outs`, and new memory where it has None.

    An input that is also in `outs` is the copy: the kernel reads what it writes.
    `layouts` has the rank, sizes and strides of each new result, `dtypes` their dtypes.
    """

    def launch() -> list[torch.Tensor]:
        results = [_new_result(out, *new, device) for out, new in _results(outs, layouts, dtypes)]
        result_of = {id(out): result for out, result in zip(outs, results, strict=True) if out is not None}
        _cpp_kernel(kernel, [result_of.get(id(item), item) for item in ins], outs=results, **numbers)
        return results

    return run_without_gradient(launch, [*ins, *[out for out in outs if out is not None]])


def _cpp_kernel_functional_fake(
    kernel: str,
    _ins: Sequence[torch.Tensor],
    *,
    outs: Sequence[torch.Tensor | None],
    layouts: Sequence[int],
    dtypes: Sequence[str],
    device: torch.device,
    **_numbers: object,
) -> list[torch.Tensor]:
    _own_registered_kernel(kernel)
    return [
        torch.empty_strided(sizes, strides, dtype=dtype, device=device) if out is None
        else torch.empty_strided(out.shape, out.stride(), dtype=out.dtype, device=out.device)
        for out, (sizes, strides, dtype) in _results(outs, layouts, dtypes)
    ]  # fmt: skip


NewLayout: TypeAlias = tuple[Sequence[Any], Sequence[Any], "torch.dtype | None"]
"""Sizes, strides and dtype of a new result; empty for a copy."""


def _results(outs: Sequence[Any], layouts: Sequence[Any], dtypes: Sequence[str]) -> Iterator[tuple[Any, NewLayout]]:
    new = iter(result_layouts(layouts, dtypes))
    for out in outs:
        yield out, ((), (), None) if out is not None else next(new)


def result_layouts(layouts: Sequence[Any], dtypes: Sequence[str]) -> list[NewLayout]:
    """Returns sizes, strides and dtype of each new result of `cpp_kernel_functional`.

    Raises ValueError if there are too few or too many numbers.
    """
    position, results = 0, []
    for dtype in dtypes:
        rank = layouts[position] if position < len(layouts) else 0
        numbers = layouts[position + 1 : position + 1 + 2 * rank]
        if position >= len(layouts) or len(numbers) < 2 * rank:
            raise ValueError("layouts has the rank, sizes and strides of each new result")
        results.append((numbers[:rank], numbers[rank:], getattr(torch, dtype)))
        position += 1 + 2 * rank
    if position != len(layouts):
        raise ValueError(f"layouts has more results than the {len(dtypes)} of dtypes")
    return results


def _new_result(
    out: torch.Tensor | None,
    sizes: Sequence[int],
    strides: Sequence[int],
    dtype: torch.dtype | None,
    device: torch.device,
) -> torch.Tensor:
    if out is not None:
        return tensors.copy_with_strides(out)
    return torch.empty_strided(sizes, strides, dtype=dtype, device=device)


def _cpp_kernel_functionalised(
    kernel: str, ins: Sequence[torch.Tensor], *, outs: Sequence[torch.Tensor], **numbers: Sequence[float]
) -> None:
    contents = [[torch_compat.unwrap_functional_tensor(tensor) for tensor in group] for group in (ins, outs)]
    device = contents[1][0].device if outs else torch.device("cpu")
    with torch_compat.exclude_functionalisation():
        results = torch.ops.fxwrap.cpp_kernel_functional(
            kernel, contents[0], outs=contents[1], layouts=[], dtypes=[], device=device, **numbers
        )
    for out, content in zip(outs, results, strict=True):
        torch_compat.replace_functional_tensor(out, content)


_KERNELS_OF_TEXTS = WeakIdKeyDictionary()
"""The kernels of each tensor of texts that was registered, which they live as long as."""


def _register_kernels(texts: torch.Tensor) -> None:
    """Registers the kernels of an exported program; calls after the first return at once."""
    if texts in _KERNELS_OF_TEXTS:
        return
    parsed = parse_kernels(texts)
    with _TABLE_LOCK:
        _KERNELS_OF_TEXTS[texts] = [register_kernel(kernel_hash, kernel) for kernel_hash, kernel in parsed.items()]


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


# --- checks, random state, devices and streams ----------------------------------------------------------------------


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


def _random_state_fake(device: torch.device) -> torch.Tensor:
    spec = registered_spec(device.type)
    if spec is None or spec.random_state_bytes is None:
        raise missing_function_error(device.type, "random_state")
    return torch.empty([spec.random_state_bytes], dtype=torch.uint8, device="cpu")


def _set_random_state(state: torch.Tensor, device: torch.device) -> None:
    tensors.set_random_state(str(device), state)


def _exchange_random_state(generator: torch.Generator, device: torch.device) -> None:
    tensors.exchange_random_state(str(device), generator)


class _DeviceGuardStack(threading.local):
    """The device guards that a thread has entered and not exited."""

    def __init__(self) -> None:
        self.guards: list[AbstractContextManager[object]] = []


_DEVICE_GUARDS = _DeviceGuardStack()


def _enter_device(device: torch.device, stream: int = 0) -> None:
    make_enter_device(device, stream)()


def make_enter_device(device: torch.device, stream: int = 0) -> Callable[[], None]:
    """Returns `fxwrap::enter_device` for a fixed device and stream."""
    make_guard = devices.device_context(device, stream)

    def enter() -> None:
        guard = make_guard()
        guard.__enter__()
        _DEVICE_GUARDS.guards.append(guard)

    return enter


def _exit_device(_device: torch.device, _stream: int = 0) -> None:
    _DEVICE_GUARDS.guards.pop().__exit__(None, None, None)


@contextmanager
def exit_devices_on_error() -> Iterator[None]:
    """Exits, when a `with` block raises, the devices that were entered and not exited in it."""
    depth = len(_DEVICE_GUARDS.guards)
    try:
        yield
    except BaseException:
        while len(_DEVICE_GUARDS.guards) > depth:
            _DEVICE_GUARDS.guards.pop().__exit__(None, None, None)
        raise


def _record_event(device: torch.device, stream: int, event: int = 0) -> torch.Tensor:
    """Returns an empty tensor with the event as an attribute: graphs pass only tensors."""
    token: Any = torch.empty([0], dtype=torch.int64)
    token.event = devices.record_event(device, stream, event)
    return token  # type: ignore[no-any-return]


def _record_event_fake(_device: torch.device, _stream: int, _event: int = 0) -> torch.Tensor:
    return torch.empty([0], dtype=torch.int64, device="cpu")


def _wait_event(event: torch.Tensor, device: torch.device, stream: int) -> None:
    devices.wait_event(event.event, device, stream)  # type: ignore[attr-defined]


def _synchronize(place: int) -> None:
    """Waits for the stream or event at an index of Dynamo's table."""
    torch_compat.get_external_object()(place).synchronize()


def _synchronize_device(device: torch.device | None = None) -> None:
    torch.accelerator.synchronize(device)


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


# --- registration ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Operator:
    """One operator: schema, implementation, fake implementation (None: no results) and functionalisation rule."""

    schema: str
    run: Callable[..., object]
    fake: Callable[..., object] | None = None
    functionalised: Callable[..., object] | None = None
    has_side_effect: bool = False


_NUMBERS = "SymInt[] sizes, float[] numbers, SymInt[] grid"
_TYPE = "SymInt[] sizes, SymInt[] strides, ScalarType dtype"

_OPERATORS = (
    _Operator(
        f"cpp_kernel(str kernel, Tensor[] ins, *, Tensor(a!)[] outs, {_NUMBERS}) -> ()",
        _cpp_kernel, _cpp_kernel_fake, _cpp_kernel_functionalised, has_side_effect=True,
    ),
    _Operator(
        "cpp_kernel_functional(str kernel, Tensor[] ins, *, Tensor?[] outs, SymInt[] layouts, str[] dtypes, "
        f"Device device, {_NUMBERS}) -> Tensor[]",
        _cpp_kernel_functional, _cpp_kernel_functional_fake,
    ),
    _Operator("register_kernels(Tensor texts) -> ()", _register_kernels, has_side_effect=True),
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
    _Operator("random_state(Device device) -> Tensor", devices.random_state, _random_state_fake, has_side_effect=True),
    _Operator("set_random_state(Tensor state, Device device) -> ()", _set_random_state, has_side_effect=True),
    _Operator(
        "exchange_random_state(Generator generator, Device device) -> ()", _exchange_random_state, has_side_effect=True
    ),
    _Operator("enter_device(Device device, int stream=0) -> ()", _enter_device, has_side_effect=True),
    _Operator("exit_device(Device device, int stream=0) -> ()", _exit_device, has_side_effect=True),
    _Operator("stream_id(Device device, int stream) -> int", devices.stream_id, lambda *_: 0, has_side_effect=True),
    _Operator(
        "record_event(Device device, int stream, int event=0) -> Tensor", _record_event, _record_event_fake,
        has_side_effect=True,
    ),
    _Operator("wait_event(Tensor event, Device device, int stream) -> ()", _wait_event, has_side_effect=True),
    _Operator(
        "record_stream(Tensor tensor, Device device, int stream) -> ()", devices.record_stream, has_side_effect=True
    ),
    _Operator("synchronize(int place) -> ()", _synchronize, has_side_effect=True),
    _Operator("synchronize_device(Device? device=None) -> ()", _synchronize_device, has_side_effect=True),
)  # fmt: skip


_IMPLEMENTATIONS = {operator.schema.partition("(")[0]: operator.run for operator in _OPERATORS}


def implementation(operator: torch_compat.OpOverload) -> Callable[..., object]:
    """Returns the implementation of an operator of this library, for any device."""
    return _IMPLEMENTATIONS[torch_compat.torch_schema(operator).name.partition("::")[2]]


def _no_fake_result(*_arguments: object, **_keywords: object) -> None:
    """The fake implementation of operators without results."""


def _register(operator: _Operator) -> None:
    name = operator.schema.partition("(")[0]
    _LIBRARY.define(operator.schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))
    _LIBRARY.impl(name, operator.run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fxwrap::{name}", operator.fake or _no_fake_result, lib=_LIBRARY)
    if operator.functionalised is not None:
        _LIBRARY.impl(name, operator.functionalised, "Functionalize")
    if operator.has_side_effect:
        torch_compat.declare_side_effect(getattr(torch.ops.fxwrap, name).default)


for _operator in _OPERATORS:
    _register(_operator)

cpp_kernel_operator: Any = torch.ops.fxwrap.cpp_kernel.default
cpp_kernel_functional_operator: Any = torch.ops.fxwrap.cpp_kernel_functional.default
