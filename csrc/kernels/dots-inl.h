// Scores of few queries: dot products along the rows of both sides, as many sums at a time as a vector has lanes.
#pragma once

#include "gemm-inl.h"
#include "rows-inl.h"

namespace {

// Numbers of type T against those of B as they are stored, of type E.
template <class T, class E>
struct Stored;
template <class T, class E>
struct Factors<Stored<T, E>> {
  using Left = T;
  using Right = E;
  using Sum = T;
  static constexpr int64_t STEP = 1;

  static T left(const T* from) { return *from; }
  static F<T> right(const E* from) { return load_as<T>(from); }
  static F<T> add(F<T> sum, T left, F<T> right) { return sum + left * right; }
};

// How many rows of queries `few_dots` takes for so many: a power of two, or whole vectors.
template <class T>
constexpr int64_t dot_rows(int64_t count) {
  int64_t rows = 1;
  while (rows < count && rows < LANES<T>) rows *= 2;
  return rows < LANES<T> ? rows : padded<T>(count);
}

// The sums of the lanes of as many vectors, in order.
template <class T>
inline F<T> sums_of(F<T> (&parts)[LANES<T>]) {
#pragma GCC unroll 4
  for (int64_t half = LANES<T> / 2; half > 0; half /= 2) {
#pragma GCC unroll 8
    for (int64_t i = 0; i < half; ++i) {
      parts[i] = interleave<T, false>(parts[i], parts[i + half]) + interleave<T, true>(parts[i], parts[i + half]);
    }
  }
  return parts[0];
}

// For LANES / QUERIES keys and QUERIES queries: to[key * stride + query]. Rows of `wide` numbers, whole vectors.
template <class T, class E, int64_t QUERIES>
inline void few_dots(const E* const* keys, const T* queries, int64_t wide, T* to, int64_t stride) {
  constexpr int64_t KEYS = LANES<T> / QUERIES;
  F<T> sums[LANES<T>];
#pragma GCC unroll 16
  for (int64_t i = 0; i < LANES<T>; ++i) sums[i] = F<T>{};
  for (int64_t c = 0; c < wide; c += LANES<T>) {
#pragma GCC unroll 16
    for (int64_t k = 0; k < KEYS; ++k) {
      const F<T> key = load_as<T>(keys[k] + c);
#pragma GCC unroll 16
      for (int64_t q = 0; q < QUERIES; ++q) sums[k * QUERIES + q] += key * load(queries + q * wide + c);
    }
  }
  const F<T> found = sums_of<T>(sums);
#pragma GCC unroll 16
  for (int64_t k = 0; k < KEYS; ++k) {
    __builtin_memcpy(to + k * stride, reinterpret_cast<const T*>(&found) + k * QUERIES, QUERIES * sizeof(T));
  }
}

// All of a block; `row(i)`: where key i begins. Keys beyond the last are taken for it again: to has room for TILE.
// `fetch(i)` asks the memory for what is read soon after key i.
template <class T, class E, int64_t QUERIES, class Row, class Fetch>
inline void dots_of(Row row, Fetch fetch, int64_t count, const T* queries, int64_t wide, T* to, int64_t stride) {
  constexpr int64_t KEYS = LANES<T> / QUERIES;
  for (int64_t k = 0; k < count; k += KEYS) {
    const E* keys[KEYS];
    for (int64_t i = 0; i < KEYS; ++i) {
      keys[i] = row(least(k + i, count - 1));
      fetch(k + i);
    }
    few_dots<T, E, QUERIES>(keys, queries, wide, to + k * stride, stride);
  }
}

template <class T, class E, class Row, class Fetch>
inline void dots(Row row, Fetch fetch, int64_t count, const T* queries, int64_t rows, int64_t wide, T* to, int64_t stride) {
  switch (rows) {
    case 1: return dots_of<T, E, 1>(row, fetch, count, queries, wide, to, stride);
    case 2: return dots_of<T, E, 2>(row, fetch, count, queries, wide, to, stride);
    case 4: if constexpr (LANES<T> >= 4) return dots_of<T, E, 4>(row, fetch, count, queries, wide, to, stride); break;
    case 8: if constexpr (LANES<T> >= 8) return dots_of<T, E, 8>(row, fetch, count, queries, wide, to, stride); break;
  }
  for (int64_t q = 0; q < rows; q += LANES<T>) {
    dots_of<T, E, LANES<T>>(row, fetch, count, queries + q * wide, wide, to + q, stride);
  }
}

}  // namespace
