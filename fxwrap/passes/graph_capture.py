"""Decides which lines a device can capture in a graph, with the reason for the others."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from fxwrap import wrapper_ir as ir
from fxwrap.lines import (
    CallFunction,
    ExternCall,
    IndexPut,
    Launch,
    Mutate,
    Scatter,
    StartCollective,
    WaitCollective,
    Workspace,
)
from fxwrap.symbolic import symbol_kind
from fxwrap.torch_compat import operator_overload

_WORK = (Launch, ExternCall, Mutate, Scatter, IndexPut, Workspace, CallFunction, StartCollective, WaitCollective)

_SYNCHRONIZING = frozenset({
    "multinomial", "randperm", "nonzero", "nonzero_static", "masked_select", "unique_consecutive", "_unique2",
    "unique_dim", "bincount", "histc", "repeat_interleave", "_local_scalar_dense", "equal", "is_nonzero",
    "_ctc_loss", "_use_cudnn_ctc_loss", "segment_reduce", "_fused_moving_avg_obs_fq_helper",
    "_fused_moving_avg_obs_fq_helper_functional", "pin_memory", "_pin_memory", "resize_", "set_",
})  # fmt: skip
"""ATen operators, by name without overload, that synchronise or change storages that a graph depends on."""

_LIBRARY_SOLVERS = ("linalg_", "_linalg_", "cholesky", "lu_", "geqrf", "ormqr", "triangular_solve", "_fft_", "svd")
"""Name prefixes of operators that use library plans, scratch memory or checks on the host."""


_CAPTURED_COLLECTIVES = frozenset({
    "fxwrap_runtime.one_shot_all_reduce.default", "symm_mem.one_shot_all_reduce_copy.default",
})  # fmt: skip
"""Collectives that are one kernel on fixed addresses. All ranks replay them in one order, as they run them."""


_POINT_TO_POINT = frozenset({"isend", "irecv", "batch_p2p_ops"})


class CaptureChecker:
    """Returns for a line the device to capture it on, or the reason why it cannot be captured.

    Lines can be captured that use one device of a type with graph capture, the current stream, and scalars that depend
    on the sizes of inputs only. They may use the device's default random generator, device assertions, and all_reduces
    over symmetric memory. Collectives of a named group can be captured with their waits.
    """

    def __init__(
        self,
        program: ir.Program,
        device_types: Collection[str],
        excluded: Collection[str] = (),
        collective_device_types: Collection[str] = (),
    ) -> None:
        """`device_types` support capture, and `collective_device_types` that of collectives.

        `excluded` are names of operators ("aten.mm.default") and kernels.
        """
        self.device_types = frozenset(device_types)
        self.collective_device_types = frozenset(collective_device_types)
        self.excluded = frozenset(excluded)
        self.functions: Mapping[str, ir.Block] = dict(program.functions)
        self.varying_symbols = _varying_symbols(program)
        self._verdicts: dict[str, torch.device | str] = {}

    def __call__(self, line: ir.LineBase) -> torch.device | str:
        """Returns the device of a line, or the reason why it cannot be captured."""
        reason = self._reason(line)
        if reason is not None:
            return reason
        values = [*ir.used(line), *ir.defined(line)]
        devices = dict.fromkeys([value.type.device for value in values if isinstance(value.type, ir.TensorType)])
        if len(devices) != 1:
            return f"it uses {' and '.join(map(str, devices)) or 'no device'}"
        (device,) = devices
        if device.type not in self.device_types:
            return f"{device} does not support graph capture"
        allowed = {ir.ASSERT, ir.random_effect(str(device))}
        if isinstance(line, StartCollective | WaitCollective) and device.type not in self.collective_device_types:
            return f"{device} does not support graph capture of collectives"
        is_collective = isinstance(line, ExternCall | Mutate) and line.target in _CAPTURED_COLLECTIVES
        if is_collective or isinstance(line, StartCollective):
            allowed.update(line.effects())
        if any(effect not in allowed for effect in line.effects()):
            return "it has side effects"
        if isinstance(line, CallFunction):
            return self._function(line.function, device)
        return device

    def _function(self, name: str, device: torch.device) -> torch.device | str:
        if name not in self._verdicts:
            lines = self.functions[name].lines
            verdicts = [self(line) for line in lines if _does_work(line)]
            reasons = [verdict for verdict in verdicts if isinstance(verdict, str)]
            if _waits_for_caller(self.functions[name]):
                reasons.append("it waits for a collective that was started outside of it")
            others = [str(verdict) for verdict in verdicts if isinstance(verdict, torch.device) and verdict != device]
            self._verdicts[name] = reasons[0] if reasons else f"it also uses {others[0]}" if others else device
        return self._verdicts[name]

    def _reason(self, line: ir.LineBase) -> str | None:
        if not isinstance(line, _WORK):
            return f"{line.opcode} runs on the host"
        if line.stream != 0:
            return "it uses another stream"
        if any(not isinstance(leaf.type, ir.TensorType) for leaf in (*ir.used(line), *ir.defined(line))):
            return "it has values other than tensors"
        if self._used_symbols(line) & self.varying_symbols:
            return "its scalars change from call to call"
        match line:
            case Launch():
                return "it is excluded by name" if line.kernel in self.excluded else None
            case ExternCall() | Mutate():
                return self._operator_reason(line)
            case StartCollective():
                return self._collective_reason(line)
            case IndexPut():
                masks = [item for item in line.indices if item is not None and _is_mask(item)]
                return "it counts the elements that a mask selects" if masks else None
            case _:
                return None

    def _operator_reason(self, line: ExternCall | Mutate) -> str | None:
        if line.target in self.excluded:
            return "it is excluded by name"
        tags = operator_overload(line.target).tags
        if torch.Tag.cudagraph_unsafe in tags:
            return "torch tags it as unsafe for CUDA graphs"
        if torch.Tag.dynamic_output_shape in tags or torch.Tag.data_dependent_output in tags:
            return "its result's shape or value depends on data"
        namespace, _, rest = line.target.partition(".")
        name = rest.partition(".")[0]
        if namespace == "aten" and (name in _SYNCHRONIZING or name.startswith(_LIBRARY_SOLVERS)):
            return "it synchronises, or has state on the host"
        operands = [*ir.leaves(line.arguments), *ir.leaves(line.keywords)]
        if name.startswith(("index", "_unsafe_index")) and any(map(_is_mask, operands)):
            return "it counts the elements that a mask selects"
        return None

    def _collective_reason(self, line: StartCollective) -> str | None:
        if line.operator in self.excluded:
            return "it is excluded by name"
        name = line.operator.partition(".")[2].partition(".")[0]
        if not line.operator.startswith("_c10d_functional.") or name in _POINT_TO_POINT or not line.group:
            return "it is point-to-point or custom communication"
        return None

    def _used_symbols(self, line: ir.LineBase) -> set[str]:
        """Returns the symbols that a line uses, including those in the types of its operands."""
        types = [symbol for value in ir.used(line) for symbol in ir.type_symbols(value.type)]
        return {symbol.name for symbol in (*ir.symbols_used(line, *ir.Role), *types)}


def captures_all(program: ir.Program, device_types: Collection[str]) -> bool:
    """Whether all lines of a program can be captured, on devices of some types and without communication."""
    checker = CaptureChecker(program, device_types)
    verdicts = [checker(line) for line in program.body.lines if _does_work(line)]
    return not any(isinstance(item, str) for item in verdicts)


def _does_work(line: ir.LineBase) -> bool:
    has_effects = line.effects() or ir.defined_symbol(line) is not None or line.fields_by_role[ir.Role.BLOCK]
    return isinstance(line, _WORK) or bool(has_effects)


def _waits_for_caller(block: ir.Block) -> bool:
    """Whether a function waits for a collective that its caller may have started."""
    started = {value.name for line in block.lines if line.is_async_start for value in ir.defined(line)}
    root_of = ir.alias_roots(block.lines, block.arguments)
    roots = {root_of[name] for name in started}
    waits = [value.name for line in block.lines if line.is_async_wait for value in ir.reads(line)]
    return any(root_of[name] not in roots for name in waits)


def _is_mask(item: object) -> bool:
    type_ = item.type if isinstance(item, ir.Value) else None
    return isinstance(type_, ir.TensorType) and type_.dtype in (torch.bool, torch.uint8)


def _varying_symbols(program: ir.Program) -> set[str]:
    """Returns the symbols that may change at each call: unbacked ones and floats.

    Sizes of inputs and integer inputs are expected to repeat.
    """
    inputs = {item.name for item in program.inputs}
    symbols = [item.name for item in program.inputs if not isinstance(item.value, ir.Value)]
    varying = {name for name in symbols if symbol_kind(name) == "float"}
    for line in program.lines():
        symbol = ir.defined_symbol(line)
        if symbol is None:
            continue
        if line.opcode == "symbol.let":
            is_varying = bool({other.name for other in ir.symbols_used(line, ir.Role.ATTR)} & varying)
        else:
            is_varying = line.opcode != "symbol.size" or not {value.name for value in ir.used(line)} <= inputs
        if is_varying:
            varying.add(symbol.name)
    return varying
