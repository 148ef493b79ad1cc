"""Quasi-affine index expressions: integer polynomials over axes, sizes, floor divisions and remainders.

They are a class of fxwrap because a compile builds hundreds of thousands of them, for which sympy is too slow. Sizes
stay `int | sympy.Expr`; a symbolic size is an atom of a polynomial. Simplification uses that an axis ranges from 0 to
its size - 1, and that sizes are at least 1: no index is computed where a size is zero. Quotients rounded up, as in
`-(-s0//4)`, have atoms that are negative.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import TypeAlias

import sympy

from fxwrap.caching import bounded_cache
from fxwrap.loop_ir.atoms import Axis, IndirectIndex, SizeAtom
from fxwrap.symbolic import Size
from fxwrap.torch_compat import sympy_functions


@dataclass(frozen=True, slots=True)
class _Division:
    base: Index
    divisor: Index

    @property
    def key(self) -> str:
        """The sort key."""
        return str(self)


@dataclass(frozen=True, slots=True)
class FloorDivide(_Division):
    """`base // divisor`, rounded down, for a positive divisor."""

    def __str__(self) -> str:
        return f"({self.base})//{_parenthesize(self.divisor)}"


@dataclass(frozen=True, slots=True)
class Modulo(_Division):
    """`base % divisor`, from 0 to `divisor` - 1, for a positive divisor."""

    def __str__(self) -> str:
        return f"({self.base})%{_parenthesize(self.divisor)}"


Atom: TypeAlias = Axis | SizeAtom | IndirectIndex | FloorDivide | Modulo
Monomial: TypeAlias = tuple[Atom, ...]
IndexLike: TypeAlias = "Index | Axis | Size"


class Index:
    """An immutable polynomial with integer coefficients; equal polynomials compare equal and hash alike.

    `terms` are pairs (monomial, coefficient), none with coefficient 0, in a fixed order; the empty monomial is 1.
    """

    __slots__ = ("_atoms", "_axes", "_hash", "terms")
    terms: tuple[tuple[Monomial, int], ...]
    _hash: int | None
    _atoms: frozenset[Atom] | None
    _axes: frozenset[Axis] | None

    def __init__(self, terms: tuple[tuple[Monomial, int], ...]) -> None:
        self.terms = terms
        self._hash = self._atoms = self._axes = None

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Index) and hash(self) == hash(other) and self.terms == other.terms

    def __hash__(self) -> int:
        value = self._hash
        if value is None:
            value = self._hash = hash(self.terms)
        return value

    def __repr__(self) -> str:
        return f"Index({self})"

    def __str__(self) -> str:
        return " + ".join([_term_text(*term) for term in self.terms]).replace("+ -", "- ") or "0"

    # --- arithmetic --------------------------------------------------------------------------------------------------

    def __add__(self, other: IndexLike) -> Index:
        other = as_index(other)
        if not other.terms:
            return self
        if not self.terms:
            return other
        coefficients = dict(self.terms)
        for monomial, coefficient in other.terms:
            coefficients[monomial] = coefficients.get(monomial, 0) + coefficient
        return _normalize_terms(coefficients)

    def __sub__(self, other: IndexLike) -> Index:
        return self + as_index(other) * -1

    def __mul__(self, other: IndexLike) -> Index:
        if type(other) is int:
            return self._scale(other)
        other = as_index(other)
        number = other.constant
        if number is not None:
            return self._scale(number)
        coefficients: dict[Monomial, int] = {}
        for left, left_coefficient in self.terms:
            for right, right_coefficient in other.terms:
                monomial = tuple(sorted((*left, *right), key=attrgetter("key"))) if left and right else left or right
                coefficients[monomial] = coefficients.get(monomial, 0) + left_coefficient * right_coefficient
        return _normalize_terms(coefficients)

    __radd__ = __add__
    __rmul__ = __mul__

    def __rsub__(self, other: IndexLike) -> Index:
        return as_index(other) - self

    def __neg__(self) -> Index:
        return self._scale(-1)

    def _scale(self, factor: int) -> Index:
        if factor == 1 or not self.terms:
            return self
        return Index(tuple([(monomial, number * factor) for monomial, number in self.terms])) if factor else ZERO

    def __floordiv__(self, divisor: IndexLike) -> Index:
        return _divmod(self, as_index(divisor))[0]

    def __mod__(self, divisor: IndexLike) -> Index:
        return _divmod(self, as_index(divisor))[1]

    # --- queries -----------------------------------------------------------------------------------------------------

    @property
    def constant(self) -> int | None:
        """The value of a constant index, else None."""
        if not self.terms:
            return 0
        return self.terms[0][1] if len(self.terms) == 1 and not self.terms[0][0] else None

    @property
    def single_axis(self) -> Axis | None:
        """The axis that this equals, or None."""
        if len(self.terms) == 1:
            monomial, coefficient = self.terms[0]
            if coefficient == 1 and len(monomial) == 1 and isinstance(monomial[0], Axis):
                return monomial[0]
        return None

    def atoms(self) -> frozenset[Atom]:
        """Returns all atoms, those inside divisions and remainders included."""
        if self._atoms is None:
            result: set[Atom] = set()
            for monomial, _ in self.terms:
                for atom in monomial:
                    result.add(atom)
                    if isinstance(atom, FloorDivide | Modulo):
                        result |= atom.base.atoms() | atom.divisor.atoms()
            self._atoms = frozenset(result)
        return self._atoms

    def axes(self) -> frozenset[Axis]:
        """Returns the axes that this depends on."""
        if self._axes is None:
            self._axes = frozenset([atom for atom in self.atoms() if isinstance(atom, Axis)])
        return self._axes

    def stride(self, axis: Axis) -> Index | None:
        """Returns the change per step of the axis, or None when it is not constant."""
        step: dict[Monomial, int] = {}
        for monomial, coefficient in self.terms:
            if axis in monomial:
                rest = list(monomial)
                rest.remove(axis)
                if _depends_on(rest, axis):
                    return None
                step[tuple(rest)] = coefficient
            elif _depends_on(monomial, axis):
                return None
        return _normalize_terms(step)

    def substitute(self, mapping: Mapping[Atom, IndexLike]) -> Index:
        """Returns this with atoms replaced, simplified."""
        if not mapping:
            return self
        if len(self.terms) == 1 and self.terms[0][1] == 1 and len(self.terms[0][0]) == 1:
            return _substitute_atom(self.terms[0][0][0], mapping)
        result = ZERO
        for monomial, coefficient in self.terms:
            product = constant_index(coefficient)
            for atom in monomial:
                product = product * _substitute_atom(atom, mapping)
            result = result + product
        return result

    def bounds(self) -> tuple[Index, Index] | None:
        """Returns the lowest and the highest value as polynomials in sizes, or None when they are unknown."""
        return _bounds(self)

    def is_nonnegative(self) -> bool:
        """Whether this is provably at least 0 in every iteration."""
        limits = self.bounds()
        return limits is not None and _is_nonnegative_polynomial(limits[0])


# --- text ------------------------------------------------------------------------------------------------------------


def _term_text(monomial: Monomial, coefficient: int) -> str:
    if not monomial:
        return str(coefficient)
    alone = len(monomial) == 1 and coefficient == 1
    names = "*".join(
        [f"({atom})" if isinstance(atom, FloorDivide | Modulo) and not alone else str(atom) for atom in monomial]
    )
    return names if coefficient == 1 else f"-{names}" if coefficient == -1 else f"{coefficient}*{names}"


def _parenthesize(index: Index) -> str:
    text = str(index)
    return text if text.isalnum() else f"({text})"


# --- normal form and substitution ------------------------------------------------------------------------------------


def _monomial_key(term: tuple[Monomial, int]) -> tuple[bool, tuple[str, ...]]:
    return _monomial_sort_key(term[0])


@bounded_cache(65536)
def _monomial_sort_key(monomial: Monomial) -> tuple[bool, tuple[str, ...]]:
    return not monomial, tuple([atom.key for atom in monomial])


def _normalize_terms(coefficients: dict[Monomial, int]) -> Index:
    terms = [term for term in coefficients.items() if term[1]]
    if not terms:
        return ZERO
    if len(terms) > 1:
        terms.sort(key=_monomial_key)
    return _fold_division_pairs(Index(tuple(terms)))


def _fold_division_pairs(index: Index) -> Index:
    """Returns `d*k*(x // d) + k*(x % d)` as `k*x`, which undoes a pair of reshapes."""
    for monomial, coefficient in index.terms:
        for atom in monomial:
            if isinstance(atom, Modulo):
                rest = Index(((_remove_factor(monomial, atom), coefficient),))
                whole = rest * atom.divisor * (atom.base // atom.divisor)
                if whole.terms and all(term in index.terms for term in whole.terms):
                    others = [
                        term for term in index.terms if term not in whole.terms and term != (monomial, coefficient)
                    ]
                    return _normalize_terms(dict(others)) + rest * atom.base
    return index


def _remove_factor(monomial: Monomial, atom: Atom) -> Monomial:
    position = monomial.index(atom)
    return (*monomial[:position], *monomial[position + 1 :])


def _depends_on(atoms: Iterable[Atom], axis: Axis) -> bool:
    for atom in atoms:
        if atom == axis:
            return True
        if isinstance(atom, FloorDivide | Modulo) and axis in (atom.base.axes() | atom.divisor.axes()):
            return True
    return False


def _substitute_atom(atom: Atom, mapping: Mapping[Atom, IndexLike]) -> Index:
    replacement = mapping.get(atom)
    if replacement is not None:
        return as_index(replacement)
    if isinstance(atom, FloorDivide):
        return atom.base.substitute(mapping) // atom.divisor.substitute(mapping)
    if isinstance(atom, Modulo):
        return atom.base.substitute(mapping) % atom.divisor.substitute(mapping)
    return Index((((atom,), 1),))


# --- bounds ----------------------------------------------------------------------------------------------------------


@bounded_cache(65536)
def _bounds(index: Index) -> tuple[Index, Index] | None:
    low, high = ZERO, ZERO
    for monomial, number in index.terms:
        coefficient = number
        lowest, highest = ONE, ONE
        for atom in monomial:
            limits = _atom_bounds(atom)
            if _is_negative(atom):
                whole = Index((((atom,), 1),))
                limits, coefficient = (-whole, -whole), -coefficient
            if limits is None:
                return None
            lowest, highest = lowest * limits[0], highest * limits[1]  # none is negative
        small, large = (lowest, highest) if coefficient > 0 else (highest, lowest)
        low, high = low + small * coefficient, high + large * coefficient
    return low, high


def _atom_bounds(atom: Atom) -> tuple[Index, Index] | None:
    match atom:
        case Axis() | IndirectIndex():
            return ZERO, as_index(atom.size) - 1
        case SizeAtom():
            whole = Index((((atom,), 1),))
            return whole, whole
        case Modulo():
            return ZERO, atom.divisor - 1
        case FloorDivide():
            limits = atom.base.bounds()
            if limits is None or not _is_nonnegative_polynomial(limits[0]):
                return None
            return ZERO, limits[1] // atom.divisor


def _is_nonnegative_polynomial(index: Index) -> bool:
    """Whether a polynomial in sizes is provably at least 0 for all sizes.

    A plain symbol is at least 1. Other atoms, like the quotient in `s0//2 + 1`, may be 0; those that are negative are
    replaced by their opposites.
    """
    index = _with_opposites(index)
    if all(number > 0 for _, number in index.terms):
        return True
    if not any(number > 0 for monomial, number in index.terms if monomial):
        return False
    shifted = ZERO  # every symbol replaced by 1 plus a number that is at least 0
    for monomial, coefficient in index.terms:
        part = constant_index(coefficient)
        for atom in monomial:
            whole = Index((((atom,), 1),))
            part = part * (whole + 1 if isinstance(atom, SizeAtom) and atom.expression.is_Symbol else whole)
        shifted = shifted + part
    return all(number > 0 for _, number in shifted.terms)


def _with_opposites(index: Index) -> Index:
    """Returns a polynomial in which negative atoms stand for their opposites."""
    signs = [math.prod([-1 for atom in monomial if _is_negative(atom)]) for monomial, _ in index.terms]
    return Index(
        tuple([(monomial, sign * number) for (monomial, number), sign in zip(index.terms, signs, strict=True)])
    )


def _is_negative(atom: Atom) -> bool:
    """Whether an atom is a quotient such as that of `-(-s0//4)`, which is s0/4 rounded up."""
    return isinstance(atom, SizeAtom) and _is_negative_quotient(atom.expression)


@bounded_cache(4096)
def _is_negative_quotient(size: sympy.Expr) -> bool:
    if not isinstance(size, sympy_functions.FloorDiv):
        return False
    base, divisor = [_with_opposites(_from_size(part)) for part in size.args]
    return all(number < 0 for _, number in base.terms) and all(number > 0 for _, number in divisor.terms)


def _in_range(index: Index, divisor: Index) -> bool:
    """Whether an index is provably from 0 to `divisor` - 1."""
    limits = index.bounds()
    return (
        limits is not None
        and _is_nonnegative_polynomial(limits[0])
        and _is_nonnegative_polynomial(divisor - 1 - limits[1])
    )


# --- division --------------------------------------------------------------------------------------------------------


@bounded_cache(65536)
def _divmod(index: Index, divisor: Index) -> tuple[Index, Index]:
    """Returns quotient and remainder of floor division, simplified by the ranges of axes."""
    number = divisor.constant
    if number is not None and number < 1:
        raise ValueError(f"the divisor of an index must be positive, not {number}")
    quotient, rest = _polynomial_divmod(index, divisor)
    if not rest.terms or _in_range(rest, divisor):
        return quotient, rest
    if number is not None:
        for common in sorted({math.gcd(coefficient, number) for _, coefficient in rest.terms}, reverse=True):
            low = Index(tuple([term for term in rest.terms if term[1] % common]))
            if common > 1 and _in_range(low, constant_index(common)):
                high = Index(tuple([(monomial, n // common) for monomial, n in rest.terms if n % common == 0]))
                inner_quotient, inner_rest = _divmod(high, constant_index(number // common))
                return quotient + inner_quotient, inner_rest * common + low
    more, remainder = _atomic_divmod(rest, divisor, number)
    return quotient + more, remainder


def _atomic_divmod(rest: Index, divisor: Index, number: int | None) -> tuple[Index, Index]:
    """Returns the atoms of a division that does not simplify; nested divisions become one."""
    base, modulo_base, by = rest, rest, divisor
    if number is not None and len(rest.terms) == 1 and rest.terms[0][1] == 1 and len(rest.terms[0][0]) == 1:
        atom = rest.terms[0][0][0]
        if isinstance(atom, FloorDivide) and atom.divisor.constant is not None:
            base, by = atom.base, divisor * atom.divisor
        if isinstance(atom, Modulo) and (atom.divisor.constant or 1) % number == 0:
            modulo_base = atom.base
    return Index((((FloorDivide(base, by),), 1),)), Index((((Modulo(modulo_base, divisor),), 1),))


def _polynomial_divmod(index: Index, divisor: Index) -> tuple[Index, Index]:
    """Returns polynomials q and r with index = q*divisor + r by term-wise division."""
    lead, lead_coefficient = max(divisor.terms, key=lambda term: (len(term[0]), _monomial_key(term)))
    quotient, rest = ZERO, index
    for monomial, coefficient in index.terms:
        factor, remainder = divmod(coefficient, lead_coefficient)
        if not factor or (remainder and monomial):
            continue  # only a constant may leave a remainder
        cofactor = _cofactor(monomial, lead)
        if cofactor is not None:
            part = Index(((cofactor, factor),))
            quotient, rest = quotient + part, rest - part * divisor
    return quotient, rest


def _cofactor(monomial: Monomial, factor: Monomial) -> Monomial | None:
    """Returns the quotient of a monomial and a factor, or None."""
    rest = list(monomial)
    for atom in factor:
        if atom not in rest:
            return None
        rest.remove(atom)
    return tuple(rest)


# --- conversion ------------------------------------------------------------------------------------------------------

ZERO = Index(())
ONE = Index((((), 1),))


@bounded_cache(4096)
def constant_index(number: int) -> Index:
    """Returns a constant index."""
    return Index((((), int(number)),)) if number else ZERO


def as_index(value: IndexLike) -> Index:
    """Returns an axis, a size or an index as an index."""
    if isinstance(value, Index):
        return value
    if isinstance(value, int):
        return constant_index(value)
    if isinstance(value, Axis | IndirectIndex):
        return _from_atom(value)
    return _from_size(value)


@bounded_cache(4096)
def _from_atom(atom: Axis | IndirectIndex) -> Index:
    return Index((((atom,), 1),))


@bounded_cache(4096)
def _from_size(size: sympy.Expr) -> Index:
    if isinstance(size, sympy.Integer):
        return constant_index(int(size))
    if isinstance(size, sympy.Add):
        return sum((_from_size(term) for term in size.args), ZERO)
    if isinstance(size, sympy.Mul):
        return math.prod((_from_size(factor) for factor in size.args), start=ONE)
    if isinstance(size, sympy.Pow) and size.args[1].is_Integer and int(size.args[1]) > 0:
        return math.prod([_from_size(size.args[0])] * int(size.args[1]), start=ONE)
    return Index((((SizeAtom(size),), 1),))
