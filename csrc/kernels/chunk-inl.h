// Tokens of the linear family, a chunk at a time, made ready for the state: products between the tokens of a block of
// four, and what each token reads from and writes to the state before and after its block.
//
// Within a block, with w = exp g and products of w over the tokens after s up to t: f_ts,
//   reads   q̂_t = scale f_t q_t, k̂_t = f_t k_t       (f_t: from the start of the block)
//   writes  k̃_t = f_3t k_t
//   P_ts = scale q_tᵀ f_ts k_s (s <= t),  A_ts = beta_t k_tᵀ f_ts k_s (s < t),  decay f_3
// so that with the state S before the block
//   u_t = beta_t (v_t - Sᵀ k̂_t - Σ_s A_ts u_s) (delta) or v_t,   o_t = Sᵀ q̂_t + Σ_s P_ts u_s,   S <- f_3 S + Σ_t k̃_t u_tᵀ.
// All factors are products of gates, never quotients: none can overflow.
// Source: Yang et al., "Parallelizing linear transformers with the delta rule" (2024), with chunks of four.
#pragma once

#include "../linear.h"
#include "pass-inl.h"
#include "rows-inl.h"

namespace {

using qkv::Feature;
using qkv::Gates;
using qkv::Recurrence;
using qkv::Stride;

constexpr int64_t BLOCK = 4;             // tokens that meet the state together
constexpr int64_t CHUNK = 64;            // tokens between checkpoints
constexpr int64_t BLOCKS = CHUNK / BLOCK;
constexpr int64_t PART = 64;             // columns of v whose state stays near

// Small numbers count as zero while it lives: a state that fades would otherwise become slow.
class Flushing {
 public:
#if defined(__x86_64__)
  Flushing() : kept_(_mm_getcsr()) { _mm_setcsr(kept_ | 0x8040); }
  ~Flushing() { _mm_setcsr(kept_); }

 private:
  unsigned kept_;
#elif defined(__aarch64__)
  Flushing() {
    asm volatile("mrs %0, fpcr" : "=r"(kept_));
    asm volatile("msr fpcr, %0" ::"r"(kept_ | (uint64_t{1} << 24)));
  }
  ~Flushing() { asm volatile("msr fpcr, %0" ::"r"(kept_)); }

 private:
  uint64_t kept_;
#endif
};

// Key channels of scratch: whole vectors, and whole blocks where vectors are shorter.
template <class T>
constexpr int64_t channels(int64_t n) {
  return blocks_of(padded<T>(n), BLOCK) * BLOCK;
}

// The sums of the lanes of vectors FIRST, FIRST + STEP, ... of LANES vectors, interleaved.
template <class T, int FIRST = 0, int STEP = 1>
inline __attribute__((always_inline)) F<T> sums_of(const F<T>* rows) {
  if constexpr (STEP == LANES<T>) {
    return rows[FIRST];
  } else {
    const F<T> a = sums_of<T, FIRST, 2 * STEP>(rows), b = sums_of<T, FIRST + STEP, 2 * STEP>(rows);
    return interleave<T, false>(a, b) + interleave<T, true>(a, b);
  }
}

// Zeros, one by one: `= {}` would clear memory beside the registers.
template <class T, int COUNT>
inline __attribute__((always_inline)) void clear(F<T> (&sums)[COUNT]) {
#pragma GCC unroll 16
  for (int n = 0; n < COUNT; ++n) sums[n] = F<T>{};
}

// to[n] = the sum of the lanes of rows[n], for a count in whole vectors.
template <class T, int COUNT>
inline __attribute__((always_inline)) void store_sums(const F<T>* rows, T* to) {
  static_assert(COUNT % LANES<T> == 0);
#pragma GCC unroll 16
  for (int n = 0; n < COUNT; n += LANES<T>) store(to + n, sums_of<T>(rows + n));
}

// Four vectors as records of four numbers.
template <class T>
inline void to_records(const F<T> (&rows)[BLOCK], T* to) {
  const F<T> a = interleave<T, false>(rows[0], rows[2]), b = interleave<T, true>(rows[0], rows[2]);
  const F<T> c = interleave<T, false>(rows[1], rows[3]), d = interleave<T, true>(rows[1], rows[3]);
  store(to, interleave<T, false>(a, c));
  store(to + LANES<T>, interleave<T, true>(a, c));
  store(to + 2 * LANES<T>, interleave<T, false>(b, d));
  store(to + 3 * LANES<T>, interleave<T, true>(b, d));
}

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

// How many chunks the sequences before each one have, and all of them.
class ChunkCounts {
 public:
  bool count(const Recurrence& p) {
    each_ = blocks_of(p.length, CHUNK);
    if (!p.starts) return true;
    if (!packed_.reserve(static_cast<size_t>(p.sequences + 1) * sizeof(int64_t))) return false;
    int64_t all = 0, *const before = static_cast<int64_t*>(packed_.data());
    for (int64_t n = 0; n < p.sequences; ++n) {
      before[n] = all;
      all += blocks_of(p.starts[n + 1] - p.starts[n], CHUNK);
    }
    before[p.sequences] = all;
    return true;
  }
  int64_t before(int64_t sequence) const {
    return packed_.data() ? static_cast<const int64_t*>(packed_.data())[sequence] : sequence * each_;
  }

 private:
  Buffer packed_;
  int64_t each_ = 0;
};

// One sequence of one value head.
struct Lane {
  int64_t sequence, head, key_head, batch, first, count, checkpoint;  // first: its token 0 in the tensors

  Lane(const Recurrence& p, const ChunkCounts& chunks, int64_t unit) : sequence(unit / p.heads), head(unit % p.heads) {
    key_head = head / (p.heads / p.key_heads);
    batch = p.starts ? 0 : sequence;
    first = p.starts ? p.starts[sequence] : 0;
    count = p.starts ? p.starts[sequence + 1] - first : p.length;
    checkpoint = head * chunks.before(p.sequences) + chunks.before(sequence);
  }

  int64_t chunks() const { return blocks_of(count, CHUNK); }
  int64_t tokens(int64_t chunk) const { return least(CHUNK, count - chunk * CHUNK); }
  int64_t state(const Recurrence& p) const { return (sequence * p.heads + head) * p.key_dim * width(p); }
  static int64_t width(const Recurrence& p) { return p.value_dim + p.normalize; }

  // The tokens of a chunk in a tensor.
  Rows rows(const void* data, Type type, const Stride& stride, int64_t of_head, int64_t chunk) const {
    const int64_t offset = batch * stride.batch + of_head * stride.head + (first + chunk * CHUNK) * stride.token;
    return {static_cast<const char*>(data) + offset * size_of(type), type, stride.token, 1, nullptr, 0, tokens(chunk)};
  }
};

// The tokens of the next chunk, asked for while this one is worked on, block by block.
struct Ahead {
  Rows rows[3];
  int64_t widths[3];

  __attribute__((always_inline)) void ask(int64_t block) const {
#pragma GCC unroll 3
    for (int n = 0; n < 3; ++n) {
      const int64_t some = least(BLOCK, rows[n].count - block * BLOCK);
      if (some > 0) ask_for(rows[n], block * BLOCK, some, widths[n]);
    }
  }
};

template <class Data>
Ahead next_chunk(const Recurrence& p, const Data& data, const Lane& lane, int64_t chunk) {
  Ahead made{{lane.rows(data.query, p.type, p.query, lane.key_head, chunk + 1),
              lane.rows(data.key, p.type, p.key, lane.key_head, chunk + 1),
              lane.rows(data.value, p.type, p.value, lane.head, chunk + 1)},
             {p.key_dim, p.key_dim, p.value_dim}};
  return made;
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
