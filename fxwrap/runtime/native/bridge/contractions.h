// Contractions: tiles of sums of products, whose accumulators stay in registers.
#pragma once

#include "kernel_reductions.h"
#include "kernel_tiles.h"

// A tile of a product of matrices holds one vector of accumulators for each of its elements in registers.
#ifdef __AVX512F__
constexpr int VECTOR_BYTES = 64, VECTOR_COLUMNS = 4, TILE_ACCUMULATORS = 28, MAX_GROUP_ROWS = 8;
#else
constexpr int VECTOR_BYTES = 32, VECTOR_COLUMNS = 2, TILE_ACCUMULATORS = 12, MAX_GROUP_ROWS = 4;
#endif
// Vectors of the processor's registers. Accumulators are such values: as arrays, compilers would keep them in memory.
template <class T> struct Vector {
  typedef T Type __attribute__((vector_size(VECTOR_BYTES), aligned(sizeof(T)), may_alias));
  static constexpr int elements = VECTOR_BYTES / sizeof(T);
};

// Asks for the line of an element, for the second cache. GCC takes functions that only call __builtin_prefetch for ones
// without effects, and omits calls that are not inlined at once.
template <class T> INLINE void prefetch_line(const T* at) {
#if defined(__x86_64__)
  asm volatile("prefetcht1 %0" ::"m"(*reinterpret_cast<const char*>(at)));
#else
  __builtin_prefetch(at, 0, 2);
#endif
}

// A vector in a register: compilers would load it again for each product.
template <class V> INLINE V in_register(V value) {
#if defined(__AVX512F__)
  asm("" : "+v"(value));
#elif defined(__AVX__)
  asm("" : "+x"(value));
#endif
  return value;
}

// The rows that are multiplied at a time, of so many rows of a tile: about as many each time, and no more than leave
// registers for the accumulators of three columns.
constexpr int group_rows(int rows) {
  const int groups = (rows + MAX_GROUP_ROWS - 1) / MAX_GROUP_ROWS;
  return (rows + groups - 1) / groups;
}

// The columns that are multiplied at a time by a group of so many rows. Each column is read as a stream of its own, and up
// to eight of them use the memory better than one.
constexpr int columns_at_once(int group) {
  const int columns = TILE_ACCUMULATORS / group;
  return columns > 8 ? 8 : columns < 3 ? 3 : columns == 7 ? 6 : columns;
}

// The columns of a tile, for all of which a part of the rows is read from the nearest cache. Few rows fit it as a whole.
constexpr int tile_columns(int group) { return columns_at_once(group) * (group > 4 ? 4 : 1); }

template <int number> struct Constant {
  constexpr operator int() const { return number; }
};

// Runs body(Constant<size>, start) for tiles of `size` elements, and for the rest in tiles of `rest` elements.
template <int size, int rest, class Body> INLINE void for_tiles(int64_t count, Body body) {
  int64_t start = 0;
  for (; start + size <= count; start += size) body(Constant<size>{}, start);
  for (; start < count; start += rest) body(Constant<rest>{}, start);
}

// a * b + c, rounded once where the processor can.
INLINE float multiply_add(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
INLINE double multiply_add(double a, double b, double c) { return __builtin_fma(a, b, c); }
template <class V> INLINE V multiply_add(V a, V b, V c) {
  using T = decltype(a[0] + a[0]);
#if __has_builtin(__builtin_elementwise_fma)
  return __builtin_elementwise_fma(a, b, c);
#elif defined(__AVX512F__) && __has_builtin(__builtin_ia32_vfmaddps512_mask)
  if constexpr (sizeof(T) == 4) return __builtin_ia32_vfmaddps512_mask(a, b, c, -1, 4);
  else return __builtin_ia32_vfmaddpd512_mask(a, b, c, -1, 4);
#elif defined(__FMA__) && __has_builtin(__builtin_ia32_vfmaddps256)
  if constexpr (sizeof(T) == 4) return __builtin_ia32_vfmaddps256(a, b, c);
  else return __builtin_ia32_vfmaddpd256(a, b, c);
#else
  for (int lane = 0; lane < int(VECTOR_BYTES / sizeof(T)); ++lane) c[lane] = multiply_add(T(a[lane]), T(b[lane]), T(c[lane]));
  return c;
#endif
}

// Sums of products of rows and columns: sum[i][j] is the sum of row(i, k) * column(j, k) over k. Rows are multiplied in
// groups of `group`, by a few columns at a time, whose elements are computed once for each group. That goes along a part of
// the terms, so that the rows' part stays in the nearest cache for all columns.
template <class T, int rows, int columns, int group> struct ProductTile {
  using V = typename Vector<T>::Type;
  static constexpr int lanes = Vector<T>::elements;
  static constexpr int64_t PART = 512;  // terms that one set of accumulators adds, for the accuracy of long sums
  static constexpr int width = columns < columns_at_once(group) ? columns : columns_at_once(group);
  static_assert(columns % width == 0);
  T sum[rows][columns];  // complete after finish()
  V total[rows][columns];  // what each lane has added
  INLINE ProductTile() {
    for (int i = 0; i < rows; ++i)
      for (int j = 0; j < columns; ++j) sum[i][j] = 0, total[i][j] = V{};
  }
  // Adds `count` products. Row i is at row + i * stride; `column(j, k)` computes an element of a column, for `vectors`
  // vectors at a time: as many as the elements in memory are narrower than T. `prefetch(j, k)` asks for an element that is
  // read later, from `columns` on of the next tile.
  template <int vectors, class Column, class Prefetch>
  INLINE void add(int64_t count, const T* row, int64_t stride, Column column, Prefetch prefetch) {
    constexpr int size = group < rows ? group : rows, rest = rows % size;
    const auto nothing = [](int, int64_t) {};
    for (int64_t start = 0; start < count; start += PART) {
      const int64_t end = fxwrap::min(count, start + PART);
      for (int first = 0; first < columns; first += width) {
        const bool is_last = first + width == columns;
        const int next = !is_last ? first + width : end < count ? 0 : columns;
        const int64_t ahead = !is_last ? 0 : end < count ? PART : -start;
        add_group<size, vectors>(start, end, row, stride, total, first, column,
                                 [&](int j, int64_t k) { prefetch(next + j, k + ahead); });
        for (int i = size; i + size <= rows; i += size)
          add_group<size, vectors>(start, end, row + i * stride, stride, total + i, first, column, nothing);
        if constexpr (rest != 0) {
          constexpr int i = rows - rest;
          add_group<rest, vectors>(start, end, row + i * stride, stride, total + i, first, column, nothing);
        }
      }
    }
    constexpr int step = vectors * lanes;
    for (int64_t k = count - count % step; k < count; ++k)
      for (int j = 0; j < columns; ++j) {
        const T value = column(j, k);
        for (int i = 0; i < rows; ++i) sum[i][j] = multiply_add(row[i * stride + k], value, sum[i][j]);
      }
  }
  // Adds the lanes to the sums, once after all products.
  INLINE void finish() {
    for (int i = 0; i < rows; ++i)
      for (int j = 0; j < columns; ++j) {
        T at[lanes];
        for (int lane = 0; lane < lanes; ++lane) at[lane] = total[i][j][lane];
        fold<lanes / 2>(at, combine::sum);
        sum[i][j] += at[0];
      }
  }

 private:
  template <int height, int vectors, class Column, class Prefetch>
  INLINE static void add_group(int64_t start, int64_t end, const T* row, int64_t stride, V (*total)[columns], int first,
                               Column column, Prefetch prefetch) {
    constexpr int step = vectors * lanes;
    V partial[height][width] = {};
    for (int64_t k = start; k + step <= end; k += step) {
      T values[width][step];
#pragma GCC unroll 64
      for (int j = 0; j < width; ++j) {
        prefetch(j, k);
#pragma omp simd
        for (int lane = 0; lane < step; ++lane) values[j][lane] = column(first + j, k + lane);
      }
#pragma GCC unroll 64
      for (int vector = 0; vector < vectors; ++vector)
#pragma GCC unroll 64
        for (int i = 0; i < height; ++i) {
          const V left = in_register(*reinterpret_cast<const V*>(row + i * stride + k + vector * lanes));
#pragma GCC unroll 64
          for (int j = 0; j < width; ++j) {
            const V right = *reinterpret_cast<const V*>(&values[j][vector * lanes]);
            partial[i][j] = multiply_add(left, right, partial[i][j]);
          }
        }
    }
#pragma GCC unroll 64
    for (int i = 0; i < height; ++i)
#pragma GCC unroll 64
      for (int j = 0; j < width; ++j) total[i][first + j] += partial[i][j];
  }
};

// --- matrix instructions ----------------------------------------------------------------------------------------------

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

// Rows of bfloat16 in the form in which tiles of `height` rows multiply them: blocks of 32 terms, in which each pair of
// terms of all rows is a line; or floats, without matrix instructions.
template <int height> struct MatrixRows {
  static constexpr int BLOCK = MATRIX_LINES * MATRIX_LINES;
  int64_t count, blocks;
  bool packed;
  PartialResults<uint32_t> memory;
  uint32_t* start;  // of a line of the cache
  INLINE MatrixRows(const bfloat16* row, int64_t stride, int64_t rows, int64_t count)
      : count(count), blocks((count + MATRIX_TERMS - 1) / MATRIX_TERMS), packed(has_matrix_instructions()),
        memory((packed ? (rows + height - 1) / height * blocks * BLOCK : rows * count) + MATRIX_LINES),
        start(reinterpret_cast<uint32_t*>((reinterpret_cast<uint64_t>(memory.at) + 63) & ~uint64_t(63))) {
    if (packed) {
      for (int64_t first = 0; first < rows; first += height)
        for (int64_t k = 0; k < count; k += MATRIX_TERMS)
          pack(row + first * stride + k, stride, fxwrap::min<int64_t>(rows - first, height), count - k, block(first, k));
      return;
    }
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t k = 0; k < count; ++k) floats()[i * count + k] = Cast<float, bfloat16>::of(row[i * stride + k]);
  }
  INLINE float* floats() const { return reinterpret_cast<float*>(start); }
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
  template <int height>
  INLINE MatrixTile(const MatrixRows<height>& left, int64_t first, const bfloat16* column, int64_t stride, int limit) {
#if MATRIX_TILES
    if (left.packed) {
      multiply_blocks(left.block(first, 0), left.count, column, stride, limit);
      return;
    }
#endif
    constexpr int width = MATRIX_TILES ? 1 : columns;
    const float* row = left.floats() + first * left.count;
    int start = 0;
    for (; start + width <= limit; start += width) multiply<width>(row, left.count, column, stride, start);
    for (; start < limit; ++start) multiply<1>(row, left.count, column, stride, start);
  }

 private:
  template <int width>
  INLINE void multiply(const float* row, int64_t count, const bfloat16* column, int64_t stride, int start) {
    const auto at = [&](int j, int64_t k) { return column + (start + j) * stride + k; };
    ProductTile<float, rows, width, group> tile;
    tile.template add<2>(count, row, count, [&](int j, int64_t k) { return Cast<float, bfloat16>::of(*at(j, k)); },
                         [&](int j, int64_t k) { prefetch_line(at(j, k)); });
    tile.finish();
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
    for (int64_t k = 0; k < whole; k += MATRIX_TERMS, block += MatrixRows<rows>::BLOCK)
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
