"""The safetensors format: a length, a JSON table of names, dtypes, shapes and places, and the tensors' bytes.

Written and read here rather than by the package of that name, because it is a page of code, and this way tensors go
from and to their own memory in pieces that are hashed on the way. Files are the same for both.
"""

from __future__ import annotations

import ctypes
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

SAFETENSORS_DTYPES: Mapping[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float32: "F32",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.float64: "F64",
}
"""The element types that the format has names for."""

_DTYPES = {name: dtype for dtype, name in SAFETENSORS_DTYPES.items()}
_LARGEST_HEADER = 100_000_000
"""The format's own limit."""


class TensorFileError(ValueError):
    """Content that is not of the safetensors format."""


@dataclass(frozen=True, slots=True)
class Described:
    """A tensor of a file: dense, in row-major order, from byte `start` to byte `end` of what follows the table."""

    dtype: torch.dtype
    sizes: tuple[int, ...]
    start: int
    end: int


def header_bytes(tensors: Sequence[tuple[str, torch.dtype, tuple[int, ...]]]) -> bytes:
    """Returns what stands before the bytes of these tensors, which follow in this order without gaps."""
    table: dict[str, Any] = {}
    place = 0
    for name, dtype, sizes in tensors:
        end = place + math.prod(sizes) * dtype.itemsize
        table[name] = {"dtype": SAFETENSORS_DTYPES[dtype], "shape": list(sizes), "data_offsets": [place, end]}
        place = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % 64)  # so that what follows may be aligned
    return len(text).to_bytes(8, "little") + text


def header_size(start: bytes, file_size: int) -> int:
    """Returns how long the table with its length is, from the first 8 bytes. Raises TensorFileError."""
    size = int.from_bytes(start[:8], "little") + 8
    if len(start) < 8 or size > min(file_size, _LARGEST_HEADER + 8):
        raise TensorFileError("its table of tensors is longer than the file")
    return size


def parse_header(header: bytes, file_size: int) -> dict[str, Described]:
    """Returns the tensors that a table describes, in the order of their bytes, which they fill without gaps.

    Raises TensorFileError for anything else.
    """
    try:
        table = json.loads(header[8:])
        found = {name: _described(name, item) for name, item in table.items() if name != "__metadata__"}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise TensorFileError(f"its table of tensors cannot be read: {error}") from None
    found = dict(sorted(found.items(), key=lambda item: (item[1].start, item[1].end)))
    place = 0
    for name, item in found.items():
        if item.start != place:
            raise TensorFileError(f"the bytes of '{name}' do not follow those before")
        place = item.end
    if len(header) + place != file_size:
        raise TensorFileError(f"its tensors have {place} bytes, and {file_size - len(header)} are there")
    return found


def _described(name: str, item: Mapping[str, Any]) -> Described:
    dtype = _DTYPES.get(item["dtype"])
    if dtype is None:
        raise TensorFileError(f"'{name}' has the dtype {item['dtype']!r}, which torch has no equal of")
    sizes = tuple(item["shape"])
    start, end = item["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (*sizes, start, end)):
        raise TensorFileError(f"the sizes of '{name}' are no whole numbers")
    if end - start != math.prod(sizes) * dtype.itemsize:
        raise TensorFileError(f"'{name}' has {end - start} bytes, which do not fit its shape {list(sizes)}")
    return Described(dtype, sizes, start, end)


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Returns the memory of a dense tensor on the CPU as writable bytes; the tensor must outlive it."""
    size = tensor.numel() * tensor.element_size()
    if size == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * size).from_address(tensor.data_ptr())).cast("B")
