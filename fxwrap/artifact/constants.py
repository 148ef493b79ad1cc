"""The constants of a program in a file: their memory once, however many share it, and each as a window on it."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any

import torch

from fxwrap.artifact.archive import Archive, ArchiveWriter
from fxwrap.artifact.tensor_file import (
    SAFETENSORS_DTYPES,
    Described,
    TensorFileError,
    header_bytes,
    header_size,
    memory_of,
    parse_header,
)
from fxwrap.errors import ArtifactError
from fxwrap.wrapper_ir import DTYPE_NAMES, DTYPES, Program

ENTRY = "constants.safetensors"

_ALIGNMENT = 64
"""Where constants share memory, the file has it from an address on that is a multiple of this, so that what was aligned
to as much is so again."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory that one or several constants are windows on: its name in the file and its bytes."""

    key: str
    size: int


@dataclass(frozen=True, slots=True)
class Window:
    """A constant: which memory, the byte of it at which it starts, and how it is laid out there, in elements."""

    name: str
    key: str
    start: int
    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def end(self) -> int:
        """The byte of the memory after the last one that it touches."""
        return self.start + _span(self.sizes, self.strides, self.dtype)

    @property
    def is_dense(self) -> bool:
        """Whether it has its elements in row-major order, without gaps."""
        step = 1
        for size, stride in zip(reversed(self.sizes), reversed(self.strides)):
            if size != 1 and stride != step:
                return False
            step *= size
        return True


@dataclass(frozen=True)
class ConstantLayout:
    """How the constants of a program lie in memory."""

    memories: tuple[Memory, ...] = ()
    windows: tuple[Window, ...] = ()

    def sharing(self) -> dict[str, list[Window]]:
        """Returns the windows on each memory, by its name."""
        found: dict[str, list[Window]] = {memory.key: [] for memory in self.memories}
        for window in self.windows:
            found[window.key].append(window)
        return found

    def to_json(self) -> dict[str, Any]:
        """Returns the layout as the manifest has it."""
        return {
            "memory": {memory.key: memory.size for memory in self.memories},
            "windows": [
                {
                    "name": window.name,
                    "memory": window.key,
                    "start": window.start,
                    "dtype": DTYPE_NAMES[window.dtype],
                    "sizes": list(window.sizes),
                    "strides": list(window.strides),
                }
                for window in self.windows
            ],
        }

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> ConstantLayout:
        """Returns the layout that a manifest says. Raises KeyError, TypeError or ValueError for one that is none."""
        memories = tuple([Memory(str(key), _whole(size)) for key, size in found["memory"].items()])
        windows = tuple([
            Window(
                str(item["name"]), str(item["memory"]), _whole(item["start"]), DTYPES[item["dtype"]],
                tuple([_whole(size) for size in item["sizes"]]), tuple([_whole(step) for step in item["strides"]]),
            )
            for item in found["windows"]
        ])  # fmt: skip
        sizes = {memory.key: memory.size for memory in memories}
        for window in windows:
            if window.end > sizes[window.key] or window.start % window.dtype.itemsize:
                raise ValueError(f"constant '{window.name}' does not lie in its memory")
        return cls(memories, windows)


def _whole(number: Any) -> int:
    if type(number) is not int or number < 0:
        raise ValueError(f"{number!r} is no size")
    return number


def _span(sizes: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> int:
    if 0 in sizes:
        return 0
    return (1 + sum([(size - 1) * stride for size, stride in zip(sizes, strides)])) * dtype.itemsize


# --- from tensors ---------------------------------------------------------------------------------------------------


def check_savable(program: Program, path: str) -> None:
    """Raises ArtifactError for a constant that is missing, or that is more than memory on a device."""
    for constant in program.constants:
        name = constant.value.name
        tensor = program.store.tensors.get(name)
        if tensor is None:
            reason = f"the program has no payload for its constant '{name}'"
            raise ArtifactError(path, ENTRY, reason, "Give it one, or save with constants=False")
        plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
        if not plain or tensor.is_meta or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
            reason = f"constant '{name}' is a {type(tensor).__name__} that is more than numbers in memory"
            raise ArtifactError(path, ENTRY, reason, "Make it a plain tensor, or save with constants=False")


def layout_of(tensors: Mapping[str, torch.Tensor]) -> ConstantLayout:
    """Returns how tensors lie in memory: those that share a storage share what is saved of it.

    Memory is named for a constant that is all of it, dense and in row-major order; the name of any other memory ends in
    ".memory".
    """
    groups: dict[tuple[torch.device, int], list[str]] = {}
    for name, tensor in tensors.items():
        address = tensor.untyped_storage().data_ptr()
        groups.setdefault((tensor.device, address or -len(groups) - 1), []).append(name)
    memories, windows = [], {}
    for names in groups.values():
        memory, found = _group([(name, tensors[name]) for name in names])
        memories.append(memory)
        windows.update({window.name: window for window in found})
    # What has a length that is no multiple of the alignment comes last, so that all before it is aligned in the file.
    memories.sort(key=lambda memory: memory.size % _ALIGNMENT != 0)
    return ConstantLayout(tuple(memories), tuple([windows[name] for name in tensors]))


def declared_layout(program: Program) -> ConstantLayout:
    """Returns how constants lie in memory that nobody has: as their types say, each in memory of its own."""
    memories, windows = [], []
    for constant in program.constants:
        name, type_ = constant.value.name, constant.value.tensor_type
        sizes, strides = tuple(map(int, type_.sizes)), tuple(map(int, type_.strides))
        window = Window(name, name, 0, type_.dtype, sizes, strides)
        windows.append(window)
        memories.append(Memory(name, window.end))
    return ConstantLayout(tuple(memories), tuple(windows))


def _group(members: Sequence[tuple[str, torch.Tensor]]) -> tuple[Memory, list[Window]]:
    starts = {name: int(tensor.storage_offset()) * tensor.element_size() for name, tensor in members}
    first = min(starts.values())
    if len(members) > 1:
        first -= first % _ALIGNMENT
    windows = [
        Window(name, "", starts[name] - first, tensor.dtype, tuple(map(int, tensor.shape)), tensor.stride())
        for name, tensor in members
    ]
    size = max(window.end for window in windows)
    whole = [item.name for item in windows
             if item.is_dense and (item.start, item.end) == (0, size) and item.dtype in SAFETENSORS_DTYPES]  # fmt: skip
    key = whole[0] if whole else f"{windows[0].name}.memory"
    placed = [Window(item.name, key, item.start, item.dtype, item.sizes, item.strides) for item in windows]
    return Memory(key, size), placed


def write_constants(writer: ArchiveWriter, layout: ConstantLayout, tensors: Mapping[str, torch.Tensor]) -> None:
    """Adds the memory of constants as an entry in the safetensors format, one piece of memory at a time."""
    described, sharing = [], layout.sharing()
    for memory in layout.memories:
        named = next((window for window in sharing[memory.key] if window.name == memory.key), None)
        described.append(
            (memory.key, torch.uint8, (memory.size,)) if named is None else (memory.key, named.dtype, named.sizes)
        )
    header = header_bytes(described)

    def parts() -> Iterator[bytes | memoryview]:
        yield header
        for memory in layout.memories:
            window = sharing[memory.key][0]
            content = _bytes_of(tensors[window.name], window, memory.size)
            yield memory_of(content)

    writer.add(ENTRY, parts(), len(header) + sum(memory.size for memory in layout.memories))


def _bytes_of(tensor: torch.Tensor, window: Window, size: int) -> torch.Tensor:
    """Returns memory as a tensor of bytes on the CPU; `window` says where `tensor` lies in it."""
    made = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    start = tensor.storage_offset() * tensor.element_size() - window.start
    return made.set_(tensor.untyped_storage(), start, (size,), (1,)).cpu()


# --- to tensors -----------------------------------------------------------------------------------------------------


def read_constants(
    archive: Archive, layout: ConstantLayout, devices: Mapping[str, torch.device], mapped: bool
) -> dict[str, torch.Tensor]:
    """Returns the constants of a file by name, each on its device, sharing memory as they did.

    With `mapped` their memory is the file's, where it is aligned; writes into it stay in this process. Raises
    ArtifactError for an entry that is damaged, or that has other memory than the layout.
    """
    size = archive.size(ENTRY)
    try:
        length = header_size(archive.peek(ENTRY, 0, 8), size)
        header = archive.peek(ENTRY, 0, length)
        described = parse_header(header, size)
    except TensorFileError as error:
        raise archive.error(ENTRY, str(error)) from None
    if {key: item.end - item.start for key, item in described.items()} != {m.key: m.size for m in layout.memories}:
        raise archive.error(ENTRY, "it has other tensors than the manifest")
    checked, memory = _mapped(archive, described, length) if mapped else _read(archive, described, length)
    if checked != header:
        raise archive.error(ENTRY, "it changed while it was read", "Load it again when nobody writes it")
    return windows_on(layout, memory, devices)


_Contents = tuple[bytes, dict[str, torch.Tensor]]


def _read(archive: Archive, described: Mapping[str, Described], length: int) -> _Contents:
    """Returns the table of the file's tensors, of this length, and memory of its own for each of them."""
    header = bytearray(length)
    memory = {key: torch.empty(item.end - item.start, dtype=torch.uint8) for key, item in described.items()}
    archive.read_into(ENTRY, (header, *[memory_of(content) for content in memory.values()]))
    return bytes(header), memory


def _mapped(archive: Archive, described: Mapping[str, Described], length: int) -> _Contents:
    """Returns the table of the file's tensors, of this length, and for each of them memory that is the file's."""
    try:
        whole, first = archive.mapped(ENTRY)
    except OSError:  # the file is where nothing can be mapped
        return _read(archive, described, length)

    def part(item: Described) -> torch.Tensor:
        size, start = item.end - item.start, first + length + item.start
        if size == 0:
            return torch.empty(0, dtype=torch.uint8)
        found = torch.frombuffer(whole, dtype=torch.uint8, count=size, offset=start)
        return found if start % _ALIGNMENT == 0 else found.clone()

    return whole[first : first + length], {key: part(item) for key, item in described.items()}


def windows_on(
    layout: ConstantLayout, memory: Mapping[str, torch.Tensor], devices: Mapping[str, torch.device]
) -> dict[str, torch.Tensor]:
    """Returns constants as windows on memory, which is moved to the device of those that share it."""
    moved = {key: memory[key].to(devices[group[0].name]) for key, group in layout.sharing().items() if group}
    return {
        window.name: torch.empty(0, dtype=window.dtype, device=moved[window.key].device).set_(
            moved[window.key].untyped_storage(), window.start // window.dtype.itemsize, window.sizes, window.strides
        )
        for window in layout.windows
    }


def read_tensor_file(path: str, mapped: bool = True) -> dict[str, torch.Tensor]:
    """Returns the tensors of a safetensors file, on the CPU. Raises ArtifactError for what is none.

    With `mapped` their memory is the file's, where their elements are aligned; writes into it stay in this process.
    """
    remedy = "Give a file in the safetensors format"
    try:
        with open(path, "rb") as file:
            content = _content(file, mapped)
    except OSError as error:
        raise ArtifactError(path, "", f"it cannot be read: {error.strerror}", remedy) from error
    try:
        length = header_size(bytes(content[:8]), len(content))
        described = parse_header(bytes(content[:length]), len(content))
    except TensorFileError as error:
        raise ArtifactError(path, "", str(error), remedy) from None
    return {name: _tensor(content, length + item.start, item) for name, item in described.items()}


def _content(file: IO[bytes], mapped: bool) -> mmap.mmap | bytearray:
    """Returns what a file holds, as memory that may be written to."""
    size = os.fstat(file.fileno()).st_size
    if mapped and size:
        with suppress(OSError):  # where nothing can be mapped
            return mmap.mmap(file.fileno(), size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    content = bytearray(size)
    return content if file.readinto(content) == size else bytearray()  # type: ignore[attr-defined]


def _tensor(content: mmap.mmap | bytearray, start: int, item: Described) -> torch.Tensor:
    """Returns the tensor at a byte of a file, without a copy where its elements are aligned in memory."""
    if item.start == item.end:
        return torch.empty(item.sizes, dtype=item.dtype)
    found = torch.frombuffer(content, dtype=torch.uint8, count=item.end - item.start, offset=start)
    if found.data_ptr() % item.dtype.itemsize:
        found = found.clone()
    return found.view(item.dtype).reshape(item.sizes)
