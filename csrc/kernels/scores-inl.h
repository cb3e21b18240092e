// From raw products to scores: softcap, bias, what is hidden; and the greatest of each query.
#pragma once

#include "bias-inl.h"

namespace {

// What a tile needs beside its products: its bias, and where dropout thins it which weights are kept.
template <class T, class Tile, class Scratch>
TileBias<T> prepare_tile(const Scene<T>& scene, const void* bias, uint64_t seed, const Tile& one, int64_t block,
                         int64_t key_count, Scratch& scratch) {
  const Problem& problem = scene.problem;
  if (!problem.dropout_threshold && problem.bias.kind == BiasKind::none) return {};
  locate_tile(scene, one.tile, one.count, block, key_count, *scratch.at);
  if (problem.dropout_threshold) {
    draw_kept(scene.draw(seed), scratch.at->counters, one.width, scratch.at->keys, key_count, scratch.kept);
  }
  return tile_bias(scene, bias, one.tile, block, *scratch.at, {0, key_count}, one.width, scratch.rows, scratch.bias);
}

// A tile's options. Scores stand as s[key * width + lane], hidden ones become -infinity.
template <class T>
struct Shape {
  int64_t width;
  Share share;
  const uint64_t* mask;  // null: all are seen
  TileBias<T> bias;
  T softcap;             // in bits; 0: none
};

// In one pass over a column of vectors. SLOPE: also the derivative of the softcap, into slope[key * width + lane].
template <class T, bool CAP, bool SLOPE>
F<T> shape_column(const Shape<T>& shape, T* s, T* slope, int64_t lane) {
  F<T> peak = splat(-INFINITE<T>);
  const T inverse = CAP ? 1 / shape.softcap : 0;
  for (int64_t k = shape.share.keys.first; k < shape.share.keys.stop; ++k) {
    T* at = s + k * shape.width + lane;
    F<T> score = load(at);
    if constexpr (CAP) {
      const F<T> bent = tanh_of(score * inverse);
      if constexpr (SLOPE) store(slope + k * shape.width + lane, 1 - bent * bent);
      score = bent * shape.softcap;
    }
    if (shape.bias.at) score += load(shape.bias.at + k * shape.bias.stride + lane);
    if (shape.mask) score = bits_of<T>(shape.mask[k], lane) ? score : splat(-INFINITE<T>);
    store(at, score);
    peak = greater<T>(peak, score);
  }
  return peak;
}

template <class T>
F<T> peak_of_column(const Shape<T>& shape, const T* s, int64_t lane) {
  F<T> peak = splat(-INFINITE<T>);
  for (int64_t k = shape.share.keys.first; k < shape.share.keys.stop; ++k) {
    peak = greater<T>(peak, load(s + k * shape.width + lane));
  }
  return peak;
}

// All of a share; the greatest score of each lane into `peak` unless it is null.
template <class T>
void shape_scores(const Shape<T>& shape, T* s, T* slope, T* peak) {
  const bool plain = shape.softcap == 0 && !shape.bias.at && !shape.mask;
  for (int64_t lane = shape.share.lanes.first; lane < shape.share.lanes.stop; lane += LANES<T>) {
    F<T> found;
    if (plain) {
      if (!peak) return;
      found = peak_of_column(shape, s, lane);
    } else if (shape.softcap == 0) {
      found = shape_column<T, false, false>(shape, s, slope, lane);
    } else if (slope) {
      found = shape_column<T, true, true>(shape, s, slope, lane);
    } else {
      found = shape_column<T, true, false>(shape, s, slope, lane);
    }
    if (peak) store(peak + lane, found);
  }
}

// With care: which pairs are seen, by the pattern and by the bias, as words; all others become -infinity, NaN included.
template <class T>
void hide_carefully(const Shape<T>& shape, T* s, uint64_t* seen) {
  for (int64_t k = shape.share.keys.first; k < shape.share.keys.stop; ++k) {
    uint64_t word = shape.mask ? shape.mask[k] : ~uint64_t{0};
    for (int64_t i = shape.share.lanes.first; i < shape.share.lanes.stop; ++i) {
      if (shape.bias.at && shape.bias.at[k * shape.bias.stride + i] == -INFINITE<T>) word &= ~(uint64_t{1} << i);
      if (!(word >> i & 1)) s[k * shape.width + i] = -INFINITE<T>;
    }
    seen[k] = word;
  }
}

}  // namespace
