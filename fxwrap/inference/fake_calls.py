"""Operators run on fake tensors, and the explanation of their failures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fxwrap import torch_compat
from fxwrap.errors import FxwrapError


class FakeCallError(FxwrapError):
    """A call that fails on fake tensors.

    Fields: `reason` names the operator and says what is wrong; `remedy` says what to do; `is_unknown` tells whether the
    results cannot be inferred, although the call may be right.
    """

    def __init__(self, reason: str, remedy: str, *, is_unknown: bool) -> None:
        super().__init__(reason)
        self.reason = reason
        self.remedy = remedy
        self.is_unknown = is_unknown


def explain_fake_call(target: object, error: Exception) -> FakeCallError:
    """Returns the explanation of an exception that a call on fake tensors raised."""
    if torch_compat.is_missing_fake_impl(error):
        name = torch_compat.torch_schema(target).name if isinstance(target, torch_compat.OpOverload) else str(target)
        remedy = f"Register one with torch.library.register_fake({name!r})"
        return FakeCallError(f"the operator {name} has no fake implementation", remedy, is_unknown=True)
    if torch_compat.is_data_dependent_error(error):
        reason = f"the results of {target} are known only at run time"
        return FakeCallError(reason, "Pass operands from which they follow", is_unknown=True)
    message = str(error).partition("\n")[0]
    return FakeCallError(
        f"{target} fails on these inputs: {message}", "Correct the call or its inputs", is_unknown=False
    )


def call_on_fakes(
    mode: torch_compat.FakeTensorMode,
    target: Callable[..., Any],
    arguments: Sequence[object],
    keywords: Mapping[str, object],
) -> Any:
    """Returns the result of a call on a mode's fake tensors. Raises FakeCallError if the call fails."""
    try:
        # Some operators reject inputs that require gradients.
        with torch_compat.in_dispatched_fake_mode(mode), torch.no_grad():
            return target(*arguments, **keywords)
    except Exception as error:  # an operator may raise anything
        raise explain_fake_call(target, error) from error
