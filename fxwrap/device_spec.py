"""What fxwrap knows of kernel languages and device types: plain facts, which the compiler asks for instead of names."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class KernelLanguage:
    """A kernel language, as passes and emitters see it.

    Fields:
        name: the `language` of its kernels in a program.
        ending: of a file that holds a text, without the dot.
        called_once: whether a launch calls the kernel once, which loops over it all; its grid is then all ones. Else
            the kernel is started at each point of a grid.
        only_addresses: whether the kernels that are printed know of a tensor only where its first element is, so that
            they may be given any other tensor that begins there.
        linked: whether its texts are C++ functions, which emitted C++ links in and calls.
        is_triton: whether its texts are Triton's: emitted graphs launch it by torch's own operator for such kernels.
        on_current_device: whether a launch runs on the device that is current, wherever its tensors are, so that a
            guard makes theirs current before.
        by_user: whether its kernels are the user's own. Nobody prints them, and what a launch needs is in the text.
    """

    name: str
    ending: str = "txt"
    called_once: bool = False
    only_addresses: bool = True
    linked: bool = False
    is_triton: bool = False
    on_current_device: bool = True
    by_user: bool = False


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """A device type as the compiler sees it. Each fact has the value that is right for any device, but slow on some.

    Fields:
        device_type: torch's name: "cpu", "cuda", or what a vendor's package has registered with torch.
        kernel_language: the language of generated kernels; "" where operators are only called.
        alignment: bytes that allocations and offsets in pools are multiples of, a power of two.
        memory_spaces: the names of memory that a tensor type may carry; "" is what torch allocates.
        prefer_extern: overloads ("aten.mm.default") that are called although there are rules to generate them.
        indexed: whether there may be several devices of the type, told apart by an index.
        streams: whether work is queued on streams, so that what a model puts on several runs at the same time. Else a
            call has run when it returns.
        wide: whether a kernel needs thousands of elements at once to keep the device busy, as a GPU does: long rows are
            then cut into parts, and a kernel with few rows takes no whole tensors along. Else few threads walk over it.
        channels_last: dtypes in which convolutions of images are faster with channels last.
        activated_products: dtypes in which a library adds a bias to a product of matrices and applies relu, or the tanh
            form of GELU, before it writes it, and computes them at least as exactly as they are stored.
        aligned_products: dtypes in which products of matrices are several times as fast where the lengths of rows are
            multiples of ROW_ALIGNMENT.
        separate_biases: dtypes in which a library takes longer for a product with a bias than a kernel that reads the
            product takes to add it.
        joined_products: bytes of a matrix that take less to copy than one product of two small matrices costs besides
            its arithmetic; 0 where products of one tensor with several matrices are never computed as one.
        joined_launches: bytes that kernels read and write in the time that it takes to launch one: the launches of
            kernels that move no more are joined, where they are alike and their language has a `Joiner`; 0 for none.
        instructions_per_byte: how many instructions on each element of a large tensor the device does while it moves
            a byte of each; 0 where caches make that hard to say. With it, cheap tensors are computed again rather than
            stored, and slow functions of few elements are tables.
        raises: whether a launch raises where a kernel's requirement does not hold. Else it fails on the device.
        rounds_as_cpu: whether operators of torch's on the device compute as those for CPUs do: numbers are rounded to a
            tensor's dtype, `arange` counts in float64, and what is added to one place is added in order.
        all_atomics: whether kernels can combine into one element in every mode and dtype. Else there is no product, and
            no integer below 4 bytes.
        zeros_blind_rows: whether torch's kernels of attention give zeros for rows that a mask lets see nothing.
        saves_batch_norm: whether batch norm's forward keeps memory for the backward of another library.
        replays: whether work on the device can be recorded and replayed (CUDA graphs), by its runtime's `recorder`.
        pools: whether an allocation takes longer than emitted C++ takes to cut a tensor out of a pool.
        random_state_bytes: the length of the state of the device's generator; None where programs cannot keep it.
    """

    device_type: str
    kernel_language: str
    alignment: int = 64
    memory_spaces: tuple[str, ...] = ("",)
    prefer_extern: frozenset[str] = frozenset()
    indexed: bool = True
    streams: bool = True
    wide: bool = False
    channels_last: frozenset[torch.dtype] = frozenset()
    activated_products: frozenset[torch.dtype] = frozenset()
    aligned_products: frozenset[torch.dtype] = frozenset()
    separate_biases: frozenset[torch.dtype] = frozenset()
    joined_products: int = 0
    joined_launches: int = 0
    instructions_per_byte: int = 0
    raises: bool = False
    rounds_as_cpu: bool = False
    all_atomics: bool = False
    zeros_blind_rows: bool = False
    saves_batch_norm: bool = False
    replays: bool = False
    pools: bool = False
    random_state_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.alignment < 1 or self.alignment & (self.alignment - 1):
            raise ValueError(f"the alignment of {self.device_type} is a power of two, not {self.alignment}")

    def text(self) -> str:
        """Returns the facts that are not at their default, in order: equal specs have equal texts."""
        fields = [(item, getattr(self, item.name)) for item in dataclasses.fields(self)]
        said = [f"{item.name}={_text(given)}" for item, given in fields if given != item.default]
        return f"DeviceSpec({', '.join(said)})"


def _text(given: object) -> str:
    return str(sorted(map(str, given))) if isinstance(given, frozenset) else repr(given)


ROW_ALIGNMENT = 16
"""Bytes that the length of a matrix's rows is a multiple of where libraries are fast."""

_HALF = frozenset({torch.float16, torch.bfloat16})

CPP = KernelLanguage("cpp", ending="cpp", called_once=True, linked=True, on_current_device=False)
TRITON = KernelLanguage("triton", ending="py", is_triton=True)
USER_TRITON = KernelLanguage("user_triton", ending="py", only_addresses=False, is_triton=True, by_user=True)

CPU = DeviceSpec(
    "cpu", CPP.name, alignment=64, indexed=False, streams=False, channels_last=_HALF | {torch.float32}, raises=True,
    rounds_as_cpu=True, all_atomics=True, zeros_blind_rows=True, random_state_bytes=5056,
)  # fmt: skip
CUDA = DeviceSpec(
    "cuda", TRITON.name, alignment=512, wide=True, channels_last=_HALF,  # tensor cores; float32 is as fast either way
    activated_products=_HALF, aligned_products=_HALF, separate_biases=frozenset({torch.float32}),
    joined_products=2 << 20, joined_launches=4 << 20, instructions_per_byte=4, saves_batch_norm=True, replays=True,
    pools=True, random_state_bytes=16,
)  # fmt: skip

DEVICE_SPECS: tuple[DeviceSpec, ...] = (CPU, CUDA)
"""The devices that fxwrap itself registers."""
