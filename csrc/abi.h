// Everything that crosses the border of the core: plain structs. No torch, no Python, no STL.
//
// Axes: B batch, H query heads, G key heads, L queries, S keys, D width of q and k, V width of v; query head h reads key
// head h / (H / G). Strides count elements. Scores are in units of bits: their exponential is a power of two.
//
// Numbers are computed, and all but the tensors of a call are given, in float64 where q, k and v are of float64, and in
// float32 otherwise: the computing type.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace qkv {

constexpr int32_t ABI_VERSION = 4;
constexpr int64_t TILE = 64;       // queries and keys of a tile; a row of its bit mask is one 64-bit word

enum class Status : int32_t { ok = 0, interrupted = 1, out_of_memory = 2 };
enum class Type : int32_t { float32 = 0, float64 = 1, float16 = 2, bfloat16 = 3 };
enum class BiasKind : int32_t { none = 0, tensor = 1, alibi = 2, relative = 3 };

// For each block of 64 queries: runs of full key blocks, and partial key blocks with their bit masks; both ascending.
struct Schedule {
  int64_t rows, cols;
  const int32_t* row_ptr;      // (rows + 1)
  const int32_t* runs;         // (n, 2): first and one past the last key block
  const int32_t* partial_ptr;  // (rows + 1)
  const int32_t* partial;      // (m, 2): key block, mask
  const uint64_t* masks;       // (masks, 64): word k has bit t set where query t of the tile sees key k
};

// One attention of its own over a subset of the pairs. Slots stand for rows of the call; null rows: slot i is row i.
struct Part {
  const int32_t* query_rows;  // row of each slot, -1 for padding, which lies in no full tile
  int64_t query_count;
  const int32_t* key_rows;
  int64_t key_count;
  Schedule schedule;
};

struct Member {
  const Part* parts;
  int64_t count;
};

// What (b, h) walks: members[index[b * index_batch_stride + h * index_head_stride]].
struct Plan {
  const Member* members;
  int64_t count;
  const int32_t* index;
  int64_t index_batch_stride, index_head_stride;
};

struct Bias {
  BiasKind kind;
  Type type;          // of its numbers; alibi and relative: the computing type, contiguous
  int64_t size[4];    // tensor: (B or 1, H or 1, L or 1, S or 1); alibi: (H); relative: (H, 2R + 1)
  int64_t stride[4];  // 0 along an axis of size 1
};

// Batch rows of different length, one after another: row b has the rows begin[b] to begin[b + 1] of its tensors, whose
// batch stride plays no part; null: all have the same length.
struct Packing {
  const int64_t *queries, *keys;
};

// Keys and values in pages of one pool: those of batch row b from c · size on are rows from table[b · stride + c] · size
// on of tensors whose batch stride is 0; -1 where no query sees any of them; a null table: none.
struct Pages {
  const int32_t* table;
  int64_t stride, size;
};

// One attention call without its data.
struct Problem {
  Type type;         // of q, k, v and their gradients
  Type output_type;  // of the output and its gradient: the same, or the computing type
  int64_t batch, heads, kv_heads, queries, keys, head_dim, value_dim;
  int64_t query_stride[4], key_stride[4], value_stride[4];
  double scale;    // of q · k, natural units
  double softcap;  // 0: none
  Bias bias;
  uint32_t dropout_threshold;        // of 65,536; 0: no dropout
  const int64_t* query_start;        // absolute position of query 0, (B) or (1)
  int64_t query_start_stride;        // 1 or 0
  const int64_t* key_start;
  int64_t key_start_stride;
  int64_t batch_origin, head_origin;  // what dropout counts b and h from
  Packing packing;                    // L and S are then the greatest lengths
  Pages pages;
  Plan plan;
};

// The results are contiguous (B, H, L[, V]); packed ones (H, all rows[, V]).
struct Forward {
  const void *query, *key, *value, *bias, *sinks;  // sinks (H), contiguous, of the computing type; null: none
  uint64_t seed;
  void* output;
  void* lse;         // natural logarithm; may be null
  void* max_scores;  // natural units, without the sink; may be null
  void* shift;       // bits, with the sink: a weight is 2^(score - shift) / total; may be null, with total
  void* total;       // 1 where nothing is seen
  void* entropy;     // nats; may be null
};

// Gradients are contiguous in the order of their tensor's axes, packed ones without the batch, and are overwritten;
// null: not wanted. That of a bias is of the computing type, has the bias's sizes, and comes filled with zeros.
struct Backward {
  const void *query, *key, *value, *bias, *sinks;
  uint64_t seed;
  const void *output, *shift, *total;    // of the forward pass
  const void* grad_output;               // (B, H, L, V) with strides
  int64_t grad_output_stride[4];
  const void* grad_lse;                  // as lse, contiguous; null: zero
  void *grad_query, *grad_key, *grad_value, *grad_bias, *grad_sinks;
};

// How to run a call. `poll` is asked by the calling thread at least every 50 ms; nonzero stops the call.
struct Run {
  int32_t threads;
  int32_t (*poll)(void*);  // may be null
  void* context;
};

Status forward(const Problem&, const Forward&, const Run&);
Status backward(const Problem&, const Backward&, const Run&);

// The instruction sets that this build holds and this processor has, best first, separated by spaces.
const char* available_isas();
// The one in use: chosen from the processor at load, or by the environment variable QKV_ISA.
const char* isa();
// Choose another one, for tests; false where it is not available. Not while calls run.
bool choose_isa(const char* name);

}  // namespace qkv
