"""Higher-order operators around one operator: on copies of what it writes, in order, or with a generator's state."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import sympy
import torch
from torch.fx import Node
from torch.fx.node import map_arg

from fxwrap.device_registry import registered_spec
from fxwrap.errors import GraphError
from fxwrap.lines import Alloc, Call, ExchangeState, Mutate, RestoreState, SaveState, View
from fxwrap.lowering.binding import bind_values, new_values
from fxwrap.lowering.builder import Builder
from fxwrap.lowering.copies import writable
from fxwrap.lowering.effects import operator_label
from fxwrap.lowering.nodes import literal
from fxwrap.lowering.source import location_of
from fxwrap.torch_compat import HigherOrderOperator, OpOverload, functionalized_views
from fxwrap.wrapper_ir import GENERATOR, OUTPUT, UNKNOWN, Effect, TensorType, Value, leaves
from fxwrap.wrapper_ir.operators import operator_facts


def lower_functionalized(builder: Builder, node: Node, dying: Collection[str]) -> None:
    """An operator that writes some of its operands: it is called on copies of them, which are results.

    No copy is made of a base that the program owns and nothing reads later: the result is in its memory.
    """
    overload = _overload(node, 0)
    facts = operator_facts(overload)
    count = max(facts.return_count, 1)
    fakes = builder.fakes[node]
    if facts.is_out and "_all_bases" not in node.kwargs:  # else it gives nothing back, and copies are made for it
        outs = tuple([builder.add_root(f"{node.name}_{number}", fake) for number, fake in enumerate(_flat(fakes))])
        for out in outs:
            builder.emit(Alloc(out, origin=builder.origin(node)))
        given = {name: literal(builder, item, node) for name, item in node.kwargs.items() if not name.startswith("_")}
        arguments, keywords = _by_schema(overload, given, skip=facts.written)
        builder.emit(Call((), facts.name, arguments, keywords, outs, origin=builder.origin(node)))
        builder.env[node] = outs if len(outs) > 1 or isinstance(fakes, tuple | list) else outs[0]
        return
    given, written, bases = _Copies(builder, node, dying, fakes[count:], overload).operands()
    arguments, keywords = _by_schema(overload, given)
    results = new_values(builder, node, fakes[: facts.return_count])
    effects = facts.effects(_devices(given))
    line = Mutate(results, facts.name, arguments, written, keywords, (), effects, origin=builder.origin(node))
    builder.emit(line)
    found = bind_values(builder, node, fakes[: facts.return_count], results)
    builder.env[node] = (*(found or (None,)), *bases)


class _Copies:
    """The operands of an operator that gets copies of what it writes."""

    def __init__(
        self, builder: Builder, node: Node, dying: Collection[str], fakes: Sequence[Any], overload: OpOverload
    ) -> None:
        self.builder = builder
        self.node = node
        self.dying = dying
        self.fakes = fakes
        self.overload = overload
        self.facts = operator_facts(overload)

    def operands(self) -> tuple[dict[str, Any], tuple[Value, ...], tuple[Any, ...]]:
        """Returns the operator's arguments by name, the values it writes, and those that are results."""
        builder, node = self.builder, self.node
        kept = {name: literal(builder, item, node) for name, item in node.kwargs.items()
                if name != "_all_bases" and name not in self.facts.written}  # fmt: skip
        others = {builder.root_of[leaf.name].name for leaf in leaves(tuple(kept.values())) if isinstance(leaf, Value)}
        if "_all_bases" not in node.kwargs:
            copies = {name: self._copied(literal(builder, node.kwargs[name], node), fake, others)
                      for name, fake in zip(self.facts.written, self.fakes, strict=True)}  # fmt: skip
            return kept | copies, _values(copies.values()), tuple(copies.values())
        old = [literal(builder, item, node) for item in node.kwargs["_all_bases"]]  # type: ignore[union-attr]
        bases = tuple([self._copied(item, fake, others) for item, fake in zip(old, self.fakes, strict=True)])
        given = map_arg(dict(node.kwargs), lambda operand: builder.fakes[operand])
        views = functionalized_views(self.overload, given, list(self.fakes))
        shown = {name: self._shown(name, view, bases) for name, view in views.items()}
        plain = {name: item for name, item in kept.items() if name in self.facts.argument_names}
        return plain | shown, _values(shown.values()), bases

    def _copied(self, value: Any, fake: Any, others: set[str]) -> Any:
        """Returns a copy of a tensor, or itself where nothing else needs it."""
        builder = self.builder
        if isinstance(value, tuple):
            return tuple([self._copied(item, inner, others) for item, inner in zip(value, fake, strict=True)])
        return None if value is None else writable(builder, self.node, value, fake, self.dying, others)

    def _shown(self, name: str, view: Any, bases: Sequence[Any]) -> Any:
        """Returns what the operator gets for an argument: a base, a window on one, a tuple of them, or None."""
        if view is None:
            return None
        if isinstance(view, list):
            return tuple([self._shown(f"{name}_{number}", item, bases) for number, item in enumerate(view)])
        index, fake = view
        base: Value = bases[index]
        if fake is None or self.builder.tensor_type(fake, self.builder.offset_in_root(base, fake)) == base.type:
            return base
        window = self.builder.add_window(name, fake, base)
        self.builder.emit(View(window, base, origin=self.builder.origin(self.node)))
        return window


def lower_with_effects(builder: Builder, node: Node) -> None:
    """An operator whose calls keep their order, which its effect says; the tokens between them stand for nothing."""
    called: Any = node.args[1]
    if isinstance(called, HigherOrderOperator) and operator_label(called) == "print":
        lower_print(builder, node, 2)
        builder.env[node] = (None, None)
        return
    overload = _overload(node, 1)
    fakes = tuple(_flat(builder.fakes[node]))[1:]
    arguments, keywords = _literals(builder, node, 2)
    found = _call(builder, node, overload, arguments, keywords, fakes, (UNKNOWN,))
    builder.env[node] = (None, *(found or (None,)))


def lower_print(builder: Builder, node: Node, first: int = 0) -> None:
    """A print of a format and what is put into it: the arguments from number `first` on, and those with names."""
    arguments, keywords = _literals(builder, node, first)
    kinds: list[str] = []
    given: dict[str, list[Any]] = {"tensor": [], "number": [], "text": []}
    for name, item in [*[("", item) for item in arguments[1:]], *keywords]:
        kind = _printed_kind(item)
        if kind is None:
            raise _error(node, "it prints more than tensors, numbers and strings", "Print each by itself")
        given[kind].append(item)
        kinds.append(f"{kind} {name}".rstrip())
    printed = (arguments[0], tuple(kinds), *[tuple(items) for items in given.values()])
    line = Call((), "fxwrap_runtime.print.default", printed, (), effect_set=(OUTPUT,), origin=builder.origin(node))
    builder.emit(line)
    builder.env[node] = None


def _printed_kind(item: Any) -> str | None:
    """Returns the kind of what is printed, as the operator that prints names it."""
    if isinstance(item, Value):
        return "tensor" if isinstance(item.type, TensorType) else "number"
    if isinstance(item, str):
        return "text"
    return "number" if isinstance(item, int | float | sympy.Basic) else None


def lower_run_and_save(builder: Builder, node: Node) -> None:
    """An operator that draws random numbers, and the state of its generator before."""
    overload = _overload(node, 0)
    state_fake, fake = builder.fakes[node]
    arguments, keywords = _literals(builder, node, 1)
    state = _saved_state(builder, node, "state", _device(builder, arguments, keywords))
    builder.fake_of[state.name] = state_fake
    found = _call(builder, node, overload, arguments, keywords, tuple(_flat(fake)))
    builder.env[node] = (state, found if isinstance(fake, tuple | list) else found[0])


def lower_run_with(builder: Builder, node: Node) -> None:
    """An operator that draws the random numbers that follow a saved state; the generator's own state stays."""
    overload = _overload(node, 1)
    fake = builder.fakes[node]
    state = literal(builder, node.args[0], node)
    arguments, keywords = _literals(builder, node, 2)
    device, origin = _device(builder, arguments, keywords), builder.origin(node)
    current = _saved_state(builder, node, "current", device)
    builder.emit(RestoreState(state, device, origin=origin))
    found = _call(builder, node, overload, arguments, keywords, tuple(_flat(fake)))
    builder.emit(RestoreState(current, device, origin=origin))
    builder.env[node] = found if isinstance(fake, tuple | list) else found[0]


def lower_run_with_generator(builder: Builder, node: Node) -> None:
    """An operator that draws random numbers from a generator which is an input, in place of the default one."""
    overload = _overload(node, 0)
    fake, source = builder.fakes[node], node.kwargs.get("rng_state")
    generator = literal(builder, source, node)
    if not isinstance(source, Node) or not isinstance(generator, Value) or generator.type != GENERATOR:
        raise _error(node, "its 'rng_state' is no generator", "Pass a placeholder that stands for a torch.Generator")
    arguments, named = _literals(builder, node, 1)
    keywords = tuple([(name, item) for name, item in named if name != "rng_state"])
    exchange = ExchangeState(generator, str(builder.fakes[source].device), origin=builder.origin(node))
    builder.emit(exchange)
    found = _call(builder, node, overload, arguments, keywords, tuple(_flat(fake)))
    builder.emit(exchange)
    builder.env[node] = found if isinstance(fake, tuple | list) else found[0]


# --- parts ------------------------------------------------------------------------------------------------------------


def _call(
    builder: Builder,
    node: Node,
    overload: OpOverload,
    arguments: tuple[Any, ...],
    keywords: tuple[tuple[str, Any], ...],
    fakes: tuple[Any, ...],
    effects: tuple[Effect, ...] = (),
) -> tuple[Any, ...]:
    facts = operator_facts(overload)
    if facts.written:
        raise _error(node, f"{facts.name} writes its operands", "Trace the graph with functionalization")
    results = new_values(builder, node, fakes[: facts.return_count])
    effects = (*facts.effects(_devices((arguments, keywords))), *effects)
    builder.emit(Call(results, facts.name, arguments, keywords, effect_set=effects, origin=builder.origin(node)))
    return bind_values(builder, node, fakes[: facts.return_count], results)


def _saved_state(builder: Builder, node: Node, name: str, device: str) -> Value:
    spec = registered_spec(torch.device(device).type)
    if spec is None or spec.random_state_bytes is None:
        reason = f"it keeps the state of the generator of '{device}', whose length nobody has said"
        raise _error(node, reason, "Register the device with DeviceSpec(random_state_bytes=...)")
    type_ = TensorType.contiguous(torch.uint8, (spec.random_state_bytes,), torch.device("cpu"))
    state = builder.add_buffer(f"{node.name}_{name}", type_)
    builder.emit(SaveState(state, device, origin=builder.origin(node)))
    return state


def _device(builder: Builder, arguments: Any, keywords: Any) -> str:
    found = _devices((arguments, keywords))
    named = [leaf for leaf in leaves((arguments, keywords)) if isinstance(leaf, torch.device)]
    return str([*named, *found, torch.device("cpu")][0])


def _devices(tree: Any) -> list[torch.device]:
    found = leaves(tuple(tree.values()) if isinstance(tree, dict) else tree)
    return [leaf.tensor_type.device for leaf in found if isinstance(leaf, Value) and isinstance(leaf.type, TensorType)]


def _literals(builder: Builder, node: Node, start: int) -> tuple[tuple[Any, ...], tuple[tuple[str, Any], ...]]:
    arguments = tuple([literal(builder, item, node) for item in node.args[start:]])
    return arguments, tuple([(name, literal(builder, item, node)) for name, item in node.kwargs.items()])


def _by_schema(
    overload: OpOverload, given: dict[str, Any], skip: Collection[str] = ()
) -> tuple[tuple[Any, ...], tuple[tuple[str, Any], ...]]:
    """Returns arguments by name as positional ones, as far as the schema has them, and named ones."""
    arguments: list[Any] = []
    keywords: list[tuple[str, Any]] = []
    for item in overload._schema.arguments:
        if item.name in skip:
            continue
        if item.kwarg_only or item.name not in given or keywords:
            keywords += [(item.name, given[item.name])] if item.name in given else []
            continue
        arguments.append(given[item.name])
    return tuple(arguments), tuple(keywords)


def _values(items: Any) -> tuple[Value, ...]:
    return tuple([leaf for leaf in leaves(tuple(items)) if isinstance(leaf, Value)])


def _flat(fakes: Any) -> Sequence[Any]:
    return fakes if isinstance(fakes, tuple | list) else (fakes,)


def _overload(node: Node, position: int) -> OpOverload:
    found = node.args[position]
    if not isinstance(found, OpOverload):
        name = getattr(found, "__name__", found)
        reason = f"it calls '{name}', which is no operator overload with a schema"
        raise _error(node, reason, "Keep it out of the graph, or run this part with the eager backend")
    return found


def _error(node: Node, reason: str, remedy: str) -> GraphError:
    return GraphError(node.name, reason, remedy, location_of(node))
