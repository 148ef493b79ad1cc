"""Operators: overloads, schemas, decompositions, aliases and side effects."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, wraps
from typing import Any, Final, TypeVar

import torch
from torch._C import FunctionSchema as FunctionSchema
from torch._decomp import get_decompositions as get_decompositions
from torch._higher_order_ops.auto_functionalize import (
    NotView,
    can_auto_functionalize,
    get_mutable_args,
    read_view_information_from_args,
)
from torch._higher_order_ops.auto_functionalize import auto_functionalized as auto_functionalized
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
from torch._higher_order_ops.map import map_impl as map_impl
from torch._higher_order_ops.while_loop import while_loop_stack_output_op
from torch._library.utils import is_impure

# Why: the classes of a graph's call targets have no public name.
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._ops import OpOverload as OpOverload
from torch._ops import OpOverloadPacket as OpOverloadPacket

# Why: these are the promotion rules of pointwise operators; torch.result_type implements only the default one.
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND
from torch._prims_common import elementwise_dtypes as elementwise_dtypes
from torch.fx.node import has_side_effect
from torch.torch_version import TorchVersion

from fxwrap.torch_compat.symmetric_memory import load_symmetric_memory_operators

T = TypeVar("T")

while_loop_stack_output: HigherOrderOperator = while_loop_stack_output_op
"""The while loop that stacks the values of all iterations; torch.ops lacks it until its module is imported."""


FLEX_DEFAULT_BLOCK: Final = 1 << 30
"""The block size of FlexAttention without a block mask, which has one block.

Why: the constant has no public name, and its module is slow to import.
"""


def is_flex_default_block(size: object) -> bool:
    """Whether a block size is the one of FlexAttention without a block mask."""
    return type(size) is int and size == FLEX_DEFAULT_BLOCK


def is_vectorised(tensor: torch.Tensor) -> bool:
    """Whether `torch.vmap` vectorises over a dimension that a tensor hides, of any level.

    Why: functorch has no public function for it.
    """
    return torch._C._functorch.is_batchedtensor(tensor)


def flex_attention_operator() -> HigherOrderOperator:
    """Returns the higher-order operator of FlexAttention.

    Why: torch.ops lacks it until its module is imported, which is slow.
    """
    from torch._higher_order_ops.flex_attention import flex_attention

    return flex_attention


def flex_attention_backward_operator() -> HigherOrderOperator:
    """Returns the higher-order operator of FlexAttention's gradients.

    Why: torch.ops lacks it until its module is imported, which is slow.
    """
    from torch._higher_order_ops.flex_attention import flex_attention_backward

    return flex_attention_backward


def flex_scatter_operator() -> OpOverload | None:
    """Returns the operator with which FlexAttention adds gradients of captured tensors: shape, indices, values.

    Why: it has no public name, and is missing until Dynamo's module for FlexAttention is imported.
    """
    scatter = getattr(torch.ops.flex_lib, "zeros_and_scatter", None)
    return None if scatter is None else scatter.default


def flex_decompositions() -> dict[OpOverload, Callable[..., torch.Tensor]]:
    """Returns the decomposition of the operator with which FlexAttention adds gradients of captured tensors."""
    scatter = flex_scatter_operator()
    return {} if scatter is None else {scatter: _zeros_and_scatter}


def _zeros_and_scatter(shape: Sequence[int], indices: Sequence[torch.Tensor], values: torch.Tensor) -> torch.Tensor:
    if not indices:  # the gradient of a captured scalar, since torch 2.15
        return values.sum()
    return values.new_zeros(shape).index_put(tuple(indices), values, accumulate=True)


PROMOTION_KINDS = {kind.name: kind for kind in ELEMENTWISE_TYPE_PROMOTION_KIND}
"""torch's promotion rules by name: DEFAULT, NO_OPMATH, INT_TO_FLOAT, ALWAYS_BOOL, COMPLEX_TO_FLOAT, BOOL_TO_LONG."""

REQUIRED = object()
"""The default of an argument that has none."""


SOFTSHRINK_ROUNDS_LIMIT: bool = TorchVersion("2.14") <= torch.__version__
"""Whether softshrink on half precision rounds its limit to that dtype, as hardshrink does."""


# Why: an overload's schema and the parts of its name have no public accessors.


def torch_schema(overload: OpOverload) -> FunctionSchema:
    """Returns the schema of an overload: names, types, defaults and alias sets of its arguments and returns."""
    return overload._schema


def takes_object(schema: FunctionSchema) -> bool:
    """Whether an argument may be an opaque object: a script object, or one of a class registered as opaque."""
    kinds = {_innermost_kind(argument.type) for argument in schema.arguments}
    return not kinds.isdisjoint(("ClassType", "PyObjectType", "AnyType"))


def _innermost_kind(type_: Any) -> str:
    """Returns the kind of the elements of lists and optional values, and of any other type itself."""
    while type_.kind() in ("ListType", "OptionalType"):
        type_ = type_.getElementType()
    return str(type_.kind())


def operator_name(overload: OpOverload) -> str:
    """Returns an overload's name without namespace and overload: "add" for `aten.add.Tensor`."""
    return overload._opname


def overload_name(overload: OpOverload) -> str:
    """Returns the name of the overload alone: "Tensor" for `aten.add.Tensor`, "default" where it has none."""
    return overload._overloadname


def aten_schema(operator: str, overload: str) -> FunctionSchema | None:
    """Returns the schema of ATen's `operator.overload` ("mul", "Tensor"), or None where torch has none."""
    packet = getattr(torch.ops.aten, operator, None)
    return getattr(getattr(packet, overload, None), "_schema", None)


class UnknownOperatorError(LookupError):
    """An operator that torch does not have."""

    def __init__(self, target: str) -> None:
        super().__init__(f"torch has no operator '{target}'; import the library that registers it first")


def operator_overload(target: str) -> OpOverload:
    """Returns the overload "namespace.name.overload", not from a cache: a library may have been registered anew.

    Raises UnknownOperatorError when torch has no such operator: the library that registers it was not imported. Those
    over symmetric memory are defined when one is looked up.
    """
    namespace, _, rest = target.partition(".")
    if namespace == "symm_mem":
        load_symmetric_memory_operators()
    name, _, overload = rest.rpartition(".")
    operator = getattr(getattr(getattr(torch.ops, namespace), name, None), overload, None)
    if not isinstance(operator, OpOverload):
        raise UnknownOperatorError(target)
    return operator


_TORCH_NAMESPACES = frozenset({
    "aten", "prim", "prims", "rngprims", "quantized", "_quantized", "quantized_decomposed", "mkl", "mkldnn",
    "mkldnn_prepacked", "onednn", "c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "symm_mem",
    "inductor", "inductor_prims", "profiler", "streams", "sparse", "static_runtime", "fxwrap", "fxwrap_runtime",
})  # fmt: skip


def is_torch_operator(target: str) -> bool:
    """Whether "namespace.name.overload" is in a namespace of torch or fxwrap, not in that of another package."""
    return target.partition(".")[0] in _TORCH_NAMESPACES


def overload_names_of(namespace: str) -> list[str]:
    """Returns the overloads of a namespace, "namespace.name.overload". torch.ops lists only those used before."""
    schemas = torch._C._jit_get_all_schemas()
    names = [(*schema.name.partition("::")[::2], schema.overload_name or "default") for schema in schemas]
    return sorted(".".join(name) for name in names if name[0] == namespace)


def _cached_by_operator(function: Callable[[str], T]) -> Callable[[str], T]:
    """Returns a cached function of an operator's name. A name that is registered anew, as in a notebook, is new."""
    cached = lru_cache(maxsize=4096)(lambda _operator, target: function(target))

    @wraps(function)
    def call(target: str) -> T:
        try:
            operator = operator_overload(target)
        except LookupError:
            return function(target)
        return cached(operator, target)

    return call


@_cached_by_operator
def out_argument_names(target: str) -> tuple[str, ...]:
    """Returns the names of an operator's out arguments, in the order of its schema."""
    return tuple(argument.name for argument in torch_schema(operator_overload(target)).arguments if argument.is_out)


@_cached_by_operator
def functional_of_out_variant(target: str) -> OpOverload | None:
    """Returns the overload that returns new tensors in place of an operator's out arguments, None if there is none."""
    operator = operator_overload(target)
    arguments = [(item.name, str(item.type)) for item in torch_schema(operator).arguments if not item.is_out]
    return _functional_overload(operator.overloadpacket, arguments)


@_cached_by_operator
def out_variant_of(target: str) -> OpOverload | None:
    """Returns the overload that writes an operator's results to out arguments, None if there is none."""
    operator = operator_overload(target)
    arguments = [(item.name, str(item.type)) for item in torch_schema(operator).arguments]
    packet = operator.overloadpacket
    for name in packet.overloads():
        overload: OpOverload = getattr(packet, name)
        items = torch_schema(overload).arguments
        has_outs = any(item.is_out for item in items)
        if has_outs and [(item.name, str(item.type)) for item in items if not item.is_out] == arguments:
            return overload
    return None


@_cached_by_operator
def functional_of_in_place(target: str) -> OpOverload | None:
    """Returns the overload that returns the new content of its first argument, which an operator overwrites.

    For "aten.add_.Tensor", `aten.add.Tensor`; None if there is none, or if the operator writes anything else.
    """
    operator = operator_overload(target)
    schema = torch_schema(operator)
    written = [item.alias_info is not None and item.alias_info.is_write for item in schema.arguments]
    name = operator_name(operator)
    if not name.endswith("_") or written != [True] + [False] * (len(written) - 1):
        return None
    packet = getattr(getattr(torch.ops, operator.namespace), name.removesuffix("_"), None)
    arguments = [(item.name, str(item.type)) for item in schema.arguments]
    return None if packet is None else _functional_overload(packet, arguments)


@_cached_by_operator
def view_of_in_place(target: str) -> OpOverload | None:
    """Returns the overload that returns a view with the layout that an operator gives its first argument in place.

    For "aten.transpose_.default", `aten.transpose.int`; None for operators whose result is no view (`resize_`).
    """
    operator = operator_overload(target)
    packet = getattr(getattr(torch.ops, operator.namespace), operator_name(operator).removesuffix("_"), None)
    arguments = [(item.name, str(item.type)) for item in torch_schema(operator).arguments]
    names = [] if packet is None else packet.overloads()
    overloads: list[OpOverload] = [getattr(packet, name) for name in names]
    for overload in overloads:
        schema = torch_schema(overload)
        is_view = bool(schema.returns) and schema.returns[0].alias_info is not None and not schema.is_mutable
        if is_view and [(item.name, str(item.type)) for item in schema.arguments] == arguments:
            return overload
    return None


@lru_cache(maxsize=256)
def is_view_operator(operator: OpOverload) -> bool:
    """Whether an operator of ATen returns one tensor, a view of its first argument."""
    if str(operator) == "aten._unsafe_view.default":  # its schema hides that from autograd
        return True
    schema = torch_schema(operator)
    aliases = [item.alias_info is not None and not item.alias_info.is_write for item in schema.returns]
    returns_tensor = [str(item.type) for item in schema.returns] == ["Tensor"]
    return operator.namespace == "aten" and returns_tensor and aliases == [True]


@_cached_by_operator
def in_place_of_functional(target: str) -> str | None:
    """Returns the name of the overload that overwrites the first argument with the result of an operator.

    For "aten.add.Tensor", "aten.add_.Tensor"; None if there is none.
    """
    operator = operator_overload(target)
    name = f"{operator_name(operator)}_"
    packet = getattr(getattr(torch.ops, operator.namespace), name, None)
    for overload in () if packet is None else packet.overloads():
        in_place = f"{operator.namespace}.{name}.{overload}"
        if functional_of_in_place(in_place) is operator:
            return in_place
    return None


@_cached_by_operator
def functional_of_mutating(target: str) -> OpOverload | None:
    """Returns the overload that returns an operator's results, then the new content of the arguments it overwrites.

    For "aten._native_batch_norm_legit.default", `aten._native_batch_norm_legit_functional.default`; None if there is
    none.
    """
    operator = operator_overload(target)
    packet = getattr(getattr(torch.ops, operator.namespace), f"{operator_name(operator)}_functional", None)
    arguments = [(item.name, str(item.type)) for item in torch_schema(operator).arguments]
    return None if packet is None else _functional_overload(packet, arguments)


def is_auto_functionalizable(operator: OpOverload) -> bool:
    """Whether `auto_functionalized` can call an operator on copies of the operands that it writes: custom ones only.

    Why: the predicate has no public name.
    """
    return can_auto_functionalize(operator)


def _functional_overload(packet: OpOverloadPacket, arguments: list[tuple[str, str]]) -> OpOverload | None:
    for name in packet.overloads():  # type: ignore[no-untyped-call]
        schema = getattr(packet, name)._schema
        has_aliases = any(item.alias_info is not None for item in (*schema.arguments, *schema.returns))
        if not has_aliases and [(item.name, str(item.type)) for item in schema.arguments] == arguments:
            overload: OpOverload = getattr(packet, name)
            return overload
    return None


@_cached_by_operator
def operator_arguments(target: str) -> Mapping[str, object] | None:
    """Returns the default of each argument of an operator by name, in schema order; REQUIRED where it has none.

    None when torch has no such operator.
    """
    try:
        arguments = torch_schema(operator_overload(target)).arguments
    except LookupError:
        return None
    return {item.name: item.default_value if item.has_default_value() else REQUIRED for item in arguments}


@_cached_by_operator
def argument_kinds(target: str) -> Mapping[str, str]:
    """Returns the kind of each argument of an operator by name: "TensorType", "IntType", "ListType", ...

    That of an optional argument is the kind of its value. Raises LookupError for an operator that torch does not have.
    """
    kinds = {}
    for argument in torch_schema(operator_overload(target)).arguments:
        type_ = argument.type
        while type_.kind() == "OptionalType":
            type_ = type_.getElementType()
        kinds[argument.name] = str(type_.kind())
    return kinds


@lru_cache(maxsize=4096)
def return_aliases(operator: OpOverload) -> tuple[tuple[int, str] | None, ...]:
    """Returns, for each result of an operator, the position and name of the mutated argument it aliases, or None."""
    schema = torch_schema(operator)
    mutated = {
        frozenset(argument.alias_info.before_set): (position, argument.name)
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    }
    sets = [frozenset(item.alias_info.before_set) if item.alias_info is not None else None for item in schema.returns]
    return tuple([mutated.get(item) if item is not None else None for item in sets])


def arguments_by_name(node: torch.fx.Node) -> dict[str, Any]:
    """Returns the arguments of an operator's call by parameter name, without those that are left to their default."""
    assert isinstance(node.target, OpOverload)
    names = [item.name for item in torch_schema(node.target).arguments]
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def aliased_or_mutated_inputs(node: torch.fx.Node) -> list[torch.fx.Node]:
    """Returns the inputs of a node that its result may alias or that it mutates; all of them for unknown targets."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return node.all_input_nodes
    inputs: list[torch.fx.Node] = []
    for position, argument in enumerate(torch_schema(node.target).arguments):
        if argument.alias_info is not None:
            operand = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
            torch.fx.map_arg(operand, inputs.append)
    return inputs


def operator_identity(overload: OpOverload) -> str:
    """Returns the name of an operator; for operators outside torch, whose schema may change, also schema and tags."""
    if overload.namespace in ("aten", "prims"):
        return str(overload)
    return f"{overload} {torch_schema(overload)} {sorted(map(str, overload.tags))}"


def is_composite(overload: OpOverload) -> bool:
    """Whether an operator has only a CompositeImplicitAutograd kernel: it decomposes, and may return its argument."""
    if not torch._C._dispatch_has_kernel(overload._name):
        return False  # of TorchScript only, as `aten.size.default`
    return bool(overload.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd))


def has_device_kernel(overload: OpOverload, device: torch.device) -> bool:
    """Whether an operator has a kernel of its own on a device: the dispatcher does not decompose it there.

    A torch without kernels of the device, which compiles for another machine, has the operators of the CPU's instead.

    Why: the dispatcher's table has no public name.
    """
    key, allocates = torch._C._parse_dispatch_key(torch._C._dispatch_key_for_device(device.type)), torch.ops.aten.empty
    if key is None or not allocates.memory_format.has_kernel_for_dispatch_key(key):
        key = torch._C.DispatchKey.CPU
    return bool(overload.has_kernel_for_dispatch_key(key))


# Why: torch 2.11 looks up higher-order operators in another table than torch.fx.node.has_side_effect fills, so that
# dead-code elimination deletes every launch of a Triton kernel.


def declare_side_effect(operator: OpOverload | HigherOrderOperator) -> None:
    """Makes dead-code elimination keep the calls of an operator."""
    has_side_effect(operator)
    if not is_impure(operator):
        _register_effectful_op(operator, _EffectType.ORDERED)


def functionalized_views(
    operator: OpOverload, arguments: Mapping[str, object], bases: Sequence[torch.Tensor]
) -> dict[str, object]:
    """Returns, by name, the view of a base that a functionalized operator receives for each mutated argument.

    A view is (index of the base, fake view, or None for the base itself); a list argument has a list of views, an
    absent one None. `arguments` are the keyword arguments of `auto_functionalized_v2`, `bases` their fake base tensors.

    Why: the encoding of views in these arguments has no public description.
    """
    names, types = get_mutable_args(operator)
    encoded = {name: item for name, item in arguments.items() if name != "_all_bases"}
    views = read_view_information_from_args(names, types, encoded, list(bases))

    def regenerate(info: Any) -> object:
        if info is None:
            return None
        if isinstance(info, list):
            return [regenerate(item) for item in info]
        if isinstance(info, NotView):
            return info.base_index, None
        index = info.base_index
        with bases[index].fake_mode:
            return index, info.regenerate_view(bases)

    return {name: regenerate(info) for name, info in views.items()}
