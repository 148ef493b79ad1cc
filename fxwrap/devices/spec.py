"""Traits of kernel languages and capabilities of device types; the compiler reads these instead of names."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fxwrap.devices.matmul_traits import Dtypes, MatmulTraits, SizesByDtype
from fxwrap.torch_compat import multiplies_bfloat16_matrices, multiplies_bfloat16_pairs, multiplies_bytes_exactly

WARP_LANES = 32
"""The threads of a warp, for which Triton's kernels are printed."""


@dataclass(frozen=True, slots=True)
class KernelLanguage:
    """Traits of a kernel language for passes and emitters.

    Fields:
        name: the `language` of its kernels in a program.
        file_extension: of a file with a kernel's source, without the dot.
        gridless: a launch calls the kernel once, with the grid (1, 1, 1); other kernels run at each point of a grid.
        raw_pointer_arguments: printed kernels read only the data pointer of a tensor, so that any tensor with the same
            data pointer may replace it.
        links_into_cpp: sources are C++ functions that emitted C++ links and calls.
        is_triton: sources are Triton's; emitted graphs launch them by torch's operator for Triton kernels.
        needs_device_guard: a launch runs on the current device instead of the tensors' device.
        user_defined: kernels are the user's; they have no printer, and their source has all that a launch needs.
        takes_regions: the printer takes the region of a kernel, the ATen operators that it computes
            (`printers.KernelRequest.region`); operators of a kernel without one are called.
    """

    name: str
    file_extension: str = "txt"
    gridless: bool = False
    raw_pointer_arguments: bool = True
    links_into_cpp: bool = False
    is_triton: bool = False
    needs_device_guard: bool = True
    user_defined: bool = False
    takes_regions: bool = False


# --- traits of operators --------------------------------------------------------------------------------------------
# Each default is correct for any device. Sizes are by dtype.


@dataclass(frozen=True, slots=True)
class ConvolutionLayoutCosts:
    """The cost model of channels-last convolutions, in bytes that a library reorders around a convolution.

    Fitted to run times of the convolutions of ResNet-50 and MobileNet on CPUs, in float32 and bfloat16.

    Fields:
        copied_byte: the cost of copying a byte to another layout.
        reorder_overhead_bytes: the fixed cost of reordering around a convolution.
        products_per_byte: the products of overlapping windows that channels-last kernels save such a byte's time in.
    """

    copied_byte: float = 1.3
    reorder_overhead_bytes: int = 65536
    products_per_byte: int = 32


_SHARING_WINDOWS = (4, 5, 6, 7, 8)
"""The numbers of neighbouring windows whose shared loads make a kernel of these faster than a library's."""


@dataclass(frozen=True, slots=True)
class ConvolutionTraits:
    """Traits of convolutions of images.

    Fields:
        channels_last_dtypes: dtypes in which they are faster in channels-last layout.
        layout_costs: the cost model that decides which of these get the layout.
        patch_matmul_widths: by dtype, the least width of a kernel as large as its strides that is faster as a matmul.
        pointwise_matmul_dtypes: dtypes in which convolutions of sequences by single elements are faster as matmuls.
        unfused_bias_dtypes: dtypes in which a library adds biases, and sums their gradients, in passes of its own.
        prepacked_dtypes: dtypes in which frozen weights are prepacked; batch norms are then folded into them.
        depthwise_windows: by dtype, the most elements of a window with which results of depthwise convolutions, the
            gradients of their images, and those of their weights are kernels.
    """

    channels_last_dtypes: Dtypes = frozenset()
    layout_costs: ConvolutionLayoutCosts = ConvolutionLayoutCosts()
    patch_matmul_widths: SizesByDtype = ()
    pointwise_matmul_dtypes: Dtypes = frozenset()
    unfused_bias_dtypes: Dtypes = frozenset()
    prepacked_dtypes: Dtypes = frozenset()
    depthwise_windows: tuple[tuple[torch.dtype, tuple[int, int, int]], ...] = ()

    def generates_depthwise(
        self,
        dtype: torch.dtype,
        image: Sequence[Any],
        filters: Sequence[Any],
        groups: int,
        transposed: bool,
        results: Sequence[bool],
    ) -> bool:
        """Whether a convolution is depthwise, and kernels compute its result or the gradients of image and weight.

        Each is faster by windows that share loads along a dimension, which some numbers of elements divide. Those with
        symbolic sizes, but for the batch, are not.

        Args:
            dtype: the dtype of the image.
            image: its sizes (batch, channels, ...).
            filters: those of the weight (outputs, channels of a group, ...).
            groups: the number of groups of channels.
            transposed: whether the convolution is a transposed one.
            results: which of the result and the gradients of the image and of the weight are computed.
        """
        (_, channels, *sides), (outputs, _, *window) = image, filters
        if not all(type(size) is int for size in (channels, outputs, *sides, *window)):
            return False
        is_depthwise = not transposed and groups != 1 and channels == groups == outputs
        limits = dict(self.depthwise_windows).get(dtype, (0, 0, 0))
        limit = min([limit for limit, is_computed in zip(limits, results, strict=True) if is_computed], default=0)
        is_shared = any(size % count == 0 for size in sides for count in _SHARING_WINDOWS)
        return is_depthwise and is_shared and math.prod(window) <= limit


@dataclass(frozen=True, slots=True)
class AttentionTraits:
    """Traits of attention. Sizes are numbers of query rows and of keys.

    Fields:
        streaming_sizes: by dtype, the least sizes with which attention that is written as its formula is faster as one
            kernel than as two matmuls and a kernel between them.
        streaming_backward_sizes: the same for forward and backward of training together.
        streaming_backward_width: the widest heads with which that is so.
        streaming_bias_width: the widest heads with which kernels are faster than a library's attention with a bias.
        streaming_mask_rows: by dtype, the largest sizes with which forward and backward of training are faster than a
            library's attention with a mask that needs no gradient.
        streaming_dropout_sizes: the same as for forward and backward together for formulas with dropout, whose mask is
            in memory.
        decoding_rows: by dtype, the largest number of query rows of all heads that share a key head with which
            attention is faster as one kernel than as a library's. Massively parallel devices split keys instead.
        decoding_keys: the least number of keys with which few query rows are such a kernel, or are split over keys.
        library_sizes: by dtype, the least sizes with which a library's attention is faster than both where scores have
            no bias and no mask.
        zeroes_fully_masked_rows: torch's attention kernels return zeros for fully masked rows.
    """

    streaming_sizes: SizesByDtype = ()
    streaming_backward_sizes: SizesByDtype = ()
    streaming_backward_width: int = 512
    streaming_bias_width: int = 512
    streaming_mask_rows: SizesByDtype = ()
    streaming_dropout_sizes: SizesByDtype = ()
    decoding_rows: SizesByDtype = ()
    decoding_keys: int = 512
    library_sizes: SizesByDtype = ()
    zeroes_fully_masked_rows: bool = False


@dataclass(frozen=True, slots=True)
class CollectiveTraits:
    """Traits of collectives.

    Fields:
        latency_s: the seconds that a collective of a few bytes takes.
        bytes_per_s: the bytes of a large collective's larger side per second. Collectives are bucketed up to
            `bucket_bytes`; 0 never buckets them.
        coalesced: the functional collectives ("all_reduce") whose coalesced form process groups run as one.
        captured: captured work may contain collectives; the capturer decides for which process groups.
    """

    latency_s: float = 0.0
    bytes_per_s: float = 0.0
    coalesced: frozenset[str] = frozenset()
    captured: bool = False

    @property
    def bucket_bytes(self) -> int:
        """The size up to which collectives become one: larger buckets gain less than a tenth of the time."""
        return collective_bucket_bytes(self.latency_s, self.bytes_per_s)


def collective_bucket_bytes(latency_s: float, bytes_per_s: float) -> int:
    """Returns the bytes of a collective of whose time the latency is a tenth."""
    return int(10 * latency_s * bytes_per_s)


# --- devices --------------------------------------------------------------------------------------------------------

_MATMULS = MatmulTraits()

SYMMETRIC_MEMORY = "symmetric"
"""The memory spaces "symmetric:GROUP", one for each process group: memory that all ranks of the group can access."""


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """Capabilities of a device type. Each default is correct for any device, but slow on some.

    A compile whose inputs are on a device of this machine reads some fields from it, by the runtime's `read_limits`:
    `multiprocessors`, `shared_memory_bytes`, `supports_tensor_descriptors`. For others they are those of the spec.

    Fields:
        device_type: torch's name: "cpu", "cuda", or a name that a vendor's package registered with torch.
        kernel_language: the language of generated kernels; "" for extern calls only.
        alignment: bytes to which allocations and pool offsets are aligned, a power of two.
        memory_spaces: memory spaces that a tensor type may have; "" is the one that torch allocates in, and
            SYMMETRIC_MEMORY those of process groups whose ranks access each other's memory.
        prefer_extern_ops: overloads ("aten.mm.default") that stay extern calls although they have lowering rules.
        supports_multiple_devices: there may be several devices of the type, identified by an index.
        supports_streams: work is queued on streams and may overlap. Without it, a call has run when it returns.
        massively_parallel: a kernel needs thousands of elements at once to occupy the device, like a GPU: long
            reductions are split, and kernels with few rows do not fuse whole tensors. Otherwise few threads loop.
        multiprocessors: the processors of a massively parallel device, which run programs of a kernel side by side.
            Blocks of kernels, parts of long rows and of keys, and combined or dependent launches follow from it.
        registers: the 32-bit registers of such a processor, which the programs that it runs share.
        shared_memory_bytes: the most shared memory of a program of a kernel: configurations that need more are left
            out, or made smaller. By default an H100's; 101,376 for compute capability 8.6 and 8.9.
        cache_bytes: the bytes of a massively parallel device's last cache. Programs of a matmul go through blocks of
            rows that fit a part of it. By default about an H100's.
        min_program_bytes: the bytes that a program should move at least: those that move while the device starts one.
        matmuls: where a library's or generated matmuls are faster, and which rewrites of them.
        convolutions: the layouts and rewrites with which convolutions are faster.
        attention: where kernels of attention are faster than a library's.
        collectives: the costs of collectives, and which of them run as one.
        combo_kernel_bytes: bytes that kernels move in the time of one launch: similar kernels up to this size, and on
            massively parallel devices others, become combo kernels where the language has a `KernelCombiner`; 0 for
            none.
        combo_large_kernels: the number of larger similar kernels that one launch runs faster; below 2 for none.
        supports_dependent_launch: kernels of the language may start before the launch before them has ended
            (programmatic dependent launch) where the option `dependent_launch` asks for it. Devices without the feature
            run the same kernels one after the other.
        supports_tensor_descriptors: one instruction loads a block of a matrix that a descriptor describes (compute
            capability 9.0 or more).
        instructions_per_byte: instructions per element of a large tensor in the time to move one byte of each; 0 where
            caches make that unpredictable. It enables recomputation of cheap tensors and tables of slow functions.
        asserts_raise: a failed assertion in a kernel raises at its launch. Otherwise it fails on the device.
        cpu_rounding: torch's operators compute as on the CPU: scalars are rounded to a tensor's dtype, `arange` counts
            in float64, and additions into one element are ordered.
        supports_all_atomics: kernels have atomics for all modes and dtypes. Otherwise products and integers below
            4 bytes are missing.
        float8_kernels: kernels access float8 tensors, as bytes. Otherwise operators on them are called.
        reserves_batch_norm_state: batch norm's forward reserves memory for a library's backward.
        supports_graph_capture: work can be captured and replayed (CUDA graphs) by the runtime's `graph_capturer`.
        prefers_memory_pools: an allocation takes longer than a slice of a pool in emitted C++.
        random_state_bytes: the size of the generator's state; None where programs cannot save it.
        memory_bytes_per_s: the bytes that the device reads and writes per second, for `fxwrap.profile`, and for
            autotuning, which times no kernel that takes about as long as a launch. Where it is 0, profiles measure it,
            and autotuning counts that of a large GPU.
        counted_sort_elements: the most integers that are sorted by counting in less time; half as many of 1 or 2 bytes.
    """

    device_type: str
    kernel_language: str
    alignment: int = 64
    memory_spaces: tuple[str, ...] = ("",)
    prefer_extern_ops: frozenset[str] = frozenset()
    supports_multiple_devices: bool = True
    supports_streams: bool = True
    massively_parallel: bool = False
    multiprocessors: int = 132
    registers: int = 65536
    shared_memory_bytes: int = 227 << 10
    cache_bytes: int = 48 << 20
    min_program_bytes: int = 4096
    matmuls: MatmulTraits = _MATMULS
    convolutions: ConvolutionTraits = ConvolutionTraits()
    attention: AttentionTraits = AttentionTraits()
    collectives: CollectiveTraits = CollectiveTraits()
    combo_kernel_bytes: int = 0
    combo_large_kernels: int = 0
    supports_dependent_launch: bool = False
    supports_tensor_descriptors: bool = False
    instructions_per_byte: int = 0
    asserts_raise: bool = False
    cpu_rounding: bool = False
    supports_all_atomics: bool = False
    float8_kernels: bool = False
    reserves_batch_norm_state: bool = False
    supports_graph_capture: bool = False
    prefers_memory_pools: bool = False
    random_state_bytes: int | None = None
    memory_bytes_per_s: float = 0.0
    counted_sort_elements: int = 0

    def __post_init__(self) -> None:
        if self.alignment < 1 or self.alignment & (self.alignment - 1):
            raise ValueError(f"the alignment of {self.device_type} must be a power of two, not {self.alignment}")

    def generates_grouped(self, kernels: str, dtype: torch.dtype, rows: object, groups: object, columns: bool) -> bool:
        """Whether a grouped matmul is a kernel, with the option `matmul_kernels`: only of static sizes by default.

        `columns` states whether columns of matrices are contiguous.
        """
        if kernels != "auto" or not isinstance(rows, int) or not isinstance(groups, int):
            return kernels == "generated"
        most = dict(self.matmuls.generated_grouped_rows).get(dtype, 0)
        least, highest = dict(self.matmuls.described_grouped_rows).get(dtype, (1, 0))
        is_described = columns and self.supports_tensor_descriptors and groups * least <= rows <= groups * highest
        return is_described or rows <= groups * (most if columns else min(most, 4))

    def text(self) -> str:
        """Returns the fields that differ from those of the built-in device, else from their defaults, in order.

        Equal specs have equal texts: "cuda", "cuda(multiprocessors=108)".
        """
        known = (self.device_type, self.kernel_language)
        base = next((spec for spec in DEVICE_SPECS if (spec.device_type, spec.kernel_language) == known), None)
        texts = _differences(self, base)
        if base is None:
            return f"DeviceSpec({', '.join(texts)})"
        return f"{self.device_type}({', '.join(texts)})" if texts else self.device_type


def _differences(value: object, base: object | None, prefix: str = "") -> list[str]:
    """Returns the fields of a dataclass that differ from those of another one, else from their defaults, in order."""
    assert dataclasses.is_dataclass(value)
    texts: list[str] = []
    for item in dataclasses.fields(value):
        own, other = getattr(value, item.name), item.default if base is None else getattr(base, item.name)
        name = f"{prefix}{item.name}"
        if dataclasses.is_dataclass(own):
            texts += _differences(own, other, f"{name}.")
        elif own != other:
            texts.append(f"{name}={sorted(map(str, own)) if isinstance(own, frozenset) else repr(own)}")
    return texts


_HALF = frozenset({torch.float16, torch.bfloat16})

CPP = KernelLanguage("cpp", file_extension="cpp", gridless=True, links_into_cpp=True, needs_device_guard=False)
TRITON = KernelLanguage("triton", file_extension="py", is_triton=True)
USER_TRITON = KernelLanguage(
    "user_triton", file_extension="py", raw_pointer_arguments=False, is_triton=True, user_defined=True
)
FX = KernelLanguage("fx", gridless=True, raw_pointer_arguments=False, needs_device_guard=False, takes_regions=True)

_BFLOAT16_ROWS = 16 if multiplies_bfloat16_matrices() else 8 if multiplies_bfloat16_pairs() else 1

CPU = DeviceSpec(
    "cpu",
    CPP.name,
    alignment=64,
    supports_multiple_devices=False,
    supports_streams=False,
    convolutions=ConvolutionTraits(
        channels_last_dtypes=_HALF | {torch.float32},
        patch_matmul_widths=((torch.float32, 16), (torch.bfloat16, 16)),
        prepacked_dtypes=frozenset({torch.float32, torch.bfloat16}),
    ),
    matmuls=MatmulTraits(
        generated_rows=((torch.float32, 8), (torch.bfloat16, _BFLOAT16_ROWS)),
        generated_bytes=1 << 18,
        generated_dequantised_rows=((torch.float32, 32), (torch.bfloat16, 32), (torch.float16, 32)),
        generated_grouped_rows=((torch.bfloat16, 1),) if multiplies_bfloat16_pairs() else (),
        grouped_dtypes=frozenset({torch.bfloat16}),
        prepacked_dtypes=frozenset(
            {torch.float32, torch.bfloat16, *([torch.int8] if multiplies_bytes_exactly() else [])}
        ),
        biased_linear_dtypes=frozenset({torch.bfloat16}) if multiplies_bfloat16_matrices() else frozenset(),
    ),
    attention=AttentionTraits(
        streaming_sizes=((torch.float32, 512),),
        streaming_backward_sizes=((torch.float32, 512),),
        streaming_dropout_sizes=((torch.float32, 512),),
        decoding_rows=((torch.float32, 8), (torch.bfloat16, 8)),
        library_sizes=((torch.bfloat16, 512),),
        zeroes_fully_masked_rows=True,
    ),
    asserts_raise=True,
    cpu_rounding=True,
    supports_all_atomics=True,
    float8_kernels=True,
    random_state_bytes=5056,
    collectives=CollectiveTraits(
        latency_s=100e-6,  # Gloo on one host
        bytes_per_s=1e9,
        coalesced=frozenset({"all_gather_into_tensor", "all_reduce"}),
    ),
)
CUDA = DeviceSpec(
    "cuda",
    TRITON.name,
    alignment=512,
    memory_spaces=("", SYMMETRIC_MEMORY),
    massively_parallel=True,
    convolutions=ConvolutionTraits(
        channels_last_dtypes=_HALF,  # tensor cores
        patch_matmul_widths=((torch.float16, 16), (torch.bfloat16, 2)),
        pointwise_matmul_dtypes=_HALF,
        unfused_bias_dtypes=_HALF | {torch.float32},
        depthwise_windows=((torch.bfloat16, (25, 25, 0)), (torch.float32, (49, 25, 0))),
    ),
    matmuls=MatmulTraits(
        epilogue_dtypes=_HALF,
        padding_dtypes=_HALF,
        unfused_bias_dtypes=frozenset({torch.float32}),
        generated_rows=((torch.float16, 16), (torch.bfloat16, 16)),
        generated_bytes=8 << 20,
        generated_dequantised_rows=((torch.bfloat16, 16),),
        dequantised_packed_rows=(("aten._weight_int8pack_mm.default", 1), ("aten._weight_int4pack_mm.default", 8)),
        generated_unaligned_products=((torch.bfloat16, 1024),),
        generated_grouped_rows=((torch.bfloat16, 128),),
        described_grouped_rows=((torch.bfloat16, (256, 352)),),
        grouped_dtypes=frozenset({torch.bfloat16}),
        stacked_expert_bytes=32 << 20,
        sorted_expert_dtypes=_HALF | {torch.float32},
        packed_bytes=2 << 20,
    ),
    attention=AttentionTraits(
        streaming_sizes=((torch.float16, 16), (torch.bfloat16, 16)),
        streaming_backward_sizes=((torch.bfloat16, 32),),
        streaming_backward_width=128,
        streaming_bias_width=64,
        streaming_mask_rows=((torch.bfloat16, 512),),
        streaming_dropout_sizes=((torch.bfloat16, 512),),
        library_sizes=((torch.float16, 512), (torch.bfloat16, 512)),
    ),
    combo_kernel_bytes=4 << 20,
    combo_large_kernels=16,
    supports_dependent_launch=True,
    supports_tensor_descriptors=True,
    instructions_per_byte=4,
    float8_kernels=True,
    reserves_batch_norm_state=True,
    supports_graph_capture=True,
    collectives=CollectiveTraits(
        captured=True,
        latency_s=20e-6,  # NCCL over NVLink
        bytes_per_s=250e9,
        coalesced=frozenset({"all_gather_into_tensor", "all_reduce", "reduce_scatter_tensor"}),
    ),
    prefers_memory_pools=True,
    random_state_bytes=16,
    counted_sort_elements=8192,
)

DEVICE_SPECS: tuple[DeviceSpec, ...] = (CPU, CUDA)
"""The device types that fxwrap registers itself."""
