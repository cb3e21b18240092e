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

// The four words of counter (group, query, head, batch) for a vector of queries.
//
// Even and odd lanes are worked on apart, in the low halves of 64-bit lanes: what is above them never comes down.
inline void philox(const Draw& draw, uint32_t group, U<float> query, U<float> words[4]) {
  using Wide = U<double>;
  Wide c[2][4];
  for (int half = 0; half < 2; ++half) {
    c[half][0] = group - Wide{};
    c[half][1] = half ? (Wide)query >> 32 : (Wide)query;
    c[half][2] = draw.head - Wide{};
    c[half][3] = draw.batch - Wide{};
  }
  uint32_t k0 = draw.key[0], k1 = draw.key[1];
#pragma GCC unroll 10
  for (int round = 0; round < 10; ++round) {
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const Wide a = multiply_low(c[half][0], 0xD2511F53u), b = multiply_low(c[half][2], 0xCD9E8D57u);
      c[half][0] = (b >> 32) ^ c[half][1] ^ k0;
      c[half][1] = b;
      c[half][2] = (a >> 32) ^ c[half][3] ^ k1;
      c[half][3] = a;
    }
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  constexpr uint64_t LOW = 0xffffffff;
  for (int word = 0; word < 4; ++word) words[word] = (U<float>)((c[0][word] & LOW) | (c[1][word] << 32));
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
      const U<float> word = words[(keys[k] & 7) >> 1], number = keys[k] & 1 ? word : word << 16;
      const I<float> dropped = number < draw.threshold << 16;
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
