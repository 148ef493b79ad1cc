// Contractions of bfloat16 matrices: matrix instructions, or products of factors.
#pragma once

#include "factors.h"

// Intel's matrix instructions (AMX) multiply 16 rows by 32 terms of 16 columns at a time: tiles of 16 lines of 64 bytes.
#if defined(__AMX_BF16__) && defined(__AMX_TILE__) && defined(__linux__)
#define MATRIX_TILES 1
#else
#define MATRIX_TILES 0
#endif
constexpr int MATRIX_LINES = 16, MATRIX_TERMS = 32;

// The columns of a tile of bfloat16 matrices whose rows are multiplied in such groups.
constexpr int matrix_columns(int group) { return MATRIX_TILES ? 2 * MATRIX_LINES : tile_columns(group); }

#if MATRIX_TILES
extern "C" long syscall(long, ...) noexcept;
inline int matrix_permission = 0;  // 1 if the process may use matrix instructions, 2 if not, 0 before the system was asked
inline bool has_matrix_instructions() {
  int known = __atomic_load_n(&matrix_permission, __ATOMIC_RELAXED);
  if (known == 0) {
    constexpr long arch_prctl = 158, request_permission = 0x1023, tile_data = 18;
    known = syscall(arch_prctl, request_permission, tile_data) == 0 ? 1 : 2;
    __atomic_store_n(&matrix_permission, known, __ATOMIC_RELAXED);
  }
  return known == 1;
}

// The operand of ldtilecfg. Tiles 0 and 1 are sums of 16 columns each, 2 holds rows, 3 and 4 columns. Only the lines of
// existing columns are loaded and computed.
struct alignas(64) MatrixConfiguration {
  uint8_t palette = 1, unused[15] = {};
  uint16_t bytes[16] = {};
  uint8_t lines[16] = {};
  INLINE explicit MatrixConfiguration(int columns) {
    set(2, MATRIX_LINES);
    for (int tile = 0; tile < 2; ++tile) {
      const int rest = fxwrap::min(columns - tile * MATRIX_LINES, MATRIX_LINES);
      if (rest > 0) set(tile, rest), set(3 + tile, rest);
    }
  }
  INLINE void set(int tile, int count) { bytes[tile] = 64, lines[tile] = uint8_t(count); }
};
#else
inline bool has_matrix_instructions() { return false; }
#endif

// Rows of bfloat16 in the form in which tiles of `height` rows, and of `rest` rows after them, multiply them: blocks of 32
// terms, in which each pair of terms of all rows is a line; or factors, without matrix instructions.
template <int height, int rest> struct MatrixRows {
  static constexpr int BLOCK = MATRIX_LINES * MATRIX_LINES;
  int64_t count, blocks;
  bool packed;
  FactorRows<bfloat16, height, rest> factors;
  PartialResults<uint32_t> memory;
  uint32_t* start;  // of a line of the cache
  INLINE MatrixRows(const bfloat16* row, int64_t stride, int64_t rows, int64_t count)
      : count(count), blocks((count + MATRIX_TERMS - 1) / MATRIX_TERMS), packed(has_matrix_instructions()),
        factors(packed ? 0 : rows, count,
                [=](int64_t i, int64_t g, int64_t k, auto to) { to[0] = row[i * stride + g * FACTOR_PART + k]; }),
        memory(packed ? (rows + height - 1) / height * blocks * BLOCK + MATRIX_LINES : 0),
        start(reinterpret_cast<uint32_t*>((reinterpret_cast<uint64_t>(memory.at) + 63) & ~uint64_t(63))) {
    if (!packed) return;
    for (int64_t first = 0; first < rows; first += height)
      for (int64_t k = 0; k < count; k += MATRIX_TERMS)
        pack(row + first * stride + k, stride, fxwrap::min<int64_t>(rows - first, height), count - k, block(first, k));
  }
  INLINE uint32_t* block(int64_t first, int64_t k) const {
    return start + (first / height * blocks + k / MATRIX_TERMS) * BLOCK;
  }

 private:
  static void pack(const bfloat16* row, int64_t stride, int64_t rows, int64_t terms, uint32_t* to) {
    uint32_t lines[BLOCK] = {};
    const int64_t bytes = fxwrap::min<int64_t>(terms, MATRIX_TERMS) * int64_t(sizeof(bfloat16));
    for (int64_t i = 0; i < rows; ++i) __builtin_memcpy(lines + i * MATRIX_LINES, row + i * stride, uint64_t(bytes));
    transpose_16(lines, MATRIX_LINES, to, MATRIX_LINES);
  }
};

// Sums of products of rows and columns of bfloat16 in float32, for the first `limit` columns.
template <int rows, int columns, int group> struct MatrixTile {
  float sum[rows][columns];
  // Computes the sums of the rows from `first` on. Column j is at column + j * stride.
  template <int height, int rest>
  INLINE MatrixTile(const MatrixRows<height, rest>& left, int64_t first, const bfloat16* column, int64_t stride, int limit) {
#if MATRIX_TILES
    if (left.packed) {
      multiply_blocks(left.block(first, 0), left.count, column, stride, limit);
      return;
    }
#endif
    constexpr int width = MATRIX_TILES ? 1 : columns;
    int start = 0;
    for (; start + width <= limit; start += width) multiply<width>(left.factors, first, column, stride, start);
    for (; start < limit; ++start) multiply<1>(left.factors, first, column, stride, start);
  }

 private:
  template <int width, class Rows>
  INLINE void multiply(const Rows& left, int64_t first, const bfloat16* column, int64_t stride, int start) {
    const auto at = [&](int j, int64_t g, int64_t k) { return column + (start + j) * stride + g * FACTOR_PART + k; };
    const FactorTile<bfloat16, rows, width, group> tile(
        left, first, [&](int j, int64_t g, int64_t k, auto to) { to[0] = *at(j, g, k); },
        [&](int j, int64_t g, int64_t k) { prefetch_line(at(j, g, k)); });
    for (int i = 0; i < rows; ++i)
      for (int j = 0; j < width; ++j) sum[i][start + j] = tile.sum[i][j];
  }
#if MATRIX_TILES
  INLINE void multiply_blocks(const uint32_t* block, int64_t count, const bfloat16* column, int64_t stride, int limit) {
    const MatrixConfiguration configuration(limit);
    const bool has_two = limit > MATRIX_LINES;
    asm volatile("ldtilecfg %0\n\ttilezero %%tmm0" ::"m"(configuration) : "memory");
    if (has_two) asm volatile("tilezero %%tmm1" ::: "memory");
    const int64_t whole = count / MATRIX_TERMS * MATRIX_TERMS;
    for (int64_t k = 0; k < whole; k += MATRIX_TERMS, block += MatrixRows<rows, 1>::BLOCK)
      multiply_block(block, column + k, stride, has_two);
    if (whole < count) {
      alignas(64) bfloat16 rest[columns][MATRIX_TERMS] = {};
      for (int j = 0; j < limit; ++j)
        __builtin_memcpy(rest[j], column + j * stride + whole, uint64_t(count - whole) * sizeof(bfloat16));
      multiply_block(block, rest[0], MATRIX_TERMS, has_two);
    }
    alignas(64) float sums[columns][MATRIX_LINES];
    asm volatile("tilestored %%tmm0, (%0,%1,1)" ::"r"(sums[0]), "r"(int64_t(64)) : "memory");
    if (has_two) asm volatile("tilestored %%tmm1, (%0,%1,1)" ::"r"(sums[MATRIX_LINES]), "r"(int64_t(64)) : "memory");
    asm volatile("tilerelease" ::: "memory");
    for (int j = 0; j < limit; ++j)
      for (int i = 0; i < rows; ++i) sum[i][j] = sums[j][i];
  }
  INLINE static void multiply_block(const uint32_t* block, const bfloat16* column, int64_t stride, bool has_two) {
    const int64_t bytes = stride * int64_t(sizeof(bfloat16));
    asm volatile("tileloadd (%0,%1,1), %%tmm2\n\ttileloadd (%2,%3,1), %%tmm3\n\ttdpbf16ps %%tmm2, %%tmm3, %%tmm0" ::"r"(block),
                 "r"(int64_t(64)), "r"(column), "r"(bytes)
                 : "memory");
    if (has_two)
      asm volatile("tileloadd (%0,%1,1), %%tmm4\n\ttdpbf16ps %%tmm2, %%tmm4, %%tmm1" ::"r"(column + MATRIX_LINES * stride),
                   "r"(bytes)
                   : "memory");
  }
#endif
};
