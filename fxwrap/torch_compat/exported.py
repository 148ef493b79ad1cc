"""torch.export: the construction of exported programs."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature


class InvalidExport(Exception):
    """A graph that torch.export's verifier rejects; the message is its reason."""


def make_exported_program(
    root: Mapping[str, torch.nn.Module],
    graph: torch.fx.Graph,
    signature: ExportGraphSignature,
    *,
    state_dict: Mapping[str, Any],
    range_constraints: Mapping[Any, Any],
    module_call_graph: list[Any],
    example_inputs: Any,
    constants: Mapping[str, Any],
) -> ExportedProgram:
    """Returns an exported program of a functional graph. Raises InvalidExport.

    Why: the class of the verifier's errors has no public name. Importing it takes long, so that is done here.
    """
    from torch._export.verifier import SpecViolationError

    try:
        return ExportedProgram(
            dict(root), graph, signature, dict(state_dict), dict(range_constraints), module_call_graph, example_inputs,
            dict(constants),
        )  # fmt: skip
    except SpecViolationError as error:
        raise InvalidExport(str(error).partition("\n")[0]) from error


def unlifted_module(exported: ExportedProgram) -> torch.fx.GraphModule:
    """Returns an exported program as a module with its parameters and final writes, without a module of guards.

    Why: torch before 2.13 has no argument for the guards.
    """
    names = inspect.signature(exported.module).parameters
    module: torch.fx.GraphModule = exported.module(**({"check_guards": False} if "check_guards" in names else {}))
    return module
