// Sums of the lanes of many vectors at once, and vectors of four tokens as records of a key channel.
#pragma once

#include "rows-inl.h"

namespace {

constexpr int64_t BLOCK = 4;  // tokens that meet the state together

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

}  // namespace
