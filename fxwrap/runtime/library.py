"""The torch library `fxwrap::`: what emitted FX graphs call where ATen has no operator.

Each has a schema that says what it writes and shares, an implementation for every device, a rule for fake tensors and,
where it writes or shares memory, one for functionalisation. Operators whose effect is not in their schema are declared
to have side effects, so that dead-code elimination keeps them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from fxwrap.device_registry import Language, Launcher, find_language, missing_function, registered_spec
from fxwrap.errors import FxwrapError
from fxwrap.runtime import devices, tensors
from fxwrap.runtime.checks import check_alignment, check_rank, fail
from fxwrap.runtime.checks import check_layout as check_tensor
from fxwrap.runtime.cpp_kernels import KernelText
from fxwrap.runtime.kernels import load_kernel, prepare_kernels
from fxwrap.torch_compat import (
    below_functionalisation,
    declare_side_effect,
    functional_content,
    functional_update,
    get_external_object,
    triton_launch,
)

_LIBRARY: Any = torch.library.Library("fxwrap", "DEF")  # type: ignore[no-untyped-call]

# --- kernels --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RegisteredKernel:
    """A kernel that graphs launch by its content hash: what `load_kernel` takes, a name to read, how many outputs."""

    language: str
    source: str
    signature: tuple[str, ...]
    options: tuple[tuple[str, Any], ...]
    name: str = ""
    outs: int = 0

    @property
    def text(self) -> tuple[str, tuple[str, ...], tuple[tuple[str, Any], ...]]:
        """What loads a kernel of a language: source, signature and options."""
        return self.source, self.signature, self.options


_KERNELS: dict[str, RegisteredKernel] = {}


def register_kernel(kernel_hash: str, kernel: RegisteredKernel) -> None:
    """Makes a kernel known under its content hash; again for an equal one changes nothing."""
    _KERNELS.setdefault(kernel_hash, kernel)


def known_kernel(kernel_hash: Any) -> RegisteredKernel | None:
    """Returns the kernel with a content hash; None for one that this process has not loaded, and for anything else."""
    return _KERNELS.get(kernel_hash) if isinstance(kernel_hash, str) else None


def registered_kernel(kernel_hash: str) -> RegisteredKernel:
    """Returns the kernel with a content hash. Raises FxwrapError for one that this process has not loaded."""
    found = _KERNELS.get(kernel_hash)
    if found is None:
        raise FxwrapError(
            f"no kernel with the hash {kernel_hash} is loaded; emit the program with fxwrap.to_fx in this process first"
        )
    return found


def interleave(
    signature: tuple[str, ...], sizes: Sequence[Any], numbers: Sequence[Any], truth: Callable[[Any], Any] = bool
) -> list[Any]:
    """Returns a kernel's number arguments in the order of its signature, in which floats are "f..." and bools "i1".

    `truth` makes a bool of a size. Raises ValueError when there are too few or too many.
    """
    left_sizes, left_numbers = iter(sizes), iter(numbers)
    kinds = [entry for entry in signature if not entry.startswith("*")]
    if not kinds:
        return [*sizes, *numbers]
    floats = sum(kind.startswith("f") for kind in kinds)
    if (len(kinds) - floats, floats) != (len(sizes), len(numbers)):
        raise ValueError(f"the kernel takes {len(kinds) - floats} sizes and {floats} numbers")
    return [
        next(left_numbers) if kind.startswith("f") else truth(next(left_sizes)) if kind == "i1" else next(left_sizes)
        for kind in kinds
    ]


@cache
def _launcher(kernel_hash: str, _language: Language | None) -> Launcher:
    """Returns the launcher of a kernel, which is another where its language was registered anew."""
    found = registered_kernel(kernel_hash)
    texts = [KernelText(item.language, item.source, item.signature, item.options) for item in _KERNELS.values()]
    prepare_kernels(tuple(texts))  # those of one graph are registered together, and compile faster together
    return load_kernel(found.language, found.source, found.signature, found.options)


def _cpp_kernel(
    kernel: str,
    ins: Sequence[torch.Tensor],
    *,
    outs: Sequence[torch.Tensor],
    sizes: Sequence[int],
    numbers: Sequence[float],
    grid: Sequence[int],
) -> None:
    found = registered_kernel(kernel)
    launch = _launcher(kernel, find_language(found.language))
    launch(tuple(grid), *ins, *outs, *interleave(found.signature, sizes, numbers))


def _cpp_kernel_functional(
    kernel: str,
    ins: Sequence[torch.Tensor],
    outs: Sequence[torch.Tensor],
    sizes: Sequence[int],
    numbers: Sequence[float],
    grid: Sequence[int],
) -> list[torch.Tensor]:
    made = [out.clone() for out in outs]
    _cpp_kernel(kernel, ins, outs=made, sizes=sizes, numbers=numbers, grid=grid)
    return made


def _cpp_kernel_functional_fake(
    _kernel: str, _ins: Sequence[torch.Tensor], outs: Sequence[torch.Tensor], *_rest: Sequence[Any]
) -> list[torch.Tensor]:
    return [torch.empty_like(out) for out in outs]


def _cpp_kernel_functionalised(
    kernel: str, ins: Sequence[torch.Tensor], *, outs: Sequence[torch.Tensor], **numbers: Sequence[Any]
) -> None:
    contents = [[functional_content(tensor) for tensor in group] for group in (ins, outs)]
    with below_functionalisation():
        made = torch.ops.fxwrap.cpp_kernel_functional(kernel, *contents, **numbers)
    for out, content in zip(outs, made, strict=True):
        functional_update(out, content)


# --- memory ---------------------------------------------------------------------------------------------------------


def _reuse(memory: torch.Tensor, sizes: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return _pool_slice(memory, 0, sizes, strides, dtype)


def _pool_slice(
    pool: torch.Tensor, offset: int, sizes: Sequence[int], strides: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    return tensors.reinterpret(pool, sizes, strides, dtype, offset)


def _reuse_functionalised(
    memory: torch.Tensor, sizes: Sequence[int], strides: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """The old content is gone and the new one unwritten, so without mutation it is a tensor of its own."""
    return torch.empty_strided(sizes, strides, dtype=dtype, device=memory.device)


def _pool_slice_functionalised(
    pool: torch.Tensor, offset: int, sizes: Sequence[int], strides: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """A slice starts unwritten, and slices that are alive together never overlap."""
    return torch.empty_strided(sizes, strides, dtype=dtype, device=pool.device)


def _pool(size: int, device: torch.device) -> torch.Tensor:
    return torch.empty([size], dtype=torch.uint8, device=device)


def _workspace(size: int, zeroed: bool, device: torch.device) -> torch.Tensor:
    make = torch.zeros if zeroed else torch.empty
    return make([size], dtype=torch.uint8, device=device)


# --- the world ------------------------------------------------------------------------------------------------------


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
        fail(error, message, shown)


def _random_state(device: torch.device) -> torch.Tensor:
    return tensors.random_state(str(device))


def _random_state_fake(device: torch.device) -> torch.Tensor:
    spec = registered_spec(device.type)
    if spec is None or spec.random_state_bytes is None:
        raise missing_function(device.type, "random_state")
    return torch.empty([spec.random_state_bytes], dtype=torch.uint8, device="cpu")


def _set_random_state(state: torch.Tensor, device: torch.device) -> None:
    tensors.set_random_state(str(device), state)


def _exchange_random_state(generator: torch.Generator, device: torch.device) -> None:
    tensors.exchange_random_state(str(device), generator)


class _Entered(threading.local):
    """The guards that a thread has entered and not yet left."""

    def __init__(self) -> None:
        self.guards: list[Any] = []


_ENTERED = _Entered()


def _enter_device(device: torch.device, stream: int = 0) -> None:
    guard = devices.on(device, stream)()
    guard.__enter__()
    _ENTERED.guards.append(guard)


def entering(device: torch.device, stream: int = 0) -> Callable[[], None]:
    """Returns what `fxwrap::enter_device` does for a device and a stream, worked out once."""
    guard_of = devices.on(device, stream)

    def enter() -> None:
        guard = guard_of()
        guard.__enter__()
        _ENTERED.guards.append(guard)

    return enter


def _exit_device(_device: torch.device, _stream: int = 0) -> None:
    _ENTERED.guards.pop().__exit__(None, None, None)


@contextmanager
def left_when_it_raises() -> Iterator[None]:
    """Leaves, where a `with` block raises, the devices that were entered in it and not left."""
    depth = len(_ENTERED.guards)
    try:
        yield
    except BaseException:
        while len(_ENTERED.guards) > depth:
            _ENTERED.guards.pop().__exit__(None, None, None)
        raise


def _stream_id(device: torch.device, stream: int) -> int:
    return devices.stream_id(device, stream)


def _record_event(device: torch.device, stream: int, event: int = 0) -> torch.Tensor:
    """Returns an empty tensor that carries the event: a graph passes only tensors on."""
    token: Any = torch.empty([0], dtype=torch.int64)
    token.event = devices.record_event(device, stream, event)
    return token  # type: ignore[no-any-return]


def _record_event_fake(_device: torch.device, _stream: int, _event: int = 0) -> torch.Tensor:
    return torch.empty([0], dtype=torch.int64, device="cpu")


def _wait_event(event: torch.Tensor, device: torch.device, stream: int) -> None:
    devices.wait_event(event.event, device, stream)  # type: ignore[attr-defined]


def _synchronize(place: int) -> None:
    """Waits for a stream or an event of the model's, by its place in Dynamo's table."""
    get_external_object()(place).synchronize()


def _synchronize_device(device: torch.device | None = None) -> None:
    torch.accelerator.synchronize(device)


def _record_stream(tensor: torch.Tensor, device: torch.device, stream: int) -> None:
    devices.record_stream(tensor, device, stream)


# --- registration ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Operator:
    """One operator: its schema, what it does, what it gives for fake tensors (None: nothing), its functional form."""

    schema: str
    run: Callable[..., Any]
    fake: Callable[..., Any] | None = None
    functionalised: Callable[..., Any] | None = None
    has_effect: bool = False


_NUMBERS = "SymInt[] sizes, float[] numbers, SymInt[] grid"
_TYPE = "SymInt[] sizes, SymInt[] strides, ScalarType dtype"

_OPERATORS = (
    _Operator(
        f"cpp_kernel(str kernel, Tensor[] ins, *, Tensor(a!)[] outs, {_NUMBERS}) -> ()",
        _cpp_kernel, None, _cpp_kernel_functionalised, has_effect=True,
    ),
    _Operator(
        f"cpp_kernel_functional(str kernel, Tensor[] ins, Tensor[] outs, {_NUMBERS}) -> Tensor[]",
        _cpp_kernel_functional, _cpp_kernel_functional_fake,
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
        _check_layout, has_effect=True,
    ),
    _Operator("check_rank(Tensor? tensor, str name, int rank) -> ()", check_rank, has_effect=True),
    _Operator("require(Scalar condition, str message, str error, SymInt? shown) -> ()", _require, has_effect=True),
    _Operator("random_state(Device device) -> Tensor", _random_state, _random_state_fake, has_effect=True),
    _Operator("set_random_state(Tensor state, Device device) -> ()", _set_random_state, has_effect=True),
    _Operator(
        "exchange_random_state(Generator generator, Device device) -> ()", _exchange_random_state, has_effect=True
    ),
    _Operator("enter_device(Device device, int stream=0) -> ()", _enter_device, has_effect=True),
    _Operator("exit_device(Device device, int stream=0) -> ()", _exit_device, has_effect=True),
    _Operator("stream_id(Device device, int stream) -> int", _stream_id, lambda *_: 0, has_effect=True),
    _Operator(
        "record_event(Device device, int stream, int event=0) -> Tensor", _record_event, _record_event_fake,
        has_effect=True,
    ),
    _Operator("wait_event(Tensor event, Device device, int stream) -> ()", _wait_event, has_effect=True),
    _Operator("record_stream(Tensor tensor, Device device, int stream) -> ()", _record_stream, has_effect=True),
    _Operator("synchronize(int place) -> ()", _synchronize, has_effect=True),
    _Operator("synchronize_device(Device? device=None) -> ()", _synchronize_device, has_effect=True),
)  # fmt: skip


_RUN = {operator.schema.partition("(")[0]: operator.run for operator in _OPERATORS}


def implementation(operator: Any) -> Callable[..., Any]:
    """Returns the function that an operator of this library runs, on any device."""
    return _RUN[operator._schema.name.partition("::")[2]]


def _nothing(*_arguments: Any, **_keywords: Any) -> None:
    """The rule for fake tensors of an operator that gives nothing."""


def _register(operator: _Operator) -> None:
    name = operator.schema.partition("(")[0]
    _LIBRARY.define(operator.schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))
    _LIBRARY.impl(name, operator.run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fxwrap::{name}", operator.fake or _nothing, lib=_LIBRARY)
    if operator.functionalised is not None:
        _LIBRARY.impl(name, operator.functionalised, "Functionalize")
    if operator.has_effect:
        declare_side_effect(getattr(torch.ops.fxwrap, name).default)


for _operator in _OPERATORS:
    _register(_operator)

cpp_kernel_operator: Any = torch.ops.fxwrap.cpp_kernel.default

# torch's own operator for Triton kernels writes its operands but has no schema that says so.
declare_side_effect(triton_launch)
