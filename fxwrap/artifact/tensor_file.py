"""The safetensors format: a length, a JSON table of names, dtypes, shapes and offsets, and the tensors' bytes.

fxwrap reads and writes it without the safetensors package, so that content is hashed in pieces between file and tensor
memory. Files are identical.
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
"""The format's names of dtypes."""

_DTYPES = {name: dtype for dtype, name in SAFETENSORS_DTYPES.items()}
_MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""


class TensorFileError(ValueError):
    """Content that is not in the safetensors format."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A dense, row-major tensor from byte `start` to byte `end` after the header."""

    dtype: torch.dtype
    sizes: tuple[int, ...]
    start: int
    end: int


def header_bytes(tensors: Sequence[tuple[str, torch.dtype, tuple[int, ...]]]) -> bytes:
    """Returns the header of tensors that follow in this order without gaps."""
    table: dict[str, object] = {}
    offset = 0
    for name, dtype, sizes in tensors:
        end = offset + math.prod(sizes) * dtype.itemsize
        table[name] = {"dtype": SAFETENSORS_DTYPES[dtype], "shape": list(sizes), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % 64)  # aligns the tensors
    return len(text).to_bytes(8, "little") + text


def header_size(start: bytes, file_size: int) -> int:
    """Returns the size of the header from the first 8 bytes. Raises TensorFileError."""
    size = int.from_bytes(start[:8], "little") + 8
    if len(start) < 8 or size > min(file_size, _MAX_HEADER_BYTES + 8):
        raise TensorFileError("its table of tensors is longer than the file")
    return size


def parse_header(header: bytes, file_size: int) -> dict[str, TensorEntry]:
    """Returns the tensors of a header in file order. Raises TensorFileError for an invalid header or gaps."""
    try:
        table = json.loads(header[8:])
        entries = {name: _parse_entry(name, item) for name, item in table.items() if name != "__metadata__"}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise TensorFileError(f"its table of tensors cannot be read: {error}") from None
    entries = dict(sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)))
    offset = 0
    for name, item in entries.items():
        if item.start != offset:
            raise TensorFileError(f"the bytes of '{name}' do not follow those before")
        offset = item.end
    if len(header) + offset != file_size:
        raise TensorFileError(f"its tensors have {offset} bytes, but the file has {file_size - len(header)}")
    return entries


def _parse_entry(name: str, item: Mapping[str, Any]) -> TensorEntry:
    dtype = _DTYPES.get(item["dtype"])
    if dtype is None:
        raise TensorFileError(f"'{name}' has the dtype {item['dtype']!r}, which torch does not have")
    sizes = tuple(item["shape"])
    start, end = item["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (*sizes, start, end)):
        raise TensorFileError(f"the sizes of '{name}' are not natural numbers")
    if end - start != math.prod(sizes) * dtype.itemsize:
        raise TensorFileError(f"'{name}' has {end - start} bytes, which do not fit its shape {list(sizes)}")
    return TensorEntry(dtype, sizes, start, end)


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Returns the memory of a dense CPU tensor as writable bytes; the tensor must outlive it."""
    size = tensor.numel() * tensor.element_size()
    if size == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * size).from_address(tensor.data_ptr())).cast("B")
