// A linear map of a few rows, across the border of the core: y = x · weightᵀ + bias.
//
// Axes: R rows, N outputs, K inputs. Strides count elements; the numbers of a row lie side by side. Sums are in float64
// where the tensors are of float64, and in float32 otherwise. Each row of y is what its row of x gives alone.
#pragma once

#include "abi.h"

namespace qkv {

struct Projection {
  Type type;  // of all tensors
  int64_t rows, outputs, inputs;
  int64_t x_stride, weight_stride;  // from row to row
  const void *x, *weight, *bias;    // (R, K), (N, K), and (N), dense; bias may be null
  void* output;                     // (R, N), dense
};

Status project(const Projection&, const Run&);

}  // namespace qkv
