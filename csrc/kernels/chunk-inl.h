// Tokens of the linear family, a chunk at a time, made ready for the state: products between the tokens of a block of
// four, and what each token reads from and writes to the state before and after its block.
//
// Within a block, with w = exp g and products of w over the tokens after s up to t: f_ts,
//   reads   q̂_t = scale f_t q_t, k̂_t = f_t k_t       (f_t: from the start of the block)
//   writes  k̃_t = f_3t k_t
//   P_ts = scale q_tᵀ f_ts k_s (s <= t),  A_ts = k_tᵀ f_ts k_s (s < t),  decay f_3
// so that with the state S before the block
//   u_t = beta_t (v_t - Sᵀ k̂_t - Σ_s A_ts u_s) (delta) or v_t,   o_t = Sᵀ q̂_t + Σ_s P_ts u_s,   S <- f_3 S + Σ_t k̃_t u_tᵀ.
// All factors are products of gates, never quotients: none can overflow.
// Source: Yang et al., "Parallelizing linear transformers with the delta rule" (2024), with chunks of four.
#pragma once

#include "lane-inl.h"
#include "sums-inl.h"

namespace {

// phi(x), and its derivative by x.
template <class T>
inline F<T> feature_of(Feature feature, F<T> x) {
  switch (feature) {
    case Feature::elu:
      return x > 0 ? x + 1 : exp2<T>(x * static_cast<T>(LOG2_E));
    case Feature::relu:
      return x <= 0 ? F<T>{} : x;
    case Feature::squared_relu:
      return x <= 0 ? F<T>{} : x * x;
    default:
      return x;
  }
}

template <class T>
inline F<T> slope_of(Feature feature, F<T> x) {
  const F<T> one = splat<T>(1);
  switch (feature) {
    case Feature::elu:
      return x > 0 ? one : exp2<T>(x * static_cast<T>(LOG2_E));
    case Feature::relu:
      return x <= 0 ? F<T>{} : one;
    case Feature::squared_relu:
      return x <= 0 ? F<T>{} : 2 * x;
    default:
      return one;
  }
}

// What a chunk is while its columns meet the state. Rows of tokens are `wide` apart, records of a key channel hold the
// four tokens of a block.
template <class T>
struct ChunkScratch {
  int64_t wide;
  T *query, *key, *gate;    // (CHUNK, wide): features, and exp g
  T *beta;                  // (CHUNK)
  T *reads, *erases;        // (BLOCKS, wide, BLOCK): q̂ and, for delta rules, k̂
  T *writes;                // (BLOCKS, wide, BLOCK): k̃
  T *decay;                 // (BLOCKS, wide)
  T *inner, *weights;       // (BLOCKS, BLOCK, BLOCK): A and P
  T *ones;                  // (CHUNK), for the loading of rows
  T *norm, *norms;          // (wide), (BLOCKS, wide): the normaliser's column of the state, now and before each block
  T *denominator;           // (CHUNK)

  ChunkScratch(const Recurrence& p, Arena& arena) : wide(channels<T>(p.key_dim)) {
    T** const rows[] = {&query, &key, &gate, &reads, &erases, &writes};
    for (T** one : rows) *one = arena.take<T>(CHUNK * wide);
    beta = arena.take<T>(CHUNK);
    decay = arena.take<T>(BLOCKS * wide);
    inner = arena.take<T>(CHUNK * BLOCK);
    weights = arena.take<T>(CHUNK * BLOCK);
    ones = arena.take<T>(CHUNK);
    norm = arena.take<T>(wide);
    norms = arena.take<T>(BLOCKS * wide);
    denominator = arena.take<T>(CHUNK);
  }

  void prepare(const Recurrence&) {
    for (int64_t t = 0; t < CHUNK; ++t) ones[t] = 1;
  }
};

// A token whose weights add up to exactly 0 has an output of 0, whatever the sum above them.
template <class T>
inline void clear_undefined(const Recurrence& p, const ChunkScratch<T>& s, int64_t count, T* rows, int64_t stride) {
  for (int64_t t = 0; t < count && p.normalize; ++t) {
    for (int64_t c = 0; c < stride && s.denominator[t] == 0; ++c) rows[t * stride + c] = 0;
  }
}

// Rows of tokens with zeros behind the last one, up to whole blocks.
template <class T>
inline void load_tokens(const Rows& from, int64_t width, const T* ones, T* to, int64_t to_stride) {
  load_rows(from, width, ones, to, to_stride);
  const int64_t end = (from.count + BLOCK - 1) / BLOCK * BLOCK * to_stride;
  for (int64_t i = from.count * to_stride; i < end; ++i) to[i] = 0;
}

// exp g of each token and key channel; 1 behind the last token.
template <class T>
inline void load_gates(const Recurrence& p, const Lane& lane, const void* gate, int64_t chunk, ChunkScratch<T>& s) {
  const Rows rows = lane.rows(gate, p.gate_type, p.gate, lane.head, chunk);
  load_tokens(rows, p.gates == Gates::vector ? p.key_dim : 1, s.ones, s.gate, s.wide);
  const int64_t end = (rows.count + BLOCK - 1) / BLOCK * BLOCK;
  for (int64_t t = 0; t < end; ++t) {
    T* row = s.gate + t * s.wide;
    const F<T> alike = exp2<T>(splat(row[0] * static_cast<T>(LOG2_E)));
    for (int64_t i = 0; i < s.wide; i += LANES<T>) {
      store(row + i, p.gates == Gates::scalar ? alike : exp2<T>(load(row + i) * static_cast<T>(LOG2_E)));
    }
  }
}

// The four tokens of a block at LANES key channels: what they are, and products of gates on the way.
template <class T>
struct Block {
  F<T> q[BLOCK], k[BLOCK], w[BLOCK], since[BLOCK];  // since: of the gates from the start of the block
  F<T> faded[BLOCK][BLOCK];                         // [t][s]: f_ts k_s

  template <bool GATED>
  inline __attribute__((always_inline)) void load_at(const ChunkScratch<T>& s, int64_t first, int64_t i) {
#pragma GCC unroll 4
    for (int t = 0; t < BLOCK; ++t) {
      q[t] = load(s.query + (first + t) * s.wide + i);
      k[t] = load(s.key + (first + t) * s.wide + i);
      if constexpr (GATED) w[t] = load(s.gate + (first + t) * s.wide + i);
    }
#pragma GCC unroll 4
    for (int t = 0; t < BLOCK; ++t) {
      if constexpr (GATED) since[t] = t == 0 ? w[0] : since[t - 1] * w[t];
      faded[t][t] = k[t];
#pragma GCC unroll 4
      for (int r = 0; r < t; ++r) faded[t][r] = GATED ? faded[t - 1][r] * w[t] : k[r];
    }
  }
};

// Reads, writes, decay and the products within each block.
template <class T, bool DELTA, bool GATED>
void prepare_blocks(const Recurrence& p, int64_t count, ChunkScratch<T>& s) {
  const F<T> scale = splat(static_cast<T>(p.normalize ? 1.0 : p.scale));
  for (int64_t n = 0; n * BLOCK < count; ++n) {
    F<T> by_query[16], by_key[16], by_norm[16];
    clear<T>(by_query);
    clear<T>(by_key);
    clear<T>(by_norm);
    for (int64_t i = 0; i < s.wide; i += LANES<T>) {
      Block<T> b;
      b.template load_at<GATED>(s, n * BLOCK, i);
      F<T> read[BLOCK], erase[BLOCK];
#pragma GCC unroll 4
      for (int t = 0; t < BLOCK; ++t) {
        read[t] = GATED ? b.q[t] * scale * b.since[t] : b.q[t] * scale;
        if constexpr (DELTA) erase[t] = GATED ? b.k[t] * b.since[t] : b.k[t];
#pragma GCC unroll 4
        for (int r = 0; r <= t; ++r) {
          by_query[t * BLOCK + r] += b.q[t] * b.faded[t][r];
          if (DELTA && r < t) by_key[t * BLOCK + r] += b.k[t] * b.faded[t][r];
        }
      }
      const int64_t record = (n * s.wide + i) * BLOCK;
      to_records<T>(read, s.reads + record);
      if constexpr (DELTA) to_records<T>(erase, s.erases + record);
      to_records<T>(b.faded[BLOCK - 1], s.writes + record);
      if constexpr (GATED) store(s.decay + n * s.wide + i, b.since[BLOCK - 1]);
      if (p.normalize) {
        F<T> norm = load(s.norm + i);
        store(s.norms + n * s.wide + i, norm);
#pragma GCC unroll 4
        for (int t = 0; t < BLOCK; ++t) by_norm[t] += read[t] * norm;
        if constexpr (GATED) norm = norm * b.since[BLOCK - 1];
#pragma GCC unroll 4
        for (int t = 0; t < BLOCK; ++t) norm += b.faded[BLOCK - 1][t];
        store(s.norm + i, norm);
      }
    }
    T* const weights = s.weights + n * BLOCK * BLOCK;
    store_sums<T, 16>(by_query, weights);
    for (int i = 0; i < BLOCK * BLOCK; ++i) weights[i] *= scale[0];
    if constexpr (DELTA) {
      store_sums<T, 16>(by_key, s.inner + n * BLOCK * BLOCK);
    }
    if (p.normalize) {
      alignas(64) T sums[16];
      store_sums<T, 16>(by_norm, sums);
      for (int t = 0; t < BLOCK; ++t) {
        for (int r = 0; r <= t; ++r) sums[t] += weights[t * BLOCK + r];
        s.denominator[n * BLOCK + t] = sums[t];
      }
    }
  }
}

template <class T>
void apply_feature(const Recurrence& p, int64_t count, T* row, int64_t stride) {
  if (p.feature == Feature::none) return;
  for (int64_t t = 0; t < count; ++t, row += stride) {
    for (int64_t i = 0; i < stride; i += LANES<T>) store(row + i, feature_of<T>(p.feature, load(row + i)));
    for (int64_t i = p.key_dim; i < stride; ++i) row[i] = 0;
  }
}

// Load a chunk of one sequence and head.
template <class T, bool DELTA, bool GATED, class Data>
void load_chunk(const Recurrence& p, const Data& data, const Lane& lane, int64_t chunk, ChunkScratch<T>& s) {
  const int64_t count = lane.tokens(chunk);
  load_tokens(lane.rows(data.query, p.type, p.query, lane.key_head, chunk), p.key_dim, s.ones, s.query, s.wide);
  load_tokens(lane.rows(data.key, p.type, p.key, lane.key_head, chunk), p.key_dim, s.ones, s.key, s.wide);
  apply_feature(p, count, s.query, s.wide);
  apply_feature(p, count, s.key, s.wide);
  if constexpr (GATED) load_gates(p, lane, data.gate, chunk, s);
  if constexpr (DELTA) load_tokens(lane.rows(data.beta, p.beta_type, p.beta, lane.head, chunk), 1, s.ones, s.beta, 1);
}

// And prepare its blocks.
template <class T, bool DELTA, bool GATED, class Data>
void prepare_chunk(const Recurrence& p, const Data& data, const Lane& lane, int64_t chunk, ChunkScratch<T>& s) {
  load_chunk<T, DELTA, GATED>(p, data, lane, chunk, s);
  prepare_blocks<T, DELTA, GATED>(p, lane.tokens(chunk), s);
}

}  // namespace
