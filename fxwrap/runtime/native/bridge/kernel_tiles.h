// Tiles of matrices that are transposed: elements are only moved, as integers of their size.
#pragma once

#include "kernel_operations.h"

// Rows and columns of tiles: a multiple of 16, and `most` at most. A row of a tile is two lines of the nearest cache, or one
// on processors of the Zen family, whose nearest cache holds only 8 lines at addresses that agree in their last 12 bits.
constexpr int tile_size(int most, int bytes) {
#if defined(__znver1__) || defined(__znver2__) || defined(__znver3__) || defined(__znver4__) || defined(__znver5__)
  const int size = 64 / bytes;
#else
  const int size = 128 / bytes;
#endif
  return size < 16 ? 16 : size < most ? size : most;
}

// Vectors of four, eight and sixteen elements of so many bytes, which loads and stores move from and to memory of any type.
// They are no templates: GCC drops `may_alias` and `aligned` from the types of templates, and would then move loads of a tile
// before the stores of its rows.
template <int size> struct ElementVectors;
#define ELEMENT_VECTORS(size, element)                                                                   \
  template <> struct ElementVectors<size> {                                                              \
    typedef element Four __attribute__((vector_size(4 * size)));                                         \
    typedef element Eight __attribute__((vector_size(8 * size)));                                        \
    typedef element Sixteen __attribute__((vector_size(16 * size)));                                     \
    typedef element FourAt __attribute__((vector_size(4 * size), aligned(size), may_alias));             \
    typedef element EightAt __attribute__((vector_size(8 * size), aligned(size), may_alias));            \
    typedef element SixteenAt __attribute__((vector_size(16 * size), aligned(size), may_alias));         \
    static INLINE void load(const void* from, Four& to) { to = *static_cast<const FourAt*>(from); }      \
    static INLINE void load(const void* from, Eight& to) { to = *static_cast<const EightAt*>(from); }    \
    static INLINE void load(const void* from, Sixteen& to) { to = *static_cast<const SixteenAt*>(from); } \
    static INLINE void store(const Four& from, void* to) { *static_cast<FourAt*>(to) = from; }           \
    static INLINE void store(const Eight& from, void* to) { *static_cast<EightAt*>(to) = from; }         \
    static INLINE void store(const Sixteen& from, void* to) { *static_cast<SixteenAt*>(to) = from; }     \
  };
ELEMENT_VECTORS(1, uint8_t)
ELEMENT_VECTORS(2, uint16_t)
ELEMENT_VECTORS(4, uint32_t)
ELEMENT_VECTORS(8, uint64_t)
#undef ELEMENT_VECTORS

// Transposes 16 x 16 elements: pairs, then fours of rows are interleaved, then fours of columns change places. Each
// step is one instruction for 32-bit elements.
template <class T> inline void transpose_16(const T* source, int64_t stride, T* target, int64_t target_stride) {
  using Vectors = ElementVectors<sizeof(T)>;
  using Row = typename Vectors::Sixteen;
#define MIX(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
  Row a[16], b[16];
  for (int i = 0; i < 16; ++i) Vectors::load(source + i * stride, a[i]);
  for (int i = 0; i < 16; i += 2) {
    b[i] = MIX(a[i], a[i + 1], 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
    b[i + 1] = MIX(a[i], a[i + 1], 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
  }
  for (int i = 0; i < 16; i += 4)
    for (int k = 0; k < 2; ++k) {
      a[i + 2 * k] = MIX(b[i + k], b[i + k + 2], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
      a[i + 2 * k + 1] = MIX(b[i + k], b[i + k + 2], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    }
  for (int i = 0; i < 16; i += 8)
    for (int k = i; k < i + 4; ++k) {
      b[k] = MIX(a[k], a[k + 4], 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
      b[k + 4] = MIX(a[k], a[k + 4], 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    }
  for (int i = 0; i < 8; ++i) {
    a[i] = MIX(b[i], b[i + 8], 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
    a[i + 8] = MIX(b[i], b[i + 8], 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
  }
#undef MIX
  for (int i = 0; i < 16; ++i) Vectors::store(a[i], target + i * target_stride);
}

// The same of 8 x 8 elements of 64 bits, whose rows are vectors of 64 bytes, too.
template <class T> inline void transpose_8(const T* source, int64_t stride, T* target, int64_t target_stride) {
  using Vectors = ElementVectors<8>;
  using Row = Vectors::Eight;
#define MIX(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
  Row a[8], b[8];
  for (int i = 0; i < 8; ++i) Vectors::load(source + i * stride, a[i]);
  for (int i = 0; i < 8; i += 2) {
    b[i] = MIX(a[i], a[i + 1], 0, 8, 2, 10, 4, 12, 6, 14);
    b[i + 1] = MIX(a[i], a[i + 1], 1, 9, 3, 11, 5, 13, 7, 15);
  }
  for (int i = 0; i < 8; i += 4)
    for (int k = i; k < i + 2; ++k) {
      a[k] = MIX(b[k], b[k + 2], 0, 1, 8, 9, 4, 5, 12, 13);
      a[k + 2] = MIX(b[k], b[k + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    }
  for (int k = 0; k < 4; ++k) {
    b[k] = MIX(a[k], a[k + 4], 0, 1, 2, 3, 8, 9, 10, 11);
    b[k + 4] = MIX(a[k], a[k + 4], 4, 5, 6, 7, 12, 13, 14, 15);
  }
#undef MIX
  for (int i = 0; i < 8; ++i) Vectors::store(b[i], target + i * target_stride);
}

// target[i * target_stride + j] = source[j * stride + i], for i < height and j < width. The last blocks overlap those before
// them.
template <class T>
inline void transpose(const T* source, int64_t stride, int height, int width, T* target, int64_t target_stride) {
  if constexpr (sizeof(T) == 8)
    if (height >= 8 && width >= 8) {
      for (int j = 0; j < width; j += 8)
        for (int i = 0; i < height; i += 8) {
          const int row = fxwrap::min(i, height - 8), column = fxwrap::min(j, width - 8);
          transpose_8(source + column * stride + row, stride, target + row * target_stride + column, target_stride);
        }
      return;
    }
  if (height < 16 || width < 16) {
    for (int j = 0; j < width; ++j)
      for (int i = 0; i < height; ++i) target[i * target_stride + j] = source[j * stride + i];
    return;
  }
  for (int j = 0; j < width; j += 16)
    for (int i = 0; i < height; i += 16) {
      const int row = fxwrap::min(i, height - 16), column = fxwrap::min(j, width - 16);
      transpose_16(source + column * stride + row, stride, target + row * target_stride + column, target_stride);
    }
}

// Four columns of sixteen rows, each a vector with a lane for a row. In memory, four elements of a row are adjacent.
template <class T> struct FourColumns {
  using Vectors = ElementVectors<sizeof(T)>;
  using Four = typename Vectors::Four;
  using Column = typename Vectors::Sixteen;
#define EACH_FOUR(a, b, i, j, k, l)                                                                          \
  __builtin_shufflevector(a, b, i, j, k, l, i + 4, j + 4, k + 4, l + 4, i + 8, j + 8, k + 8, l + 8, i + 12, \
                          j + 12, k + 12, l + 12)
  // Each fourth row from `first` on.
  static INLINE Column load(const T* first, int64_t stride) {
    const auto four = [&](int row) {
      Four elements;
      Vectors::load(first + row * stride, elements);
      return elements;
    };
    const auto low = __builtin_shufflevector(four(0), four(4), 0, 1, 2, 3, 4, 5, 6, 7);
    const auto high = __builtin_shufflevector(four(8), four(12), 0, 1, 2, 3, 4, 5, 6, 7);
    return EACH_FOUR(low, high, 0, 1, 2, 3);
  }
  static INLINE void store(Column rows, T* first, int64_t stride) {
    Vectors::store(Four(__builtin_shufflevector(rows, rows, 0, 1, 2, 3)), first);
    Vectors::store(Four(__builtin_shufflevector(rows, rows, 4, 5, 6, 7)), first + 4 * stride);
    Vectors::store(Four(__builtin_shufflevector(rows, rows, 8, 9, 10, 11)), first + 8 * stride);
    Vectors::store(Four(__builtin_shufflevector(rows, rows, 12, 13, 14, 15)), first + 12 * stride);
  }
  // Transposes the fours of elements in four vectors: columns become rows, and rows columns.
  static INLINE void transpose(Column (&at)[4]) {
    const Column low = EACH_FOUR(at[0], at[1], 0, 16, 1, 17), high = EACH_FOUR(at[0], at[1], 2, 18, 3, 19);
    const Column low_2 = EACH_FOUR(at[2], at[3], 0, 16, 1, 17), high_2 = EACH_FOUR(at[2], at[3], 2, 18, 3, 19);
    at[0] = EACH_FOUR(low, low_2, 0, 1, 16, 17), at[1] = EACH_FOUR(low, low_2, 2, 3, 18, 19);
    at[2] = EACH_FOUR(high, high_2, 0, 1, 16, 17), at[3] = EACH_FOUR(high, high_2, 2, 3, 18, 19);
  }
#undef EACH_FOUR
};

// Whether rows of so many elements are moved in fours. Blocks of sixteen elements do not fit in shorter rows.
template <int length, class T> constexpr bool MOVES_FOURS = sizeof(T) <= 4 && length >= 4 && length < 16;

// Runs block(column, row) for fours of columns in blocks of sixteen rows. The last ones overlap those before them.
template <int length, class Body> INLINE void for_fours(int count, Body block) {
  for (int j = 0; j < count; j += 16)
#pragma GCC unroll 4
    for (int i = 0; i < length; i += 4) block(fxwrap::min(i, length - 4), fxwrap::min(j, count - 16));
}

// Rows as columns: columns[i * distance + j] = rows[j * stride + i], for i < length and j < count.
template <int length, class T>
inline void load_columns(const T* rows, int64_t stride, int count, T* columns, int64_t distance) {
  if constexpr (MOVES_FOURS<length, T>)
    if (count >= 16) {
      using Block = FourColumns<T>;
      for_fours<length>(count, [&](int column, int row) {
        typename Block::Column at[4];
#pragma GCC unroll 4
        for (int k = 0; k < 4; ++k) at[k] = Block::load(rows + (row + k) * stride + column, stride);
        Block::transpose(at);
#pragma GCC unroll 4
        for (int k = 0; k < 4; ++k) Block::Vectors::store(at[k], columns + (column + k) * distance + row);
      });
      return;
    }
  transpose(rows, stride, length, count, columns, distance);
}

// Columns as rows: the same in the other direction.
template <int length, class T>
inline void store_columns(const T* columns, int64_t distance, int count, T* rows, int64_t stride) {
  if constexpr (MOVES_FOURS<length, T>)
    if (count >= 16) {
      using Block = FourColumns<T>;
      for_fours<length>(count, [&](int column, int row) {
        typename Block::Column at[4];
#pragma GCC unroll 4
        for (int k = 0; k < 4; ++k) Block::Vectors::load(columns + (column + k) * distance + row, at[k]);
        Block::transpose(at);
#pragma GCC unroll 4
        for (int k = 0; k < 4; ++k) Block::store(at[k], rows + (row + k) * stride + column, stride);
      });
      return;
    }
  transpose(columns, distance, count, length, rows, stride);
}

// Moves rows of so many elements to a block of adjacent rows, and back.
template <int length, class T> INLINE void load_rows(const T* from, int64_t stride, int64_t rows, T* to) {
  for (int64_t row = 0; row < rows; ++row) __builtin_memcpy(to + row * length, from + row * stride, length * sizeof(T));
}
template <int length, class T> INLINE void store_rows(const T* from, int64_t rows, T* to, int64_t stride) {
  for (int64_t row = 0; row < rows; ++row) __builtin_memcpy(to + row * stride, from + row * length, length * sizeof(T));
}
