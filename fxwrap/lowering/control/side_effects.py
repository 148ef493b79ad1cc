"""Higher-order operators that wrap one operator: functionalised, ordered by effects, or with a generator's state."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import Node
from torch.fx.node import map_arg

from fxwrap.devices import registered_spec
from fxwrap.fx_passes.effects import EMPTY_OPERATORS, operator_label
from fxwrap.lines import Alloc, ExchangeRngState, ExternCall, Mutate, RestoreRngState, SaveRngState
from fxwrap.lowering.builder import Builder, FakeValue, Keywords, node_error
from fxwrap.lowering.calls.copies import writable_operand
from fxwrap.lowering.calls.nodes import literal, literals, tensor_operands, view_of
from fxwrap.lowering.symbols.unbacked import bind_values, new_values
from fxwrap.torch_compat import HigherOrderOperator, OpOverload, functionalized_views, torch_schema
from fxwrap.wrapper_ir import GENERATOR, OUTPUT, UNKNOWN, Effect, Operand, Result, TensorType, Value, leaves
from fxwrap.wrapper_ir.operators import operator_schema


def lower_functionalized(builder: Builder, node: Node, dead_roots: Collection[str]) -> None:
    """Lowers an operator that writes some of its operands: it is called on copies of them, which are results.

    An operand is not copied if the program owns it and nothing uses it later; the result reuses its memory.
    """
    overload = _overload(node, 0)
    schema = operator_schema(overload)
    count, fakes, origin = max(schema.return_count, 1), builder.fakes[node], builder.origin(node)
    if schema.is_out_variant and "_all_bases" not in node.kwargs:  # with bases, it returns copies of its outs
        outs = tuple([builder.add_root(f"{node.name}_{number}", fake) for number, fake in enumerate(_flat(fakes))])
        for out in outs:
            builder.emit(Alloc(out, origin=origin))
        inputs = {name: literal(builder, item, node) for name, item in node.kwargs.items() if not name.startswith("_")}
        arguments, keywords = _by_schema(overload, inputs, skip=schema.mutated_arguments)
        builder.emit(ExternCall((), schema.name, arguments, keywords, outs, origin=origin))
        builder.env[node] = outs if len(outs) > 1 or isinstance(fakes, tuple | list) else outs[0]
        return
    operands, written, bases = _FunctionalizedOperands(builder, node, dead_roots, fakes[count:], overload).operands()
    arguments, keywords = _by_schema(overload, operands)
    results = new_values(builder, node, fakes[: schema.return_count])
    effects = schema.effects(_devices(tuple(operands.values())))
    builder.emit(Mutate(results, schema.name, arguments, written, keywords, (), effects, origin=origin))
    returned = bind_values(builder, node, fakes[: schema.return_count], results)
    builder.env[node] = (*(returned or (None,)), *bases)


@dataclass(frozen=True)
class _FunctionalizedOperands:
    """The operands of a functionalised operator, with copies of those that it writes."""

    builder: Builder
    node: Node
    dead_roots: Collection[str]
    fakes: Sequence[FakeValue]
    overload: OpOverload

    def operands(self) -> tuple[dict[str, Operand], tuple[Value, ...], tuple[Result, ...]]:
        """Returns the operator's arguments by name, the values that it writes, and those that are results."""
        builder, node, schema = self.builder, self.node, operator_schema(self.overload)
        mutated = schema.mutated_arguments
        unchanged = {name: literal(builder, item, node) for name, item in node.kwargs.items()
                     if name != "_all_bases" and name not in mutated}  # fmt: skip
        others = {builder.storages.root(value).name for value in _values(unchanged.values())}
        if "_all_bases" not in node.kwargs:
            copies = {name: self._copy(node.kwargs[name], fake, others)
                      for name, fake in zip(mutated, self.fakes, strict=True)}  # fmt: skip
            return unchanged | copies, _values(copies.values()), tuple(copies.values())
        originals: Any = node.kwargs["_all_bases"]
        bases = tuple([self._copy(item, fake, others) for item, fake in zip(originals, self.fakes, strict=True)])
        fake_arguments: Any = map_arg(dict(node.kwargs), lambda operand: builder.fakes[operand])
        views = functionalized_views(self.overload, fake_arguments, list(self.fakes))
        written = {name: self._view(name, view, bases) for name, view in views.items()}
        plain = {name: item for name, item in unchanged.items() if name in schema.argument_names}
        return plain | written, _values(written.values()), bases

    def _copy(self, operand: object, fake: FakeValue, others: set[str]) -> Result:
        """Returns a copy of a tensor, or the tensor itself if nothing else uses it: each operand has its own memory.

        Two operands may be one tensor: equal allocations are one node after common subexpression elimination.
        """
        if isinstance(operand, list | tuple):
            return tuple([self._copy(item, inner, others) for item, inner in zip(operand, fake, strict=True)])
        if operand is None:
            return None
        assert isinstance(operand, Node)
        value, is_read = self.builder.value(operand), operand.target not in EMPTY_OPERATORS
        copy = writable_operand(self.builder, self.node, value, fake, self.dead_roots, others, is_read=is_read)
        others.add(self.builder.storages.root(copy).name)
        return copy

    def _view(self, name: str, view: FakeValue, bases: Sequence[Result]) -> Operand:
        """Returns the operand of an argument: a base, a view of one, a tuple of them, or None."""
        if view is None:
            return None
        if isinstance(view, list):
            return tuple([self._view(f"{name}_{number}", item, bases) for number, item in enumerate(view)])
        index, fake = view
        base = bases[index]
        assert isinstance(base, Value)
        return base if fake is None else view_of(self.builder, self.node, name, fake, base)


def lower_with_effects(builder: Builder, node: Node) -> None:
    """Lowers an operator whose calls are ordered: by the line's effect; the tokens become None."""
    called: object = node.args[1]
    if isinstance(called, HigherOrderOperator) and operator_label(called) == "print":
        lower_print(builder, node, 2)
        builder.env[node] = (None, None)
        return
    if isinstance(called, HigherOrderOperator) and operator_label(called) == "call_torchbind":
        builder.env[node] = (None, *_call_method(builder, node, 2, builder.fakes[node][1:]))
        return
    results = _call(builder, node, _overload(node, 1), _literals(builder, node, 2), builder.fakes[node][1:], (UNKNOWN,))
    builder.env[node] = (None, *(results or (None,)))


def lower_method_call(builder: Builder, node: Node) -> None:
    """Lowers a call of a script object's method."""
    fake = builder.fakes[node]
    builder.env[node] = _like(fake, _call_method(builder, node, 0, _flat(fake)))


def _call_method(builder: Builder, node: Node, first: int, fakes: Sequence[FakeValue]) -> tuple[Operand, ...]:
    """Emits the call of a method: argument number `first` is the object, then its name and its arguments follow.

    Returns the operands of its results, at least one; a method with several results returns them as a list.
    """
    (script_object, method, *arguments), keywords = _literals(builder, node, first)
    if keywords:
        raise node_error(node, f"it calls '{method}' with keyword arguments", "Pass them by position")
    operands = ((script_object, method, tuple(arguments)), ())
    fakes = [fake for fake in fakes if fake is not None]
    returned = fakes if len(fakes) < 2 else [tuple(fakes)]
    results = _call(builder, node, torch.ops.fxwrap_runtime.call_method.default, operands, returned)
    if len(fakes) < 2:
        return results or (None,)
    assert isinstance(results[0], tuple)
    return results[0]


def lower_print(builder: Builder, node: Node, first: int = 0) -> None:
    """Lowers a print: argument number `first` is the format, the others and the keyword arguments are its fields."""
    arguments, keywords = _literals(builder, node, first)
    kinds: list[str] = []
    fields: dict[str, list[Operand]] = {"tensor": [], "number": [], "text": []}
    for name, item in [*[("", item) for item in arguments[1:]], *keywords]:
        kind = _printed_kind(item)
        if kind is None:
            reason = "it prints values that are not tensors, numbers or strings"
            raise node_error(node, reason, "Print each tensor by itself")
        fields[kind].append(item)
        kinds.append(f"{kind} {name}".rstrip())
    printed = (arguments[0], tuple(kinds), *[tuple(items) for items in fields.values()])
    name, origin = "fxwrap_runtime.print.default", builder.origin(node)
    builder.emit(ExternCall((), name, printed, (), effect_set=(OUTPUT,), origin=origin))
    builder.env[node] = None


def _printed_kind(item: Operand) -> str | None:
    """Returns the kind of a printed field as the runtime's operator names it, or None."""
    if isinstance(item, Value):
        return "tensor" if isinstance(item.type, TensorType) else "number"
    if isinstance(item, str):
        return "text"
    return "number" if isinstance(item, int | float | sympy.Basic) else None


# --- generator states -------------------------------------------------------------------------------------------------


def lower_run_and_save(builder: Builder, node: Node) -> None:
    """Lowers an operator that draws random numbers, after the generator's state is saved."""
    state_fake, fake = builder.fakes[node]
    operands = _literals(builder, node, 1)
    state = _saved_state(builder, node, "state", _device(operands))
    builder.storages.add_fake(state, state_fake)
    results = _call(builder, node, _overload(node, 0), operands, _flat(fake))
    builder.env[node] = (state, _like(fake, results))


def lower_run_with(builder: Builder, node: Node) -> None:
    """Lowers an operator that draws random numbers from a saved state; the generator's own state is unchanged."""
    fake, state = builder.fakes[node], builder.value(node.args[0])
    operands = _literals(builder, node, 2)
    device, origin = _device(operands), builder.origin(node)
    current = _saved_state(builder, node, "current", device)
    builder.emit(RestoreRngState(state, device, origin=origin))
    results = _call(builder, node, _overload(node, 1), operands, _flat(fake))
    builder.emit(RestoreRngState(current, device, origin=origin))
    builder.env[node] = _like(fake, results)


def lower_run_with_generator(builder: Builder, node: Node) -> None:
    """Lowers an operator that draws random numbers from a generator input instead of the default generator."""
    fake, source = builder.fakes[node], node.kwargs.get("rng_state")
    generator = literal(builder, source, node)
    if not isinstance(source, Node) or not isinstance(generator, Value) or generator.type != GENERATOR:
        raise node_error(node, "its 'rng_state' is not a generator", "Pass a placeholder for a torch.Generator")
    arguments, keywords = _literals(builder, node, 1)
    operands = (arguments, tuple([(name, item) for name, item in keywords if name != "rng_state"]))
    exchange = ExchangeRngState(generator, str(builder.fakes[source].device), origin=builder.origin(node))
    builder.emit(exchange)
    results = _call(builder, node, _overload(node, 0), operands, _flat(fake))
    builder.emit(exchange)
    builder.env[node] = _like(fake, results)


def _saved_state(builder: Builder, node: Node, name: str, device: str) -> Value:
    spec = registered_spec(torch.device(device).type)
    if spec is None or spec.random_state_bytes is None:
        reason = f"it saves the state of the generator of '{device}', whose size is unknown"
        raise node_error(node, reason, "Register the device with DeviceSpec(random_state_bytes=...)")
    type_ = TensorType.contiguous(torch.uint8, (spec.random_state_bytes,), torch.device("cpu"))
    state = builder.add_buffer(f"{node.name}_{name}", type_)
    builder.emit(SaveRngState(state, device, origin=builder.origin(node)))
    return state


# --- calls ------------------------------------------------------------------------------------------------------------


def _call(
    builder: Builder,
    node: Node,
    overload: OpOverload,
    operands: tuple[tuple[Operand, ...], Keywords],
    fakes: Sequence[FakeValue],
    effects: tuple[Effect, ...] = (),
) -> tuple[Operand, ...]:
    """Emits the call of an operator; returns the operands of its results."""
    schema = operator_schema(overload)
    if schema.mutated_arguments:
        raise node_error(node, f"{schema.name} writes its operands", "Trace the graph with functionalization")
    fakes = fakes[: schema.return_count]
    results = new_values(builder, node, fakes)
    effects = tuple(dict.fromkeys((*schema.effects(_devices(operands)), *effects)))
    builder.emit(ExternCall(results, schema.name, *operands, effect_set=effects, origin=builder.origin(node)))
    return bind_values(builder, node, fakes, results)


def _device(operands: Operand) -> str:
    """Returns the device that an operator runs on: the one in its arguments, that of its tensors, or the CPU."""
    named = [leaf for leaf in leaves(operands) if isinstance(leaf, torch.device)]
    return str([*named, *_devices(operands), torch.device("cpu")][0])


def _devices(operands: Operand) -> list[torch.device]:
    return [value.tensor_type.device for value in tensor_operands(operands)]


def _literals(builder: Builder, node: Node, start: int) -> tuple[tuple[Operand, ...], Keywords]:
    keywords = tuple([(name, literal(builder, item, node)) for name, item in node.kwargs.items()])
    return literals(builder, node.args[start:], node), keywords


def _by_schema(
    overload: OpOverload, operands: Mapping[str, Operand], skip: Collection[str] = ()
) -> tuple[tuple[Operand, ...], Keywords]:
    """Returns operands by name as positional arguments, as far as the schema allows, and keyword arguments."""
    arguments: list[Operand] = []
    keywords: list[tuple[str, Operand]] = []
    for item in torch_schema(overload).arguments:
        if item.name in skip:
            continue
        if item.kwarg_only or item.name not in operands or keywords:
            keywords += [(item.name, operands[item.name])] if item.name in operands else []
            continue
        arguments.append(operands[item.name])
    return tuple(arguments), tuple(keywords)


def _values(items: Collection[Operand]) -> tuple[Value, ...]:
    return tuple([leaf for leaf in leaves(tuple(items)) if isinstance(leaf, Value)])


def _flat(fakes: FakeValue) -> Sequence[FakeValue]:
    return fakes if isinstance(fakes, tuple | list) else (fakes,)


def _like(fake: FakeValue, results: tuple[Operand, ...]) -> Operand:
    """Returns the operand of a node: all results, or the only one."""
    return results if isinstance(fake, tuple | list) else results[0]


def _overload(node: Node, position: int) -> OpOverload:
    overload = node.args[position]
    if not isinstance(overload, OpOverload):
        name = getattr(overload, "__name__", overload)
        reason = f"it calls '{name}', which is not an operator overload with a schema"
        raise node_error(node, reason, "Keep it out of the graph, or run this part with the eager backend")
    return overload
