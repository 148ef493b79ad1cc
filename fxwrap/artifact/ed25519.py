"""Ed25519 signatures as RFC 8032 defines them: https://www.rfc-editor.org/rfc/rfc8032, section 5.1.

Times of signing depend on the private key: sign on a machine where nobody else can measure them. The C runtime checks
the same signatures in `host/ed25519.cpp`.
"""

from __future__ import annotations

import hashlib
from typing import TypeAlias

_PRIME = 2**255 - 19
_ORDER = 2**252 + 27742317777372353535851937790883648493
_D = -121665 * pow(121666, -1, _PRIME) % _PRIME
_ROOT_OF_MINUS_ONE = pow(2, (_PRIME - 1) // 4, _PRIME)

_Point: TypeAlias = tuple[int, int, int, int]
"""Extended coordinates: x = X/Z, y = Y/Z, T = X*Y/Z."""

_NEUTRAL: _Point = (0, 1, 1, 0)


def public_key(private_key: bytes) -> bytes:
    """Returns the public key, 32 bytes, of a private key of 32 random bytes."""
    scalar, _ = _expanded(private_key)
    return _encoded(_multiplied(scalar, _BASE))


def sign(private_key: bytes, message: bytes) -> bytes:
    """Returns the signature of a message, 64 bytes."""
    scalar, prefix = _expanded(private_key)
    nonce = _hash_number(prefix, message)
    point = _encoded(_multiplied(nonce, _BASE))
    challenge = _hash_number(point, _encoded(_multiplied(scalar, _BASE)), message)
    return point + ((nonce + challenge * scalar) % _ORDER).to_bytes(32, "little")


def verify(key: bytes, message: bytes, signature: bytes) -> bool:
    """Returns whether a signature of 64 bytes is that of a message by the owner of a public key of 32 bytes."""
    point, scalar = _decoded(key), int.from_bytes(signature[32:], "little")
    if point is None or len(signature) != 64 or scalar >= _ORDER:
        return False
    challenge = _hash_number(signature[:32], key, message)
    x, y, z, t = _multiplied(challenge, point)
    return _encoded(_added(_multiplied(scalar, _BASE), (-x % _PRIME, y, z, -t % _PRIME))) == signature[:32]


def _expanded(private_key: bytes) -> tuple[int, bytes]:
    digest = hashlib.sha512(private_key).digest()
    scalar = int.from_bytes(digest[:32], "little") & ((1 << 254) - 8) | (1 << 254)
    return scalar, digest[32:]


def _hash_number(*parts: bytes) -> int:
    return int.from_bytes(hashlib.sha512(b"".join(parts)).digest(), "little") % _ORDER


def _added(first: _Point, second: _Point) -> _Point:
    a = (first[1] - first[0]) * (second[1] - second[0]) % _PRIME
    b = (first[1] + first[0]) * (second[1] + second[0]) % _PRIME
    c = 2 * first[3] * second[3] * _D % _PRIME
    d = 2 * first[2] * second[2] % _PRIME
    e, f, g, h = b - a, d - c, d + c, b + a
    return e * f % _PRIME, g * h % _PRIME, f * g % _PRIME, e * h % _PRIME


def _multiplied(scalar: int, point: _Point) -> _Point:
    result = _NEUTRAL
    for bit in bin(scalar)[2:]:
        result = _added(result, result)
        if bit == "1":
            result = _added(result, point)
    return result


def _encoded(point: _Point) -> bytes:
    inverse = pow(point[2], -1, _PRIME)
    x, y = point[0] * inverse % _PRIME, point[1] * inverse % _PRIME
    return (y | (x & 1) << 255).to_bytes(32, "little")


def _decoded(data: bytes) -> _Point | None:
    """Returns the point of 32 bytes; None for bytes that encode none."""
    number = int.from_bytes(data, "little")
    y, sign = number & ((1 << 255) - 1), number >> 255
    if len(data) != 32 or y >= _PRIME:
        return None
    square = (y * y - 1) * pow(_D * y * y + 1, -1, _PRIME) % _PRIME
    x = pow(square, (_PRIME + 3) // 8, _PRIME)
    if (x * x - square) % _PRIME:
        x = x * _ROOT_OF_MINUS_ONE % _PRIME
    if (x * x - square) % _PRIME or (x == 0 and sign):
        return None
    x = _PRIME - x if x & 1 != sign else x
    return x, y, 1, x * y % _PRIME


_BASE_POINT = _decoded((4 * pow(5, -1, _PRIME) % _PRIME).to_bytes(32, "little"))
assert _BASE_POINT is not None
_BASE: _Point = _BASE_POINT
