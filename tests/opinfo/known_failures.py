"""Known failures of the sweep, by name, with the reason."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KnownFailure:
    """A reason why calls of an operator fail; regular expressions select the rows and match the observed error."""

    name: str
    reason: str
    detail: str = ""
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
"""Operators with uninitialised results, of which only dtypes, sizes and strides are compared."""

KNOWN_FAILURES = (
    KnownFailure(
        ".*sparse.*", "fxwrap compiles strided tensors only, and raises GraphError for sparse ones",
        detail="GraphError: .*layout torch.sparse",
    ),
    KnownFailure(
        "nn_functional_embedding(_bag)?", "fxwrap compiles strided tensors only, and raises GraphError for sparse ones",
        detail="GraphError: .*layout torch.sparse", form="gradient",
    ),
    KnownFailure(
        "jiterator.*",
        "torch launches the operator's kernel on addresses of fake tensors, which breaks the process's CUDA context",
        detail="illegal memory access", device="cuda",
    ),
    KnownFailure(
        "nn_functional_(layer_norm|normalize)",
        "one or two elements are normalised: the exact gradient is zero or about epsilon, so the result consists of "
        "rounding errors of much larger numbers",
        detail=r"^\(\['float32\[1, 2(, 4, 5)?\]'.* relative error .*e-0[4-6]", form="gradient",
    ),
    KnownFailure(
        "as_strided.*|squeeze.*|unsqueeze|resize_|transpose|t|swap.*",
        "it changes the sizes or strides of its operand, which AOTAutograd does outside of the graph",
        detail="InputError: input 'arg0_1': expected", form="inplace",
    ),
)  # fmt: skip
