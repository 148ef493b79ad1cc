"""Which lines start work that a device can record once and replay, and why others cannot."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from fxwrap.lines import Call, CallFunction, IndexPut, Launch, Mutate, Scatter, Workspace
from fxwrap.symbolic import symbol_kind
from fxwrap.torch_compat import operator_overload
from fxwrap.wrapper_ir import (
    ASSERT,
    Block,
    LineBase,
    Program,
    Role,
    TensorType,
    Value,
    defined,
    defined_symbol,
    leaves,
    random_effect,
    symbols_used,
    type_symbols,
    used,
)

_WAITING = frozenset({
    "multinomial", "randperm", "nonzero", "nonzero_static", "masked_select", "unique_consecutive", "_unique2",
    "unique_dim", "bincount", "histc", "repeat_interleave", "_local_scalar_dense", "equal", "is_nonzero",
    "_ctc_loss", "_use_cudnn_ctc_loss", "segment_reduce", "_fused_moving_avg_obs_fq_helper",
    "_fused_moving_avg_obs_fq_helper_functional", "pin_memory", "_pin_memory", "resize_", "set_",
})  # fmt: skip
"""Operators of ATen's, by name without overload, whose code waits for the device or changes what a graph relies on."""

_LIBRARY_SOLVERS = ("linalg_", "_linalg_", "cholesky", "lu_", "geqrf", "ormqr", "triangular_solve", "_fft_", "svd")
"""How operators begin that libraries do with plans, scratch memory or checks on the host."""


class Recordable:
    """Judges lines: gives the device that their work is on, or the reason why it cannot be recorded.

    Work can be recorded that is on one device of a type that replays, on the current stream, for numbers that follow
    from the sizes of inputs. It may draw random numbers of that device's default generator, and may fail on the device.
    """

    def __init__(self, program: Program, device_types: Collection[str], kept_out: Collection[str] = ()) -> None:
        """`device_types` are those that replay; `kept_out` names operators ("aten.mm.default") and kernels to leave."""
        self.device_types = frozenset(device_types)
        self.kept_out = frozenset(kept_out)
        self.functions: Mapping[str, Block] = dict(program.functions)
        self.changing = _changing_symbols(program)
        self._judged: dict[str, torch.device | str] = {}

    def __call__(self, line: LineBase) -> torch.device | str:
        """Returns the device of a line's work, or why it cannot be recorded."""
        reason = self._reason(line)
        if reason is not None:
            return reason
        values = [*used(line), *defined(line)]
        devices = dict.fromkeys([value.type.device for value in values if isinstance(value.type, TensorType)])
        if len(devices) != 1:
            return f"it works on {' and '.join(map(str, devices)) or 'no device'}"
        (device,) = devices
        if device.type not in self.device_types:
            return f"work on {device} is not recorded"
        allowed = (ASSERT, random_effect(str(device)))
        if any(effect not in allowed for effect in line.effects()):
            return "it does more than to compute"
        if isinstance(line, CallFunction):
            return self._function(line.function, device)
        return device

    def _function(self, name: str, device: torch.device) -> torch.device | str:
        """Judges a function that a line calls, by all of its lines."""
        found = self._judged.get(name)
        if found is None:
            verdicts = [self(line) for line in self.functions[name].lines if _works(line)]
            reasons = [verdict for verdict in verdicts if isinstance(verdict, str)]
            wrong = [str(verdict) for verdict in verdicts if isinstance(verdict, torch.device) and verdict != device]
            found = reasons[0] if reasons else f"it works on {wrong[0]} too" if wrong else device
            self._judged[name] = found
        return found

    def _reason(self, line: LineBase) -> str | None:
        if not isinstance(line, Launch | Call | Mutate | Scatter | IndexPut | Workspace | CallFunction):
            return f"{line.opcode} runs on the host"
        if getattr(line, "stream", 0) != 0:
            return "it runs on a stream of its own"
        if any(not isinstance(leaf.type, TensorType) for leaf in (*used(line), *defined(line))):
            return "it takes or gives something other than tensors"
        if self._numbers(line) & self.changing:
            return "its numbers change from call to call"
        match line:
            case Launch():
                return "it is kept out by name" if line.kernel in self.kept_out else None
            case Call() | Mutate():
                return self._operator_reason(line)
            case IndexPut():
                masks = [item for item in line.indices if item is not None and _is_mask(item)]
                return "it counts what a mask selects" if masks else None
            case _:
                return None

    def _operator_reason(self, line: Call | Mutate) -> str | None:
        if line.target in self.kept_out:
            return "it is kept out by name"
        tags = operator_overload(line.target).tags
        if torch.Tag.cudagraph_unsafe in tags:
            return "torch says that it cannot be recorded"
        if torch.Tag.dynamic_output_shape in tags or torch.Tag.data_dependent_output in tags:
            return "what it gives depends on data"
        namespace, _, rest = line.target.partition(".")
        name = rest.partition(".")[0]
        if namespace == "aten" and (name in _WAITING or name.startswith(_LIBRARY_SOLVERS)):
            return "it waits for the device, or keeps something on the host"
        operands = [*leaves(line.arguments), *leaves(line.keywords)]
        if name.startswith(("index", "_unsafe_index")) and any(map(_is_mask, operands)):
            return "it counts what a mask selects"
        return None

    def _numbers(self, line: LineBase) -> set[str]:
        """Returns the symbols that a line uses, those in the types of what it takes included."""
        found = {symbol.name for symbol in symbols_used(line, *Role)}
        for value in used(line):
            found.update([symbol.name for symbol in type_symbols(value.type)])
        return found


def _works(line: LineBase) -> bool:
    return isinstance(line, Launch | Call | Mutate | Scatter | IndexPut | Workspace | CallFunction) or bool(
        line.effects() or defined_symbol(line) is not None or line.fields_by_role[Role.BLOCK]
    )


def _is_mask(item: object) -> bool:
    return (
        isinstance(item, Value) and isinstance(item.type, TensorType) and item.type.dtype in (torch.bool, torch.uint8)
    )


def _changing_symbols(program: Program) -> set[str]:
    """Returns the symbols that may be others at each call: those that lines read from data, and floats.

    What follows from sizes of inputs, and whole numbers that are inputs, is taken to come again.
    """
    given = {item.name for item in program.inputs}
    found = {item.name for item in program.inputs
             if not isinstance(item.value, Value) and symbol_kind(item.name) == "float"}  # fmt: skip
    for line in program.lines():
        made = defined_symbol(line)
        if made is None:
            continue
        if line.opcode == "symbol.let":
            if {symbol.name for symbol in symbols_used(line, Role.ATTR)} & found:
                found.add(made.name)
        elif line.opcode != "symbol.size" or not {value.name for value in used(line)} <= given:
            found.add(made.name)
    return found
