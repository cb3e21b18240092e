// The state of the online softmax over a tile of queries, and what a forward unit does with it.
// Source: Milakov, Gimelshein, "Online normalizer calculation for softmax" (2018); Rabe, Staats (2021).
//
// Scores of a tile stand with the queries in the lanes, so that the greatest, the sum and the decay of a query are plain
// vector operations.
#pragma once

#include "careful-inl.h"
#include "pass-inl.h"
#include "scores-inl.h"

namespace {

using qkv::Forward;

// The running state of a tile's queries. A query's weights are 2^(score - top); `energy` sums weights · scores.
// Weights may be rounded before they meet the values: `total` sums them as they are used, `exact` as they are.
template <class T>
struct Online {
  T* query;   // as the unit packs it
  T* output;  // sums of weights · values, as the unit keeps them
  T *top, *total, *exact, *energy;  // (TILE); exact may be total
  int64_t tile, count, width;
  Cursor cursor;
};

template <class T>
struct ForwardScratch {
  Online<T> tiles[TOGETHER];
  T *ones, *scales, *rows, *keys, *values, *scores, *bias, *kept, *peak, *decay;
  uint64_t* seen;
  Positions* at;

  ForwardScratch(const Problem& p, Arena& arena) {
    const int64_t wide_d = padded<T>(p.head_dim), wide_v = padded<T>(p.value_dim);
    const auto take = [&arena](int64_t count) { return arena.take<T>(count); };
    for (Online<T>& one : tiles) {
      one.query = take(wide_d * TILE), one.output = take(TILE * wide_v);
      one.top = take(TILE), one.total = take(TILE), one.exact = take(TILE), one.energy = take(TILE);
    }
    ones = take(TILE), scales = take(TILE), peak = take(TILE), decay = take(TILE);
    rows = take(TILE * most(most(wide_d, wide_v), TILE));
    keys = take(TILE * wide_d), values = take(TILE * wide_v);
    scores = take(TILE * TILE), bias = take(TILE * TILE), kept = take(TILE * TILE);
    seen = arena.take<uint64_t>(TILE);
    at = arena.take<Positions>(1);
  }

  void prepare(const Problem& p) {
    for (int64_t i = 0; i < TILE; ++i) ones[i] = 1, scales[i] = static_cast<T>(p.scale * LOG2_E);
  }
};

// One key block as a forward unit is asked about it.
template <class T>
struct Weighing {
  const Problem& problem;
  Shape<T> shape;
  Online<T>& one;
  ForwardScratch<T>& scratch;
  const T* kept;  // null: no dropout
  bool aux;       // whether anything but the output is asked for
  bool energy;

  Range lanes() const { return shape.share.lanes; }
  Range keys() const { return shape.share.keys; }
  // Scores of the first key and lane.
  T* corner() const { return scratch.scores + keys().first * one.width + lanes().first; }
};

// The output of a (b, h); `first`: its first row.
inline Matrix output_of(const Problem& p, const Forward& data, int64_t first) {
  const char* const from = static_cast<const char*>(data.output) + first * p.value_dim * size_of(p.output_type);
  return {from, p.output_type, p.value_dim, 1};
}

// Divide sums by rows, padded V wide, by their totals, and give all results; a sink joins here, since it has no value.
// `factors`: room for a number a row.
template <class T>
void finish(const Problem& p, const Forward& data, const Rows& rows, int64_t first, int64_t h, const Online<T>& one,
            const T* by_rows, T* factors) {
  const T keep_scale = keep_scale_of<T>(p);
  for (int64_t i = 0; i < rows.count; ++i) {
    const T keys = one.exact[i];
    T shift = one.top[i], total = keys, used = one.total[i], factor = 1;
    if (data.sinks) {
      const T sink = in_bits(static_cast<const T*>(data.sinks)[h], T());
      shift = sink > shift ? sink : shift;
      const F<T> parts = exp2<T>(shift == -INFINITE<T> ? F<T>{one.top[i], sink} : F<T>{one.top[i] - shift, sink - shift});
      factor = parts[0];
      total = keys * factor + parts[1];
      used = used * factor + parts[1];
    }
    shift = shift == -INFINITE<T> ? 0 : shift;
    const bool nothing = total == 0;
    total = nothing ? 1 : total;
    factors[i] = factor * keep_scale / (used == 0 ? 1 : used);
    if (rows.row(i) < 0) continue;
    const int64_t at = first + rows.row(i);
    if (data.shift) static_cast<T*>(data.shift)[at] = shift;
    if (data.total) static_cast<T*>(data.total)[at] = total;
    if (data.max_scores) static_cast<T*>(data.max_scores)[at] = one.top[i] * static_cast<T>(LN_2);
    if (!data.lse && !data.entropy) continue;
    const T lse = nothing ? -INFINITE<T> : shift * static_cast<T>(LN_2) + static_cast<T>(__builtin_log(total));
    if (data.lse) static_cast<T*>(data.lse)[at] = lse;
    if (data.entropy) {
      const T energy = one.energy[i] * static_cast<T>(LN_2);
      static_cast<T*>(data.entropy)[at] = nothing ? 0 : factor * (keys * lse - energy) / total;
    }
  }
  store_rows(by_rows, padded<T>(p.value_dim), p.value_dim, factors, rows);
}

}  // namespace
