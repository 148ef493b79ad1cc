// Reductions and scans of rows: loops over lanes, and partial results that they combine.
#pragma once

#include "kernel_operations.h"

// Combines two partial results of a reduction.
namespace combine {
struct Sum { template <class T> INLINE T operator()(T a, T b) const { return T(a + b); } };
struct Prod { template <class T> INLINE T operator()(T a, T b) const { return T(a * b); } };
struct Max { template <class T> INLINE T operator()(T a, T b) const { return op::maximum(a, b); } };
struct Min { template <class T> INLINE T operator()(T a, T b) const { return op::minimum(a, b); } };
// Accumulators of truth values are integers as wide as what is compared, so that vectors of both have as many lanes.
struct Any {
  template <class T> INLINE T operator()(T a, T b) const { return T(a | b); }
  template <class T> INLINE T operator()(T a, bool b) const requires(!__is_same(T, bool)) { return b ? T(1) : a; }
};
struct All {
  template <class T> INLINE T operator()(T a, T b) const { return T(a & b); }
  template <class T> INLINE T operator()(T a, bool b) const requires(!__is_same(T, bool)) { return b ? a : T(0); }
};
struct LogAddExp { template <class T> INLINE T operator()(T a, T b) const { return op::logaddexp(a, b); } };
constexpr Sum sum;
constexpr Prod prod;
constexpr Max max;
constexpr Min min;
constexpr Any any;
constexpr All all;
constexpr LogAddExp logaddexp;
}  // namespace combine

// --- lanes ------------------------------------------------------------------------------------------------------------

// Runs body(element, lane) for 0 <= element < count, `lanes` elements at a time: loops over a reduced axis use it.
template <int lanes, class Body> INLINE void for_lanes(int64_t count, Body body) {
  int64_t start = 0;
  for (; start + lanes <= count; start += lanes)
#pragma omp simd
    for (int lane = 0; lane < lanes; ++lane) body(start + lane, lane);
#pragma omp simd
  for (int lane = 0; lane < int(count - start); ++lane) body(start + lane, lane);
}

template <int number> struct Constant {
  constexpr operator int() const { return number; }
};

// Runs body(lanes) for a block of at most `lanes` elements: with a constant if it is whole.
template <int lanes, class Body> INLINE void for_lane_block(int64_t count, Body body) {
  if (count >= lanes) body(Constant<lanes>{});
  else body(int(count));
}

// Runs body(element, lane, place, is_new) for all elements of a row, `width` or more at a time: the last block begins early
// enough to be a whole one, and its first elements are not new. `place` is where the element is in a buffer of whole blocks.
template <int lanes, int width, class Body> INLINE void for_overlapping_lanes(int64_t count, Body body) {
  int64_t start = 0;
  for (; start + lanes <= count; start += lanes)
#pragma omp simd
    for (int lane = 0; lane < lanes; ++lane) body(start + lane, lane, start + lane, true);
  for (; start + width <= count; start += width)
#pragma omp simd
    for (int lane = 0; lane < width; ++lane) body(start + lane, lane, start + lane, true);
  if (start < count) {
    const int64_t first = count - width;
    int repeated = int(start - first);
    __asm__("" : "+r"(repeated));  // a number that the compiler knows would split the loop there
#pragma omp simd
    for (int lane = 0; lane < width; ++lane) body(first + lane, lane, start + lane, lane >= repeated);
  }
}

// The same for elements that depend on those before them.
template <int lanes, class Body> INLINE void for_lanes_in_order(int64_t count, Body body) {
  for (int64_t element = 0; element < count; ++element) body(element, int(element % lanes));
}

// Combines each of the first `width` elements with the one `width` places behind it, then half as many, down to one.
template <int width, class T, class Combine> INLINE void fold(T* at, Combine combine) {
  if constexpr (width > 0) {
#pragma omp simd
    for (int lane = 0; lane < width; ++lane) at[lane] = combine(at[lane], at[lane + width]);
    fold<width / 2>(at, combine);
  }
}

// One accumulator a lane; together they are one reduction.
template <class T, int lanes> struct Lanes {
  T at[lanes];
  INLINE explicit Lanes(T start) {
    for (int lane = 0; lane < lanes; ++lane) at[lane] = start;
  }
  INLINE T& operator[](int lane) { return at[lane]; }
  template <class Combine> INLINE T combined(Combine combine) {
    fold<lanes / 2>(at, combine);
    return at[0];
  }
  // Combines the lanes of each column of rows of so many: all of them have the result.
  template <int columns, class Combine> INLINE void combine_rows(Combine combine) {
    for (int first = columns; first + columns <= lanes; first += columns)
      for (int lane = 0; lane < columns; ++lane) at[lane] = combine(at[lane], at[first + lane]);
    for (int lane = columns; lane < lanes; ++lane) at[lane] = at[lane - columns];
  }
  // Combines adjacent lanes: all lanes of a group have the result.
  template <int group, class Combine> INLINE void combine_groups(Combine combine) {
    for (int first = 0; first + group <= lanes; first += group) {
      T result = at[first];
      for (int lane = 1; lane < group; ++lane) result = combine(result, at[first + lane]);
      for (int lane = 0; lane < group; ++lane) at[first + lane] = result;
    }
  }
};

// Partial results of the parts of a long reduction, combined pairwise in a fixed order. Few are on the stack.
template <class T> struct PartialResults {
  static constexpr int64_t FEW = 8192 / sizeof(T);
  alignas(64) char few[8192];
  T* at;
  INLINE explicit PartialResults(int64_t count)
      : at(reinterpret_cast<T*>(count <= FEW ? few : __builtin_malloc(uint64_t(count) * sizeof(T)))) {}
  PartialResults(const PartialResults&) = delete;
  INLINE ~PartialResults() {
    if (reinterpret_cast<char*>(at) != few) __builtin_free(at);
  }
  INLINE T& operator[](int64_t part) const { return at[part]; }
  template <class Combine> INLINE T combined(int64_t count, T start, Combine combine) const {
    if (count == 0) return start;
    for (int64_t width = 1; width < count; width *= 2)
      for (int64_t part = 0; part + width < count; part += 2 * width) at[part] = combine(at[part], at[part + width]);
    return at[0];
  }
};

// A value and its position. The first of equal values wins, and the first NaN over everything.
template <class T> struct IndexedValue {
  T value;
  int64_t position;
};
struct Greater { template <class T> INLINE bool operator()(T a, T b) const { return (a > b) | ((a != a) & (b == b)); } };
struct Less { template <class T> INLINE bool operator()(T a, T b) const { return (a < b) | ((a != a) & (b == b)); } };
template <class Better> struct ArgCombine {
  template <class T> INLINE IndexedValue<T> operator()(IndexedValue<T> a, IndexedValue<T> b) const {
    const bool same = !Better{}(a.value, b.value) && !Better{}(b.value, a.value);
    return Better{}(a.value, b.value) || (same && a.position < b.position) ? a : b;
  }
};
namespace combine {
constexpr ArgCombine<Greater> argmax;
constexpr ArgCombine<Less> argmin;
}  // namespace combine

// The comparisons of cummax and cummin: the last of equal values wins.
struct NotLess { template <class T> INLINE bool operator()(T a, T b) const { return ((a >= b) & (b == b)) | (a != a); } };
struct NotGreater { template <class T> INLINE bool operator()(T a, T b) const { return ((a <= b) & (b == b)) | (a != a); } };
template <class T> INLINE IndexedValue<T> cummax_step(IndexedValue<T> running, T value, int64_t position) {
  return NotLess{}(value, running.value) ? IndexedValue<T>{value, position} : running;
}
template <class T> INLINE IndexedValue<T> cummin_step(IndexedValue<T> running, T value, int64_t position) {
  return NotGreater{}(value, running.value) ? IndexedValue<T>{value, position} : running;
}

// One best value a lane; positions are of type P, which is 32 bits wide where they fit.
template <class T, int lanes, class P, class Better> struct IndexedLanes {
  T value[lanes];
  P position[lanes];
  INLINE explicit IndexedLanes(T start) {
    for (int lane = 0; lane < lanes; ++lane) value[lane] = start, position[lane] = 0;
  }
  INLINE IndexedValue<T> operator[](int lane) const { return {value[lane], position[lane]}; }
  INLINE void update(int lane, T candidate, P where) {
    const bool better = Better{}(candidate, value[lane]);
    value[lane] = better ? candidate : value[lane];
    position[lane] = better ? where : position[lane];
  }
  INLINE IndexedValue<T> combined(ArgCombine<Better> combine) const {
    IndexedValue<T> best = (*this)[0];
    for (int lane = 1; lane < lanes; ++lane) best = combine(best, (*this)[lane]);
    return best;
  }
};

// Combines the results of two parts of columns, lane by lane.
template <class Combine> struct Lanewise {
  Combine combine;
  template <class T, int lanes> INLINE Lanes<T, lanes> operator()(Lanes<T, lanes> a, const Lanes<T, lanes>& b) const {
    for (int lane = 0; lane < lanes; ++lane) a.at[lane] = combine(a.at[lane], b.at[lane]);
    return a;
  }
  template <class T, int lanes, class P, class Better>
  INLINE IndexedLanes<T, lanes, P, Better> operator()(IndexedLanes<T, lanes, P, Better> a,
                                                   const IndexedLanes<T, lanes, P, Better>& b) const {
    for (int lane = 0; lane < lanes; ++lane) {
      const IndexedValue<T> best = combine(a[lane], b[lane]);
      a.value[lane] = best.value, a.position[lane] = P(best.position);
    }
    return a;
  }
};

// --- scans ------------------------------------------------------------------------------------------------------------

constexpr int SCAN_BLOCK = 256;

// Inclusive scan: combines each value with the running value of those before it. Sixteen at a time: four steps combine
// each with the one 1, 2, 4 and 8 places before it, then all with the running value.
template <class T, class Running, class Combine>
INLINE void scan_block(T* values, int64_t count, Running& running, T neutral, Combine combine) {
  typedef T Row __attribute__((vector_size(16 * sizeof(T)), aligned(sizeof(T)), may_alias));
  int64_t start = 0;
  for (; start + 16 <= count; start += 16) {
    Row& place = *reinterpret_cast<Row*>(values + start);
    const Row none = neutral - Row{};
    Row row = place;
    row = combine(row, __builtin_shufflevector(none, row, 0, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30));
    row = combine(row, __builtin_shufflevector(none, row, 0, 1, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29));
    row = combine(row, __builtin_shufflevector(none, row, 0, 1, 2, 3, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27));
    row = combine(row, __builtin_shufflevector(none, row, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23));
    place = combine(row, T(running) - Row{});
    running = combine(running, Running(row[15]));
  }
  for (; start < count; ++start) {
    running = combine(running, Running(values[start]));
    values[start] = T(running);
  }
}
