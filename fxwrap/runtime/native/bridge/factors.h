// Contractions of numbers that half precision represents: rows and matrices of bfloat16, and quantised weights, also with
// coefficients of groups of terms.
#pragma once

#include "contractions.h"

// Factors are bfloat16 where the processor multiplies pairs of them and adds both products to a float; else floats. They
// are numbers that T represents.
template <class T> struct Factors {
  typedef float Type;
  static constexpr int lanes = Vector<float>::elements;
  template <class U> static INLINE float of(U number) { return to<float>(number); }
  static INLINE Vector<float>::Type add(Vector<float>::Type sum, const float* row, const float* column) {
    typedef Vector<float>::Type V;
    return multiply_add(*reinterpret_cast<const V*>(row), *reinterpret_cast<const V*>(column), sum);
  }
};
#if defined(__AVX512BF16__) && defined(__AVX512F__)
template <> struct Factors<bfloat16> {
  typedef bfloat16 Type;
  static constexpr int lanes = 2 * Vector<float>::elements;
  template <class U> static INLINE bfloat16 of(U number) { return bfloat16(bitcast<uint32_t>(to<float>(number)) >> 16); }
  static INLINE bfloat16 of(bfloat16 number) { return number; }
  static INLINE Vector<float>::Type add(Vector<float>::Type sum, const bfloat16* row, const bfloat16* column) {
    typedef Vector<uint16_t>::Type V;
    const V right = *reinterpret_cast<const V*>(column);
    asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(right), "m"(*reinterpret_cast<const V*>(row)));
    return sum;
  }
};
#endif

// Where an element's factor of each of `terms` terms is written; converts to the type of factors.
template <class T, int step> struct FactorTarget {
  typename Factors<T>::Type* at;
  struct Term {
    typename Factors<T>::Type& factor;
    template <class U> INLINE void operator=(U number) const { factor = Factors<T>::of(number); }
  };
  INLINE Term operator[](int term) const { return {at[term * step]}; }
};

// 128 + n for n < 128: bits of a bfloat16.
INLINE bfloat16 plus_128(uint8_t n) { return bfloat16(uint16_t(0x4300 | n)); }

// Elements of a group that are multiplied at a time, and those of one part of a sum without groups.
constexpr int FACTOR_STEP = 32, FACTOR_PART = 1024;

// The columns of a tile of sums of groups, of which few are multiplied at a time: each group has accumulators, too.
constexpr int grouped_columns_at_once(int group) {
  const int columns = TILE_ACCUMULATORS / 2 / group;
  return columns > 4 ? 4 : columns < 1 ? 1 : columns;
}
constexpr int grouped_columns(int group) { return grouped_columns_at_once(group) * (group > 4 ? 4 : 1); }

// Rows as factors, in the order in which tiles of `height` rows, and of `rest` rows after them, multiply them: for each
// step of each group of `length` elements, each vector of all of a tile's rows. An element has a factor of each of `terms`
// terms.
template <class T, int height, int rest, int length = FACTOR_PART, int terms = 1, int step = FACTOR_STEP> struct FactorRows {
  typedef typename Factors<T>::Type F;
  static constexpr int lanes = Factors<T>::lanes, vectors = terms * step / lanes;
  static_assert(vectors * lanes == terms * step);
  int64_t rows, count, groups, steps;
  PartialResults<F> memory;
  PartialResults<float> sums;  // of the factors of each group of each row
  F* start;  // of a line of the cache
  // `row(i, g, k, to)` writes the terms of element k of group g; the last group has what is left of `count` elements.
  template <class Row>
  INLINE FactorRows(int64_t rows, int64_t count, Row row)
      : rows(rows), count(count), groups((count + length - 1) / length),
        steps((fxwrap::min<int64_t>(count, length) + step - 1) / step), memory(rows * elements() + 64 / int64_t(sizeof(F))),
        sums(rows * padded_groups()),
        start(reinterpret_cast<F*>((reinterpret_cast<uint64_t>(memory.at) + 63) & ~uint64_t(63))) {
    const int64_t blocks = rows * groups;
#pragma omp parallel for schedule(static) if (parallel : rows * count >= 32768)
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t i = block / groups, g = block % groups;
      const int64_t whole = i / height * height, tile = whole + height <= rows ? height : rest;
      const int64_t first = tile == height ? whole : whole + (i - whole) / rest * rest;
      float sum = 0;
      for (int64_t s = 0; s < steps; ++s) {
        F values[terms * step] = {};
        const int size = int(fxwrap::min<int64_t>(step, elements_of(g) - s * step));
#pragma omp simd
        for (int lane = 0; lane < size; ++lane) row(i, g, s * step + lane, FactorTarget<T, step>{values + lane});
        for (int v = 0; v < vectors; ++v) {
          F* to = start + first * elements() + (((g * steps + s) * vectors + v) * tile + i - first) * lanes;
          for (int lane = 0; lane < lanes; ++lane) to[lane] = values[v * lanes + lane];
        }
#pragma omp simd reduction(+ : sum)
        for (int at = 0; at < terms * step; ++at) sum += to<float>(values[at]);
      }
      sums[i * padded_groups() + g] = sum;
    }
    const int64_t padding = padded_groups() - groups;
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t g = 0; g < padding; ++g) sums[i * padded_groups() + groups + g] = 0;
  }
  INLINE int64_t elements() const { return groups * steps * vectors * lanes; }
  INLINE int64_t elements_of(int64_t group) const { return fxwrap::min<int64_t>(length, count - group * length); }
  INLINE int64_t padded_groups() const {
    constexpr int64_t size = Vector<float>::elements;
    return (groups + size - 1) / size * size;
  }
};

struct NoCoefficients {};

// Sums of products of rows and columns, rows in groups of `group`. Of a group of terms, the products' sum is multiplied by
// one coefficient, and the sum of the row's factors by another; without coefficients, groups are parts of the sum.
template <class T, int rows, int columns, int group, int length = FACTOR_PART, int terms = 1, int step = FACTOR_STEP>
struct FactorTile {
  typedef typename Vector<float>::Type V;
  typedef typename Factors<T>::Type F;
  static constexpr int block = Vector<float>::elements, lanes = Factors<T>::lanes, vectors = terms * step / lanes;
  float sum[rows][columns];
  // Computes the sums of the rows from `first` on. `column(j, g, k, to)` writes the factors of element k of group g of a
  // column, `prefetch(j, g, k)` asks for one that is read later, from `columns` on of the next tile, and
  // `coefficients(j, g, products, row)` writes those of a group.
  template <int height, int rest, class Column, class Prefetch, class Coefficients = NoCoefficients>
  INLINE FactorTile(const FactorRows<T, height, rest, length, terms, step>& left, int64_t first, Column column,
                    Prefetch prefetch, Coefficients coefficients = {}) {
    constexpr bool grouped = !__is_same(Coefficients, NoCoefficients);
    constexpr int size = group < rows ? group : rows, after = rows % size;
    constexpr int at_once = grouped ? grouped_columns_at_once(group) : columns_at_once(group);
    constexpr int width = columns < at_once ? columns : at_once;
    static_assert(columns % width == 0);
    constexpr int64_t part = grouped ? block : 1;
    V total[rows][columns] = {};
    for (int64_t start = 0; start < left.groups; start += part)
      for (int j = 0; j < columns; j += width) {
        const bool is_last = j + width == columns;
        const int next = !is_last ? j + width : start + part < left.groups ? 0 : columns;
        const int64_t ahead = !is_last ? 0 : start + part < left.groups ? part : -start;
        const auto later = [&](int at, int64_t g, int64_t k) { prefetch(next + at, g + ahead, k); };
        const auto nothing = [](int, int64_t, int64_t) {};
        multiply<size, width, grouped>(left, first, 0, start, total, j, column, later, coefficients);
        for (int i = size; i + size <= rows; i += size)
          multiply<size, width, grouped>(left, first, i, start, total + i, j, column, nothing, coefficients);
        if constexpr (after != 0)
          multiply<after, width, grouped>(left, first, rows - after, start, total + rows - after, j, column, nothing,
                                          coefficients);
      }
    for (int i = 0; i < rows; ++i)
      for (int j = 0; j < columns; ++j) {
        float at[block];
        for (int lane = 0; lane < block; ++lane) at[lane] = total[i][j][lane];
        fold<block / 2>(at, combine::sum);
        sum[i][j] = at[0];
      }
  }

 private:
  // Adds the products of `height` rows, of which the first is row i of the tile, to `total`: those of one part.
  template <int height, int width, bool grouped, class Rows, class Column, class Prefetch, class Coefficients>
  INLINE static void multiply(const Rows& left, int64_t first, int i, int64_t start, V (*total)[columns], int j,
                              Column column, Prefetch prefetch, Coefficients coefficients) {
    const int64_t end = fxwrap::min<int64_t>(start + (grouped ? block : 1), left.groups);
    V sums[height][width];
    alignas(64) float of_products[width][block], of_rows[width][block];
    if constexpr (grouped) {
      for (int at = 0; at < width; ++at) {
        for (int lane = 0; lane < block; ++lane) of_products[at][lane] = of_rows[at][lane] = 0;
#pragma omp simd
        for (int lane = 0; lane < int(end - start); ++lane)
          coefficients(j + at, start + lane, of_products[at][lane], of_rows[at][lane]);
      }
      const float* row_sums = &left.sums[(first + i) * left.padded_groups() + start];
#pragma GCC unroll 64
      for (int row = 0; row < height; ++row)
#pragma GCC unroll 64
        for (int at = 0; at < width; ++at)
          sums[row][at] = multiply_add(*reinterpret_cast<const V*>(of_rows[at]),
                                       *reinterpret_cast<const V*>(row_sums + row * left.padded_groups()),
                                       total[row][j + at]);
    }
    for (int64_t g = start; g < end; ++g) {
      V partial[height][width] = {};
      const F* row = left.start + first * left.elements() + g * left.steps * vectors * rows * lanes + i * lanes;
      const int64_t size = grouped ? length : left.elements_of(g);
      int64_t k = 0;
      for (; k + step <= size; k += step, row += vectors * rows * lanes) {
        alignas(64) F values[width][terms * step];
#pragma GCC unroll 64
        for (int at = 0; at < width; ++at) {
          prefetch(at, g, k);
#pragma omp simd
          for (int lane = 0; lane < step; ++lane) column(j + at, g, k + lane, FactorTarget<T, step>{values[at] + lane});
        }
        add(partial, row, values);
      }
      if (k < size) {
        alignas(64) F values[width][terms * step] = {};
        for (int at = 0; at < width; ++at)
          for (int lane = 0; lane < int(size - k); ++lane)
            column(j + at, g, k + lane, FactorTarget<T, step>{values[at] + lane});
        add(partial, row, values);
      }
#pragma GCC unroll 64
      for (int row = 0; row < height; ++row)
#pragma GCC unroll 64
        for (int at = 0; at < width; ++at)
          if constexpr (grouped)
            sums[row][at] = multiply_add(partial[row][at], V{} + of_products[at][g - start], sums[row][at]);
          else
            sums[row][at] = partial[row][at] + total[row][j + at];
    }
#pragma GCC unroll 64
    for (int row = 0; row < height; ++row)
#pragma GCC unroll 64
      for (int at = 0; at < width; ++at) total[row][j + at] = sums[row][at];
  }
  template <int height, int width>
  INLINE static void add(V (&partial)[height][width], const F* row, const F (&values)[width][terms * step]) {
#pragma GCC unroll 64
    for (int vector = 0; vector < vectors; ++vector)
#pragma GCC unroll 64
      for (int i = 0; i < height; ++i)
#pragma GCC unroll 64
        for (int j = 0; j < width; ++j)
          partial[i][j] = Factors<T>::add(partial[i][j], row + (vector * rows + i) * lanes, values[j] + vector * lanes);
  }
};
