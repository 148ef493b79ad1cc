// Streaming reductions: products of a block of scores, and sums that new maxima rescale.
#pragma once

#include "contractions.h"

// result[n][i] = result[n][i] * scale[i] + the sum over k < depth of left[k][i] * right[n * across + k * along], for four
// rows n and the vectors at `column`; without `scale`, the sum alone. Rows of `left` and `result` have `lanes` elements.
template <int lanes, int vectors, class T>
INLINE void contract_four(const T* left, const T* right, int64_t across, int64_t along, int64_t depth, const T* scale,
                          T* result) {
  typedef typename Vector<T>::Type V;
  constexpr int width = Vector<T>::elements;
  V sums[4][vectors] = {};
  for (int64_t k = 0; k < depth; ++k) {
    V row[vectors];
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) row[v] = *reinterpret_cast<const V*>(left + k * lanes + v * width);
#pragma GCC unroll 4
    for (int n = 0; n < 4; ++n) {
      const V factor = right[n * across + k * along] - V{};
#pragma GCC unroll 4
      for (int v = 0; v < vectors; ++v) sums[n][v] = multiply_add(row[v], factor, sums[n][v]);
    }
  }
#pragma GCC unroll 4
  for (int n = 0; n < 4; ++n)
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) {
      V& at = *reinterpret_cast<V*>(result + n * lanes + v * width);
      const V& factor = *reinterpret_cast<const V*>(scale + v * width);
      at = scale == nullptr ? sums[n][v] : multiply_add(at, factor, sums[n][v]);
    }
}

// The same for `count` rows, rounded up to a multiple of four: both tiles have memory for these.
template <int lanes, class T>
inline void contract(const T* left, const T* right, int64_t across, int64_t along, int64_t depth, int64_t count,
                     const T* scale, T* result) {
  constexpr int width = Vector<T>::elements, step = VECTOR_COLUMNS * width, rest = lanes % step / width;
  for (int64_t n = 0; n < count; n += 4) {
    int column = 0;
    for (; column + step <= lanes; column += step)
      contract_four<lanes, VECTOR_COLUMNS>(left + column, right + n * across, across, along, depth,
                                           scale == nullptr ? nullptr : scale + column, result + n * lanes + column);
    if constexpr (rest > 0)
      contract_four<lanes, rest>(left + column, right + n * across, across, along, depth,
                                 scale == nullptr ? nullptr : scale + column, result + n * lanes + column);
  }
}

// --- few rows --------------------------------------------------------------------------------------------------------

// The sums of sixteen vectors of sixteen elements each, as one vector: halves of four, then eight vectors at a time.
template <class Row> INLINE Row sums_of_16(Row (&a)[16]) {
#define MIX(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i)
    a[i] = MIX(a[2 * i], a[2 * i + 1], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
           MIX(a[2 * i], a[2 * i + 1], 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i)
    a[i] = MIX(a[2 * i], a[2 * i + 1], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
           MIX(a[2 * i], a[2 * i + 1], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i)
    a[i] = MIX(a[2 * i], a[2 * i + 1], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
           MIX(a[2 * i], a[2 * i + 1], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
  return MIX(a[0], a[1], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
         MIX(a[0], a[1], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
#undef MIX
}

// products[i * stride + n] = the sum over k < depth of left[i * depth + k] * right[n * across + k], for n < count, whose
// number is rounded up to a multiple of 16, as depth is. With `ahead`, elements that far behind are read later.
template <int rows, bool prefetches, class T>
inline void contract_rows(const T* left, const T* right, int64_t across, int64_t depth, int64_t count, T* products,
                          int64_t stride, int64_t ahead) {
  typedef T Row __attribute__((vector_size(16 * sizeof(T)), aligned(sizeof(T)), may_alias));
  for (int64_t n = 0; n < count; n += 16) {
    const T* others[16];
    for (int j = 0; j < 16; ++j) others[j] = right + fxwrap::min(n + j, count - 1) * across;
    for (int i = 0; i < rows; ++i) {
      Row sums[16] = {};
      for (int64_t k = 0; k < depth; k += 16) {
        const Row row = *reinterpret_cast<const Row*>(left + i * depth + k);
#pragma GCC unroll 16
        for (int j = 0; j < 16; ++j) {
          if constexpr (prefetches)
            if (i == 0) prefetch_line(others[j] + k + ahead);
          const Row other = *reinterpret_cast<const Row*>(others[j] + k);
          if constexpr (16 * sizeof(T) == VECTOR_BYTES) sums[j] = multiply_add(row, other, sums[j]);
          else sums[j] += row * other;
        }
      }
      *reinterpret_cast<Row*>(products + i * stride + n) = sums_of_16(sums);
    }
  }
}

// result[i][j] = result[i][j] * scale[i] + the sum over n < count of left[i * stride + n] * right[n * across + j],
// for `height` rows and the vectors at `right` and `result`.
template <int height, int vectors, bool prefetches, class T>
INLINE void accumulate_vectors(const T* left, int64_t stride, const T* right, int64_t across, int64_t count,
                               const T* scale, T* result, int64_t width, int64_t ahead) {
  typedef typename Vector<T>::Type V;
  constexpr int lanes = Vector<T>::elements;
  V sums[height][vectors] = {};
  for (int64_t n = 0; n < count; ++n) {
    V values[vectors];
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) {
      if constexpr (prefetches) prefetch_line(right + n * across + v * lanes + ahead);
      values[v] = *reinterpret_cast<const V*>(right + n * across + v * lanes);
    }
#pragma GCC unroll 4
    for (int i = 0; i < height; ++i) {
      const V factor = left[i * stride + n] - V{};
#pragma GCC unroll 4
      for (int v = 0; v < vectors; ++v) sums[i][v] = multiply_add(values[v], factor, sums[i][v]);
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < height; ++i)
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) {
      V& at = *reinterpret_cast<V*>(result + i * width + v * lanes);
      at = multiply_add(at, scale[i] - V{}, sums[i][v]);
    }
}

// The same for all rows, and `width` columns, a multiple of 16.
template <int rows, bool prefetches, class T>
inline void accumulate_rows(const T* left, int64_t stride, const T* right, int64_t across, int64_t count, const T* scale,
                            T* result, int64_t width, int64_t ahead) {
  constexpr int lanes = Vector<T>::elements, vectors = VECTOR_COLUMNS, step = vectors * lanes;
  constexpr int height = rows < 4 ? rows : 4, rest = rows % height;
  const auto run = [&](auto number, int64_t j) {
    accumulate_vectors<height, number, prefetches>(left, stride, right + j, across, count, scale, result + j, width, ahead);
    for (int i = height; i + height <= rows; i += height)
      accumulate_vectors<height, number, false>(left + i * stride, stride, right + j, across, count, scale + i,
                                                result + i * width + j, width, ahead);
    if constexpr (rest != 0) {
      constexpr int i = rows - rest;
      accumulate_vectors<rest, number, false>(left + i * stride, stride, right + j, across, count, scale + i,
                                              result + i * width + j, width, ahead);
    }
  };
  int64_t j = 0;
  for (; j + step <= width; j += step) run(Constant<vectors>{}, j);
  for (; j < width; j += lanes) run(Constant<1>{}, j);
}
