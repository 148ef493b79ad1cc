"""Lines that allocate, alias and release memory."""

from __future__ import annotations

from typing import ClassVar

import torch

from fxwrap.wrapper_ir import LineBase, Size, TensorType, Value, attribute, consume, define, line_class, read


@line_class("memory.alloc")
class Alloc(LineBase):
    """Allocates uninitialized memory for a tensor, a new root, on a stream.

    Example: `%buf0 = memory.alloc() : f32[4, 8]@cpu`
    """

    result: Value = define(initialized=False)
    stream: int = attribute(default=0)

    def verify_self(self) -> str | None:
        if not isinstance(self.result.type, TensorType):
            return f"%{self.result.name} must be a tensor"
        if self.result.type.symmetric_group == "":
            return f"%{self.result.name} is in symmetric memory of no group; its memory space is 'symmetric:GROUP'"
        return None


@line_class("memory.free")
class Free(LineBase):
    """Releases a root. If `stream` is not the stream it was allocated on, the memory is reused after its work too.

    Example: `memory.free(%buf0)`
    """

    root: Value = consume()
    stream: int = attribute(default=0)


@line_class("memory.reuse")
class Reuse(LineBase):
    """Consumes a root and defines a new, uninitialized root of another type at the same address.

    Example: `%buf1 = memory.reuse(%buf0) : f32[8, 4]@cpu`
    """

    result: Value = define(initialized=False)
    root: Value = consume()

    def verify_self(self) -> str | None:
        old, new = self.root.tensor_type, self.result.tensor_type
        if old.device != new.device or old.memory_space != new.memory_space:
            return f"the memory is on {old.device}, but the result is on {new.device}"
        return None

    def window(self) -> tuple[Value, Value, Size]:
        return self.result, self.root, 0


@line_class("memory.view")
class View(LineBase):
    """A view of a value with other sizes, strides and offset, and the same dtype.

    The offset in the result's type is relative to the first element of the root (or pool slice), not of `base`.

    Example: `%t = memory.view(%buf0) : f32[8, 4 | 1, 8]@cpu`
    """

    on_host: ClassVar[bool] = True

    result: Value = define(alias="base")
    base: Value = read()

    def verify_self(self) -> str | None:
        base, result = self.base.tensor_type, self.result.tensor_type
        if base.dtype != result.dtype or base.device != result.device:
            return "a view has the dtype and the device of its base"
        if base.memory_space != result.memory_space:
            return "a view has the memory space of its base"
        return None

    def window(self) -> tuple[Value, Value, Size]:
        type_ = self.result.tensor_type
        return self.result, self.base, type_.storage_offset * type_.dtype.itemsize


@line_class("memory.pool")
class Pool(LineBase):
    """Allocates a pool of bytes for `memory.pool_slice` lines.

    Example: `%pool = memory.pool() : u8[4096]@cpu`
    """

    result: Value = define(initialized=False)

    def verify_self(self) -> str | None:
        return _not_bytes(self.result)


@line_class("memory.pool_slice")
class PoolSlice(LineBase):
    """An uninitialized tensor inside a pool, `offset` bytes from its start. It has the pool's root.

    Offsets of its views are relative to its first element.

    Example: `%buf0 = memory.pool_slice(%pool) offset=1024 : f32[16, 16]@cpu`
    """

    on_host: ClassVar[bool] = True

    result: Value = define(alias="pool", initialized=False)
    pool: Value = read()
    offset: Size = attribute(default=0)

    def window(self) -> tuple[Value, Value, Size]:
        return self.result, self.pool, self.offset


@line_class("memory.workspace")
class Workspace(LineBase):
    """Allocates scratch memory for kernels, which is initialized if `zeroed` is true.

    Example: `%work = memory.workspace() zeroed=true : u8[256]@cpu`
    """

    result: Value = define(initialized=False)
    zeroed: bool = attribute(default=False)

    def verify_self(self) -> str | None:
        return _not_bytes(self.result)


def _not_bytes(value: Value) -> str | None:
    if isinstance(value.type, TensorType) and value.type.dtype == torch.uint8 and len(value.type.sizes) == 1:
        return None
    return f"%{value.name} must be a one-dimensional u8 tensor"
