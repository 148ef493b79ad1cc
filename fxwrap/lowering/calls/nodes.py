"""Lowers each call of a graph to lines: a view, an extern call, a mutation, or a number."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from fxwrap.fx_passes.effects import IN_PLACE_VARIANTS
from fxwrap.fx_passes.stream_calls import stream_call
from fxwrap.inference import with_declared_layout
from fxwrap.lines import SCATTER_OPERATORS, ExternCall, IndexPut, Mutate, Scatter, View, WaitCollective
from fxwrap.lowering.builder import Builder, Fakes, FakeValue, Keywords, node_error
from fxwrap.lowering.calls.copies import emit_result_copy, reuse_operand_memory
from fxwrap.lowering.calls.slice_writes import lower_slice_write
from fxwrap.lowering.control.collectives import (
    await_results,
    emit_start,
    emit_wait,
    is_point_to_point,
    is_wait,
    pending_collective,
    result_fakes,
    starts_collective,
)
from fxwrap.lowering.control.streams import StreamTracker, is_emitted_guard
from fxwrap.lowering.symbols.unbacked import (
    bind_results,
    is_asserted_read,
    is_bounds_checked_at_run_time,
    lower_assert,
    lower_item,
)
from fxwrap.torch_compat import OpOverload, is_opaque, is_plain_view, real_object, storage_identity
from fxwrap.wrapper_ir import Leaf, LineBase, Operand, Origin, Result, TensorType, Value, leaves, map_leaves
from fxwrap.wrapper_ir.operators import OperatorSchema, operator_schema, used_result_indices

_AS_STRIDED = torch.ops.aten.as_strided.default
_EFFECT_TOKENS = (torch.ops.prims._make_token.default, torch.ops.prims._sink_tokens.default)
_LITERALS = (int, float, bool, str, complex, torch.dtype, torch.device, torch.layout, torch.memory_format)


def lower_call(builder: Builder, node: Node, dead_roots: Collection[str] = frozenset()) -> None:
    """Lowers a call_function node and records its operand.

    `dead_roots` are the names of the roots that the program owns and that nothing uses after this call.
    """
    fake, env, target = builder.fakes[node], builder.env, node.target
    if target is operator.getitem and isinstance(env.get(node.args[0]), tuple | dict):  # type: ignore[arg-type]
        items: Any = env[node.args[0]]  # type: ignore[index]
        env[node] = items[node.args[1]]
    elif not isinstance(target, OpOverload) and isinstance(fake, torch.Tensor):
        name = getattr(target, "__name__", target)
        reason = f"the Python builtin '{name}' is applied to the tensor '{node.all_input_nodes[0].name}'"
        raise node_error(node, reason, "Use the torch.ops.aten overload of the same meaning")
    elif not isinstance(target, OpOverload) or (_is_known_number(builder, fake) and not is_asserted_read(node)):
        env[node] = builder.symbols.expression(fake)
    elif isinstance(fake, tuple | list) and fake and all(_is_known_number(builder, item) for item in fake):
        env[node] = tuple([builder.symbols.expression(item) for item in fake])  # as of `aten.size.default`
    elif target is torch.ops.aten._local_scalar_dense.default:
        lower_item(builder, node, fake)
    elif target is torch.ops.aten._assert_scalar.default:
        lower_assert(builder, node, literal(builder, node.args[0], node), str(node.args[1]))
    elif is_emitted_guard(node) or target in _EFFECT_TOKENS:
        env[node] = None
    elif starts_collective(node):
        _lower_start(builder, node, target, fake)
    elif is_wait(node):
        _lower_wait(builder, node, fake)
    elif builder.buffer.streams is not None and stream_call(node):
        _lower_stream_call(builder, builder.buffer.streams, node, target)
    else:
        _lower_operator(builder, node, target, fake, dead_roots)


def _lower_start(builder: Builder, node: Node, target: OpOverload, fake: FakeValue) -> None:
    """Lowers the start of a collective, whose results are ready after its wait."""
    schema = operator_schema(target)
    arguments = literals(builder, node.args, node)
    keywords = tuple([(name, literal(builder, argument, node)) for name, argument in node.kwargs.items()])
    # memory is in use, and torch keeps the work, until the wait for the last result
    results, aliases = _results(builder, node, schema, result_fakes(node, fake), arguments, keywords, needs_all=True)
    emit_start(builder, node, schema, results, aliases, arguments, keywords)
    _bind_results(builder, node, schema, results)
    if not is_point_to_point(node):
        await_results(builder, node)


def _lower_wait(builder: Builder, node: Node, fake: torch.Tensor) -> None:
    """Lowers the wait for a tensor, which is in its memory."""
    pending, started = builder.value(node.args[0]), pending_collective(node)
    root = builder.storages.root(pending)
    if builder.in_flight.finish(root.name) is not None:
        _emit_same_wait(builder, node, pending, fake)
    elif started is not None and not is_point_to_point(started):
        builder.env[node] = emit_wait(builder, node, started, pending, fake)
    elif node.all_input_nodes[0].op == "placeholder":  # the caller may have started a collective
        _emit_same_wait(builder, node, pending, fake)
    else:
        builder.storages.share(fake, root)
        builder.env[node] = pending


def _emit_same_wait(builder: Builder, node: Node, pending: Value, fake: torch.Tensor) -> None:
    """Emits the wait for a tensor in any group, which has the strides of the graph."""
    value = builder.env[node] = builder.add_view(node.name, fake, pending)
    builder.storages.share(fake, builder.storages.root(pending))
    builder.emit(WaitCollective(value, pending, "", origin=builder.origin(node)))


def _lower_stream_call(builder: Builder, streams: StreamTracker, node: Node, target: OpOverload) -> None:
    lines = streams.lines(node, builder.unique, builder.origin(node))
    if lines is None:
        _lower_operator(builder, node, target, None, frozenset())
        return
    builder.buffer.lines.extend(lines)
    builder.env[node] = None


def _is_known_number(builder: Builder, fake: FakeValue) -> bool:
    """Whether a fake value is a number over symbols that the program knows: the result of `sym_size`, for example."""
    if isinstance(fake, torch.Tensor | tuple | list) or fake is None or is_opaque(fake):
        return False
    return not builder.symbols.unknown(builder.symbols.expression(fake))


def returns_tensors(fake: FakeValue) -> bool:
    """Whether a call's results are tensors only, or None."""
    tensors = [item for item in (fake if isinstance(fake, tuple | list) else (fake,)) if item is not None]
    return bool(tensors) and all(isinstance(item, torch.Tensor) for item in tensors)


def is_in_operand_memory(node: Node, fake: torch.Tensor, fakes: Fakes) -> bool:
    """Whether a result is in the storage of one of the node's operands."""
    operands = [fakes.get(operand) for operand in node.all_input_nodes]
    tensors = [item for part in operands for item in (part if isinstance(part, tuple | list) else (part,))]
    return any(_on_storage_of(fake, item) for item in tensors)


def literal(builder: Builder, argument: object, node: Node) -> Operand:
    """Returns an argument of a node as an operand of a line. Raises GraphError for types that the IR cannot hold."""
    kind = type(argument)
    if kind is Node:
        return builder.env[argument]  # type: ignore[index]
    if kind is float:
        return math.nan if math.isnan(argument) else argument  # type: ignore[arg-type]  # equal programs share a NaN
    if kind is int or argument is None or kind is bool:
        return argument
    if isinstance(argument, list | tuple):
        return tuple([literal(builder, item, node) for item in argument])
    if isinstance(argument, torch.SymInt | torch.SymFloat | torch.SymBool):
        return builder.symbols.expression(argument)
    if isinstance(argument, _LITERALS):
        return argument
    if is_opaque(argument):
        return builder.constants.constant(real_object(argument), f"{node.name}_{type(argument).__name__.lower()}")
    reason = f"an argument is a {kind.__name__}"
    raise node_error(node, reason, "Pass tensors, numbers, strings, dtypes or devices")


def literals(builder: Builder, arguments: Sequence[object], node: Node) -> tuple[Operand, ...]:
    """Returns arguments of a node as operands of a line."""
    return tuple([literal(builder, argument, node) for argument in arguments])


def tensor_operands(tree: Operand) -> list[Value]:
    """Returns the tensors among operands, in nested tuples."""
    return [leaf for leaf in leaves(tree) if isinstance(leaf, Value) and isinstance(leaf.type, TensorType)]


def _lower_operator(
    builder: Builder, node: Node, target: OpOverload, fake: FakeValue, dead_roots: Collection[str]
) -> None:
    schema = operator_schema(target)
    named = tuple([(name, literal(builder, argument, node)) for name, argument in node.kwargs.items()])
    operands = (literals(builder, node.args, node), named)
    arguments, keywords = map_leaves(operands, lambda leaf: with_device_index(leaf, fake))
    if schema.replacement is not None:
        target, arguments, keywords = schema.replacement(target, arguments, keywords)
        schema = operator_schema(target)
    write = match_indirect_write(schema, arguments, keywords)
    if write is not None and lower_indirect_write(builder, node, write, fake, dead_roots):
        return
    if lower_slice_write(builder, node, fake, dead_roots):
        return
    if schema.mutated_arguments:
        _lower_mutation(builder, node, schema, arguments, keywords, fake)
    elif (base := _view_base(builder, node, schema, arguments, fake)) is not None:
        builder.env[node] = _views(builder, node, base, fake)
    else:
        effects = schema.effects(_devices(arguments, keywords, fake))
        results, aliases = _results(builder, node, schema, fake, arguments, keywords)
        line = ExternCall(
            results, schema.name, arguments, keywords, aliases=aliases, effect_set=effects, origin=builder.origin(node)
        )
        for item in with_declared_layout(line):
            builder.emit(item)
        _bind_results(builder, node, schema, results)


def with_device_index(leaf: Leaf, fake: FakeValue) -> Leaf:
    """Returns an operand, a device with its index; without it, the device current at run time would be used."""
    if isinstance(leaf, torch.device) and isinstance(fake, torch.Tensor) and leaf.type == fake.device.type:
        return fake.device
    return leaf


def _view_base(
    builder: Builder, node: Node, schema: OperatorSchema, arguments: Sequence[Operand], fake: FakeValue
) -> Value | None:
    """Returns the operand that all results are plain strided views of, or None."""
    if schema.aliased_argument is None or schema.aliased_argument >= len(arguments):
        return None
    base = arguments[schema.aliased_argument]
    if not isinstance(base, Value) or is_bounds_checked_at_run_time(builder, node):
        return None
    base_fake = builder.storages.fake(base)
    results = fake if isinstance(fake, tuple | list) else (fake,)
    if schema.may_alias and not all(_on_storage_of(base_fake, item) for item in results):
        return None
    if not all(is_plain_view(item, base_fake) for item in results):
        return None
    return None if node.target is _AS_STRIDED and not _is_inside(builder, node, base, results[0]) else base


def _is_inside(builder: Builder, node: Node, base: Value, fake: torch.Tensor) -> bool:
    """Whether a view is inside of the memory that its root declares: an input's storage may be larger, or not."""
    type_ = builder.view_type(fake, base, _operand_fake(builder, node, base))
    whole = builder.storages.root(base).tensor_type
    if not type_.is_static or not whole.is_static:
        return type_.end_bytes == whole.storage_bytes and type_.storage_offset == 0
    return type_.storage_offset >= 0 and type_.end_bytes <= whole.storage_bytes


def _on_storage_of(base: torch.Tensor, item: object) -> bool:
    return isinstance(item, torch.Tensor) and storage_identity(item) == storage_identity(base)


def _views(builder: Builder, node: Node, base: Value, fake: FakeValue) -> Result:
    if isinstance(fake, tuple | list):
        used = used_result_indices(node)
        return tuple([
            view_of(builder, node, f"{node.name}_{index}", item, base) if used is None or index in used else None
            for index, item in enumerate(fake)
        ])  # fmt: skip
    return view_of(builder, node, node.name, fake, base)


def view_of(builder: Builder, node: Node, name: str, fake: torch.Tensor, base: Value) -> Value:
    """Emits the view of a value, or returns the value itself if the type is equal."""
    type_ = builder.view_type(fake, base, _operand_fake(builder, node, base))
    if type_ == base.type:
        return base
    value = builder.add_alias(name, type_, base, fake)
    builder.emit(View(value, base, origin=builder.origin(node)))
    return value


def _operand_fake(builder: Builder, node: Node, value: Value) -> torch.Tensor | None:
    """Returns the fake tensor of the operand of a call whose value is this one; None if there is none."""
    fakes = [builder.fakes[item] for item in node.all_input_nodes if builder.env.get(item) is value]
    return next((fake for fake in fakes if isinstance(fake, torch.Tensor)), None)


def _base_of(
    builder: Builder, schema: OperatorSchema, arguments: Sequence[Operand], keywords: Keywords, fake: torch.Tensor
) -> Value | None:
    """Returns the operand that a result aliases, by the schema or because both share a storage."""
    if schema.aliased_argument is not None and not schema.may_alias:
        declared = arguments[schema.aliased_argument]
        return declared if isinstance(declared, Value) else None
    root = builder.storages.root_of_fake(fake)
    candidates = tensor_operands((arguments, keywords)) if root is not None else ()
    return next((operand for operand in candidates if builder.storages.root(operand) is root), None)


def _results(
    builder: Builder,
    node: Node,
    schema: OperatorSchema,
    fake: FakeValue,
    arguments: Sequence[Operand],
    keywords: Keywords,
    needs_all: bool = False,
) -> tuple[tuple[Result, ...], tuple[Value | None, ...]]:
    """Adds the values of an operator's results, one tree per return, and returns the operand that each aliases.

    Results that nothing uses have no value, unless the line `needs_all`.
    """
    count = schema.return_count
    fakes = () if count == 0 else (fake,) if count == 1 else tuple(fake)
    used = used_result_indices(node) if isinstance(fake, tuple | list) and not needs_all else None
    aliases: list[Value | None] = []

    def make(item: FakeValue, name: str, is_used: bool) -> Result:
        if is_used and isinstance(item, tuple | list):
            indices = used if count == 1 else None
            return tuple([
                make(part, f"{name}_{index}", indices is None or index in indices) for index, part in enumerate(item)
            ])  # fmt: skip
        base = None
        value: Value | None = None
        if is_used and isinstance(item, torch.Tensor):
            base = _base_of(builder, schema, arguments, keywords, item)
            value = builder.add_root(name, item) if base is None else builder.add_view(name, item, base)
        elif is_used and item is not None:
            value = builder.add_value(name, item)
        aliases.append(base)
        return value

    names = [node.name] if count == 1 else [f"{node.name}_{index}" for index in range(count)]
    results = tuple([
        make(item, name, used is None or count == 1 or index in used)
        for index, (item, name) in enumerate(zip(fakes, names, strict=True))
    ])  # fmt: skip
    return results, tuple(aliases) if any(alias is not None for alias in aliases) else ()


def _bind_results(builder: Builder, node: Node, schema: OperatorSchema, results: tuple[Result, ...]) -> None:
    """Records the operand of a node, and binds the symbols of its results."""
    fake = builder.fakes[node]
    operands = bind_results(
        builder, node, () if not results else (fake,) if schema.return_count == 1 else fake, results
    )
    builder.env[node] = None if not operands else operands[0] if schema.return_count == 1 else operands


def _devices(arguments: Sequence[Operand], keywords: Keywords, fake: FakeValue) -> list[torch.device]:
    """Returns the devices of a call's operands and results."""
    devices = [operand.tensor_type.device for operand in tensor_operands((arguments, keywords))]
    results = fake if isinstance(fake, tuple | list) else (fake,)
    return devices + [item.device for item in results if isinstance(item, torch.Tensor)]


def _lower_mutation(
    builder: Builder,
    node: Node,
    schema: OperatorSchema,
    arguments: tuple[Operand, ...],
    keywords: Keywords,
    fake: FakeValue,
) -> None:
    origin, written = builder.origin(node), schema.mutated_operands(arguments, keywords)
    for value in written:
        builder.storages.mark_mutated(value)
    effects = schema.effects(_devices(arguments, keywords, fake))
    if schema.is_out_variant:
        inputs = tuple([item for item in keywords if item[0] not in schema.mutated_arguments])
        builder.emit(ExternCall((), schema.name, arguments, inputs, written, effect_set=effects, origin=origin))
        builder.env[node] = written[0] if schema.return_count == 1 else written
        return
    returned = schema.returned_operands(arguments, keywords)
    if returned is not None:  # every return is an operand, or there is none
        builder.env[node] = None if not returned else returned[0] if len(returned) == 1 else returned
        builder.emit(Mutate((), schema.name, arguments, written, keywords, (), effects, origin=origin))
        return
    results, aliases = _results(builder, node, schema, fake, arguments, keywords)
    builder.emit(Mutate(results, schema.name, arguments, written, keywords, aliases, effects, origin=origin))
    _bind_results(builder, node, schema, results)


_SCATTER_LINES = frozenset({
    "aten.scatter_.src", "aten.scatter_.value", "aten.scatter_.reduce", "aten.scatter_.value_reduce",
    "aten.scatter_reduce_.two",
})  # fmt: skip
_INDEX_PUT_LINES = frozenset({"aten.index_put_.default", "aten.index_put_.hacked_twin"})


@dataclass(frozen=True)
class IndirectWrite:
    """A call that writes its first argument, or a copy of it, at indirect indices.

    Fields:
        schema: the operator's schema.
        arguments, keywords: the call's operands.
        in_place_operator: the name of the in-place operator.
        base: the tensor that the call writes, or copies first.
        is_functional: whether the base keeps its content.
    """

    schema: OperatorSchema
    arguments: tuple[Operand, ...]
    keywords: Keywords
    in_place_operator: str
    base: Value
    is_functional: bool

    def argument(self, name: str, default: Operand = None) -> Any:
        """Returns an argument by its name in the schema, which has its type; the default if it is None or missing."""
        if name not in self.schema.argument_names:
            return default
        argument = self.schema.operand(name, self.arguments, self.keywords)
        return default if argument is None else argument

    def operands(self) -> list[Value]:
        """Returns the call's tensors without its base."""
        return [leaf for leaf in leaves((self.arguments[1:], self.keywords)) if isinstance(leaf, Value)]

    def dedicated_line(self, target: Value, origin: Origin) -> LineBase | None:
        """Returns the scatter or index_put line on the target's memory, or None if the IR has no such line."""
        if self.in_place_operator in _INDEX_PUT_LINES:
            accumulate = self.argument("accumulate", False)
            return IndexPut(target, self.argument("indices"), self.argument("values"), accumulate, origin=origin)
        reduce = self.argument("reduce", "")
        if self.in_place_operator not in _SCATTER_LINES or reduce not in SCATTER_OPERATORS:
            return None
        source = self.argument("src" if "src" in self.schema.argument_names else "value")
        dim, index, include_self = self.argument("dim"), self.argument("index"), self.argument("include_self", True)
        return Scatter(target, index, source, dim, reduce, include_self, origin=origin)

    def mutation(self, target: Value, origin: Origin) -> Mutate:
        """Returns the call of the in-place operator on the target's memory."""
        arguments = (target, *self.arguments[1:])
        return Mutate((), self.in_place_operator, arguments, (target,), self.keywords, origin=origin)


def match_indirect_write(
    schema: OperatorSchema, arguments: tuple[Operand, ...], keywords: Keywords
) -> IndirectWrite | None:
    """Returns the indirect write that a call is, or None."""
    variant = IN_PLACE_VARIANTS.get(schema.name)
    operator = variant or (schema.name if schema.name in _SCATTER_LINES | _INDEX_PUT_LINES else None)
    if operator is None or not arguments or not isinstance(arguments[0], Value):
        return None
    return IndirectWrite(schema, arguments, keywords, operator, arguments[0], variant is not None)


def lower_indirect_write(
    builder: Builder, node: Node, write: IndirectWrite, fake: torch.Tensor, dead_roots: Collection[str]
) -> bool:
    """Emits an indirect write and records the operand of its node; returns whether it did.

    `dead_roots` are the names of the roots that the call may overwrite: the program owns them and nothing uses them
    after it. A call without a dedicated line stays an extern call, unless it can overwrite its base.
    """
    origin, storages = builder.origin(node), builder.storages
    target: Value | None = write.base
    if write.is_functional:
        others = {storages.root(operand).name for operand in write.operands()}
        target = reuse_operand_memory(builder, write.base, fake, dead_roots, others)
    has_line = write.dedicated_line(write.base, origin) is not None
    if not has_line and (target is None or not write.is_functional):
        return False
    if target is None:
        target = emit_result_copy(builder, node, node.name, fake, write.base)
    storages.mark_mutated(target)
    builder.emit(write.dedicated_line(target, origin) or write.mutation(target, origin))
    builder.env[node] = target
    return True
