// A few tokens meet the state one by one, where it lies: decoding. Each row of the state is read twice and written once a
// token, the second time from a near cache.
#pragma once

#include "chunk-inl.h"

namespace {

constexpr int64_t FEW = 3;        // tokens of a sequence that come one by one: fewer than a block
constexpr int STEP_WIDEST = QKV_PANEL >= 4 ? 8 : 4;  // vectors of a tile of columns: what the registers hold twice

// Sums over the rows of a state of N vectors of columns, in two chains a vector.
template <class T, int N>
struct StepSums {
  F<T> even[N], odd[N];

  inline __attribute__((always_inline)) void clear() {
#pragma GCC unroll 8
    for (int v = 0; v < N; ++v) even[v] = odd[v] = F<T>{};
  }
  inline __attribute__((always_inline)) F<T> total(int v) const { return even[v] + odd[v]; }
};

// sums += Σ_i factors[i] · row i
template <class T, int N>
inline __attribute__((always_inline)) void ask_rows(const T* state, int64_t stride, int64_t rows, const T* factors,
                                                    StepSums<T, N>& given) {
  StepSums<T, N> sums;
  sums.clear();
  int64_t i = 0;
  for (; i + 1 < rows; i += 2, state += 2 * stride) {
#pragma GCC unroll 8
    for (int v = 0; v < N; ++v) {
      sums.even[v] += factors[i] * load(state + v * LANES<T>);
      sums.odd[v] += factors[i + 1] * load(state + stride + v * LANES<T>);
    }
  }
  if (i < rows) {
#pragma GCC unroll 8
    for (int v = 0; v < N; ++v) sums.even[v] += factors[i] * load(state + v * LANES<T>);
  }
  given = sums;
}

// row i <- gates[i] · row i + keys[i] · u;  sums += Σ_i queries[i] · row i
template <class T, int N, bool GATED>
inline __attribute__((always_inline)) void write_rows(const T* from, T* to, int64_t stride, int64_t rows, const T* gates,
                                                      const T* keys, const F<T> (&written)[N],
                                                      const T* queries, StepSums<T, N>& given) {
  StepSums<T, N> sums;
  sums.clear();
  F<T> u[N];
#pragma GCC unroll 8
  for (int v = 0; v < N; ++v) u[v] = written[v];
  const auto row = [&](int64_t i, F<T>(&into)[N]) __attribute__((always_inline)) {
    // The state of the next head lies behind this one.
#pragma GCC unroll 8
    for (int v = 0; v < N; ++v) __builtin_prefetch(from + (rows + i) * stride + v * LANES<T>, 1, 2);
#pragma GCC unroll 8
    for (int v = 0; v < N; ++v) {
      F<T> s = load(from + i * stride + v * LANES<T>);
      if constexpr (GATED) s *= gates[i];
      s += keys[i] * u[v];
      store(to + i * stride + v * LANES<T>, s);
      into[v] += queries[i] * s;
    }
  };
  int64_t i = 0;
  for (; i + 1 < rows; i += 2) row(i, sums.even), row(i + 1, sums.odd);
  if (i < rows) row(i, sums.even);
  given = sums;
}

// One token of a chunk in a tile of columns: value and output are its rows there; `asks`: its key times its gates.
template <class T, int N, bool DELTA, bool GATED>
void step(const ChunkScratch<T>& s, int64_t t, const T* asks, int64_t rows, const T* from, T* to, int64_t stride,
          const T* value, T* output) {
  const T *const key = s.key + t * s.wide, *const gate = s.gate + t * s.wide;
  F<T> u[N];
  StepSums<T, N> sums;
  if constexpr (DELTA) ask_rows<T, N>(from, stride, rows, asks, sums);
#pragma GCC unroll 8
  for (int v = 0; v < N; ++v) {
    u[v] = load(value + v * LANES<T>);
    if constexpr (DELTA) u[v] = s.beta[t] * (u[v] - sums.total(v));
  }
  write_rows<T, N, GATED>(from, to, stride, rows, gate, key, u, s.query + t * s.wide, sums);
#pragma GCC unroll 8
  for (int v = 0; v < N; ++v) store(output + v * LANES<T>, sums.total(v));
}

// What the tokens of a short sequence ask of the state: k, times exp g.
template <class T, bool GATED>
void prepare_asks(int64_t count, const ChunkScratch<T>& s) {
  for (int64_t i = 0; i < count * s.wide; i += LANES<T>) {
    const F<T> key = load(s.key + i);
    store(s.erases + i, GATED ? key * load(s.gate + i) : key);
  }
}

// The normaliser's column of the state, token by token, and the denominators.
template <class T, bool GATED>
void step_norm(int64_t count, const ChunkScratch<T>& s) {
  for (int64_t t = 0; t < count; ++t) {
    F<T> sum = {};
    for (int64_t i = 0; i < s.wide; i += LANES<T>) {
      F<T> norm = load(s.norm + i);
      if constexpr (GATED) norm *= load(s.gate + t * s.wide + i);
      norm += load(s.key + t * s.wide + i);
      store(s.norm + i, norm);
      sum += load(s.query + t * s.wide + i) * norm;
    }
    s.denominator[t] = 0;
    for (int lane = 0; lane < LANES<T>; ++lane) s.denominator[t] += sum[lane];
  }
}

}  // namespace
