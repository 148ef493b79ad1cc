"""The one place through which fxwrap reaches PyTorch's private API.

Each item says why the public API does not do and on which versions it was checked.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, cast

import sympy
import torch
from torch._C import FunctionSchema as FunctionSchema

# Why: the classes of a graph's call targets have no public name. Checked on 2.11, 2.13.
from torch._decomp import get_decompositions as get_decompositions
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import TracingContext
from torch._guards import detect_fake_mode as detect_fake_mode
from torch._higher_order_ops.auto_functionalize import NotView, get_mutable_args, read_view_information_from_args
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

# Why: torch's operator for Triton kernels takes indices into a table without a public name; the operator of a while
# loop that keeps every round's values is not in torch.ops until its module is imported. Checked on 2.11, 2.13.
from torch._higher_order_ops.triton_kernel_wrap import (
    kernel_side_table,
    triton_kernel_wrapper_functional,
    triton_kernel_wrapper_mutation,
)
from torch._higher_order_ops.while_loop import while_loop_stack_output_op
from torch._library.utils import is_impure
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._ops import OpOverload as OpOverload
from torch._ops import OpOverloadPacket as OpOverloadPacket

# Why: the promotion rules of pointwise operators; torch.result_type knows only the default one. Checked on 2.11, 2.13.
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND
from torch._prims_common import elementwise_dtypes as elementwise_dtypes
from torch._subclasses.fake_impls import op_implementations_dict
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)

# Why: fake tensors are how graphs say shapes; only the mode's module path is private. Checked on 2.11, 2.13.
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    CallMethodKey,
    ConvertIntKey,
    DimDynamic,
    DivideByKey,
    GuardOnDataDependentSymNode,
    ShapeEnv,
)
from torch.fx.node import has_side_effect
from torch.overrides import _get_current_function_mode_stack as function_modes
from torch.torch_version import TorchVersion
from torch.utils._device import DeviceContext

# Why: nested inputs and outputs are flattened as torch.compile does it; torch.utils.pytree is not public yet.
# Checked on 2.11, 2.13.
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import SequenceKey
from torch.utils._pytree import keystr as keystr
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_flatten_with_path as tree_flatten_with_path
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_unflatten as tree_unflatten

# Why: ShapeEnv writes sizes with these sympy functions; there is no public name for them. Checked on 2.11, 2.13.
from torch.utils._sympy.functions import BitwiseFn_bitwise_and as BitwiseFn_bitwise_and
from torch.utils._sympy.functions import BitwiseFn_bitwise_or as BitwiseFn_bitwise_or
from torch.utils._sympy.functions import BitwiseFn_bitwise_xor as BitwiseFn_bitwise_xor
from torch.utils._sympy.functions import CeilDiv as CeilDiv
from torch.utils._sympy.functions import CeilToInt as CeilToInt
from torch.utils._sympy.functions import CleanDiv as CleanDiv
from torch.utils._sympy.functions import FloatPow as FloatPow
from torch.utils._sympy.functions import FloatTrueDiv as FloatTrueDiv
from torch.utils._sympy.functions import FloorDiv as FloorDiv
from torch.utils._sympy.functions import FloorToInt as FloorToInt
from torch.utils._sympy.functions import Identity as Identity
from torch.utils._sympy.functions import IntTrueDiv as IntTrueDiv
from torch.utils._sympy.functions import LShift as LShift
from torch.utils._sympy.functions import Max as Max
from torch.utils._sympy.functions import Min as Min
from torch.utils._sympy.functions import Mod as Mod
from torch.utils._sympy.functions import ModularIndexing as ModularIndexing
from torch.utils._sympy.functions import OpaqueUnaryFn_acos as OpaqueUnaryFn_acos
from torch.utils._sympy.functions import OpaqueUnaryFn_asin as OpaqueUnaryFn_asin
from torch.utils._sympy.functions import OpaqueUnaryFn_asinh as OpaqueUnaryFn_asinh
from torch.utils._sympy.functions import OpaqueUnaryFn_atan as OpaqueUnaryFn_atan
from torch.utils._sympy.functions import OpaqueUnaryFn_cos as OpaqueUnaryFn_cos
from torch.utils._sympy.functions import OpaqueUnaryFn_cosh as OpaqueUnaryFn_cosh
from torch.utils._sympy.functions import OpaqueUnaryFn_exp as OpaqueUnaryFn_exp
from torch.utils._sympy.functions import OpaqueUnaryFn_log as OpaqueUnaryFn_log
from torch.utils._sympy.functions import OpaqueUnaryFn_log2 as OpaqueUnaryFn_log2
from torch.utils._sympy.functions import OpaqueUnaryFn_sin as OpaqueUnaryFn_sin
from torch.utils._sympy.functions import OpaqueUnaryFn_sinh as OpaqueUnaryFn_sinh
from torch.utils._sympy.functions import OpaqueUnaryFn_sqrt as OpaqueUnaryFn_sqrt
from torch.utils._sympy.functions import OpaqueUnaryFn_tan as OpaqueUnaryFn_tan
from torch.utils._sympy.functions import OpaqueUnaryFn_tanh as OpaqueUnaryFn_tanh
from torch.utils._sympy.functions import PowByNatural as PowByNatural
from torch.utils._sympy.functions import PythonMod as PythonMod
from torch.utils._sympy.functions import RoundDecimal as RoundDecimal
from torch.utils._sympy.functions import RoundToInt as RoundToInt
from torch.utils._sympy.functions import RShift as RShift
from torch.utils._sympy.functions import ToFloat as ToFloat
from torch.utils._sympy.functions import TruncToFloat as TruncToFloat
from torch.utils._sympy.functions import TruncToInt as TruncToInt
from torch.utils._sympy.functions import Where as Where
from torch.utils._sympy.numbers import int_oo as int_oo
from torch.utils._sympy.value_ranges import ValueRanges as ValueRanges
from torch.utils._sympy.value_ranges import bound_sympy as bound_sympy

# --- operator schemas -----------------------------------------------------------------------------------------------
# Why: an overload's schema (names, types and defaults of its arguments) has no public accessor. Checked on 2.11, 2.13.


def aten_schema(operator: str, overload: str) -> FunctionSchema | None:
    """Give the schema of ATen overload `operator.overload` ("mul", "Tensor"), or None where torch has none."""
    packet = getattr(torch.ops.aten, operator, None)
    found = getattr(packet, overload, None)
    return getattr(found, "_schema", None)

# --- operators and graphs -------------------------------------------------------------------------------------------


def composite_decompositions() -> dict[OpOverload, Callable[..., object]]:
    """Give each composite operator (matmul, reshape, linear, ...) with the function that takes it apart.

    torch.export keeps them whole unless its table names them; torch has no public list of them alone.
    """
    table = torch.export.default_decompositions()
    entries = table.items()  # type: ignore[no-untyped-call]
    return {overload: function for overload, function in entries if is_composite(overload)}


_PLAIN_CLASSES = (torch.Tensor, torch.nn.Parameter, FakeTensor)


def is_desugared(tensor: torch.Tensor) -> bool:
    """Say whether a tensor is plain: no subclass beyond Parameter and FakeTensor."""
    return type(tensor) in _PLAIN_CLASSES


def storage_identity(tensor: torch.Tensor) -> int:
    """Give a number that two tensors share exactly when they share a storage (fake tensors have no data pointer)."""
    return int(tensor.untyped_storage()._cdata)


def is_plain_view(view: torch.Tensor, base: torch.Tensor) -> bool:
    """Say whether a (fake) view differs from its base by sizes, strides and offset alone.

    That is not so for views of another element type, and for conjugate or negative ones.
    """
    return (
        view.layout is torch.strided
        and view.dtype == base.dtype
        and view.is_conj() == base.is_conj()
        and view.is_neg() == base.is_neg()
    )


def is_composite(overload: OpOverload) -> bool:
    """Say whether an operator is only a recipe of others: it has no kernel of its own, and may return its argument."""
    return bool(overload.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd))


def symbol_bounds(
    number: torch.SymInt | torch.SymFloat | torch.SymBool,
) -> tuple[int | float | None, int | float | None]:
    """Give the inclusive bounds a ShapeEnv knows of a symbolic number, None where there is none."""
    node = number.node
    bounds = node.shape_env.bound_sympy(node.expr) if node.shape_env is not None else None
    if bounds is None or bounds.is_bool:
        return None, None
    return _finite(bounds.lower), _finite(bounds.upper)


# Why: a graph was traced for sizes for which its guards hold: `s0//2` that was broadcast is 1. Checked on 2.13.


def guarded_bounds(shape_env: ShapeEnv) -> dict[sympy.Basic, tuple[int | None, int | None]]:
    """Give the inclusive bounds that guards of the form `expression < number` set, by expression."""
    found: dict[sympy.Basic, tuple[int | None, int | None]] = {}
    for guard in shape_env.guards:
        for relation in (guard.expr, getattr(guard.expr, "reversed", None)):
            if not isinstance(relation, sympy.core.relational.Relational) or not relation.rhs.is_Integer:
                continue
            lower, upper = found.get(relation.lhs, (None, None))
            number = int(relation.rhs)
            match relation:
                case sympy.Eq():
                    lower = upper = number
                case sympy.Lt() | sympy.Le():
                    most = number - isinstance(relation, sympy.Lt)
                    upper = most if upper is None else min(upper, most)
                case sympy.Gt() | sympy.Ge():
                    least = number + isinstance(relation, sympy.Gt)
                    lower = least if lower is None else max(lower, least)
                case _:
                    pass
            found[relation.lhs] = lower, upper
    return found


def _finite(bound: object) -> int | float | None:
    if bound in (int_oo, -int_oo, sympy.oo, -sympy.oo):
        return None
    number = int(bound) if getattr(bound, "is_integer", False) else float(bound)  # type: ignore[call-overload, arg-type]
    return None if abs(number) >= 2**62 else number


def symbol_hint(number: torch.SymInt | torch.SymFloat | torch.SymBool) -> int | float | None:
    """Give the size a symbolic number had when the graph was traced, or the hint that its user gave; None without."""
    overrides: Mapping[Any, int] = getattr(number.node.shape_env, "var_to_hint_override", {})
    if overrides and number.node.expr in overrides:
        return overrides[number.node.expr]
    hint = number.node.hint if number.node.has_hint() else None
    return hint if isinstance(hint, int | float) else None


def shape_env_in(tree: Any) -> ShapeEnv | None:
    """Give the ShapeEnv of the first fake value in nested results that has one."""
    for leaf in tree_flatten(tree)[0]:
        if isinstance(leaf, FakeTensor) and leaf.fake_mode.shape_env is not None:
            found: ShapeEnv = leaf.fake_mode.shape_env
            return found
        if isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool):
            known: ShapeEnv | None = leaf.node.shape_env
            return known
    return None


# Why: a compile cache must know all that a ShapeEnv can tell of a graph's symbols, most of which has no public reader.
# Checked on 2.11, 2.13.


def shape_facts(
    shape_env: ShapeEnv, symbols: frozenset[sympy.Symbol], text: Callable[[Any], str]
) -> Iterator[str]:
    """Give what a ShapeEnv knows of symbols, and of those that it knows to go together with them, as texts in order.

    That is ranges, hints, replacements, renamings, guards, assertions still to be made, and what is divisible or a
    size. `text` says an expression.
    """
    asserted = [item.expr for items in shape_env.deferred_runtime_asserts.values() for item in items]
    relations = [*[guard.expr for guard in shape_env.guards], *asserted, *shape_env.divisible]
    pairs = [*shape_env.replacements.items(), *shape_env.unbacked_renamings.items()]
    groups = [expression.free_symbols for expression in relations]
    groups += [{old} | new.free_symbols for old, new in pairs]
    known = set(symbols)
    found: list[set[Any]] = []
    while len(found) < len(more := [group for group in groups if group & known]):
        found = more
        known |= set().union(*found)
    hints, chosen = shape_env.backed_var_to_val, shape_env.var_to_hint_override
    for symbol in sorted(known, key=lambda symbol: str(symbol)):
        bounds, size = shape_env.var_to_range.get(symbol), symbol in shape_env.size_like
        yield f"{text(symbol)} {bounds} {hints.get(symbol)} {chosen.get(symbol)} {size}"
    yield from [f"{text(old)} is {text(new)}" for old, new in pairs if old in known]
    yield from sorted([text(expression) for expression in relations if expression.free_symbols & known])


def operator_text(overload: OpOverload) -> str:
    """Give an operator's name; of one that is not torch's own, whose schema may change, also schema and tags."""
    if overload.namespace in ("aten", "prims"):
        return str(overload)
    return f"{overload} {overload._schema} {sorted(map(str, overload.tags))}"


# Why: where a node's unbacked symbols are found in its result is metadata without a public reader; it may speak of
# symbols that were renamed or solved since. Checked on 2.11, 2.13.


def unbacked_bindings(node: torch.fx.Node, fakes: Any) -> list[tuple[sympy.Basic, tuple[tuple[str, int], ...]]]:
    """Give what is found at each key path of a node's result, as the ShapeEnv knows it by now, and the path.

    A renamed symbol is there by both names: the metadata of nodes may have either.

    Steps are ("at", index), ("size", 0), ("stride", 0), ("storage_offset", 0), ("divide", constant) and ("truth", 0).
    """
    bindings, shape_env = node.meta.get("unbacked_bindings"), shape_env_in(fakes)
    if not bindings or shape_env is None:
        return []
    found = []
    for symbol, path in bindings.items():
        steps = [_path_step(key) for key in path]
        if all(step is not None for step in steps):
            taken = tuple([step for step in steps if step is not None])
            names = dict.fromkeys((symbol, shape_env.unbacked_renamings.get(symbol, symbol)))
            found += [(shape_env.replace(name), taken) for name in names]
    return found


def _path_step(key: Any) -> tuple[str, int] | None:
    match key:
        case SequenceKey():
            return "at", key.idx
        case CallMethodKey():
            return key.name, 0
        case DivideByKey():
            return "divide", int(key.divisor)
        case ConvertIntKey():
            return "truth", 0
        case _:
            return None


@cache
def operator_overload(target: str) -> OpOverload:
    """Give the overload that a program calls "namespace.name.overload".

    Raises LookupError when torch knows no such operator: the library that registers it was not imported.
    """
    namespace, _, rest = target.partition(".")
    name, _, overload = rest.rpartition(".")
    try:
        found = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    except AttributeError:
        found = None
    if not isinstance(found, OpOverload):
        raise LookupError(f"torch knows no operator '{target}'; import the library that registers it first")
    return found


@cache
def out_argument_names(target: str) -> tuple[str, ...]:
    """Give the names of an operator's out arguments, in its schema's order."""
    return tuple(argument.name for argument in operator_overload(target)._schema.arguments if argument.is_out)


@cache
def operator_arguments(target: str) -> Mapping[str, Any] | None:
    """Give the names of an operator's arguments in its schema's order, each with its default (REQUIRED without one).

    None when torch knows no such operator.
    """
    try:
        arguments = operator_overload(target)._schema.arguments
    except LookupError:
        return None
    return {item.name: item.default_value if item.has_default_value() else REQUIRED for item in arguments}


REQUIRED = object()
"""Stands for the default of an argument that has none."""


@cache
def returned_arguments(operator: OpOverload) -> tuple[tuple[int, str] | None, ...]:
    """Give, for each return of an operator, the position and name of the written argument that it is, if it is one."""
    schema = operator._schema
    written = {
        frozenset(argument.alias_info.before_set): (position, argument.name)
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    }
    sets = [frozenset(item.alias_info.before_set) if item.alias_info is not None else None for item in schema.returns]
    return tuple([written.get(item) if item is not None else None for item in sets])


def shared_or_written(node: torch.fx.Node) -> list[torch.fx.Node]:
    """Give the nodes whose memory a node gives back, shares with its result, or writes; all it uses where unknown."""
    target: Any = node.target
    if node.op != "call_function" or not isinstance(target, OpOverload):
        return node.all_input_nodes
    found: list[torch.fx.Node] = []
    for position, argument in enumerate(target._schema.arguments):
        if argument.alias_info is not None:
            given = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
            torch.fx.map_arg(given, found.append)
    return found


# --- AOTAutograd ----------------------------------------------------------------------------------------------------
# Why: backends of torch.compile that train have no public entry to AOTAutograd. Imported when first used, because
# Dynamo takes over a second to import, which a program that only runs need not pay. Checked on 2.11, 2.13.


def aot_autograd(*, partition_fn: Callable[..., Any], **compilers: Any) -> Callable[..., Any]:
    """Give the backend that traces forward and backward with AOTAutograd and has each graph compiled.

    `compilers` are AOTAutograd's own arguments; `partition_fn` splits the joint graph.
    """
    from torch._dynamo.backends.common import aot_autograd as make
    from torch._functorch import config

    backend: Callable[..., Any] = make(partition_fn=partition_fn, **compilers)

    def with_eagers_numbers(graph_module: Any, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        # Why: on GPUs the partitioner would have checkpointed operators draw from generators of its own making, so
        # that CUDA graphs can hold them; those do not give the numbers that eager draws. Checked on 2.11, 2.13.
        with config.patch(graphsafe_rng_functionalization=False):
            return cast("Callable[..., Any]", backend(graph_module, example_inputs))

    return with_eagers_numbers


def min_cut_partition() -> Callable[..., Any]:
    """Give torch's partitioner, which saves as little for the backward as it can, and computes the rest again."""
    from functorch.compile import min_cut_rematerialization_partition

    partition: Callable[..., Any] = min_cut_rematerialization_partition
    return partition


@dataclass(frozen=True)
class TracingFacts:
    """What AOTAutograd knows of a graph's inputs, by position.

    `static_inputs` of the forward (or inference) graph keep their address from call to call; `donated_inputs` of the
    backward are given away. `saved_outputs` of the forward are kept for the backward, and are nobody else's.
    """

    static_inputs: frozenset[int] = frozenset()
    donated_inputs: frozenset[int] = frozenset()
    saved_outputs: frozenset[int] = frozenset()


def tracing_facts(kind: str, outputs: int = 0) -> TracingFacts:
    """Give what AOTAutograd knows of the graph it is having compiled: "forward", "backward" or "inference".

    `outputs` is how many outputs the graph has.
    """
    context = TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    if metadata is None:
        return TracingFacts()
    donated = metadata.bw_donated_idxs if kind == "backward" else None
    saved: frozenset[int] = frozenset()
    if kind == "forward" and context is not None and context.output_strides is not None:
        saved = frozenset(range(outputs)[metadata.tensors_saved_for_backwards_slice])
    return TracingFacts(frozenset(metadata.static_input_indices or ()), frozenset(donated or ()), saved)


def report_output_strides(strides: Sequence[tuple[int, ...] | None]) -> None:
    """Tell AOTAutograd which strides the outputs of the forward graph will have; None where they are as traced.

    It hands the backward inputs to match, when that is compiled.
    """
    context = TracingContext.try_get()
    if context is not None and context.output_strides is not None and not context.output_strides:
        context.output_strides.extend(strides)


# --- emitted FX graphs ----------------------------------------------------------------------------------------------
# Why: metadata of emitted graphs is made of fake tensors and symbolic numbers of the input graph's own mode, and only
# private constructors make those without running an operator. Checked on 2.11, 2.13.

def fresh_fake_mode() -> FakeTensorMode:
    """Give a fake mode with a ShapeEnv of its own."""
    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())


def unknown_number(shape_env: ShapeEnv, kind: str) -> Any:
    """Give a symbolic number of a kind ("int", "float" or "bool") of which nothing is known."""
    with apart_from_pending_symbols(shape_env):
        if kind == "bool":
            return shape_env.create_unbacked_symbool()
        if kind == "float":
            return shape_env.create_unbacked_symfloat()
        return shape_env.create_unbacked_symint()


def shape_env_of(mode: FakeTensorMode) -> ShapeEnv:
    """Give a fake mode's ShapeEnv, or a new one for a mode that has none."""
    return mode.shape_env if mode.shape_env is not None else ShapeEnv()


def shape_symbols(shape_env: ShapeEnv) -> dict[str, sympy.Symbol]:
    """Give the symbols a ShapeEnv has made, by name."""
    return {symbol.name: symbol for symbol in shape_env.var_to_range}


def symbolic_number(shape_env: ShapeEnv, expression: sympy.Basic, kind: str) -> Any:
    """Give the SymInt, SymFloat or SymBool (`kind` "int", "float", "bool") of an expression over known symbols."""
    if kind == "int":
        return shape_env.create_symintnode(expression, hint=None)
    if kind == "float":
        return shape_env.create_symfloatnode(expression, hint=None)
    return shape_env.create_symboolnode(expression)


def new_symbol(shape_env: ShapeEnv, name: str, kind: str, hint: int | None) -> Any:
    """Give a new SymInt, SymFloat or SymBool: backed by a hint when there is one and it is an int, else unbacked."""
    if kind != "int" or hint is None:
        return unknown_number(shape_env, kind)
    from torch._dynamo.source import ConstantSource

    symbol = shape_env.create_symbol(
        hint, source=ConstantSource(name), dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None,
        positive=None, do_not_specialize_zero_one=True,
    )  # fmt: skip
    return shape_env.create_symintnode(symbol, hint=hint)


def fake_tensor(mode: FakeTensorMode, meta: torch.Tensor, device: torch.device) -> FakeTensor:
    """Give the fake tensor of a mode with a meta tensor's sizes, strides, offset and storage, as if on a device."""
    return FakeTensor(mode, meta, device)


def lacks_fake_rule(error: BaseException) -> bool:
    """Say whether an operator failed on fake tensors because nobody registered what it does with them."""
    return isinstance(error, UnsupportedOperatorException) or "no fake impl registered" in str(error)


def depends_on_data(error: BaseException) -> bool:
    """Say whether an operator failed on fake tensors because what it gives depends on what is in them."""
    return isinstance(error, DataDependentOutputException | DynamicOutputShapeException | GuardOnDataDependentSymNode)


# Why: torch 2.11's rules for fake tensors say that the places and counts which `unique` and its like give have the
# dtype of what is looked through, and `_unique` has no rule, so that it gives one element. A graph that is traced with
# them lacks conversions that it needs, and no reader of it can know. torch's own rules have no public table, and
# corrections must be there when Dynamo traces. Checked on 2.11 (wrong), 2.13 (right, left as it is).


def _as_positions(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.new_empty(tensor.shape, dtype=torch.int64) for tensor in tensors]


def _correct_rules_of_unique(rules: dict[OpOverload, Callable[..., Sequence[torch.Tensor]]]) -> None:
    """Make the table's rules say that places and counts are whole numbers, and how many values `_unique` gives."""
    aten = torch.ops.aten

    def corrected(rule: Callable[..., Sequence[torch.Tensor]], *arguments: Any, **keywords: Any) -> Any:
        values, *others = rule(*arguments, **keywords)
        return (values, *_as_positions(others))

    for operator in (aten._unique2.default, aten.unique_dim.default, aten.unique_consecutive.default):
        rules[operator] = partial(corrected, rules[operator])
    unique = rules[aten._unique2.default]

    def without_counts(mode: Any, _operator: Any, *arguments: Any, **keywords: Any) -> Any:
        return unique(mode, aten._unique2.default, *arguments, **keywords)[:2]

    rules.setdefault(aten._unique.default, without_counts)


if TorchVersion("2.13") > torch.__version__:
    _correct_rules_of_unique(op_implementations_dict)


# Why: a ShapeEnv has the unbacked symbols that an operator makes wait until the node is traced which gives them, and
# tracing raises where others wait too. Operators that run for their fake values alone make such that no node gives.
# Checked on 2.11, 2.13.


@contextmanager
def apart_from_pending_symbols(shape_env: ShapeEnv | None) -> Iterator[None]:
    """Run as if no unbacked symbol waited for its node; those that wait before wait afterwards, and no others."""
    if shape_env is None:
        yield
        return
    waiting = shape_env.pending_fresh_unbacked_symbols
    before = [*waiting]
    waiting.clear()
    try:
        yield
    finally:
        waiting[:] = before


@contextmanager
def in_fake_mode(mode: FakeTensorMode | None) -> Iterator[None]:
    """Run operators on a mode's fake tensors for what they give alone: no node is traced. None changes nothing."""
    if mode is None:
        yield
        return
    with mode, apart_from_pending_symbols(mode.shape_env):
        yield


# Why: composite operators with symbolic sizes run on fake tensors only by torch's Python rules, which have no public
# switch. Checked on 2.13.


@contextmanager
def on_fake_tensors(mode: FakeTensorMode) -> Iterator[None]:
    """Run operators on a mode's fake tensors, composite ones with symbolic sizes too, by torch's Python rules."""
    with in_fake_mode(mode), enable_python_dispatcher():
        yield


def without_fake_mode() -> AbstractContextManager[Any]:
    """Give a context in which operators make what they say, also when the caller has a fake mode on."""
    return unset_fake_temporarily()


def symbolic_function(name: str) -> Callable[..., Any] | None:
    """Give torch's function of one float, e.g. "cos", that also takes a SymFloat; None where torch has none."""
    return getattr(torch, f"_sym_{name}", None)


# Why: an operator of ours that writes or shares memory needs its own rule for functionalisation. Checked on 2.11, 2.13.


def functional_content(tensor: torch.Tensor) -> torch.Tensor:
    """Give the tensor that a functionalised one stands for, brought up to date; any other tensor itself."""
    if not torch._is_functional_tensor(tensor):
        return tensor
    torch._sync(tensor)  # type: ignore[attr-defined,no-untyped-call]
    return torch._from_functional_tensor(tensor)


def functional_update(tensor: torch.Tensor, content: torch.Tensor) -> None:
    """Make a functionalised tensor, and what it is a view of, stand for new content: what writing to it means."""
    torch._functionalize_replace(tensor, content)
    torch._functionalize_commit_update(tensor)
    torch._sync(tensor)  # type: ignore[attr-defined,no-untyped-call]


@contextmanager
def below_functionalisation() -> Iterator[None]:
    """Run operators as functionalisation itself does: without being functionalised again."""
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.Functionalize)):
        yield


# Why: torch's operator for Triton kernels takes indices into a table that has no public name. Checked on 2.11, 2.13.


def triton_kernel_index(kernel: Any) -> int:
    """Give the index of a Triton kernel object in torch's table, adding it when it is new.

    That of a kernel with a content hash follows from it, and is far above those that torch gives: so an index that
    outlives a reset of the table, or the process, is an error or right, and never another kernel's.
    """
    content = getattr(kernel, "fxwrap_hash", None)
    if content is None:
        return kernel_side_table.add_kernel(kernel)
    index = _content_index(content, type(kernel).__qualname__)
    with kernel_side_table.lock:
        kernel_side_table.id_to_kernel.setdefault(index, kernel)
        kernel_side_table.kernel_to_id.setdefault(kernel, index)
    return index


def _content_index(*content: str) -> int:
    return (1 << 60) + int(hashlib.sha256("\0".join(content).encode()).hexdigest()[:14], 16)


def triton_kernel_at(index: int) -> Any:
    """Give the Triton kernel object at an index of torch's table."""
    return kernel_side_table.get_kernel(index)


def triton_constants_index(constants: tuple[tuple[str, int | float | bool | str], ...]) -> int:
    """Give the index of these constant arguments in torch's table, which follows from them, adding them when new."""
    index = _content_index(repr(constants))
    kernel_side_table.constant_args.setdefault(index, dict(constants))
    return index


triton_launch: HigherOrderOperator = triton_kernel_wrapper_mutation

triton_launch_on_copies: HigherOrderOperator = triton_kernel_wrapper_functional
"""What functionalisation makes of a launch: it writes copies of the tensors that are written, and gives these."""


def triton_constants_at(index: int) -> dict[str, Any]:
    """Give the constant arguments at an index of torch's table."""
    return dict(kernel_side_table.get_constant_args(index))


def new_triton_constants(constants: Mapping[str, Any], kernel_hash: str | None = None) -> int:
    """Add constant arguments of any type to torch's table; give their index.

    Those that belong to a kernel with a content hash have the index that follows from it.
    """
    if kernel_hash is None:
        return kernel_side_table.add_constant_args(dict(constants))
    index = _content_index("constants", kernel_hash)
    kernel_side_table.constant_args.setdefault(index, dict(constants))
    return index


def triton_written_arguments(kernel: int, constants: int, given: Mapping[str, Any], descriptors: Any) -> list[str]:
    """Give the names of the tensors that a Triton kernel writes, found by compiling it; of all where that fails.

    `kernel` and `constants` are indices of torch's table, `given` the arguments by name, `descriptors` the operator's
    metadata of tensor descriptors. Imported when first used, because it needs Triton.
    """
    from torch._higher_order_ops.triton_kernel_wrap import get_mutated_tensors

    return list(get_mutated_tensors(kernel, constants, dict(given), descriptors))


# --- running and measuring ------------------------------------------------------------------------------------------

def allocation_record(profile: torch.profiler.profile) -> list[int]:
    """Give the bytes of each CPU allocation (positive) and release (negative) that a profile saw, in order of time.

    Why: the public event list folds them into sums for each operator, from which no peak can be told, and leaves out
    what native code allocates by itself. Checked on 2.11, 2.13.
    """
    results: Any = getattr(profile.profiler, "kineto_results", None)
    events = [event for event in results.events() if event.name() == "[memory]"] if results is not None else []
    return [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]


@contextmanager
def quiet_profiler() -> Iterator[None]:
    """Keep torch's profiler from writing two lines to stderr for each profile, unless the user chose a log level.

    Why: the profiler reads its level from the environment when it is first used; nothing else sets it. Checked on 2.13.
    """
    if "KINETO_LOG_LEVEL" in os.environ:
        yield
        return
    os.environ["KINETO_LOG_LEVEL"] = "6"
    try:
        yield
    finally:
        del os.environ["KINETO_LOG_LEVEL"]


def negated_view(tensor: torch.Tensor) -> torch.Tensor:
    """Give a view with the negative bit turned over, as `imag` of a conjugate has it. Checked on 2.11, 2.13."""
    return torch._neg_view(tensor)


# Why: one check and one guard for the autocast of every device; the public ones name a device. Checked on 2.11, 2.13.
DisableAutocast = torch._C._DisableAutocast
is_any_autocast_enabled = torch._C._is_any_autocast_enabled


# Why: torch.no_grad as a context costs 10 us a call, more than a small program. Checked on 2.11, 2.13.
set_grad_enabled = torch._C._set_grad_enabled


# Why: torch 2.11 looks up higher-order operators in another table than torch.fx.node.has_side_effect fills, so that
# dead-code elimination deletes every launch of a Triton kernel. Checked on 2.11, 2.13.


def declare_side_effect(operator: OpOverload | HigherOrderOperator) -> None:
    """Make dead-code elimination keep the calls of an operator."""
    has_side_effect(operator)
    if not is_impure(operator):
        _register_effectful_op(operator, _EffectType.ORDERED)


class UnwrittenModule(torch.fx.GraphModule):
    """A GraphModule whose code is written by `write()`, not when it is made; copies have theirs.

    Why: GraphModule writes its code at once, which costs as much as the nodes, also for graphs that are only read or
    that run in another form. Dynamo cannot trace torch's own lazy class. Checked on 2.11, 2.13.
    """

    def __init__(self, *arguments: Any) -> None:
        self.__dict__["_unwritten"] = True
        super().__init__(*arguments)

    def recompile(self) -> Any:
        """Write the code again, where it was written before."""
        return None if self.__dict__.get("_unwritten") else super().recompile()

    def write(self) -> None:
        """Write the code, if that has not been done."""
        if self.__dict__.pop("_unwritten", False):
            self.recompile()


# Why: the code of a graph in another calling convention, without changing the graph's own. Checked on 2.11, 2.13.


def graph_python_code(graph: torch.fx.Graph, codegen: torch.fx.graph.CodeGen) -> torch.fx.graph.PythonCode:
    """Give the Python code that a CodeGen writes for a graph whose own CodeGen stays as it is."""
    own = graph._codegen
    graph.set_codegen(codegen)
    try:
        return graph.python_code(root_module="self")
    finally:
        graph.set_codegen(own)


# Why: whether torch would do more with a call than run it (modes, functorch, functionalisation, tracing) stands in the
# thread's included dispatch keys, which nothing public shows. Checked on 2.11, 2.13.
_QUIET_KEYS: int = (
    torch._C.DispatchKeySet(torch._C.DispatchKey.BackendSelect)
    | torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
).raw_repr()
_included_keys = torch._C._dispatch_tls_local_include_set
_function_mode_count = torch._C._len_torch_function_stack


def operators_are_watched() -> bool:
    """Say whether anything sees or changes calls of operators: a mode, a level of functorch, a tracer.

    torch.set_default_device is a mode too, but one that leaves calls that name their device alone.
    """
    if _included_keys().raw_repr() & ~_QUIET_KEYS:
        return True
    if not _function_mode_count():
        return False
    modes: list[Any] = function_modes()  # type: ignore[no-untyped-call]
    return not all(isinstance(mode, DeviceContext) for mode in modes)


def is_vmapped() -> bool:
    """Say whether the innermost level of functorch is torch.vmap's."""
    level: Any = torch._C._functorch.peek_interpreter_stack()
    return level is not None and level.key() == torch._C._functorch.TransformType.Vmap


def has_own_memory(tensor: torch.Tensor) -> bool:
    """Say whether what a plain-looking tensor stands for is in its memory: it is not meta or functionalised."""
    return tensor.data_ptr() != 0 or not (tensor.is_meta or torch._is_functional_tensor(tensor))


def graph_codegen(graph: torch.fx.Graph) -> torch.fx.graph.CodeGen:
    """Give what writes a graph's code, which can be set in public but not asked for. Checked on 2.11, 2.13."""
    return graph._codegen


class GraphCode(torch.fx.graph.CodeGen):
    """A CodeGen whose subclasses add to the code that torch writes.

    Why: the hook for a whole graph's code, and the nodes and namespace it is written with, have no public name. Each
    node's part of the body begins with a line "# COUNTER: <position>". Checked on 2.11, 2.13.
    """

    def _gen_python_code(
        self, nodes: Any, root_module: str, namespace: Any, **options: Any
    ) -> torch.fx.graph.PythonCode:
        def write(change: Callable[[list[str]], list[str]]) -> torch.fx.graph.PythonCode:
            own = self._body_transformer
            self._body_transformer = change
            try:
                return super(GraphCode, self)._gen_python_code(nodes, root_module, namespace, **options)
            finally:
                self._body_transformer = own

        if options.get("record_func"):
            return super()._gen_python_code(nodes, root_module, namespace, **options)
        users = self._body_transformer or (lambda body: body)
        return self.written(list(nodes), partial(_new_name, namespace), users, write, not options.get("colored"))

    def written(
        self,
        nodes: Sequence[torch.fx.Node],
        new_name: Callable[[str], str],
        users: Callable[[list[str]], list[str]],
        write: Callable[[Callable[[list[str]], list[str]]], torch.fx.graph.PythonCode],
        runs: bool,
    ) -> torch.fx.graph.PythonCode:
        """Give the code of a graph: what `write` gives with a function that changes the body's pieces.

        `new_name` gives a name that nothing else in the code has, `users` is the user's own change of the body
        (`graph.on_generate_code`). `runs` is false for code that is only shown: with colours, it is no Python.
        """
        raise NotImplementedError


def _new_name(namespace: Any, wish: str) -> str:
    name: str = namespace.create_name(wish, None)
    return name


while_loop_stack_output: HigherOrderOperator = while_loop_stack_output_op

PROMOTION_KINDS = {kind.name: kind for kind in ELEMENTWISE_TYPE_PROMOTION_KIND}
"""torch's promotion rules by name: DEFAULT, NO_OPMATH, INT_TO_FLOAT, ALWAYS_BOOL, COMPLEX_TO_FLOAT, BOOL_TO_LONG."""


def functionalized_views(operator: OpOverload, given: Mapping[str, Any], bases: list[Any]) -> dict[str, Any]:
    """Returns what a functionalized operator gets for each argument that it writes, by name.

    That is (index of the base, the view of it, None for the base itself), a list of such, or None. `given` are the
    keyword arguments of `auto_functionalized_v2`, `bases` what they are views of.

    Why: how that operator writes views into its arguments has no public description. Checked on 2.11, 2.13.
    """
    names, types = get_mutable_args(operator)
    remaining = {name: item for name, item in given.items() if name != "_all_bases"}
    found = read_view_information_from_args(names, types, remaining, bases)

    def regenerated(info: Any) -> Any:
        if info is None:
            return None
        if isinstance(info, list):
            return [regenerated(item) for item in info]
        if isinstance(info, NotView):
            return info.base_index, None
        base = bases[info.base_index]
        with base.fake_mode:
            return info.base_index, info.regenerate_view(bases)

    return {name: regenerated(info) for name, info in found.items()}


# Why: emitted Python allocates and makes windows dozens of times a call. torch.empty_strided takes 1.2 us, a view 0.9
# to 1.9; these take 0.5 and 0.7. They are what Inductor's wrappers use, and in no public place. Checked on 2.11, 2.13.


def allocator(device: str) -> Callable[[Sequence[int], Sequence[int], torch.dtype], torch.Tensor]:
    """Give the cheapest function that makes an uninitialised tensor on a device from sizes, strides and dtype."""
    kind = torch.device(device)
    # torch's function for CUDA allocates on the current device, which is the one meant only where there is no other
    only = kind.type == "cpu" or (kind.type == "cuda" and torch.cuda.device_count() == 1)
    cheap: Callable[..., torch.Tensor] | None = getattr(torch._C._dynamo.guards, f"_empty_strided_{kind.type}", None)
    if only and cheap is not None:
        return cheap

    def allocate(sizes: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(sizes, strides, dtype=dtype, device=kind)

    return allocate


def strided_window(base: torch.Tensor, sizes: Sequence[int], strides: Sequence[int], offset: int = 0) -> torch.Tensor:
    """Give what `window` does by torch's public functions."""
    return base.data.as_strided(sizes, strides, base.storage_offset() + offset)


window: Callable[..., torch.Tensor] = getattr(torch._C._dynamo.guards, "_reinterpret_tensor", strided_window)
"""`window(base, sizes, strides, offset=0)`: a tensor on the same memory, `offset` elements after the first of `base`.

It is no view in autograd's sense, has its own version counter and no base; sizes and strides are not checked."""


# Why: the streams and events of a model are in a table of Dynamo's without a public name; graphs say their places
# there. In 2.13 place 0 is the stream that is current, in 2.11 it may be any of them. In both AOTAutograd gives it more
# places: what makes an object anew for each call, a function in another table, says which they are.
# Numbers of ours keep 0 for that. It must not import Dynamo, which takes over a second. Checked on 2.11, 2.13.
_EXTERNAL_OBJECTS = "torch._dynamo.graph_bytecode_inputs"


def external_number(place: int) -> int:
    """Give the number that programs have for a stream or an event at a place of Dynamo's table."""
    if _is_current_stream(place):
        return 0
    return place if _current_stream_has_a_place() else place + 1


def _is_current_stream(place: int) -> bool:
    """Say whether what is at a place of Dynamo's table is, as far as that says it, the stream current at each call."""
    table = sys.modules.get(_EXTERNAL_OBJECTS)
    constructor = None if table is None else table.index_to_bytecode_constructor.get(place)
    if constructor is None:
        return False
    made_of = inspect.getclosurevars(constructor).nonlocals
    if "source" in made_of:  # in a model
        return type(made_of["source"]).__name__ == "CurrentStreamSource"
    return getattr(made_of.get("construct_fn"), "__qualname__", "").startswith("get_current_stream.")  # AOTAutograd's


def external_place(node: torch.fx.Node) -> int:
    """Give the place in Dynamo's table of the stream or event that a node of its graph gives."""
    assert node.target is get_external_object()
    place = node.args[0]
    assert isinstance(place, int)
    return place


def copy_dynamo_node(graph: torch.fx.Graph, node: torch.fx.Node, copies: Mapping[Any, torch.fx.Node]) -> torch.fx.Node:
    """Copy a node of a graph of Dynamo's into another graph, with what AOTAutograd wants to know of inputs."""
    made = graph.node_copy(node, copies.__getitem__)
    if hasattr(node, "_dynamo_source"):
        made._dynamo_source = node._dynamo_source
    return made


def dynamo_module(graph_module: torch.fx.GraphModule, graph: torch.fx.Graph) -> torch.fx.GraphModule:
    """Give a module with a changed copy of the graph of one of Dynamo's, and all that AOTAutograd reads of it."""
    found = torch.fx.GraphModule(graph_module, graph)
    for name, value in vars(graph_module).items():
        vars(found).setdefault(name, value)
    found.meta = graph_module.meta
    return found


def get_external_object() -> Callable[[int], Any]:
    """Give the function that graphs of Dynamo's call for the stream or event at a place of its table."""
    from torch._dynamo.graph_bytecode_inputs import get_external_object_by_index

    return get_external_object_by_index


def new_external_event() -> int:
    """Make an event for the graph that Dynamo is having compiled, and give its place."""
    from torch._dynamo.variables.streams import new_event

    return new_event()


def external_object(number: int) -> Any:
    """Give the stream or event of the model's own that has a number; None where there is none, or it is gone."""
    table = sys.modules.get(_EXTERNAL_OBJECTS)
    if table is None:
        return None
    place = number if _current_stream_has_a_place() else number - 1
    found = table.index_to_external_object_weakref.get(place)
    return None if found is None else found()


def external_stream(number: int) -> torch.Stream | None:
    """Give the stream of the model's own that has a number; None where there is none."""
    found = external_object(number)
    return found if isinstance(found, torch.Stream) else None


def _current_stream_has_a_place() -> bool:
    return hasattr(sys.modules.get(_EXTERNAL_OBJECTS), "CURRENT_STREAM_INDEX")


# Why: replayed functions hand out memory that they write again once nobody holds it. Only a storage's count of
# references knows that, and no public function gives it, or compares many addresses at once, or copies many tensors
# by one kernel. Inductor's CUDA graphs use the same. Checked on 2.11, 2.13.


def storage_uses(storage: torch.UntypedStorage) -> tuple[int, int]:
    """Give how many tensors and the like hold a storage, and how many references there are to its Python object."""
    return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)


def _same_addresses(tensors: list[Any], addresses: list[int | None], positions: list[int]) -> bool:
    return all(tensors[position].data_ptr() == addresses[position] for position in positions)


same_addresses: Callable[[list[Any], list[int | None], list[int]], bool] = getattr(
    torch._C, "_tensors_data_ptrs_at_indices_equal", _same_addresses
)
"""`same_addresses(tensors, addresses, positions)`: whether the tensors at these positions begin at their addresses.

All three are lists; `addresses` has an item for each tensor, of which those at `positions` are read."""

copy_all: Callable[[list[torch.Tensor], list[torch.Tensor]], Any] = torch._foreach_copy_
"""`copy_all(to, from)` copies each tensor of a list, by few kernels."""


def clear_cublas_workspaces() -> None:
    """Let go of the workspaces of NVIDIA's libraries; they are made again when they are needed."""
    clear: Callable[[], None] | None = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        clear()


def stop_allocating_to(pool: tuple[int, int], device: torch.device) -> None:
    """Let go of a private pool of a GPU that a capture has failed in: torch's `capture_end` raises before it does."""
    with suppress(RuntimeError):  # the capture has let go of it
        torch._C._cuda_endAllocateToPool(device.index, pool)


def caches_memory() -> bool:
    """Whether torch's caching allocator is on, without which a capture can neither allocate nor free."""
    is_enabled = getattr(torch._C, "_cuda_cudaCachingAllocator_is_enabled", None)  # torch 2.11 cannot be asked
    return "PYTORCH_NO_CUDA_MEMORY_CACHING" not in os.environ and (is_enabled is None or is_enabled())
