"""Matmuls that torch lacks: those of groups of rows, for any dtypes, and those that store the input of their GELU.

Groups are multiplied one after the other. Their numbers of rows are in memory of the host, so that a call waits for no
device.

In processes with the C++ bridge, its kernel of `fxwrap::gelu_matmul` calls cuBLASLt for GPU tensors of half precision,
and its GELU reads the unrounded sum; the function here is the implementation for all other tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch

from fxwrap.errors import NativeBuildError
from fxwrap.runtime import native

# --- groups of rows ---------------------------------------------------------------------------------------------------


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy of a tensor in memory of the host, which waits for it."""
    return tensor.to("cpu", copy=True)


def to_host_fake(tensor: torch.Tensor) -> torch.Tensor:
    """The fake implementation."""
    return tensor.new_empty(tensor.shape, device="cpu")


def grouped_matmul(
    rows: torch.Tensor,
    matrices: Sequence[torch.Tensor],
    transposed: bool,
    biases: torch.Tensor | None,
    ends: torch.Tensor,
) -> torch.Tensor:
    """Returns rows times the matrix of their group, plus its bias; rows beyond the last group have any value.

    Args:
        rows: of shape (rows, terms), sorted by group.
        matrices: one of shape (terms, columns) for each group, or of (columns, terms) if `transposed`; or one tensor
            that has all of them along dimension 0.
        transposed: whether matrices are transposed.
        biases: of shape (groups, columns), or None.
        ends: the position after the last row of each group, of int32 on the CPU.
    """
    with torch.no_grad():
        items = matrices[0].unbind() if len(matrices) == 1 else matrices
        result = rows.new_empty(rows.shape[0], items[0].shape[0 if transposed else 1])
        lengths = _lengths(ends)
        lengths.append(rows.shape[0] - sum(lengths))
        groups = zip(items, _split(rows, lengths), _split(result, lengths), strict=False)
        for group, (matrix, own, part) in enumerate(groups):
            if not lengths[group]:
                continue
            right = matrix.t() if transposed else matrix
            if biases is None:
                torch.mm(own, right, out=part)
            else:
                torch.addmm(biases[group], own, right, out=part)
        return result


def grouped_matmul_fake(
    rows: torch.Tensor,
    matrices: Sequence[torch.Tensor],
    transposed: bool,
    _biases: torch.Tensor | None,
    _ends: torch.Tensor,
) -> torch.Tensor:
    """The fake implementation."""
    return rows.new_empty(rows.shape[0], matrices[0].shape[-2 if transposed else -1])


def grouped_products(left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Returns for each group the matmul of its columns of `left` and its rows of `right`: zeros without any.

    Args:
        left: of shape (rows of the results, terms).
        right: of shape (terms, columns of the results).
        ends: the position after the last term of each group, of int32 on the CPU.
    """
    with torch.no_grad():
        results = left.new_empty(ends.shape[0], left.shape[0], right.shape[1])
        lengths = _lengths(ends)
        lengths.append(right.shape[0] - sum(lengths))
        for result, one, other in zip(results.unbind(), _split(left, lengths, 1), _split(right, lengths), strict=False):
            torch.mm(one, other, out=result)
        return results


def grouped_products_fake(left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """The fake implementation."""
    return left.new_empty(ends.shape[0], left.shape[0], right.shape[1])


def _lengths(ends: torch.Tensor) -> list[int]:
    """Returns the number of rows of each group."""
    positions = ends.tolist()
    return [end - begin for begin, end in zip([0, *positions[:-1]], positions, strict=True)]


def _split(tensor: torch.Tensor, lengths: list[int], dim: int = 0) -> Sequence[torch.Tensor]:
    """Returns parts of a tensor along a dimension."""
    parts: Sequence[torch.Tensor] = torch.ops.aten.split_with_sizes.default(tensor, lengths, dim)
    return parts


# --- matmuls with GELU ------------------------------------------------------------------------------------------------


def gelu_matmul(
    left: torch.Tensor, right: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns `(gelu(x), x)`, both contiguous, where `x = left @ right + bias`, and the tanh form of GELU.

    Args:
        left: of shape (rows, products).
        right: of shape (products, columns).
        bias: of shape (columns,), or None.
    """
    if left.is_cuda:
        _load_bridge()
    with torch.no_grad():
        result = left @ right if bias is None else torch.addmm(bias, left, right)
        return torch.nn.functional.gelu(result, approximate="tanh"), result


def gelu_matmul_fake(
    left: torch.Tensor, right: torch.Tensor, _bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The fake implementation."""
    result = left.new_empty(left.shape[0], right.shape[1])
    return result, torch.empty_like(result)


def _load_bridge() -> None:
    """Loads the bridge, whose kernel later calls use."""
    with suppress(NativeBuildError):
        native.load_binding()
