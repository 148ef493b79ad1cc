// Blocks of float16 elements, which kernels convert together. Kernels that call these include it after kernel.h.
#pragma once

// Conversions of a vector by its instructions, which compilers do not use for loops over elements.
#if defined(__AVX512F__) && __has_builtin(__builtin_ia32_vcvtph2ps512_mask)
struct HalfVectors {
  static constexpr int lanes = 16;
  typedef int16_t Halves __attribute__((vector_size(32), aligned(2), may_alias));
  typedef float Floats __attribute__((vector_size(64)));
  typedef int16_t Result __attribute__((vector_size(32)));
  static INLINE void widen(const Halves* from, Floats* to) {
    *to = __builtin_ia32_vcvtph2ps512_mask(*from, Floats{}, -1, 4);
  }
  static INLINE void narrow(const Floats* from, Halves* to) {
    *to = __builtin_ia32_vcvtps2ph512_mask(*from, 0, Result{}, -1);
  }
};
#define HAS_HALF_VECTORS
#elif defined(__F16C__) && __has_builtin(__builtin_ia32_vcvtph2ps256)
struct HalfVectors {
  static constexpr int lanes = 8;
  typedef int16_t Halves __attribute__((vector_size(16), aligned(2), may_alias));
  typedef float Floats __attribute__((vector_size(32)));
  static INLINE void widen(const Halves* from, Floats* to) { *to = __builtin_ia32_vcvtph2ps256(*from); }
  static INLINE void narrow(const Floats* from, Halves* to) { *to = __builtin_ia32_vcvtps2ph256(*from, 0); }
};
#define HAS_HALF_VECTORS
#endif

// Converts sixteen elements.
INLINE void widen_16(const float16* from, float* to) {
#ifdef HAS_HALF_VECTORS
  using V = HalfVectors;
  for (int i = 0; i < 16; i += V::lanes)
    V::widen(reinterpret_cast<const V::Halves*>(from + i), reinterpret_cast<V::Floats*>(to + i));
#else
#pragma omp simd
  for (int i = 0; i < 16; ++i) to[i] = Cast<float, float16>::of(from[i]);
#endif
}
INLINE void narrow_16(const float* from, float16* to) {
#ifdef HAS_HALF_VECTORS
  using V = HalfVectors;
  for (int i = 0; i < 16; i += V::lanes)
    V::narrow(reinterpret_cast<const V::Floats*>(from + i), reinterpret_cast<V::Halves*>(to + i));
#else
#pragma omp simd
  for (int i = 0; i < 16; ++i) to[i] = Cast<float16, float>::of(from[i]);
#endif
}

// A block of elements of memory in float32, and back. The last elements of a block that is not whole are copied.
template <int size> INLINE void widen(const float16* from, int count, float (&to)[size]) {
  if (size % 16 == 0 && count == size) {
#pragma GCC unroll 8
    for (int i = 0; i < size; i += 16) widen_16(from + i, to + i);
    return;
  }
  int i = 0;
  for (; i + 16 <= count; i += 16) widen_16(from + i, to + i);
  for (; i < count; ++i) to[i] = Cast<float, float16>::of(from[i]);
}
template <int size> INLINE void narrow(const float (&from)[size], int count, float16* to) {
  if (size % 16 == 0 && count == size) {
#pragma GCC unroll 8
    for (int i = 0; i < size; i += 16) narrow_16(from + i, to + i);
    return;
  }
  int i = 0;
  for (; i + 16 <= count; i += 16) narrow_16(from + i, to + i);
  for (; i < count; ++i) to[i] = Cast<float16, float>::of(from[i]);
}

// The loops `for_lanes` over blocks: runs body(start, lanes), where `lanes` is a constant for whole blocks.
template <int lanes, class Body> INLINE void for_blocks(int64_t count, Body body) {
  int64_t start = 0;
  for (; start + lanes <= count; start += lanes) body(start, Constant<lanes>{});
  if (start < count) body(start, int(count - start));
}

// `for_overlapping_lanes` over blocks: runs body(start, lanes, place, repeated). The first elements of the last block, as many
// as `repeated`, are not new.
template <int lanes, int width, class Body> INLINE void for_overlapping_blocks(int64_t count, Body body) {
  int64_t start = 0;
  for (; start + lanes <= count; start += lanes) body(start, Constant<lanes>{}, start, 0);
  if constexpr (width < lanes)
    for (; start + width <= count; start += width) body(start, Constant<width>{}, start, 0);
  if (start < count) {
    const int64_t first = count - width;
    int repeated = int(start - first);
    __asm__("" : "+r"(repeated));
    body(first, Constant<width>{}, start, repeated);
  }
}
