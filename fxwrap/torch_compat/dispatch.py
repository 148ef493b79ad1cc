"""The dispatcher's thread-local state: autocast, grad mode, modes and functorch levels."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

# Why: one check and one guard cover the autocast of all devices; the public ones take a device.
DisableAutocast = torch._C._DisableAutocast
is_any_autocast_enabled = torch._C._is_any_autocast_enabled

# Why: AOTAutograd compiles graphs with the Python dispatcher enabled, where each operator on real tensors takes several
# times longer; there is no public switch.
DisablePythonDispatcher = torch._C._DisablePythonDispatcher

# Why: one call for all inputs takes less time than one for each; there is no public function of several tensors.
any_requires_grad = torch._C._any_requires_grad

# Why: torch.no_grad as a context costs more than a small program.
set_grad_enabled = torch._C._set_grad_enabled
set_autocast_functions = (torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast)

# Why: Dynamo's graph of a model that creates a module in its forward calls it.
log_api_usage = torch._C._log_api_usage_once

# Why: modes, functorch, functionalisation and tracing show in the included dispatch keys of the thread, which have no
# public accessor.
_PASSIVE_DISPATCH_KEYS: int = (
    torch._C.DispatchKeySet(torch._C.DispatchKey.BackendSelect)
    | torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
).raw_repr()
_included_keys = torch._C._dispatch_tls_local_include_set
_function_mode_count = torch._C._len_torch_function_stack

_MODE_KEYS: int = (
    torch._C.DispatchKeySet(torch._C.DispatchKey.Python)
    | torch._C.DispatchKeySet(torch._C.DispatchKey.PythonTLSSnapshot)
).raw_repr()

# Why: AOTAutograd runs the first call of a compiled function under a mode that checks whether results of custom
# operators alias their inputs, which needs no calls of our operators. Its module is named because an import of it takes
# long.
_ALIASING_CHECK = ("torch._functorch._aot_autograd.runtime_wrappers", "_AnalyzeCustomOpInputOutputMode")

dispatch_mode_count = torch._C._len_torch_dispatch_stack
"""Returns the number of active dispatch modes; fake modes are among them. Why: it has no public name."""


def without_dispatch_modes() -> AbstractContextManager[object]:
    """Returns a context without fake, functional, tracing and other dispatch modes."""
    return _disable_current_modes()


def is_dispatch_intercepted() -> bool:
    """Whether a mode, a functorch level or a tracer intercepts calls of operators.

    torch.set_default_device is a mode too, but does not change calls that name their device.
    """
    if keys := _included_keys().raw_repr() & ~_PASSIVE_DISPATCH_KEYS:
        dispatch_modes = _get_current_dispatch_mode_stack()
        if keys & ~_MODE_KEYS or not dispatch_modes or not all(map(_checks_aliasing, dispatch_modes)):
            return True
    if not _function_mode_count():
        return False
    modes: list[object] = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return not all(isinstance(mode, DeviceContext) for mode in modes)


def _checks_aliasing(mode: object) -> bool:
    return (type(mode).__module__, type(mode).__qualname__) == _ALIASING_CHECK


def call_below_autograd(operator: Any, keys: Any, *arguments: object, **keywords: object) -> Any:
    """Returns the results of an operator from its rule for autograd, which was called with these dispatch keys.

    Why: torch's registration of such rules ignores tensors that are keyword arguments.
    """
    with torch._C._AutoDispatchBelowAutograd():
        return operator.redispatch(keys & torch._C._after_autograd_keyset, *arguments, **keywords)


# Why: an operator's rule for autograd runs once for each functorch level, a public Function at all of them.
SingleLevelFunction: Any = torch.autograd.function._SingleLevelFunction
single_level_functions = torch._functorch.utils.enable_single_level_autograd_function


# Why: torch.jit.is_tracing is a function in Python around it, with a second check.
is_jit_tracing = torch._C._is_tracing
"""Whether torch.jit.trace records the operators that run."""

# Why: torch has no public name for the transforms of torch.func that are active.
_innermost_functorch_level = torch._C._functorch.peek_interpreter_stack


def has_functorch_level() -> bool:
    """Whether a transform of torch.func (vmap, grad, functionalize) is active."""
    return _innermost_functorch_level() is not None


def is_vmapped() -> bool:
    """Whether the innermost functorch level is torch.vmap's."""
    level: Any = _innermost_functorch_level()
    return level is not None and level.key() == torch._C._functorch.TransformType.Vmap


_DERIVATIVES = (torch._C._functorch.TransformType.Grad, torch._C._functorch.TransformType.Jvp)


def records_derivatives(inputs: Sequence[object]) -> bool:
    """Whether operators on these inputs record derivatives, of either mode, or the innermost functorch level may."""
    level: Any = _innermost_functorch_level()
    if level is not None:
        return level.key() in _DERIVATIVES
    return (torch.is_grad_enabled() and any_requires_grad(*inputs)) or has_tangent(inputs)


# Why: `unpack_dual` tells whether a tensor has a tangent; whether any may have one has no public name.
def is_forward_mode_active() -> bool:
    """Whether a level of torch.autograd.forward_ad is active."""
    return forward_ad._current_level >= 0


def has_tangent(inputs: Sequence[object]) -> bool:
    """Whether an input has a tangent of torch.autograd.forward_ad, outside of functorch levels."""
    if not is_forward_mode_active() or has_functorch_level():
        return False
    tensors = [item for item in inputs if isinstance(item, torch.Tensor)]
    return any(forward_ad.unpack_dual(item).tangent is not None for item in tensors)  # type: ignore[no-untyped-call]
