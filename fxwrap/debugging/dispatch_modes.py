"""Dispatch modes: the float64 reference, and corrections of calls that eager computes wrongly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fxwrap.debugging.copies import WIDENED_DTYPES
from fxwrap.torch_compat import HigherOrderOperator, TorchDispatchMode, torch_schema, tree_map

_NARROW = {torch.float64: torch.float32, torch.complex128: torch.complex64}


class Float64Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's base class has no annotations
    """Runs every operator in float64 and complex128.

    Widens tensors that a function captures, and replaces dtype arguments. Random operators run in `random_dtype`, the
    function's original dtype, since the random numbers depend on the dtype. The functions that a higher-order operator
    takes run in the mode too.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Lets functions compile themselves in the mode, as FlexAttention does in eager mode."""
        return True

    def __init__(self, random_dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.random_dtype = random_dtype

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            args, kwargs = tree_map(lambda leaf: self._in_mode(leaf) if callable(leaf) else _wide(leaf), (args, kwargs))
            return tree_map(_wide_tensor, func(*args, **kwargs))
        if torch.Tag.nondeterministic_seeded in func.tags:
            return self._draw(func, args, kwargs)
        args, kwargs = tree_map(_wide, (args, kwargs))
        return tree_map(_wide_tensor, func(*args, **kwargs))

    def _in_mode(self, function: Callable[..., object]) -> Callable[..., object]:
        def run(*args: object, **kwargs: object) -> object:
            with self:
                return function(*args, **kwargs)

        return run

    def _draw(self, func: Any, args: object, kwargs: object) -> Any:
        """Runs a random operator on copies in the original dtype, and copies mutated operands back."""
        narrowed: list[tuple[Tensor, Tensor]] = []

        def narrow(leaf: object) -> object:
            if not isinstance(leaf, Tensor) or leaf.dtype not in _NARROW:
                return leaf
            narrowed.append((leaf, leaf.to(self.random_dtype if leaf.dtype.is_floating_point else _NARROW[leaf.dtype])))
            return narrowed[-1][1]

        narrow_args, narrow_kwargs = tree_map(narrow, (args, kwargs))
        result = func(*narrow_args, **narrow_kwargs)
        written = any(a.alias_info is not None and a.alias_info.is_write for a in torch_schema(func).arguments)
        if not written:
            return tree_map(_wide_tensor, result)
        for original, copy in narrowed:
            original.copy_(copy)
        originals = {id(copy): original for original, copy in narrowed}
        return tree_map(lambda leaf: originals.get(id(leaf), leaf), result)


def infer_random_dtype(tensors: Iterable[Tensor]) -> torch.dtype:
    """Returns the most frequent floating dtype of the tensors, in which random numbers are drawn."""
    counts = Counter(tensor.dtype for tensor in tensors if tensor.dtype.is_floating_point)
    return counts.most_common(1)[0][0] if counts else torch.get_default_dtype()


def _wide(leaf: object) -> object:
    return WIDENED_DTYPES.get(leaf, leaf) if isinstance(leaf, torch.dtype) else _wide_tensor(leaf)


def _wide_tensor(leaf: object) -> object:
    return leaf.to(WIDENED_DTYPES[leaf.dtype]) if isinstance(leaf, Tensor) and leaf.dtype in WIDENED_DTYPES else leaf


_MAX_ROUNDING = 1e-2
"""The relative difference of gradients, by norm, that rounding may cause."""


class CorrectedEager(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's base class has no annotations
    """Replaces wrong results of eager's operators; `defects` describes each kind of call once.

    On a CPU, `native_batch_norm_backward` mixes up elements where the input is dense in a permuted layout and a batch
    of one, such as `h.permute(0, 2, 1).view(1, C, 2, 2)`, and the gradient is contiguous. It is right on contiguous
    copies, with which every call is compared.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Lets functions compile themselves in the mode, as FlexAttention does in eager mode."""
        return True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.defects: dict[str, None] = {}

    def __torch_dispatch__(
        self,
        function: Callable[..., Any],
        types: object,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> Any:
        results = function(*args, **(kwargs or {}))
        if function is torch.ops.aten.native_batch_norm_backward.default:
            grad, x, *others = args
            if x.device.type == "cpu" and not (x.is_contiguous() and grad.is_contiguous()):
                correct = function(grad.contiguous(), x.contiguous(), *others, **(kwargs or {}))
                if any(_differ(actual, expected) for actual, expected in zip(results, correct, strict=True)):
                    self.defects[f"aten.native_batch_norm_backward on strides {x.stride()} and {grad.stride()}"] = None
                    for actual, expected in zip(results, correct, strict=True):
                        if actual is not None:
                            actual.copy_(expected)
        return results


def _differ(actual: Tensor | None, expected: Tensor | None) -> bool:
    if actual is None or expected is None:
        return False
    return bool((actual - expected).norm() > _MAX_ROUNDING * expected.norm())
