"""The constants of a program in a file: each storage once, and each constant as a view of one."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any

import torch

from fxwrap.artifact import tensor_file
from fxwrap.artifact.archive import Archive, ArchiveWriter
from fxwrap.errors import ArtifactError
from fxwrap.runtime.plain_inputs import is_plain_class
from fxwrap.torch_compat import DTYPE_NAMES
from fxwrap.wrapper_ir import DTYPES, OpaqueType, Program

ENTRY = "constants.safetensors"

_ALIGNMENT = 64
"""Alignment in bytes of shared storages in the file, which preserves the alignment of their views."""


@dataclass(frozen=True, slots=True)
class SavedStorage:
    """The storage of one or several constants: its name in the file and its size in bytes."""

    key: str
    size: int


@dataclass(frozen=True, slots=True)
class SavedView:
    """A constant: the key of its storage, its start in bytes, and sizes and strides in elements."""

    name: str
    key: str
    start: int
    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def end(self) -> int:
        """The first byte after the view."""
        return self.start + _byte_extent(self.sizes, self.strides, self.dtype)

    @property
    def is_dense(self) -> bool:
        """Whether it is dense in row-major order."""
        step = 1
        for size, stride in zip(reversed(self.sizes), reversed(self.strides)):
            if size != 1 and stride != step:
                return False
            step *= size
        return True


@dataclass(frozen=True)
class ConstantLayout:
    """The memory layout of a program's constants."""

    storages: tuple[SavedStorage, ...] = ()
    views: tuple[SavedView, ...] = ()

    def views_by_storage(self) -> dict[str, list[SavedView]]:
        """Returns the views of each storage, by its key."""
        groups: dict[str, list[SavedView]] = {memory.key: [] for memory in self.storages}
        for view in self.views:
            groups[view.key].append(view)
        return groups

    def to_json(self) -> dict[str, object]:
        """Returns the layout as JSON data."""
        return {
            "memory": {memory.key: memory.size for memory in self.storages},
            "windows": [
                {
                    "name": view.name,
                    "memory": view.key,
                    "start": view.start,
                    "dtype": DTYPE_NAMES[view.dtype],
                    "sizes": list(view.sizes),
                    "strides": list(view.strides),
                }
                for view in self.views
            ],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ConstantLayout:
        """Returns the layout in a manifest. Raises KeyError, TypeError or ValueError for invalid data."""
        storages = tuple([SavedStorage(str(key), _parse_size(size)) for key, size in data["memory"].items()])
        views = tuple(
            [
                SavedView(
                    str(item["name"]),
                    str(item["memory"]),
                    _parse_size(item["start"]),
                    DTYPES[item["dtype"]],
                    tuple([_parse_size(size) for size in item["sizes"]]),
                    tuple([_parse_size(step) for step in item["strides"]]),
                )
                for item in data["windows"]
            ]
        )
        sizes = {memory.key: memory.size for memory in storages}
        for view in views:
            if view.end > sizes[view.key] or view.start % view.dtype.itemsize:
                raise ValueError(f"constant '{view.name}' is not inside its storage")
        return cls(storages, views)


def _parse_size(number: object) -> int:
    if type(number) is not int or not 0 <= number < 1 << 63:
        raise ValueError(f"{number!r} is not a size")
    return number


def _byte_extent(sizes: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> int:
    if 0 in sizes:
        return 0
    return (1 + sum([(size - 1) * stride for size, stride in zip(sizes, strides)])) * dtype.itemsize


# --- from tensors ---------------------------------------------------------------------------------------------------


def check_no_objects(program: Program, path: str) -> None:
    """Raises ArtifactError for a constant that is an opaque object."""
    for constant in program.constants:
        name, type_ = constant.value.name, constant.value.type
        if isinstance(type_, OpaqueType):
            reason = f"constant '{name}' is an object of {type_.name}, which a file cannot hold"
            raise ArtifactError(path, ENTRY, reason, "Pass the object as an input of the program")


def check_savable(program: Program, path: str) -> None:
    """Raises ArtifactError for a constant that is missing, or that is more than memory on a device."""
    contents = program.store.operands()
    for constant in program.constants:
        name = constant.value.name
        tensor = contents.get(name)
        if tensor is None:
            reason = f"the program has no payload for its constant '{name}'"
            raise ArtifactError(path, ENTRY, reason, "Give it one, or save with constants=False")
        plain = is_plain_class(type(tensor)) and tensor.layout == torch.strided
        if not plain or tensor.is_meta or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
            reason = f"constant '{name}' is a {type(tensor).__name__} that is more than numbers in memory"
            raise ArtifactError(path, ENTRY, reason, "Make it a plain tensor, or save with constants=False")


def layout_of(tensors: Mapping[str, torch.Tensor]) -> ConstantLayout:
    """Returns the layout of tensors in memory: those that share a storage share its saved bytes.

    Memory is named for a constant that is all of it, dense and in row-major order; the name of any other memory ends in
    ".memory".
    """
    groups: dict[tuple[torch.device, int], list[str]] = {}
    for name, tensor in tensors.items():
        address = tensor.untyped_storage().data_ptr()
        groups.setdefault((tensor.device, address or -len(groups) - 1), []).append(name)
    storages, views = [], {}
    for names in groups.values():
        memory, group = _group([(name, tensors[name]) for name in names])
        storages.append(memory)
        views.update({view.name: view for view in group})
    # What has a length that is no multiple of the alignment comes last, so that all before it is aligned in the file.
    storages.sort(key=lambda memory: memory.size % _ALIGNMENT != 0)
    return ConstantLayout(tuple(storages), tuple([views[name] for name in tensors]))


def declared_layout(program: Program) -> ConstantLayout:
    """Returns the layout of constants without tensors: that of their types, each in a storage of its own."""
    storages, views = [], []
    for constant in program.constants:
        name, type_ = constant.value.name, constant.value.tensor_type
        sizes, strides = tuple(map(int, type_.sizes)), tuple(map(int, type_.strides))
        view = SavedView(name, name, 0, type_.dtype, sizes, strides)
        views.append(view)
        storages.append(SavedStorage(name, view.end))
    return ConstantLayout(tuple(storages), tuple(views))


def _group(members: Sequence[tuple[str, torch.Tensor]]) -> tuple[SavedStorage, list[SavedView]]:
    starts = {name: int(tensor.storage_offset()) * tensor.element_size() for name, tensor in members}
    first = min(starts.values())
    if len(members) > 1:
        first -= first % _ALIGNMENT
    views = [
        SavedView(name, "", starts[name] - first, tensor.dtype, tuple(map(int, tensor.shape)), tensor.stride())
        for name, tensor in members
    ]
    size = max(view.end for view in views)
    dense = [item for item in views if item.is_dense and (item.start, item.end) == (0, size)]
    whole = [item.name for item in dense if item.dtype in tensor_file.SAFETENSORS_DTYPES]
    key = whole[0] if whole else f"{views[0].name}.memory"
    placed = [SavedView(item.name, key, item.start, item.dtype, item.sizes, item.strides) for item in views]
    return SavedStorage(key, size), placed


def write_constants(writer: ArchiveWriter, layout: ConstantLayout, tensors: Mapping[str, torch.Tensor]) -> None:
    """Adds the constants' storages as an entry in the safetensors format."""
    described, views_by_storage = [], layout.views_by_storage()
    for memory in layout.storages:
        named = next((view for view in views_by_storage[memory.key] if view.name == memory.key), None)
        described.append(
            (memory.key, torch.uint8, (memory.size,)) if named is None else (memory.key, named.dtype, named.sizes)
        )
    header = tensor_file.header_bytes(described)

    def parts() -> Iterator[bytes | memoryview]:
        yield header
        for memory in layout.storages:
            view = views_by_storage[memory.key][0]
            content = _bytes_of(tensors[view.name], view, memory.size)
            yield tensor_file.tensor_bytes(content)

    writer.add(ENTRY, parts(), len(header) + sum(memory.size for memory in layout.storages))


def _bytes_of(tensor: torch.Tensor, view: SavedView, size: int) -> torch.Tensor:
    """Returns the storage of `tensor` as bytes on the CPU; `view` is the tensor's view of it."""
    start = tensor.storage_offset() * tensor.element_size() - view.start
    return (
        torch.empty(0, dtype=torch.uint8, device=tensor.device)
        .set_(tensor.untyped_storage(), start, (size,), (1,))
        .cpu()
    )


# --- to tensors -----------------------------------------------------------------------------------------------------


def read_constants(
    archive: Archive, layout: ConstantLayout, devices: Mapping[str, torch.device], mapped: bool
) -> dict[str, torch.Tensor]:
    """Returns the constants of a file by name, each on its device, with the saved sharing of memory.

    With `mapped`, aligned storages are private mappings of the file. Raises ArtifactError for a damaged entry and one
    that does not match the layout.
    """
    size = archive.size(ENTRY)
    try:
        length = tensor_file.header_size(archive.peek(ENTRY, 0, 8), size)
        header = archive.peek(ENTRY, 0, length)
        described = tensor_file.parse_header(header, size)
    except tensor_file.TensorFileError as error:
        raise archive.error(ENTRY, str(error)) from None
    if {key: item.end - item.start for key, item in described.items()} != {m.key: m.size for m in layout.storages}:
        raise archive.error(ENTRY, "its tensors are not those of the manifest")
    checked, memory = _mapped(archive, described, length) if mapped else _read(archive, described, length)
    if checked != header:
        raise archive.error(ENTRY, "it changed while it was read", "Load it again when no process writes it")
    return make_views(layout, memory, devices)


_Contents = tuple[bytes, dict[str, torch.Tensor]]


def _read(archive: Archive, described: Mapping[str, tensor_file.TensorEntry], length: int) -> _Contents:
    """Returns the header of this length and the tensors' content in new memory."""
    header = bytearray(length)
    memory = {key: torch.empty(item.end - item.start, dtype=torch.uint8) for key, item in described.items()}
    archive.read_into(ENTRY, (header, *[tensor_file.tensor_bytes(content) for content in memory.values()]))
    return bytes(header), memory


def _mapped(archive: Archive, described: Mapping[str, tensor_file.TensorEntry], length: int) -> _Contents:
    """Returns the header of this length and the tensors' content as mappings of the file."""
    try:
        whole, first = archive.mapped(ENTRY)
    except OSError:  # the file system has no mappings
        return _read(archive, described, length)

    def part(item: tensor_file.TensorEntry) -> torch.Tensor:
        size, start = item.end - item.start, first + length + item.start
        if size == 0:
            return torch.empty(0, dtype=torch.uint8)
        content = torch.frombuffer(whole, dtype=torch.uint8, count=size, offset=start)
        return content if start % _ALIGNMENT == 0 else content.clone()

    return whole[first : first + length], {key: part(item) for key, item in described.items()}


def make_views(
    layout: ConstantLayout, memory: Mapping[str, torch.Tensor], devices: Mapping[str, torch.device]
) -> dict[str, torch.Tensor]:
    """Returns constants as views of their storages, which move to the constants' device."""
    moved = {key: memory[key].to(devices[group[0].name]) for key, group in layout.views_by_storage().items() if group}
    return {
        view.name: torch.empty(0, dtype=view.dtype, device=moved[view.key].device).set_(
            moved[view.key].untyped_storage(), view.start // view.dtype.itemsize, view.sizes, view.strides
        )
        for view in layout.views
    }


def read_tensor_file(path: str, mapped: bool = True) -> dict[str, torch.Tensor]:
    """Returns the CPU tensors of a safetensors file. Raises ArtifactError for an invalid file.

    With `mapped`, aligned tensors are private mappings of the file.
    """
    remedy = "Pass a file in the safetensors format"
    try:
        with open(path, "rb") as file:
            content = _content(file, mapped)
    except OSError as error:
        raise ArtifactError(path, "", f"it cannot be read: {error.strerror}", remedy) from error
    try:
        length = tensor_file.header_size(bytes(content[:8]), len(content))
        described = tensor_file.parse_header(bytes(content[:length]), len(content))
    except tensor_file.TensorFileError as error:
        raise ArtifactError(path, "", str(error), remedy) from None
    return {name: _tensor(content, length + item.start, item) for name, item in described.items()}


def _content(file: IO[bytes], mapped: bool) -> mmap.mmap | bytearray:
    """Returns the content of a file as writable memory."""
    size = os.fstat(file.fileno()).st_size
    if mapped and size:
        with suppress(OSError):  # the file system has no mappings
            return mmap.mmap(file.fileno(), size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    content = bytearray(size)
    return content if file.readinto(content) == size else bytearray()  # type: ignore[attr-defined]


def _tensor(content: mmap.mmap | bytearray, start: int, item: tensor_file.TensorEntry) -> torch.Tensor:
    """Returns the tensor at an offset in a file, without a copy if it is aligned."""
    if item.start == item.end:
        return torch.empty(item.sizes, dtype=item.dtype)
    data = torch.frombuffer(content, dtype=torch.uint8, count=item.end - item.start, offset=start)
    if data.data_ptr() % item.dtype.itemsize:
        data = data.clone()
    return data.view(item.dtype).reshape(item.sizes)
