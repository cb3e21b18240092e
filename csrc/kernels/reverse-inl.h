// The columns of a part of the state walked backwards: gradients of what the blocks of a chunk read, write and hold.
//
// With G the gradient of the state after a block and S the state before it (chunk-inl.h names the rest),
//   du_s = Gᵀ k̃_s + Σ_t P_ts do_t - Σ_t A_ts dl_t,   dl_t = beta_t du_t,   dv_t = dl_t   (add: dv_t = du_t)
//   dk̃_t = G u_t,  dq̂_t = S do_t,  dk̂_t = - S dl_t,  df_3 = the row sums of G · S
//   dP_ts = do_tᵀ u_s,  dA_ts = - dl_tᵀ u_s,  dbeta_t = du_tᵀ l_t   with l_t = v_t - Sᵀ k̂_t - Σ_s A_ts u_s
//   G <- f_3 G + Σ_t q̂_t do_tᵀ - Σ_t k̂_t dl_tᵀ.
// The states come from a checkpoint and the blocks before; nothing is inverted.
#pragma once

#include "columns-inl.h"

namespace {

// What the blocks of a chunk have and give while the columns of a part are walked. Rows of columns are `columns` apart.
template <class T>
struct ReverseScratch {
  int64_t columns, wide, area;  // area: of a state of these columns
  T *states;                   // (BLOCKS, wide, columns): before each block
  T *grad_states;              // (parts, wide, columns)
  T *grad_state;               // of the part that is walked
  T *value, *left;             // (CHUNK, columns): u from v on, and l
  T *grad_output, *grad_value;  // (CHUNK, columns)
  T *grad_left, *asked;        // (BLOCK, columns): - dl, and Gᵀ k̃ of the block that comes next
  T *reads, *erases, *writes;  // (CHUNK, wide): gradients, a row a token
  T *decay;                    // (BLOCKS, wide)
  T *inner, *weights;          // (BLOCKS, BLOCK, BLOCK); the diagonal of inner holds that of beta

  ReverseScratch(const Recurrence& p, Arena& arena) : wide(channels<T>(p.key_dim)) {
    columns = blocks_of(least(PART, p.value_dim), TILE_WIDTH<T>) * TILE_WIDTH<T>;
    area = wide * columns;
    states = arena.take<T>(BLOCKS * area);
    grad_states = grad_state = arena.take<T>(blocks_of(p.value_dim, PART) * area);
    T **const tokens[] = {&value, &left, &grad_output, &grad_value}, **const keys[] = {&reads, &erases, &writes};
    for (T** one : tokens) *one = arena.take<T>(CHUNK * columns);
    for (T** one : keys) *one = arena.take<T>(CHUNK * wide);
    grad_left = arena.take<T>(BLOCK * columns);
    asked = arena.take<T>(BLOCK * columns);
    decay = arena.take<T>(BLOCKS * wide);
    inner = arena.take<T>(CHUNK * BLOCK);
    weights = arena.take<T>(CHUNK * BLOCK);
  }

  // Rows and lanes beyond the key channels are zero, once and for all.
  void clear(int64_t rows, int64_t parts) {
    for (int64_t i = 0; i < CHUNK * wide; ++i) reads[i] = erases[i] = writes[i] = 0;
    for (int64_t n = 0; n < BLOCKS; ++n) {
      for (int64_t i = rows * columns; i < area; ++i) states[n * area + i] = 0;
    }
    for (int64_t part = 0; part < parts; ++part) {
      for (int64_t i = rows * columns; i < area; ++i) grad_states[part * area + i] = 0;
    }
  }
};

// The states before each block, u and l of a tile of columns, from the state before the first block on.
template <class T, bool DELTA, bool GATED>
void retrace(const ChunkScratch<T>& s, ReverseScratch<T>& back, int64_t rows, int64_t blocks, int64_t column) {
  Four<T> u, none, e, left;
  T* state = back.states + column;
  pass<T, GATED, false, false, DELTA>({state, state, back.columns}, rows, nullptr, nullptr, u, nullptr, none, s.erases, e);
  for (int64_t n = 0; n < blocks; ++n, state += back.area) {
    const int64_t at = n * s.wide * BLOCK;
    T* const value = back.value + n * BLOCK * back.columns + column;
    u.load_from(value, back.columns);
    solve<T, DELTA>(s.beta + n * BLOCK, s.inner + n * BLOCK * BLOCK, e, u, left);
    if constexpr (DELTA) {
      u.store_to(value, back.columns);
      left.store_to(back.left + n * BLOCK * back.columns + column, back.columns);
    }
    if (n + 1 == blocks) return;
    pass<T, GATED, true, false, DELTA>({state, state + back.area, back.columns}, rows, s.decay + n * s.wide,
                                       s.writes + at, u, nullptr, none, s.erases + at + s.wide * BLOCK, e);
  }
}

// to[t][i] = Σ_c rows[i][c] · four[t][c], over i < count.
template <class T>
void sums_by_row(const T* rows, int64_t count, const T* four, int64_t columns, T* to, int64_t to_stride) {
  constexpr int SOME = LANES<T> >= BLOCK ? LANES<T> / BLOCK : 1;
  for (int64_t i = 0; i < count; i += SOME) {
    F<T> sums[BLOCK * SOME];
    clear<T>(sums);
    for (int64_t c = 0; c < columns; c += LANES<T>) {
#pragma GCC unroll 4
      for (int r = 0; r < SOME; ++r) {
        const F<T> row = load(rows + (i + r) * columns + c);
#pragma GCC unroll 4
        for (int t = 0; t < BLOCK; ++t) sums[t * SOME + r] += row * load(four + t * columns + c);
      }
    }
    alignas(64) T flat[BLOCK * SOME];
    store_sums<T, BLOCK * SOME>(sums, flat);
#pragma GCC unroll 4
    for (int t = 0; t < BLOCK; ++t) __builtin_memcpy(to + t * to_stride + i, flat + t * SOME, SOME * sizeof(T));
  }
}

// to[i] = Σ_c a[i][c] · b[i][c], over whole vectors of i.
template <class T>
void products_by_row(const T* a, const T* b, int64_t count, int64_t columns, T* to) {
  for (int64_t i = 0; i < count; i += LANES<T>) {
    F<T> sums[LANES<T>];
    clear<T>(sums);
#pragma GCC unroll 16
    for (int r = 0; r < LANES<T>; ++r) {
      const int64_t row = (i + r) * columns;
      for (int64_t c = 0; c < columns; c += LANES<T>) sums[r] += load(a + row + c) * load(b + row + c);
    }
    store_sums<T, LANES<T>>(sums, to + i);
  }
}

// to[t][s] = Σ_c a[t][c] · b[s][c], for s <= t or s < t; on the diagonal, where it is left, those of c and d.
template <class T, bool STRICT>
void products_of_fours(const T* a, const T* b, const T* c, const T* d, int64_t columns, T* to) {
  F<T> sums[16];
  clear<T>(sums);
  for (int64_t i = 0; i < columns; i += LANES<T>) {
#pragma GCC unroll 4
    for (int t = 0; t < BLOCK; ++t) {
      const F<T> row = load(a + t * columns + i);
#pragma GCC unroll 4
      for (int s = 0; s < t + !STRICT; ++s) sums[t * BLOCK + s] += row * load(b + s * columns + i);
      if constexpr (STRICT) sums[t * BLOCK + t] += load(c + t * columns + i) * load(d + t * columns + i);
    }
  }
  store_sums<T, 16>(sums, to);
}

// G <- f_3 G + Σ_t q̂_t do_tᵀ - Σ_t k̂_t dl_tᵀ in some rows of a tile of columns; what the block before asks of these is
// added to what it asks.
template <class T, bool DELTA, bool GATED>
void turn_back(const ChunkScratch<T>& s, ReverseScratch<T>& back, int64_t first, int64_t rows, int64_t n, int64_t column) {
  const int64_t at = (n * s.wide + first) * BLOCK;
  const T *const reads = s.reads + at, *const erases = s.erases + at, *const decay = s.decay + n * s.wide + first;
  const T* const writes = n > 0 ? s.writes + at - s.wide * BLOCK : nullptr;
  T* const state = back.grad_state + first * back.columns + column;
  Four<T> output, left, asked;
  output.load_from(back.grad_output + n * BLOCK * back.columns + column, back.columns);
  if constexpr (DELTA) left.load_from(back.grad_left + column, back.columns);
  asked.load_from(back.asked + column, back.columns);
  for (int64_t i = 0; i < rows; ++i) {
    F<T> g[TILE_VECTORS];
#pragma GCC unroll 2
    for (int v = 0; v < TILE_VECTORS; ++v) {
      g[v] = load(state + i * back.columns + v * LANES<T>);
      if constexpr (GATED) g[v] *= decay[i];
    }
#pragma GCC unroll 4
    for (int t = 0; t < BLOCK; ++t) {
      const F<T> read = splat(reads[i * BLOCK + t]);
#pragma GCC unroll 2
      for (int v = 0; v < TILE_VECTORS; ++v) g[v] += read * output.at[t][v];
      if constexpr (DELTA) {
        const F<T> erase = splat(erases[i * BLOCK + t]);
#pragma GCC unroll 2
        for (int v = 0; v < TILE_VECTORS; ++v) g[v] += erase * left.at[t][v];
      }
    }
#pragma GCC unroll 2
    for (int v = 0; v < TILE_VECTORS; ++v) store(state + i * back.columns + v * LANES<T>, g[v]);
    if (!writes) continue;
#pragma GCC unroll 4
    for (int t = 0; t < BLOCK; ++t) {
      const F<T> write = splat(writes[i * BLOCK + t]);
#pragma GCC unroll 2
      for (int v = 0; v < TILE_VECTORS; ++v) asked.at[t][v] += write * g[v];
    }
  }
  asked.store_to(back.asked + column, back.columns);
}

// du of a block in a tile of columns, from what it asked of G; gives dv, and - dl for a delta rule.
template <class T, bool DELTA>
void solve_back(const ChunkScratch<T>& s, ReverseScratch<T>& back, int64_t n, int64_t column) {
  const int64_t first = n * BLOCK * back.columns + column;
  const T *const weights = s.weights + n * BLOCK * BLOCK, *const inner = s.inner + n * BLOCK * BLOCK;
  Four<T> du, output, left;
  du.load_from(back.asked + column, back.columns);
  output.load_from(back.grad_output + first, back.columns);
#pragma GCC unroll 4
  for (int from = BLOCK - 1; from >= 0; --from) {
#pragma GCC unroll 4
    for (int t = from; t < BLOCK; ++t) du.add(from, weights[t * BLOCK + from], output, t);
    if constexpr (DELTA) {
#pragma GCC unroll 4
      for (int t = from + 1; t < BLOCK; ++t) du.add(from, inner[t * BLOCK + from], left, t);
#pragma GCC unroll 2
      for (int v = 0; v < TILE_VECTORS; ++v) left.at[from][v] = -s.beta[n * BLOCK + from] * du.at[from][v];
    }
  }
  du.store_to(back.asked + column, back.columns);
  if constexpr (DELTA) {
    left.store_to(back.grad_left + column, back.columns);
    for (int t = 0; t < BLOCK; ++t) {
      for (int v = 0; v < TILE_VECTORS; ++v) left.at[t][v] = -left.at[t][v];
    }
    left.store_to(back.grad_value + first, back.columns);
  } else {
    du.store_to(back.grad_value + first, back.columns);
  }
}

constexpr int64_t SWEEP = 16;  // rows of both states that stay near while they are used: whole vectors of any lanes

// Some rows of S and G: what they give to the gradients of block n, and G as it is before the block.
template <class T, bool DELTA, bool GATED>
void sweep(const ChunkScratch<T>& s, ReverseScratch<T>& back, int64_t first, int64_t rows, int64_t n) {
  const int64_t some = blocks_of(rows, BLOCK) * BLOCK, columns = back.columns, keys = n * BLOCK * s.wide + first;
  const T *const state = back.states + n * back.area + first * columns, *const grad = back.grad_state + first * columns;
  sums_by_row(grad, some, back.value + n * BLOCK * columns, columns, back.writes + keys, s.wide);
  sums_by_row(state, some, back.grad_output + n * BLOCK * columns, columns, back.reads + keys, s.wide);
  if constexpr (DELTA) sums_by_row(state, some, back.grad_left, columns, back.erases + keys, s.wide);
  if constexpr (GATED) products_by_row(grad, state, channels<T>(rows), columns, back.decay + n * s.wide + first);
  for (int64_t c = 0; c < columns; c += TILE_WIDTH<T>) turn_back<T, DELTA, GATED>(s, back, first, rows, n, c);
}

// All blocks of a chunk, last to first. The gradient of the state comes in as after the chunk and leaves as before it.
template <class T, bool DELTA, bool GATED>
void reverse(const ChunkScratch<T>& s, ReverseScratch<T>& back, int64_t rows, int64_t count) {
  const int64_t blocks = blocks_of(count, BLOCK);
  for (int64_t c = 0; c < back.columns; c += TILE_WIDTH<T>) {
    Four<T> none, asked, without;
    pass<T, false, false, true, false>({back.grad_state + c, nullptr, back.columns}, rows, nullptr, nullptr, none,
                                       s.writes + (blocks - 1) * s.wide * BLOCK, asked, nullptr, without);
    asked.store_to(back.asked + c, back.columns);
  }
  for (int64_t n = blocks - 1; n >= 0; --n) {
    const int64_t row = n * BLOCK * back.columns, square = n * BLOCK * BLOCK;
    const T *const u = back.value + row, *const output = back.grad_output + row;
    for (int64_t c = 0; c < back.columns; c += TILE_WIDTH<T>) solve_back<T, DELTA>(s, back, n, c);
    products_of_fours<T, false>(output, u, nullptr, nullptr, back.columns, back.weights + square);
    if constexpr (DELTA) {
      products_of_fours<T, true>(back.grad_left, u, back.asked, back.left + row, back.columns, back.inner + square);
    }
    for (int64_t i = 0; i < BLOCK * back.columns; i += LANES<T>) store(back.asked + i, F<T>{});
    for (int64_t i = 0; i < rows; i += SWEEP) sweep<T, DELTA, GATED>(s, back, i, least(SWEEP, rows - i), n);
  }
}

}  // namespace
