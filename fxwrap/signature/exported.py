"""The calling convention of exported programs."""

from __future__ import annotations

from collections.abc import Sequence

from torch.export.exported_program import ModuleCallEntry
from torch.export.graph_signature import ConstantArgument, InputKind, InputSpec

from fxwrap.signature.convention import CallingConvention


def exported_convention(modules: Sequence[ModuleCallEntry], inputs: Sequence[InputSpec]) -> CallingConvention:
    """Returns the convention of an exported program: that of the module that was exported.

    `modules` is its module call graph, `inputs` are the specifications of its placeholders.
    """
    signature = modules[0].signature
    assert signature is not None, "torch.export describes the arguments of the whole module"
    positional, keywords = signature.in_spec.children()
    count = positional.num_children
    names = signature.forward_arg_names or [*[f"arg{position}" for position in range(count)], *keywords.context]
    user_inputs = [spec.arg for spec in inputs if spec.kind is InputKind.USER_INPUT]
    constants = {place: item.value for place, item in enumerate(user_inputs) if isinstance(item, ConstantArgument)}
    trees = (*positional.children(), *keywords.children())
    return CallingConvention(tuple(names), count, trees, signature.out_spec, constants)
