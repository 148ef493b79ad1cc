"""Fake tensors and their modes."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial, wraps
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch._dispatch.python import enable_python_dispatcher

# Why: fake tensors carry the sizes of graphs; only the module path of the mode is private.
from torch._guards import detect_fake_mode as detect_fake_mode
from torch._ops import OpOverload
from torch._subclasses import fake_tensor as fake_tensor_module
from torch._subclasses.fake_impls import op_implementations_dict
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv
from torch.torch_version import TorchVersion

from fxwrap.torch_compat.symbols import isolate_pending_symbols


def fresh_fake_mode() -> FakeTensorMode:
    """Returns a fake mode with a new ShapeEnv."""
    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())


def shape_env_of(mode: FakeTensorMode) -> ShapeEnv:
    """Returns the ShapeEnv of a fake mode, or a new one for a mode without."""
    return mode.shape_env if mode.shape_env is not None else ShapeEnv()


def fake_tensor(mode: FakeTensorMode, meta: torch.Tensor, device: torch.device) -> FakeTensor:
    """Returns a fake tensor on `device` with the sizes, strides, offset and storage of a meta tensor."""
    return FakeTensor(mode, meta, device)


def fake_like(like: FakeTensor, storage: torch.UntypedStorage | None = None) -> FakeTensor:
    """Returns a fake tensor of the same layout on a storage; None for a new one, as large, that nothing has written.

    Why: under a fake mode, an operator on fake tensors is dispatched several times. `empty_strided` and `set_` compute
    the bytes of a storage from symbolic sizes, which takes a hundred times as long as the copy of a storage.
    """
    with torch._C._DisableTorchDispatch(), torch._C._DisablePythonDispatcher():
        meta = torch.empty(0, dtype=like.dtype, device="meta")
        meta.set_(like.untyped_storage() if storage is None else storage, 0, (0,), (1,))
        if storage is None:
            meta = torch._lazy_clone(meta)
        offset = 0 if storage is None else like.storage_offset()
        return fake_tensor(like.fake_mode, meta.as_strided(like.shape, like.stride(), offset), like.device)


def is_plain_fake(value: object, mode: FakeTensorMode) -> bool:
    """Whether a value is a strided fake tensor of no subclass that counts writes, with symbols of a mode's ShapeEnv."""
    return (
        type(value) is FakeTensor
        and value.fake_mode.shape_env is mode.shape_env
        and value.layout is torch.strided
        and not value.is_quantized
        and not value.is_inference()
    )


def is_written(fake: FakeTensor) -> bool:
    """Whether a plain fake tensor, or another one of its memory, has been written in place."""
    return fake._version > 0


def is_described_by_layout(fake: FakeTensor) -> bool:
    """Whether sizes, strides, dtype and device describe a plain fake tensor that has memory of its own."""
    offset = fake.storage_offset()
    has_bits = fake.is_conj() or fake.is_neg()
    return fake.constant is None and isinstance(offset, int) and offset == 0 and not has_bits


def is_missing_fake_impl(error: BaseException) -> bool:
    """Whether an operator failed on fake tensors because it has no fake implementation."""
    return isinstance(error, UnsupportedOperatorException) or "no fake impl registered" in str(error)


def is_data_dependent_error(error: BaseException) -> bool:
    """Whether an operator failed on fake tensors because its result depends on tensor contents.

    Some composite operators read the memory of their operands directly, which fake tensors do not have.
    """
    kinds = DataDependentOutputException | DynamicOutputShapeException | GuardOnDataDependentSymNode
    return isinstance(error, kinds) or "its data is not allocated yet" in str(error)


@contextmanager
def in_fake_mode(mode: FakeTensorMode | None) -> Iterator[None]:
    """Runs operators for their fake results alone, without queueing unbacked symbols; None changes nothing."""
    if mode is None:
        yield
        return
    with mode, isolate_pending_symbols(mode.shape_env):
        yield


@contextmanager
def in_dispatched_fake_mode(mode: FakeTensorMode | None) -> Iterator[None]:
    """Runs operators on fake tensors, including composite ones with symbolic sizes, through torch's Python dispatcher.

    Why: the Python dispatcher has no public switch. Tested on 2.13.
    """
    with in_fake_mode(mode), enable_python_dispatcher():
        yield


@contextmanager
def in_tracing_fake_mode(mode: FakeTensorMode) -> Iterator[None]:
    """Traces on fake tensors as in `in_dispatched_fake_mode`, where `Tensor.item` returns an unbacked symbol.

    Why: `torch._dynamo.config.capture_scalar_outputs` has decided that for the modes that exist.
    """
    before, mode.allow_scalar_outputs = mode.allow_scalar_outputs, True
    try:
        with in_dispatched_fake_mode(mode):
            yield
    finally:
        mode.allow_scalar_outputs = before


def without_fake_mode() -> AbstractContextManager[object]:
    """Returns a context in which operators create real tensors, even inside a caller's fake mode."""
    return unset_fake_temporarily()


@contextmanager
def accept_real_tensors(mode: FakeTensorMode) -> Iterator[None]:
    """Enters a fake mode in which operators accept real tensors too, such as a program's constants."""
    before = mode.allow_non_fake_inputs
    mode.allow_non_fake_inputs = True
    try:
        with mode:
            yield
    finally:
        mode.allow_non_fake_inputs = before


@contextmanager
def quiet_fake_errors() -> Iterator[None]:
    """Suppresses the traceback that torch logs of an operator that fails on fake tensors, unless TORCH_LOGS is set.

    Why: torch raises the same error, and the logger has no public name.
    """
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.disabled
    logger.disabled = before or "TORCH_LOGS" not in os.environ
    try:
        yield
    finally:
        logger.disabled = before


def without_guards(mode: FakeTensorMode | None) -> AbstractContextManager[object]:
    """Returns a context in which the ShapeEnv of a fake mode records no guards.

    Why: torch 2.15 guards on whether a symbolic size is 0 when it allocates a tensor for metadata, and the switch has
    no public name.
    """
    return nullcontext() if mode is None or mode.shape_env is None else mode.shape_env.suppress_guards()


def without_library_guards(mode: FakeTensorMode | None, target: object) -> AbstractContextManager[object]:
    """Returns a context for a call of an operator on fake tensors, in which a convolution records no guards.

    Why: torch asks which library computes it, some of them only from a number of images on. A program that was exported
    for any number would refuse those for which another library is asked, although the result is the same.
    """
    return without_guards(mode if str(target).startswith("aten.conv") else None)


@contextmanager
def without_logged_errors() -> Iterator[None]:
    """Runs without the log entries that fake tensors write for each operator that raises, in this thread.

    Why: the entries have a traceback at the level of errors, and the name of their logger is private.
    """
    logger, thread = logging.getLogger(FakeTensor.__module__), threading.get_ident()

    def is_elsewhere(record: logging.LogRecord) -> bool:
        return record.thread != thread

    logger.addFilter(is_elsewhere)
    try:
        yield
    finally:
        logger.removeFilter(is_elsewhere)


# Why: rules of torch 2.11 that are wrong; right on 2.13, which stays as it is. Indices and counts of `unique` and its
# variants have the dtype of the input, and `_unique` has no rule, so that it returns one element: graphs traced with
# these rules lack conversions that they need. `slice_scatter` and its relatives keep the strides of an operand whose
# elements overlap, as those of `expand` do, although their results have memory for each element. `split` of a dimension
# of size 0 raises. A fake tensor allocates memory on its GPU, so that a graph for another machine's fails. The tables
# and the function have no public names and must be correct before Dynamo traces.


def _correct_unique_fake_impls(rules: dict[OpOverload, Callable[..., Sequence[torch.Tensor]]]) -> None:
    """Makes indices and counts int64, and gives `_unique` a data-dependent number of values."""
    aten = torch.ops.aten

    def with_int64(
        rule: Callable[..., Sequence[torch.Tensor]], *arguments: object, **keywords: object
    ) -> tuple[torch.Tensor, ...]:
        values, *others = rule(*arguments, **keywords)
        return (values, *[item.new_empty(item.shape, dtype=torch.int64) for item in others])

    for operator in (aten._unique2.default, aten.unique_dim.default, aten.unique_consecutive.default):
        rules[operator] = partial(with_int64, rules[operator])
    unique = rules[aten._unique2.default]

    def without_counts(
        mode: object, _operator: object, *arguments: object, **keywords: object
    ) -> Sequence[torch.Tensor]:
        return unique(mode, aten._unique2.default, *arguments, **keywords)[:2]

    rules.setdefault(aten._unique.default, without_counts)


def _correct_slice_scatter_fake_impls(rules: dict[OpOverload, Callable[..., object]]) -> None:
    """Gives the results of `slice_scatter` and its relatives contiguous strides if the operand's elements overlap."""
    aten = torch.ops.aten

    def without_overlaps(
        rule: Callable[..., object] | None,
        mode: object,
        operator: object,
        base: torch.Tensor,
        *arguments: object,
        **keywords: object,
    ) -> object:
        if torch._debug_has_internal_overlap(base) == 1:
            return base.clone()
        return NotImplemented if rule is None else rule(mode, operator, base, *arguments, **keywords)

    for operator in (aten.slice_scatter.default, aten.select_scatter.default, aten.diagonal_scatter.default):
        rules[operator] = partial(without_overlaps, rules.get(operator))


def _correct_split_fake_impl(rules: dict[Any, Callable[..., Any]]) -> None:
    """Makes `split` of a dimension of size 0 return one part, as eager does."""
    split = rules[torch.ops.aten.split.Tensor]

    @wraps(split)
    def with_one_part(base: torch.Tensor, split_size: int, dim: int = 0) -> tuple[torch.Tensor, ...]:
        parts: tuple[torch.Tensor, ...] = (base.detach(),) if base.shape[dim] == 0 else split(base, split_size, dim)
        return parts

    rules[torch.ops.aten.split.Tensor] = with_one_part


def _initialize_present_devices_only() -> None:
    """Makes fake tensors initialize each GPU once, not for each tensor, and none that this machine does not have."""
    initialize: Callable[[torch.device], None] = fake_tensor_module.init_gpu_context

    @cache
    def initialize_present(device: torch.device) -> None:
        if (device.index or 0) < torch.accelerator.device_count():
            initialize(device)

    fake_tensor_module.init_gpu_context = initialize_present


if TorchVersion("2.13") > torch.__version__:
    _correct_split_fake_impl(decomposition_table)
    _initialize_present_devices_only()
    _correct_unique_fake_impls(op_implementations_dict)
    _correct_slice_scatter_fake_impls(op_implementations_dict)
