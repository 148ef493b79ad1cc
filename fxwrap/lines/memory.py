"""Lines that make, rename and release memory."""

from __future__ import annotations

from typing import ClassVar

import torch

from fxwrap.wrapper_ir import LineBase, Size, TensorType, Value, attribute, consume, define, line_class, read


@line_class("memory.alloc")
class Alloc(LineBase):
    """Allocates uninitialised memory for a tensor: a new root, for the work of a stream.

    Example: `%buf0 = memory.alloc() : f32[4, 8]@cpu`
    """

    result: Value = define(written=False)
    stream: int = attribute(default=0)

    def verify_self(self) -> str | None:
        return _not_tensor(self.result)


@line_class("memory.free")
class Free(LineBase):
    """Releases a root after its last use, for the stream it was made on; where `stream` is another, after its work too.

    Example: `memory.free(%buf0)`
    """

    root: Value = consume()
    stream: int = attribute(default=0)


@line_class("memory.reuse")
class Reuse(LineBase):
    """Takes a root and gives its memory a new type: a new root, uninitialised, at the same address.

    Example: `%buf1 = memory.reuse(%buf0) : f32[8, 4]@cpu`
    """

    result: Value = define(written=False)
    root: Value = consume()

    def verify_self(self) -> str | None:
        old, new = self.root.tensor_type, self.result.tensor_type
        if old.device != new.device or old.memory_space != new.memory_space:
            return f"the memory is on {old.device}, the result on {new.device}"
        if isinstance(old.storage_bytes, int) and isinstance(new.storage_bytes, int):
            if new.storage_bytes > old.storage_bytes:
                return f"{new.storage_bytes} bytes do not fit into {old.storage_bytes}"
        return None


@line_class("memory.view")
class View(LineBase):
    """A window on a value's memory with other sizes, strides and offset, of the same element type.

    The offset in the result's type counts from the first element of the root (or pool slice), not of `base`.

    Example: `%t = memory.view(%buf0) : f32[8, 4 | 1, 8]@cpu`
    """

    on_host: ClassVar[bool] = True

    result: Value = define(alias="base")
    base: Value = read()

    def verify_self(self) -> str | None:
        base, result = self.base.tensor_type, self.result.tensor_type
        if base.dtype != result.dtype or base.device != result.device:
            return "a view keeps the element type and the device of its base"
        if base.memory_space != result.memory_space:
            return "a view stays in the memory space of its base"
        return None


@line_class("memory.pool")
class Pool(LineBase):
    """Allocates one block of bytes from which `memory.pool_slice` lines take windows.

    Example: `%pool = memory.pool() : u8[4096]@cpu`
    """

    result: Value = define(written=False)

    def verify_self(self) -> str | None:
        return _not_bytes(self.result)


@line_class("memory.pool_slice")
class PoolSlice(LineBase):
    """A tensor inside a pool, `offset` bytes from its start. It shares the pool's root and starts uninitialised.

    Offsets of views of it count from its own first element.

    Example: `%buf0 = memory.pool_slice(%pool) offset=1024 : f32[16, 16]@cpu`
    """

    on_host: ClassVar[bool] = True

    result: Value = define(alias="pool", written=False)
    pool: Value = read()
    offset: Size = attribute(default=0)

    def verify_self(self) -> str | None:
        need, have = self.result.tensor_type.storage_bytes, self.pool.tensor_type.storage_bytes
        if isinstance(self.offset, int) and isinstance(need, int) and isinstance(have, int):
            if self.offset < 0 or self.offset + need > have:
                return f"bytes {self.offset} to {self.offset + need} lie outside a pool of {have}"
        return None


@line_class("memory.workspace")
class Workspace(LineBase):
    """Allocates scratch bytes for kernels, zeroed (and so readable) when `zeroed` is true.

    Example: `%work = memory.workspace() zeroed=true : u8[256]@cpu`
    """

    result: Value = define(written=False)
    zeroed: bool = attribute(default=False)

    def verify_self(self) -> str | None:
        return _not_bytes(self.result)


def _not_tensor(value: Value) -> str | None:
    return None if isinstance(value.type, TensorType) else f"%{value.name} is memory, so its type is a tensor's"


def _not_bytes(value: Value) -> str | None:
    if isinstance(value.type, TensorType) and value.type.dtype == torch.uint8 and len(value.type.sizes) == 1:
        return None
    return f"%{value.name} is bytes, so its type is a u8 tensor's of one dimension"
