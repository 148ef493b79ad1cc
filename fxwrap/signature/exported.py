"""The calling convention of exported programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch.export import ExportedProgram
from torch.export.exported_program import ModuleCallEntry
from torch.export.graph_signature import ConstantArgument, InputKind, InputSpec

from fxwrap.errors import GraphError, InputError
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


def check_examples(
    exported: ExportedProgram, arguments: Sequence[object] | None, keywords: Mapping[str, object] | None
) -> None:
    """Raises GraphError unless there are no example arguments, or those of the module that was exported.

    They are not needed: the nodes of an exported program have fake values.
    """
    if arguments is None and not keywords:
        return
    convention = exported_convention(exported.module_call_graph, exported.graph_signature.input_specs)
    try:
        convention.check_constants(convention.bind(arguments or (), keywords or {}))
    except InputError as error:
        remedy = "Pass the `args` and `kwargs` of the export, or no examples"
        raise GraphError("", f"the examples are not arguments of the exported program: {error}", remedy) from None
