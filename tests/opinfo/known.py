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
        "narrow",
        "from a start read from a tensor torch makes a slice whose size and offset only the slice itself says; the "
        "verifier refuses the program",
        seen="VerifyError: .*symbol u[0-9]+ is in a type",
    ),
    Known(
        "as_strided.*|squeeze.*|unsqueeze|resize_|transpose|t|swap.*",
        "it gives its operand other sizes or strides, which AOTAutograd does outside of the graph",
        seen="InputError: input 'arg0_1': expected", form="inplace",
    ),
)  # fmt: skip
