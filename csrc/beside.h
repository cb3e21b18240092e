// What stands beside the recurrence in a layer of the linear family: the short convolution and norms over rows.
//
// Axes: N sequences, L tokens, C channels, K taps; R rows, W width. Strides count elements. Numbers are computed in
// float64 where x is of float64, and in float32 otherwise: the computing type.
#pragma once

#include "abi.h"

namespace qkv {

constexpr int64_t MOST_TAPS = 8;

// y[t] = act(bias + sum over k of weight[k] · x[t - K + 1 + k]), channel by channel and sequence by sequence. Before
// token 0 come the K - 1 rows of `before`, zeros where it is null.
struct Convolution {
  Type type;         // of x, the output, the tails, and their gradients
  Type weight_type;  // of weight and bias
  int64_t sequences, length, channels, taps;
  int64_t x_stride[2];    // of sequence and token; channels lie side by side
  const int64_t* starts;  // (N + 1): sequence n has the tokens starts[n] to starts[n + 1] of one row; null: L each
  bool silu;              // act, else the identity
  const void *x, *weight, *bias;  // (N, L, C); (C, K) and (C), dense; bias may be null
  const void* before;             // (N, K - 1, C), dense; may be null
  void* output;                   // (N, L, C), dense; backward: null
  void* after;                    // the last K - 1 inputs, as `before`, which it may be; may be null
};

// Gradients are dense and overwritten; null: not wanted. Those of weight and bias are of the computing type.
struct ConvolutionGradients {
  const void* output;        // (N, L, C) with strides as x
  int64_t output_stride[2];
  const void* after;         // dense; null: zero
  void *x, *weight, *bias, *before;
};

enum class Activation : int32_t { none = 0, silu = 1, sigmoid = 2 };

// y = x · r · weight · act(gate), or y = a · r · weight of a = x · act(gate) where the gate comes first, with
// r = 1 / sqrt(eps + the mean, or the sum, of the squares of the row).
struct Norm {
  Type type;         // of x, the output and the gradients of both
  Type gate_type;    // and of its gradient
  Type weight_type;
  Activation activation;  // of the gate; none: there is no gate
  bool gate_first, mean;
  int64_t outer, inner, width;  // rows (outer, inner), whose numbers lie side by side
  int64_t x_stride[2], gate_stride[2];
  int64_t weight_rows;          // row r takes row r mod weight_rows of the weight
  double eps;
  const void *x, *gate, *weight;  // weight (weight_rows, W), dense; null: ones
  void* output;                   // dense; backward: null
};

// As ConvolutionGradients.
struct NormGradients {
  const void* output;
  int64_t output_stride[2];
  void *x, *gate, *weight;
};

Status convolution(const Convolution&, const Run&);
Status convolution_backward(const Convolution&, const ConvolutionGradients&, const Run&);
Status norm(const Norm&, const Run&);
Status norm_backward(const Norm&, const NormGradients&, const Run&);

}  // namespace qkv
