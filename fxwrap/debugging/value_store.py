"""Values that are kept in memory up to a limit, and in a temporary file beyond it."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch
from torch import Tensor

from fxwrap.errors import CompareError
from fxwrap.torch_compat import storage_identity, tree_map


@dataclass(frozen=True)
class _FileTensor:
    """A tensor in the file of a store: its elements begin at `offset`."""

    offset: int
    dtype: torch.dtype
    sizes: tuple[int, ...]
    device: torch.device


class ValueStore:
    """Keeps tensors; a storage counts once, and those beyond `memory_bytes` are written to a temporary file.

    Source of the folder: `tempfile`, whose environment variable is TMPDIR.
    """

    def __init__(self, memory_bytes: float) -> None:
        self.memory_bytes = memory_bytes
        self.file_bytes = 0
        self._held = 0
        self._storages: set[int] = set()
        self._file: BinaryIO | None = None

    def is_full(self, value: object) -> bool:
        """Whether the tensors of a value do not fit into the memory that is left."""
        new: dict[int, int] = {}
        tree_map(lambda leaf: new.update(self._new_storage(leaf)), value)
        return self._held + sum(new.values()) > self.memory_bytes

    def _new_storage(self, leaf: object) -> dict[int, int]:
        if not isinstance(leaf, Tensor) or not _is_strided(leaf):
            return {}
        identity = storage_identity(leaf)
        return {} if identity in self._storages else {identity: leaf.untyped_storage().nbytes()}

    def add(self, value: object) -> object:
        """Returns a value whose tensors are in memory or in the file, for `load`.

        Raises CompareError if the file's folder is full.
        """
        full = self.is_full(value)
        return tree_map(lambda leaf: self._add(leaf, full) if isinstance(leaf, Tensor) else leaf, value)

    def _add(self, tensor: Tensor, full: bool) -> object:
        if full and _is_strided(tensor):
            return self._write(tensor.detach())
        for identity, count in self._new_storage(tensor).items():
            self._storages.add(identity)
            self._held += count
        return tensor

    def _write(self, tensor: Tensor) -> _FileTensor:
        if self._file is None:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115  the store's lifetime is that of the file
        plain = tensor.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        item = _FileTensor(self.file_bytes, tensor.dtype, tuple(tensor.shape), tensor.device)
        try:
            self._file.seek(item.offset)
            self._file.write(plain.view(torch.uint8).numpy().data)
            self._file.flush()
        except OSError as error:
            folder = tempfile.gettempdir()
            reason = f"{self.file_bytes} bytes of reference values fit into '{folder}', and more are needed ({error})"
            raise CompareError(f"{reason}; set TMPDIR to a larger folder, or raise memory_bytes") from error
        self.file_bytes += plain.numel() * plain.itemsize
        return item

    def load(self, value: object) -> Any:
        """Returns a value of `add` with its tensors, on the devices where they were."""
        return tree_map(lambda leaf: self._read(leaf) if isinstance(leaf, _FileTensor) else leaf, value)

    def _read(self, item: _FileTensor) -> Tensor:
        assert self._file is not None
        count = item.dtype.itemsize
        for size in item.sizes:
            count *= size
        self._file.seek(item.offset)
        data = bytearray(self._file.read(count))
        flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        return flat.view(item.dtype).reshape(item.sizes).to(item.device)


def _is_strided(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and type(tensor) in (Tensor, torch.nn.Parameter) and not tensor.is_meta
