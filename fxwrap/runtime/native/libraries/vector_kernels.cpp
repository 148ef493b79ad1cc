// The loops of vector_loops.h for the vectors of AVX-512 and of AVX2; which one runs is chosen by the processor.
#include "libraries/vector_kernels.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)

#pragma GCC diagnostic ignored "-Wpsabi"  // vectors are arguments of inlined functions only
#define FXWRAP_INLINE inline __attribute__((always_inline))

namespace fxwrap {
namespace {
namespace avx512 {
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,prefer-vector-width=512")
constexpr int vector_lanes = 16, tile_rows = 12;
#include "libraries/vector_loops.h"
#pragma GCC pop_options
}  // namespace avx512

namespace avx2 {
#pragma GCC push_options
#pragma GCC target("avx2,fma")
constexpr int vector_lanes = 8, tile_rows = 6;
#include "libraries/vector_loops.h"
#pragma GCC pop_options
}  // namespace avx2

bool has_avx512() {
  static const bool has = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return has;
}

bool has_avx2() {
  static const bool has = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  return has;
}

}  // namespace

int64_t vector_columns() {
  if (has_avx512()) return avx512::block_columns;
  return has_avx2() ? avx2::block_columns : 0;
}

void convolve_pixels(const PointwiseConvolution& convolution, int64_t row, int64_t end) {
  has_avx512() ? avx512::convolve_pixels(convolution, row, end) : avx2::convolve_pixels(convolution, row, end);
}

void convolve_channels(const DepthwiseConvolution& convolution, int64_t row, int64_t end) {
  has_avx512() ? avx512::convolve_channels(convolution, row, end) : avx2::convolve_channels(convolution, row, end);
}

}  // namespace fxwrap

#else

namespace fxwrap {

int64_t vector_columns() { return 0; }
void convolve_pixels(const PointwiseConvolution&, int64_t, int64_t) {}
void convolve_channels(const DepthwiseConvolution&, int64_t, int64_t) {}

}  // namespace fxwrap

#endif
