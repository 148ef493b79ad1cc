"""What fails in the sweep and may: by name, with the reason."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Known:
    """A reason why calls of an operator fail. Regular expressions say of which, and what is then seen."""

    name: str
    reason: str
    seen: str = ""
    dtype: str = ".*"
    form: str = ".*"
    device: str = ".*"


UNINITIALISED = frozenset(
    {
        "empty",
        "empty_like",
        "empty_permuted",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "resize_",
        "resize_as_",
    }
)
"""Operators whose results hold whatever the memory held; of these only dtypes, sizes and strides are compared."""

KNOWN = (
    Known(
        ".*sparse.*", "fxwrap compiles strided tensors, and says so where a graph has sparse ones",
        seen="GraphError: .*layout torch.sparse",
    ),
    Known(
        "nn_functional_embedding(_bag)?", "fxwrap compiles strided tensors, and says so where a graph has sparse ones",
        seen="GraphError: .*layout torch.sparse", form="gradient",
    ),
    Known(
        "jiterator.*",
        "torch starts the operator's kernel on the addresses of fake tensors, which breaks the process's CUDA context",
        seen="illegal memory access", device="cuda",
    ),
    Known(
        "nn_functional_(layer_norm|normalize)",
        "one element or two are normalised: the gradient is zero in exact arithmetic, or as small as epsilon, and all "
        "of it is rounding of far larger numbers",
        seen=r"^\(\['float32\[1, 2(, 4, 5)?\]'.* relative error .*e-0[4-6]", form="gradient",
    ),
    Known(
        "as_strided.*|squeeze.*|unsqueeze|resize_|transpose|t|swap.*",
        "it gives its operand other sizes or strides, which AOTAutograd does outside of the graph",
        seen="InputError: input 'arg0_1': expected", form="inplace",
    ),
)  # fmt: skip
