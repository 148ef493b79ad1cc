"""Inputs on which kernels run directly, and those that emitted code cannot read: with a bit, or of plain subclasses.

The elements of a tensor with a negative bit are the negated numbers in its memory. torch's operators resolve the bits;
kernels and plain views read the memory. The program runs on plain tensors in place of such inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Proxy

from fxwrap.errors import GraphModuleError
from fxwrap.runtime.native import find_plain_inputs_check
from fxwrap.torch_compat import (
    FakeTensor,
    has_real_storage,
    is_dispatch_intercepted,
    is_forward_mode_active,
    is_functional_tensor,
    is_opaque,
    negated_view,
    storage_identity,
    tree_map,
    version_of,
    without_traced_class,
)

BoxedCallable = Callable[[list[object]], Any]

PLAIN_CLASSES: frozenset[type] = frozenset({torch.Tensor, torch.nn.Parameter})
_UNTRACED_CLASSES = PLAIN_CLASSES | {int, float, bool, type(None)}

_is_negative = torch.Tensor.is_neg
_is_conjugate = torch.Tensor.is_conj


def is_plain_class(kind: type) -> bool:
    """Whether tensors of a class are ordinary ones: no class up to Tensor or Parameter defines how operators act."""
    for base in kind.__mro__:
        if base in PLAIN_CLASSES:
            return True
        if "__torch_function__" in vars(base) or "__torch_dispatch__" in vars(base):
            return False
    return False


def needs_plain_inputs(inputs: Sequence[Any], *, has_complex: bool = True) -> bool:
    """Whether an input is of a plain subclass, or has a negative or, with `has_complex`, conjugate bit."""
    kinds = set(map(type, inputs))
    if kinds <= PLAIN_CLASSES:
        return any(map(_is_negative, inputs)) or (has_complex and any(map(_is_conjugate, inputs)))
    if any(kind not in PLAIN_CLASSES and is_plain_class(kind) for kind in kinds):
        return True
    return any(isinstance(item, torch.Tensor) and _has_bit(item) for item in inputs)


def _has_bit(item: torch.Tensor) -> bool:
    return (item.is_neg() or item.is_conj()) and not isinstance(item, FakeTensor) and not is_functional_tensor(item)


def with_plain_inputs(
    run: BoxedCallable, positions: Sequence[int] | None = None, *, has_complex: bool = True
) -> BoxedCallable:
    """Returns a boxed entry that passes plain tensors to `run`.

    `positions` are those of the inputs that may be unusual; None means all. `has_complex` is whether any is complex.
    """

    def call(inputs: list[object]) -> Any:
        checked = inputs if positions is None else [inputs[position] for position in positions]
        if needs_plain_inputs(checked, has_complex=has_complex):
            return run_on_plain_inputs(run, inputs)
        return run(inputs)

    return call


def with_traced_inputs(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that passes plain aliases of tensors whose class Dynamo has traced; gradients flow through."""

    def call(*inputs: Any) -> Any:
        if _UNTRACED_CLASSES.issuperset(map(type, inputs)):
            return function(*inputs)
        return function(*map(without_traced_class, inputs))

    return call


def with_traced_dtypes(function: Callable[..., Any], dtypes: Mapping[int, torch.dtype]) -> Callable[..., Any]:
    """Returns a function that converts the tensors at these positions to the dtypes that were traced."""

    def call(*inputs: Any) -> Any:
        converted = [*inputs]
        for position, dtype in dtypes.items():
            converted[position] = inputs[position].to(dtype)
        return function(*converted)

    return call


def with_traced_boxed_inputs(run: BoxedCallable) -> BoxedCallable:
    """Returns a boxed entry that passes plain aliases of tensors whose class was traced."""

    def call(inputs: list[object]) -> Any:
        inputs[:] = map(without_traced_class, inputs)
        return run(inputs)

    return call


def run_on_plain_inputs(run: BoxedCallable, inputs: list[Any]) -> Any:
    """Runs a boxed entry with a plain tensor in place of each unusual input.

    Writes reach the original tensors, and results that are an input, or a view of one, are those of the original.
    """
    replaced: list[tuple[torch.Tensor, torch.Tensor, int]] = []
    with torch.no_grad():
        for position, item in enumerate(inputs):
            plain = plain_tensor(item)
            if plain is not item:
                inputs[position] = plain
                replaced.append((item, plain, version_of(plain)))
        try:
            results = run(inputs)
        finally:
            for original, plain, version in replaced:
                if _has_bit(original) and version_of(plain) != version:
                    original.copy_(plain)
        originals = {storage_identity(plain): (original, plain) for original, plain, _ in replaced}

        def restore(result: object) -> object:
            pair = originals.get(storage_identity(result)) if isinstance(result, torch.Tensor) else None
            return result if pair is None else _restored(result, *pair)  # type: ignore[arg-type]

        return tree_map(restore, results)


def plain_tensor(item: object) -> Any:
    """Returns a plain tensor with the elements and strides of a tensor; other objects, and plain ones, unchanged.

    It is a copy of a tensor with a negative or conjugate bit, and an alias of any other.
    """
    if not isinstance(item, torch.Tensor) or not is_plain_class(type(item)):
        return item
    if not _has_bit(item):
        return item if type(item) in PLAIN_CLASSES else item.as_subclass(torch.Tensor)
    with torch.inference_mode(False):  # the copy needs a version counter
        length = 1 + sum((size - 1) * stride for size, stride in zip(item.shape, item.stride())) if item.numel() else 0
        memory = _flip_bits(item.detach().as_subclass(torch.Tensor), item).as_strided((length,), (1,))
        copy = memory.conj_physical() if item.is_conj() else memory
        copy = copy.neg() if item.is_neg() else copy
        return copy.as_strided(item.shape, item.stride())


def _flip_bits(view: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Returns a view with those bits flipped that `like` has."""
    view = view.conj() if like.is_conj() else view
    return negated_view(view) if like.is_neg() else view


def _restored(result: torch.Tensor, original: torch.Tensor, plain: torch.Tensor) -> torch.Tensor:
    """Returns a result that is a plain input, or a view of it with its dtype, as the same of the original."""
    if result is plain:
        return original
    if not _has_bit(original) or result.dtype != original.dtype:
        return result
    offset = result.storage_offset() - plain.storage_offset() + original.storage_offset()
    return _flip_bits(original.as_strided(result.shape, result.stride(), offset), result)


# --- calls that bypass the dispatcher ---------------------------------------------------------------------------------

SUPPORTED_ALTERNATIVES = (
    "Run it with torch.fx.Interpreter, copy it with copy.deepcopy, retrace it with make_fx, or keep the program's text "
    "(str(program)) and emit that again with fxwrap.to_fx; fxwrap.save writes it to a file"
)

_PLAIN_OBJECTS = PLAIN_CLASSES | {
    int,
    float,
    bool,
    complex,
    type(None),
    str,
    torch.dtype,
    torch.device,
    torch.Generator,
}

_address = torch.Tensor.data_ptr  # 0 for tensors without memory and empty ones
_is_compiling = torch.compiler.is_dynamo_compiling


def _make_plain_call_check() -> Callable[[tuple[object, ...]], bool]:
    """Returns `is_plain_call`, which uses the native check as soon as a bridge is loaded."""
    are_plain_inputs: Callable[[tuple[object, ...]], bool] | None = None

    def is_plain_call(inputs: tuple[object, ...]) -> bool:
        """Whether kernels may run on these inputs, with the same observable behaviour as operators.

        No mode, functorch level, level of forward-mode derivatives or tracer may be active, and no input may be a fake,
        meta, functionalised, negated, subclassed or symbolic tensor or require gradients. Raises GraphModuleError under
        symbolic tracing.
        """
        nonlocal are_plain_inputs
        if _is_compiling() or is_forward_mode_active():
            return False
        if are_plain_inputs is None:
            are_plain_inputs = find_plain_inputs_check()
        if are_plain_inputs is not None and are_plain_inputs(inputs):
            return True
        return not is_dispatch_intercepted() and _are_plain(inputs)

    return is_plain_call


is_plain_call = _make_plain_call_check()


def _are_plain(inputs: tuple[object, ...]) -> bool:
    """Whether operators run the kernels of ordinary tensors on these inputs, without gradients."""
    kinds = set(map(type, inputs))
    if not kinds <= _PLAIN_OBJECTS and not all(type(item) in _PLAIN_OBJECTS or is_opaque(item) for item in inputs):
        check_not_traced(inputs)
        return False
    tensors: Sequence[Any] = (
        inputs if kinds <= PLAIN_CLASSES else [item for item in inputs if isinstance(item, torch.Tensor)]
    )
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return False
    try:
        if not all(map(_address, tensors)) and not all(map(has_real_storage, tensors)):
            return False
        return not any(map(_is_negative, tensors))
    except RuntimeError:  # no address: sparse, or of a functorch level that has ended
        return False


def check_not_traced(inputs: Sequence[object]) -> None:
    """Raises GraphModuleError under symbolic tracing."""
    if Proxy in map(type, inputs):
        reason = "symbolic_trace would run its allocations once and record the memory as constants"
        raise GraphModuleError(f"an emitted graph cannot be traced symbolically: {reason}. {SUPPORTED_ALTERNATIVES}")
