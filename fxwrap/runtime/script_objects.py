"""An operator that calls a method of a script object: `call_torchbind` has no schema that emitters could call."""

from __future__ import annotations

import torch

from fxwrap.torch_compat import declare_side_effect

_library = torch.library.Library("fxwrap_runtime", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "call_method(Any object, str method, Any[] arguments) -> Any"
)


@torch.library.impl(_library, "call_method", "CompositeExplicitAutograd")
def _call_method(object: torch.ScriptObject, method: str, arguments: list[object]) -> object:
    returned = getattr(object, method)(*arguments)
    return list(returned) if isinstance(returned, tuple) else returned


@torch.library.register_fake("fxwrap_runtime::call_method")  # type: ignore[untyped-decorator]
def _(object: object, method: str, arguments: list[object]) -> object:
    """Calls the method of the fake class that stands in for the object's."""
    returned = torch.ops.higher_order.call_torchbind(object, method, *arguments)
    return list(returned) if isinstance(returned, tuple) else returned


declare_side_effect(torch.ops.fxwrap_runtime.call_method.default)
