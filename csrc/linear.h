// The linear family across the border of the core: one recurrence over the tokens of each sequence, by heads.
//
//   S' = Diag(exp g) S;  S = S' + beta k (v - S'ᵀ k)ᵀ for delta rules, S' + k vᵀ otherwise;  o = scale Sᵀ q
//
// Axes: N sequences, H value heads, K key heads (value head h reads key head h / (H / K)), L tokens, D width of q and k,
// V width of v, W width of a state: V, or V + 1 with the normaliser. Channels lie side by side; strides count elements.
// Gates are logarithms. States and gradients of gates are of the computing type.
#pragma once

#include "abi.h"

namespace qkv {

enum class Gates : int32_t { none = 0, scalar = 1, vector = 2 };  // one a token, or one a key channel
enum class Feature : int32_t { none = 0, elu = 1, relu = 2, squared_relu = 3 };  // of each number of q and k

struct Stride {
  int64_t batch, head, token;
};

struct Recurrence {
  Type type, gate_type, beta_type;  // type: of q, k, v and all gradients of these and of the output
  Type output_type;                 // the same, or the computing type
  int64_t sequences, heads, key_heads, length, key_dim, value_dim;  // length: of a sequence that is not packed
  const int64_t* starts;  // (N + 1): tokens where packed sequences begin, which then share batch row 0; null: one a row
  Stride query, key, value, gate, beta, output;  // output: and its gradient as the core is given it
  Gates gates;
  Feature feature;
  bool delta, normalize;
  double scale;
};

// Checkpoints: the state before each 64 tokens, (H, chunks, D, W) with the chunks of all sequences one after another.
struct RecurrenceForward {
  const void *query, *key, *value, *gate, *beta;
  const void* before;  // (N, H, D, W); null: zero
  void* output;
  void* after;  // (N, H, D, W); may be `before`
  void* checkpoints;  // null: not wanted
};

// Gradients are overwritten. Those of gate and beta are contiguous, (N, H, L[, D]), packed ones (H, all tokens[, D]).
struct RecurrenceBackward {
  const void *query, *key, *value, *gate, *beta, *checkpoints;
  const void* output;  // of the forward pass; read with the normaliser alone
  const void* grad_output;
  Stride grad_output_stride, grad_query_stride, grad_key_stride, grad_value_stride;
  const void* grad_after;  // null: zero
  void *grad_query, *grad_key, *grad_value, *grad_gate, *grad_beta;
  void* grad_before;  // null: not wanted
};

Status recur(const Recurrence&, const RecurrenceForward&, const Run&);
Status recur_backward(const Recurrence&, const RecurrenceBackward&, const Run&);

}  // namespace qkv
