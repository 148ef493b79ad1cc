// Included by vector_kernels.cpp for each set of instructions: vectors have `vector_lanes` floats, and a tile of a matmul's
// result `tile_rows` rows.

constexpr int block_columns = 2 * vector_lanes;
constexpr int64_t block_terms = 128;  // longer sums are sums of sums: their error grows with the number of terms
constexpr int block_pixels = 4;

template <int lanes>
struct VectorTypes {
  typedef float Floats __attribute__((vector_size(4 * lanes), aligned(4), may_alias));
  typedef int32_t Integers __attribute__((vector_size(4 * lanes), aligned(4), may_alias));
};
template <int lanes>
using Vector = typename VectorTypes<lanes>::Floats;

template <int lanes>
FXWRAP_INLINE Vector<lanes> load(const float* source) {
  return *reinterpret_cast<const Vector<lanes>*>(source);
}

template <int lanes>
FXWRAP_INLINE void store(float* target, Vector<lanes> value) {
  *reinterpret_cast<Vector<lanes>*>(target) = value;
}

// Loads and stores of the first elements of a vector.
template <int lanes>
FXWRAP_INLINE Vector<lanes> load_some(const float* source, int64_t count) {
  if (count >= lanes) return load<lanes>(source);
  float buffer[lanes] = {};
  for (int64_t i = 0; i < count; ++i) buffer[i] = source[i];
  return load<lanes>(buffer);
}

template <int lanes>
FXWRAP_INLINE void store_some(float* target, Vector<lanes> value, int64_t count) {
  if (count >= lanes) return store<lanes>(target, value);
  float buffer[lanes];
  store<lanes>(buffer, value);
  for (int64_t i = 0; i < count; ++i) target[i] = buffer[i];
}

// e^x: 2^n * e^r with |r| <= ln(2) / 2, whose polynomial is that of Cephes. 2^n is a product, since n may be 128.
template <int lanes>
FXWRAP_INLINE Vector<lanes> exponential(Vector<lanes> x) {
  using Integers = typename VectorTypes<lanes>::Integers;
  const Vector<lanes> none = {}, low = x < -87.3f ? none - 87.3f : x, limited = low > 88.7f ? none + 88.7f : low;
  const Vector<lanes> count = (limited * 1.44269504f + 12582912.0f) - 12582912.0f;  // adding 1.5 * 2^23 rounds to an integer
  const Vector<lanes> rest = (limited - count * 0.693359375f) + count * 2.12194440e-4f;
  Vector<lanes> sum = rest * 1.9875691500e-4f + 1.3981999507e-3f;
  sum = sum * rest + 8.3334519073e-3f;
  sum = sum * rest + 4.1665795894e-2f;
  sum = sum * rest + 1.6666665459e-1f;
  sum = sum * rest + 5.0000001201e-1f;
  sum = sum * rest * rest + rest + 1.0f;
  const Integers exponent = __builtin_convertvector(count, Integers), half = exponent >> 1;
  sum *= reinterpret_cast<Vector<lanes>>((half + 127) << 23);
  sum *= reinterpret_cast<Vector<lanes>>((exponent - half + 127) << 23);
  return x > 88.7f ? none + __builtin_inff() : (x < -87.3f ? none : sum);
}

template <int lanes>
FXWRAP_INLINE Vector<lanes> activate(Vector<lanes> x, Activation activation) {
  const Vector<lanes> none = {};
  const auto positive = [&](Vector<lanes> y) __attribute__((always_inline)) { return y < 0.0f ? none : y; };  // NaN stays
  const auto up_to_6 = [&](Vector<lanes> y) __attribute__((always_inline)) { return y > 6.0f ? none + 6.0f : y; };
  switch (activation) {
    case Activation::relu: return positive(x);
    case Activation::relu6: return up_to_6(positive(x));
    case Activation::hardswish: return x * up_to_6(positive(x + 3.0f)) * (1.0f / 6.0f);
    case Activation::silu: return x / (1.0f + exponential<lanes>(-x));
    case Activation::sigmoid: return 1.0f / (1.0f + exponential<lanes>(-x));
    default: return x;
  }
}

// Single pixels

// Columns of the result, `count` beginning with `column`, and a block of their terms. The first block adds to the residual,
// others to the sums of those before.
struct Block {
  int64_t column, count, term, end;
};

// Stores rows of a tile's sums. It is no part of the loop over terms, whose sums then stay in registers.
template <int rows, int vectors>
__attribute__((noinline)) void finish_tile(const PointwiseConvolution& c, int64_t row, const Block& block, const float* sums) {
  constexpr int lanes = vector_lanes;
  const float* others = block.term == 0 ? c.residual : c.out;
  const Activation activation = block.end == c.terms ? c.activation : Activation::none;
  Vector<lanes> bias[vectors] = {};
  for (int v = 0; v < vectors && block.end == c.terms; ++v) {
    bias[v] = load_some<lanes>(c.bias + block.column + v * lanes, block.count - v * lanes);
  }
  for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 2
    for (int v = 0; v < vectors; ++v) {
      const int64_t offset = (row + i) * c.columns + block.column + v * lanes, left = block.count - v * lanes;
      Vector<lanes> value = load<lanes>(sums + (i * vectors + v) * lanes);
      if (others != nullptr) value += load_some<lanes>(others + offset, left);
      store_some<lanes>(c.out + offset, activate<lanes>(value + bias[v], activation), left);
    }
  }
}

template <int rows, int vectors>
FXWRAP_INLINE void multiply_tile(const PointwiseConvolution& c, int64_t row, const Block& block) {
  constexpr int lanes = vector_lanes;
  const int64_t terms = c.terms, count = block.end - block.term;
  const float* image = c.image + row * terms + block.term;
  const float* packed = c.packed + block.column * terms + block.term * block_columns;
  Vector<lanes> sums[rows][vectors] = {};
  for (int64_t k = 0; k < count; ++k) {
    Vector<lanes> weights[vectors];
#pragma GCC unroll 2
    for (int v = 0; v < vectors; ++v) weights[v] = load<lanes>(packed + k * block_columns + v * lanes);
#pragma GCC unroll 16
    for (int i = 0; i < rows; ++i) {
      const float pixel = image[i * terms + k];
#pragma GCC unroll 2
      for (int v = 0; v < vectors; ++v) sums[i][v] += pixel * weights[v];
    }
  }
  float buffer[rows * vectors * lanes];
#pragma GCC unroll 16
  for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 2
    for (int v = 0; v < vectors; ++v) store<lanes>(buffer + (i * vectors + v) * lanes, sums[i][v]);
  }
  finish_tile<rows, vectors>(c, row, block, buffer);
}

template <int rows, int vectors>
int64_t multiply_rows(const PointwiseConvolution& c, int64_t row, int64_t end, const Block& block) {
  for (; row + rows <= end; row += rows) multiply_tile<rows, vectors>(c, row, block);
  return row;
}

template <int vectors>
void multiply_block(const PointwiseConvolution& c, int64_t row, int64_t end, const Block& block) {
  row = multiply_rows<tile_rows, vectors>(c, row, end, block);
  row = multiply_rows<tile_rows / 2, vectors>(c, row, end, block);
  row = multiply_rows<2, vectors>(c, row, end, block);
  multiply_rows<1, vectors>(c, row, end, block);
}

FXWRAP_INLINE int64_t smaller(int64_t one, int64_t other) { return one < other ? one : other; }

void convolve_pixels(const PointwiseConvolution& c, int64_t row, int64_t end) {
  for (int64_t column = 0; column < c.columns; column += block_columns) {
    const int64_t count = smaller(c.columns - column, block_columns);
    for (int64_t term = 0; term < c.terms; term += block_terms) {
      const Block block{column, count, term, smaller(term + block_terms, c.terms)};
      if (count > vector_lanes) multiply_block<2>(c, row, end, block);
      else multiply_block<1>(c, row, end, block);
    }
  }
}

// Channels by themselves

// The part of a kernel, in one dimension, that is within an image.
struct Span {
  int64_t first, end;
};

FXWRAP_INLINE Span span_within(int64_t start, int64_t dilation, int64_t length, int64_t kernel) {
  const int64_t first = start >= 0 ? 0 : (-start + dilation - 1) / dilation, end = (length - start + dilation - 1) / dilation;
  return {first, smaller(end, kernel)};
}

// Neighbouring pixels of a row of results, and neighbouring channels; `image` is where the first one's kernel starts.
template <int lanes, int vectors, int pixels>
FXWRAP_INLINE void sum_window(const DepthwiseConvolution& c, int64_t image, int64_t out, int64_t channel, Span rows, Span columns) {
  Vector<lanes> sums[pixels][vectors] = {};
  for (int64_t ky = rows.first; ky < rows.end; ++ky) {
    for (int64_t kx = columns.first; kx < columns.end; ++kx) {
      const float* weight = c.packed + (ky * c.kernel_width + kx) * c.channels + channel;
      const float* source = c.image + (image + ky * c.dilation_y * c.width + kx * c.dilation_x) * c.channels + channel;
#pragma GCC unroll 4
      for (int v = 0; v < vectors; ++v) {
        const Vector<lanes> factor = load<lanes>(weight + v * lanes);
#pragma GCC unroll 4
        for (int p = 0; p < pixels; ++p) sums[p][v] += factor * load<lanes>(source + p * c.stride_x * c.channels + v * lanes);
      }
    }
  }
#pragma GCC unroll 4
  for (int p = 0; p < pixels; ++p) {
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) {
      const int64_t offset = (out + p) * c.channels + channel + v * lanes;
      Vector<lanes> value = sums[p][v] + load<lanes>(c.bias + channel + v * lanes);
      if (c.residual != nullptr) value += load<lanes>(c.residual + offset);
      store<lanes>(c.out + offset, activate<lanes>(value, c.activation));
    }
  }
}

template <int lanes, int vectors, int pixels>
FXWRAP_INLINE int64_t sum_channels(const DepthwiseConvolution& c, int64_t image, int64_t out, int64_t channel, Span rows,
                                   Span columns) {
  for (; channel + lanes * vectors <= c.channels; channel += lanes * vectors) {
    sum_window<lanes, vectors, pixels>(c, image, out, channel, rows, columns);
  }
  return channel;
}

template <int pixels>
void sum_pixels(const DepthwiseConvolution& c, int64_t image, int64_t out, Span rows, Span columns) {
  int64_t channel = sum_channels<vector_lanes, 8 / (pixels + 1), pixels>(c, image, out, 0, rows, columns);
  channel = sum_channels<vector_lanes, 1, pixels>(c, image, out, channel, rows, columns);
  channel = sum_channels<8, 1, pixels>(c, image, out, channel, rows, columns);
  channel = sum_channels<4, 1, pixels>(c, image, out, channel, rows, columns);
  sum_channels<1, 1, pixels>(c, image, out, channel, rows, columns);
}

void convolve_channels(const DepthwiseConvolution& c, int64_t row, int64_t end) {
  const int64_t reach = (block_pixels - 1) * c.stride_x + (c.kernel_width - 1) * c.dilation_x;
  for (; row < end; ++row) {
    const int64_t y = row % c.out_height * c.stride_y - c.padding_y, start = (row / c.out_height * c.height + y) * c.width;
    const Span rows = span_within(y, c.dilation_y, c.height, c.kernel_height);
    for (int64_t column = 0; column < c.out_width;) {
      const int64_t x = column * c.stride_x - c.padding_x, out = row * c.out_width + column;
      if (x >= 0 && x + reach < c.width && column + block_pixels <= c.out_width) {
        sum_pixels<block_pixels>(c, start + x, out, rows, {0, c.kernel_width});
        column += block_pixels;
      } else {
        sum_pixels<1>(c, start + x, out, rows, span_within(x, c.dilation_x, c.width, c.kernel_width));
        ++column;
      }
    }
  }
}
