"""Offsets of multi-indices in tensors, and values of indices."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fxwrap.caching import bounded_cache
from fxwrap.loop_ir.index import ZERO, Atom, FloorDivide, Index, IndexLike, Modulo, as_index
from fxwrap.symbolic import Size


def linearize_index(indices: Sequence[IndexLike], sizes: Sequence[Size]) -> Index:
    """Returns the offset of a multi-index in a row-major tensor of these sizes."""
    return _linearized(tuple(indices), tuple(sizes))


@bounded_cache(4096)
def _linearized(indices: tuple[IndexLike, ...], sizes: tuple[Size, ...]) -> Index:
    position = ZERO
    for index, size in zip(indices, sizes, strict=True):
        position = position * as_index(size) + as_index(index)
    return position


def strided_index(indices: Sequence[IndexLike], strides: Sequence[Size]) -> Index:
    """Returns the offset of a multi-index by strides, in elements."""
    return _strided(tuple(indices), tuple(strides))


@bounded_cache(4096)
def _strided(indices: tuple[IndexLike, ...], strides: tuple[Size, ...]) -> Index:
    return sum((as_index(index) * as_index(stride) for index, stride in zip(indices, strides, strict=True)), ZERO)


def delinearize_index(position: Index, sizes: Sequence[Size]) -> tuple[Index, ...]:
    """Returns the multi-index of an offset in a row-major tensor of these sizes."""
    indices: list[Index] = []
    for size in reversed(sizes[1:]):
        whole = as_index(size)
        indices.append(position % whole)
        position = position // whole
    return tuple(reversed([*indices, position])) if sizes else ()


def evaluate_index(index: Index, value_of: Callable[[Atom], object]) -> object:
    """Returns an index's value, given the values of axes, sizes and indirect indices: numbers, tensors or texts."""
    result: object = 0
    for monomial, coefficient in index.terms:
        product: object = coefficient
        for atom in monomial:
            product = product * _atom_value(atom, value_of)  # type: ignore[operator]
        result = result + product  # type: ignore[operator]
    return result


def _atom_value(atom: Atom, value_of: Callable[[Atom], object]) -> object:
    if isinstance(atom, FloorDivide):
        return evaluate_index(atom.base, value_of) // evaluate_index(atom.divisor, value_of)  # type: ignore[operator]
    if isinstance(atom, Modulo):
        return evaluate_index(atom.base, value_of) % evaluate_index(atom.divisor, value_of)  # type: ignore[operator]
    return value_of(atom)
