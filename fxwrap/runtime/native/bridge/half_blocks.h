// Blocks of float16 elements, which kernels convert together. Kernels that call these include it after kernel.h.
#pragma once

// Conversions of vectors by their instructions, which compilers do not use for loops over elements.
#if defined(__AVX512F__) && __has_builtin(__builtin_ia32_vcvtph2ps512_mask)
struct SixteenHalves {
  typedef int16_t Halves __attribute__((vector_size(32), aligned(2), may_alias));
  typedef float Floats __attribute__((vector_size(64), aligned(4), may_alias));
  typedef float Wide __attribute__((vector_size(64)));
  typedef int16_t Narrow __attribute__((vector_size(32)));
  static INLINE void convert(const float16* from, float* to) {
    *reinterpret_cast<Floats*>(to) = __builtin_ia32_vcvtph2ps512_mask(*reinterpret_cast<const Halves*>(from), Wide{}, -1, 4);
  }
  static INLINE void convert(const float* from, float16* to) {
    *reinterpret_cast<Halves*>(to) = __builtin_ia32_vcvtps2ph512_mask(*reinterpret_cast<const Floats*>(from), 0, Narrow{}, -1);
  }
};
#define HAS_SIXTEEN_HALVES
#if defined(__AVX512BW__) && defined(__AVX512VL__) && !defined(__clang__)
// Converts the first of sixteen elements, and zeros instead of those behind them, which it does not read.
INLINE void widen_first(const float16* from, int count, float* to) {
  using V = SixteenHalves;
  const int16_t* source = reinterpret_cast<const int16_t*>(from);
  const V::Narrow first = __builtin_ia32_loaddquhi256_mask(source, V::Narrow{}, uint16_t((1u << count) - 1));
  *reinterpret_cast<V::Floats*>(to) = __builtin_ia32_vcvtph2ps512_mask(first, V::Wide{}, -1, 4);
}
#define HAS_FIRST_HALVES
#endif
#endif
#if defined(__F16C__) && __has_builtin(__builtin_ia32_vcvtph2ps256)
struct EightHalves {
  typedef int16_t Halves __attribute__((vector_size(16), aligned(2), may_alias));
  typedef float Floats __attribute__((vector_size(32), aligned(4), may_alias));
  static INLINE void convert(const float16* from, float* to) {
    *reinterpret_cast<Floats*>(to) = __builtin_ia32_vcvtph2ps256(*reinterpret_cast<const Halves*>(from));
  }
  static INLINE void convert(const float* from, float16* to) {
    *reinterpret_cast<Halves*>(to) = __builtin_ia32_vcvtps2ph256(*reinterpret_cast<const Floats*>(from), 0);
  }
};
struct FourHalves {
  typedef int64_t Halves __attribute__((aligned(2), may_alias));
  typedef float Floats __attribute__((vector_size(16), aligned(4), may_alias));
  typedef int64_t Words __attribute__((vector_size(16)));
  typedef int16_t Eight __attribute__((vector_size(16)));  // of which the first four are converted
  static INLINE void convert(const float16* from, float* to) {
    *reinterpret_cast<Floats*>(to) = __builtin_ia32_vcvtph2ps(reinterpret_cast<Eight>(Words{*reinterpret_cast<const Halves*>(from), 0}));
  }
  static INLINE void convert(const float* from, float16* to) {
    const Eight eight = __builtin_ia32_vcvtps2ph(*reinterpret_cast<const Floats*>(from), 0);
    *reinterpret_cast<Halves*>(to) = reinterpret_cast<Words>(eight)[0];
  }
};
#define HAS_FOUR_HALVES
#endif

// Converts 16, 8, 4 elements, or one, of float16 to float32 or back.
template <int lanes, class From, class To> INLINE void convert_lanes(const From* from, To* to) {
#ifdef HAS_SIXTEEN_HALVES
  if constexpr (lanes == 16) return SixteenHalves::convert(from, to);
#endif
#ifdef HAS_FOUR_HALVES
  if constexpr (lanes == 4) return FourHalves::convert(from, to);
  if constexpr (lanes >= 8) {
    for (int i = 0; i < lanes; i += 8) EightHalves::convert(from + i, to + i);
    return;
  }
#endif
#pragma omp simd
  for (int i = 0; i < lanes; ++i) to[i] = Cast<To, From>::of(from[i]);
}

// Runs body(start, Constant<16>) for whole vectors of `count` elements, then for shorter ones of the others. These do not
// overlap: a load of what two stores have written waits for both.
template <class Body> INLINE void for_half_vectors(int count, Body body) {
  int i = 0;
  for (; i + 16 <= count; i += 16) body(i, Constant<16>{});
  if (i + 8 <= count) {
    body(i, Constant<8>{});
    i += 8;
  }
  if (i + 4 <= count) {
    body(i, Constant<4>{});
    i += 4;
  }
  for (; i < count; ++i) body(i, Constant<1>{});
}

// A block of elements of memory in float32, and back. Blocks have memory for whole vectors.
template <int size> INLINE void widen(const float16* from, int count, float (&to)[size]) {
  static_assert(size % 16 == 0);
  if (count == size) {
#pragma GCC unroll 8
    for (int i = 0; i < size; i += 16) convert_lanes<16>(from + i, to + i);
    return;
  }
#ifdef HAS_FIRST_HALVES
  int i = 0;
  for (; i + 16 <= count; i += 16) convert_lanes<16>(from + i, to + i);
  if (i < count) widen_first(from + i, count - i, to + i);
#else
  for_half_vectors(count, [&](int i, auto lanes) { convert_lanes<lanes>(from + i, to + i); });
#endif
}
template <int size> INLINE void narrow(const float (&from)[size], int count, float16* to) {
  static_assert(size % 16 == 0);
  if (count == size) {
#pragma GCC unroll 8
    for (int i = 0; i < size; i += 16) convert_lanes<16>(from + i, to + i);
    return;
  }
  for_half_vectors(count, [&](int i, auto lanes) { convert_lanes<lanes>(from + i, to + i); });
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
