// Convolutions of float32 channels-last images by loops over vectors: of single pixels, and of each channel by itself. For
// small images a call of oneDNN takes longer than the sums.
#pragma once

#include <cstdint>

namespace fxwrap {

enum class Activation { none, relu, relu6, hardswish, silu, sigmoid };

// The pixels of images as rows: out = activation(image @ weight + bias + residual). `packed` has the weight's columns in blocks
// of `vector_columns()`, the last with zeros, each with one term's elements beside each other.
struct PointwiseConvolution {
  const float *image, *packed, *bias, *residual;  // a residual of the result's layout, perhaps in its memory, or null
  float* out;
  int64_t rows, terms, columns;
  Activation activation;
};

// Each channel's image times its own kernel: out = activation(convolution + bias + residual). `packed` is of shape (kernel
// height, kernel width, channels).
struct DepthwiseConvolution {
  const float *image, *packed, *bias, *residual;
  float* out;
  int64_t channels, height, width, out_height, out_width, kernel_height, kernel_width;
  int64_t stride_y, stride_x, padding_y, padding_x, dilation_y, dilation_x;
  Activation activation;
};

// The columns of a block of a packed weight; 0 on processors that these loops are not for.
int64_t vector_columns();

// Ranges of pixels that are multiples of this have no remainders of tiles.
constexpr int64_t pixel_rows = 12;

// Computes a range of rows: of pixels, or of the images' heights one after another.
void convolve_pixels(const PointwiseConvolution& convolution, int64_t row, int64_t end);
void convolve_channels(const DepthwiseConvolution& convolution, int64_t row, int64_t end);

}  // namespace fxwrap
