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
