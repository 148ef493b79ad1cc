"""Traits of matmuls: where those of a library are faster, and where generated ones are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch

Dtypes: TypeAlias = frozenset[torch.dtype]
SizesByDtype: TypeAlias = tuple[tuple[torch.dtype, int], ...]

ROW_ALIGNMENT = 16
"""Bytes to which GEMM libraries want row lengths aligned."""


@dataclass(frozen=True, slots=True)
class GemmPaddingCosts:
    """The cost model of padded matmuls. All figures are in bytes that the device copies in the same time.

    Fields:
        saved_bytes_per_operation: what aligned rows save for each multiplication and each addition.
        copy_overhead_bytes: the fixed cost of a copy.
        min_saved_bytes: the least saving for which a matmul is padded.
        chunk_column_multiple: the columns of a chunk of a result that is computed and copied chunk by chunk are a
            multiple of this.
        target_chunks: about how many chunks there are: more chunks need less memory and use the device less well.
    """

    saved_bytes_per_operation: float = 1 / 32
    copy_overhead_bytes: int = 10_000_000
    min_saved_bytes: int = 3_000_000
    chunk_column_multiple: int = 2048
    target_chunks: int = 8

    def saved_bytes(self, rows: int, columns: int, products: int) -> float:
        """Returns the saving of a matmul whose sums have so many products."""
        return 2.0 * rows * columns * products * self.saved_bytes_per_operation


@dataclass(frozen=True, slots=True)
class MatmulTraits:
    """Traits of matmuls.

    Fields:
        epilogue_dtypes: dtypes in which a library fuses a bias with relu or the tanh form of GELU as the epilogue of a
            GEMM, computed at least as exactly as the result is stored.
        padding_dtypes: dtypes in which matmuls are several times faster with row lengths that are multiples of
            ROW_ALIGNMENT.
        padding_costs: the cost model that decides which matmuls are padded.
        unfused_bias_dtypes: dtypes in which a matmul with a bias is slower than one followed by a kernel that adds it.
        generated_rows: by dtype, the largest number of rows with which generated matmuls are faster than a library's:
            of one row, or with a matrix of at least `generated_bytes`.
        generated_bytes: the least bytes of the matrix of several rows. Matrices that multiply the same rows count
            together where their launches are combined.
        generated_dequantised_rows: the same for matrices that are computed from tensors of at most 3/4 of their bytes,
            as those of quantised weights.
        dequantised_packed_rows: by operator of packed weights (`aten._weight_int4pack_mm.default`), the number of rows
            from which a matmul of dequantised weights is faster than the library's call; without it the call stays.
        generated_unaligned_products: by dtype, the largest number of products of a sum with which a generated matmul
            that stores unaligned rows is faster than a library's with padded rows, which are then copied.
        generated_grouped_rows: by dtype, the largest average number of rows of a group with which generated grouped
            matmuls are faster than a library's; at most 4 where columns of matrices are not contiguous.
        described_grouped_rows: by dtype, the least and the largest of such numbers, beyond these, with which they are
            faster if tensor descriptors load their operands (`DeviceSpec.supports_tensor_descriptors`).
        accumulated_dtypes: dtypes in which a library's GEMM that adds to a matrix in place is faster than a kernel that
            adds after it; `autotune` times both.
        grouped_dtypes: dtypes in which a library has grouped matmuls, which loops over experts become.
        stacked_expert_bytes: the bytes of an expert's own weights whose copy into a stack of all, in each call, takes
            less time than the launches that a grouped matmul saves; 0 never stacks them.
        sorted_expert_dtypes: dtypes in which loops over experts without grouped matmuls become matmuls of each expert
            on sorted rows, for whose numbers the host waits once.
        prepacked_dtypes: dtypes in which matmuls of frozen weights are faster with these in the library's layout.
        biased_linear_dtypes: dtypes in which a library's linear layer, which adds a bias to its accumulators, is faster
            than `aten.addmm`, which copies it into the result.
        packed_bytes: bytes of weights whose copy costs less than one more launch of a small GEMM; 0 never packs matmuls
            of one tensor with several weights.
        flops_per_s: the floating-point operations per second by dtype, for `fxwrap.profile`; those of other dtypes are
            measured.
    """

    epilogue_dtypes: Dtypes = frozenset()
    padding_dtypes: Dtypes = frozenset()
    padding_costs: GemmPaddingCosts = GemmPaddingCosts()
    unfused_bias_dtypes: Dtypes = frozenset()
    generated_rows: SizesByDtype = ()
    generated_bytes: int = 0
    generated_dequantised_rows: SizesByDtype = ()
    dequantised_packed_rows: tuple[tuple[str, int], ...] = ()
    generated_unaligned_products: SizesByDtype = ()
    generated_grouped_rows: tuple[tuple[torch.dtype, float], ...] = ()
    described_grouped_rows: tuple[tuple[torch.dtype, tuple[int, int]], ...] = ()
    accumulated_dtypes: Dtypes = frozenset()
    grouped_dtypes: Dtypes = frozenset()
    stacked_expert_bytes: int = 0
    sorted_expert_dtypes: Dtypes = frozenset()
    prepacked_dtypes: Dtypes = frozenset()
    biased_linear_dtypes: Dtypes = frozenset()
    packed_bytes: int = 0
    flops_per_s: tuple[tuple[torch.dtype, float], ...] = ()

    def generates(self, dtype: torch.dtype, rows: object, matrix_bytes: object = None) -> bool:
        """Whether kernels are faster than a library for so many rows times one matrix of so many bytes.

        `matrix_bytes` is None for other matmuls, such as batches of matrices.
        """
        if not isinstance(rows, int) or rows > dict(self.generated_rows).get(dtype, 0):
            return False
        return rows <= 1 or (isinstance(matrix_bytes, int) and matrix_bytes >= self.generated_bytes)

    def generates_unaligned(self, dtype: torch.dtype, rows: object, columns: object, products: object) -> bool:
        """Whether a kernel is faster than a library's matmul with padded rows of the result, which are then copied.

        `products` is the number of products of a sum; symbolic rows count as their hint. Other sizes that are no
        integers are never generated.
        """
        if not isinstance(rows, int) or not isinstance(columns, int) or not isinstance(products, int):
            return False
        is_unaligned = columns > 1 and columns * dtype.itemsize % ROW_ALIGNMENT != 0
        is_large = self.padding_costs.saved_bytes(rows, columns, products) >= self.padding_costs.min_saved_bytes
        return is_unaligned and is_large and products <= dict(self.generated_unaligned_products).get(dtype, 0)
