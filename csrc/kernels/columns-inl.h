// A few columns of the state of the linear family, and the tokens of a chunk that meet them in blocks of four: one
// reading and one writing of the state a block. The columns of a state never mix, and these stay in the nearest cache.
#pragma once

#include "chunk-inl.h"

namespace {

constexpr int TILE_VECTORS = QKV_PANEL >= 4 ? 2 : 1;  // of a tile of columns: what the registers hold beside its sums
template <class T>
constexpr int64_t TILE_WIDTH = TILE_VECTORS * LANES<T>;

// Sums or values of four tokens over the columns of a tile.
template <class T>
struct Four {
  F<T> at[BLOCK][TILE_VECTORS];

  inline __attribute__((always_inline)) void clear() {
#pragma GCC unroll 8
    for (int i = 0; i < BLOCK * TILE_VECTORS; ++i) at[i / TILE_VECTORS][i % TILE_VECTORS] = F<T>{};
  }
  inline __attribute__((always_inline)) void load_from(const T* rows, int64_t stride) {
#pragma GCC unroll 8
    for (int i = 0; i < BLOCK * TILE_VECTORS; ++i) {
      at[i / TILE_VECTORS][i % TILE_VECTORS] = load(rows + i / TILE_VECTORS * stride + i % TILE_VECTORS * LANES<T>);
    }
  }
  inline __attribute__((always_inline)) void store_to(T* rows, int64_t stride) const {
#pragma GCC unroll 8
    for (int i = 0; i < BLOCK * TILE_VECTORS; ++i) {
      store(rows + i / TILE_VECTORS * stride + i % TILE_VECTORS * LANES<T>, at[i / TILE_VECTORS][i % TILE_VECTORS]);
    }
  }
  // at[t] += factor · other.at[s]
  inline __attribute__((always_inline)) void add(int t, T factor, const Four& other, int s) {
#pragma GCC unroll 2
    for (int v = 0; v < TILE_VECTORS; ++v) at[t][v] += factor * other.at[s][v];
  }
};

// Rows of a tile of the state, `stride` apart; written to `to`, which may be `from`.
template <class T>
struct StateTile {
  const T* from;
  T* to;
  int64_t stride;
};

// Over the rows of a tile: take in what the tokens of the last block write, and sum what those of the next read and
// erase. By force inlined, so that sums and values stay in registers.
template <class T, bool GATED, bool WRITES, bool READS, bool ERASES>
inline __attribute__((always_inline)) void pass(const StateTile<T>& state, int64_t rows, const T* decay, const T* writes,
                                                const Four<T>& written, const T* reads, Four<T>& read,
                                                const T* erases, Four<T>& erased) {
  Four<T> u, r, e;  // locals, which no pointer can reach
  if constexpr (WRITES) u = written;
  r.clear();
  e.clear();
  for (int64_t i = 0; i < rows; ++i) {
    F<T> s[TILE_VECTORS];
#pragma GCC unroll 2
    for (int v = 0; v < TILE_VECTORS; ++v) s[v] = load(state.from + i * state.stride + v * LANES<T>);
    if constexpr (WRITES) {
#pragma GCC unroll 2
      for (int v = 0; v < TILE_VECTORS; ++v) {
        if constexpr (GATED) s[v] *= decay[i];
      }
#pragma GCC unroll 4
      for (int t = 0; t < BLOCK; ++t) {
        const F<T> factor = splat(writes[i * BLOCK + t]);
#pragma GCC unroll 2
        for (int v = 0; v < TILE_VECTORS; ++v) s[v] += factor * u.at[t][v];
      }
#pragma GCC unroll 2
      for (int v = 0; v < TILE_VECTORS; ++v) store(state.to + i * state.stride + v * LANES<T>, s[v]);
    }
#pragma GCC unroll 4
    for (int t = 0; t < BLOCK; ++t) {
      if constexpr (READS) {
        const F<T> factor = splat(reads[i * BLOCK + t]);
#pragma GCC unroll 2
        for (int v = 0; v < TILE_VECTORS; ++v) r.at[t][v] += factor * s[v];
      }
      if constexpr (ERASES) {
        const F<T> factor = splat(erases[i * BLOCK + t]);
#pragma GCC unroll 2
        for (int v = 0; v < TILE_VECTORS; ++v) e.at[t][v] += factor * s[v];
      }
    }
  }
  read = r;
  erased = e;
}

// What the tokens of a block write, from their values: for a delta rule what is left of these once the keys are asked,
// times beta. `left` takes what is left.
template <class T, bool DELTA>
inline __attribute__((always_inline)) void solve(const T* beta, const T* inner, const Four<T>& erased, Four<T>& u,
                                                 Four<T>& left) {
  if constexpr (DELTA) {
#pragma GCC unroll 4
    for (int t = 0; t < BLOCK; ++t) {
#pragma GCC unroll 2
      for (int v = 0; v < TILE_VECTORS; ++v) left.at[t][v] = u.at[t][v] - erased.at[t][v];
#pragma GCC unroll 4
      for (int s = 0; s < t; ++s) left.add(t, -inner[t * BLOCK + s], u, s);
#pragma GCC unroll 2
      for (int v = 0; v < TILE_VECTORS; ++v) u.at[t][v] = beta[t] * left.at[t][v];
    }
  }
}

// The tokens of a chunk meet a tile of columns: v and o (CHUNK, value_stride). `ahead` may be null.
template <class T, bool DELTA, bool GATED>
void meet(const ChunkScratch<T>& s, int64_t rows, int64_t count, T* state, int64_t stride, const T* value, T* output,
          int64_t value_stride, const Ahead* ahead) {
  const int64_t blocks = blocks_of(count, BLOCK);
  const StateTile<T> tile{state, state, stride};
  Four<T> u, r, e, left;
  pass<T, GATED, false, true, DELTA>(tile, rows, nullptr, nullptr, u, s.reads, r, s.erases, e);
  for (int64_t n = 0; n < blocks; ++n) {
    const int64_t at = n * s.wide * BLOCK, next = at + s.wide * BLOCK;
    if (ahead) ahead->ask(n);
    u.load_from(value + n * BLOCK * value_stride, value_stride);
    solve<T, DELTA>(s.beta + n * BLOCK, s.inner + n * BLOCK * BLOCK, e, u, left);
    const T* const weights = s.weights + n * BLOCK * BLOCK;
#pragma GCC unroll 4
    for (int t = 0; t < BLOCK; ++t) {
#pragma GCC unroll 4
      for (int from = 0; from <= t; ++from) r.add(t, weights[t * BLOCK + from], u, from);
    }
    r.store_to(output + n * BLOCK * value_stride, value_stride);
    const T* const decay = s.decay + n * s.wide;
    if (n + 1 < blocks) {
      pass<T, GATED, true, true, DELTA>(tile, rows, decay, s.writes + at, u, s.reads + next, r, s.erases + next, e);
    } else {
      pass<T, GATED, true, false, false>(tile, rows, decay, s.writes + at, u, nullptr, r, nullptr, e);
    }
  }
}

}  // namespace
