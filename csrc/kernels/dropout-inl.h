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

constexpr int64_t DRAWN = 8;  // keys that share a counter

// 1 where the number of a key, a half of one of the words, is not below the threshold; else 0.
template <class T>
inline void store_kept(const Draw& draw, const U<float> words[4], int64_t half, int64_t lanes, T* row) {
  const U<float> word = words[half >> 1], number = half & 1 ? word : word << 16;
  const I<float> dropped = number < draw.threshold << 16;
  if constexpr (sizeof(T) == sizeof(float)) {
    store(row, dropped ? F<T>{} : splat<T>(1));
  } else {
    for (int64_t i = 0; i < lanes; ++i) row[i] = dropped[i] ? T(0) : T(1);
  }
}

// Whether these are all the keys of a counter, in order.
inline bool neighbours(const int64_t* keys, int64_t first) {
  bool all = true;
  for (int64_t i = 0; i < DRAWN; ++i) all = all && keys[i] == first + i;
  return all;
}

// kept[key][lane] = 1 or 0 for a tile: positions of its queries (whole vectors of them) and of its keys.
template <class T>
void draw_kept(const Draw& draw, const uint32_t* queries, int64_t width, const int64_t* keys, int64_t count, T* kept) {
  constexpr int64_t N = LANES<float>;
  for (int64_t lane = 0; lane < width; lane += N) {
    U<float> query, words[4];
    __builtin_memcpy(&query, queries + lane, sizeof query);
    const int64_t lanes = least(N, width - lane);
    for (int64_t k = 0; k < count;) {
      const int64_t group = keys[k] >> 3;
      philox(draw, static_cast<uint32_t>(group), query, words);
      T* row = kept + k * width + lane;
      if (k + DRAWN <= count && neighbours(keys + k, group * DRAWN)) {
#pragma GCC unroll 8
        for (int64_t half = 0; half < DRAWN; ++half) store_kept(draw, words, half, lanes, row + half * width);
        k += DRAWN;
      } else {
        for (; k < count && keys[k] >> 3 == group; ++k, row += width) store_kept(draw, words, keys[k] & 7, lanes, row);
      }
    }
  }
}

}  // namespace
