// Elements of memory that are combined with values, also by several threads, and elements of tables.
#pragma once

#include "kernel_types.h"

// Combines an element of memory with a value, in the type that arithmetic on it happens in.
template <class T> struct Arithmetic { using Type = T; };
template <> struct Arithmetic<bfloat16> { using Type = float; };
template <> struct Arithmetic<float16> { using Type = float; };
template <class T, class Combine> INLINE void update(T& element, T value, Combine combine) {
  using Type = typename Arithmetic<T>::Type;
  element = to<T>(combine(to<Type>(element), to<Type>(value)));
}

// Adds a value to an element of memory to which other threads add values too.
template <class T> INLINE void add_atomically(T& element, T value) {
#pragma omp atomic
  element += value;
}

// The number of columns of scattered rows that one thread updates: a multiple of 16.
#ifdef _OPENMP
extern "C" int omp_get_max_threads() noexcept;
INLINE int64_t scattered_columns(int64_t columns) {
  const int64_t threads = omp_get_max_threads();
  return (columns + 16 * threads - 1) / (16 * threads) * 16;
}
#else
INLINE int64_t scattered_columns(int64_t columns) { return columns; }
#endif

// An element of a table, at a different index in each lane. Processors gather words of 32 bits and no shorter ones, so these
// are extracted from the aligned word that contains the element.
template <class T> INLINE T gather(const T* table, int64_t place) {
#ifdef __AVX512F__
  if constexpr (sizeof(T) <= 2) {
    typedef uint32_t Word __attribute__((may_alias));
    typedef typename Bits<sizeof(T)>::Type Element;
    constexpr int shift = 2 / sizeof(T), last = (1 << shift) - 1;  // a word has 1 << shift elements
    const uint64_t address = reinterpret_cast<uint64_t>(table);
    const Word* words = reinterpret_cast<const Word*>(address & ~uint64_t(3));
    const int64_t part = place + int64_t((address & 3) / sizeof(T));
    const Element element = Element(words[part >> shift] >> (int32_t(part & last) * int32_t(8 * sizeof(T))));
    if constexpr (__is_same(T, bool)) return element != 0;
    else return bitcast<T>(element);
  }
#endif
  if constexpr (__is_same(T, bool)) return load_bool(table[place]);
  else return table[place];
}
