// Which weights dropout keeps: Philox4x32-10 on vectors of queries, one counter for eight keys.
// Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (2011).
#pragma once

#include "math-inl.h"
#include "walk-inl.h"

namespace {

struct Draw {
  uint32_t key[2];   // the seed, low half first
  uint32_t head, batch;
  uint32_t threshold;
};

// The high and low halves of 32-bit products with a constant.
struct Wide {
  U<float> high, low;
};

inline Wide multiply_wide(U<float> x, uint32_t factor) {
  const U<float> factors = factor - U<float>{};
  const U<double> even = multiply_even(x, factors), odd = multiply_even((U<float>)((U<double>)x >> 32), factors);
  constexpr uint64_t LOW = 0xffffffff;
  return {(U<float>)((even >> 32) | (odd & ~LOW)), (U<float>)((even & LOW) | (odd << 32))};
}

// The four words of counter (group, query, head, batch) for a vector of queries.
inline void philox(const Draw& draw, uint32_t group, U<float> query, U<float> words[4]) {
  U<float> c0 = group - U<float>{}, c1 = query, c2 = draw.head - U<float>{}, c3 = draw.batch - U<float>{};
  uint32_t k0 = draw.key[0], k1 = draw.key[1];
#pragma GCC unroll 10
  for (int round = 0; round < 10; ++round) {
    const Wide a = multiply_wide(c0, 0xD2511F53u), b = multiply_wide(c2, 0xCD9E8D57u);
    c0 = b.high ^ c1 ^ k0;
    c1 = b.low;
    c2 = a.high ^ c3 ^ k1;
    c3 = a.low;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  words[0] = c0, words[1] = c1, words[2] = c2, words[3] = c3;
}

// kept[key][lane] = 1 or 0 for a tile: positions of its queries (whole vectors of them) and of its keys.
template <class T>
void draw_kept(const Draw& draw, const uint32_t* queries, int64_t width, const int64_t* keys, Range range, T* kept) {
  constexpr int64_t N = LANES<float>;
  for (int64_t lane = 0; lane < width; lane += N) {
    U<float> query, words[4];
    for (int64_t i = 0; i < N; ++i) query[i] = queries[lane + i];
    int64_t drawn = INT64_MAX;
    for (int64_t k = range.first; k < range.stop; ++k) {
      const int64_t group = keys[k] >> 3;
      if (group != drawn) philox(draw, static_cast<uint32_t>(group), query, words);
      drawn = group;
      const U<float> number = (words[(keys[k] & 7) >> 1] >> (keys[k] & 1 ? 16 : 0)) & 0xffffu;
      const I<float> dropped = number < draw.threshold;
      T* row = kept + k * width + lane;
      if constexpr (sizeof(T) == sizeof(float)) {
        store(row, dropped ? F<T>{} : splat<T>(1));
      } else {
        for (int64_t i = 0; i < least(N, width - lane); ++i) row[i] = dropped[i] ? T(0) : T(1);
      }
    }
  }
}

}  // namespace
