// What the backward pass holds: which gradients are made where, a tile's queries, and what a backward unit is asked.
#pragma once

#include "careful-inl.h"
#include "pass-inl.h"
#include "scores-inl.h"

namespace {

using qkv::Backward;

enum Wanted : int { FOR_QUERIES = 1, FOR_KEYS = 2 };

// What a unit of work covers, and which gradients it makes.
struct Region {
  Range batch, heads;     // of query heads
  Range parts;
  Range tiles, keys;      // of each part
  int wanted;
};

// How the gradient of a bias is made. One that has an axis of queries belongs to query tiles, one with keys alone to key
// blocks; where it is shared by batch rows or heads, one unit of work walks all of these. Slopes, tables and single
// numbers are summed apart for each (b, h) and chunk of query tiles, and these sums in order. A chunk is made of whole
// groups of tiles that walk together, so that stages group them as one pass does.
template <class T>
struct BiasGradient {
  int stage = 0;  // the Wanted that makes it; 0: none
  bool all_batch = false, all_heads = false;
  int64_t slice = 0, chunk = TOGETHER, chunks = 0;  // numbers of a slice of sums, query tiles of a chunk
  T* sums = nullptr;  // a slice for each (b, h) and chunk; null: the gradient itself

  BiasGradient(const Problem& problem, const Backward& data, int64_t tiles) {
    const Bias& bias = problem.bias;
    if (!data.grad_bias || problem.queries == 0 || problem.keys == 0) return;  // it comes filled with zeros
    stage = FOR_QUERIES;
    if (bias.kind == BiasKind::tensor && (bias.size[2] > 1 || bias.size[3] > 1)) {
      if (bias.size[2] == 1) stage = FOR_KEYS;
      all_batch = bias.size[0] == 1;
      all_heads = bias.size[1] == 1;
      return;
    }
    slice = bias.kind == BiasKind::relative ? bias.size[1] : 1;
    chunk = TOGETHER * most(1, blocks_of(slice, 4 * TILE * TOGETHER));
    chunks = blocks_of(most(tiles, 1), chunk);
  }
};

// A tile's queries, as the unit packs them for scores, by lanes, and for gradients of keys and values, by rows.
template <class T>
struct Asked {
  T *by_lane, *by_row;
  T *grad_by_lane, *grad_by_row;  // of the output
  T* grad_query;
  T *shift, *delta, *inverse;  // (TILE): delta as deltas say; inverse of the total; for padding infinity, 0 and 0
  int64_t tile, count, width;
  Cursor cursor;
};

template <class T>
struct BackwardScratch {
  Asked<T> tiles[TOGETHER];
  T *ones, *factors, *rows, *keys, *turned, *values, *scores, *grads, *slope, *bias, *strip, *kept, *grad_keys, *grad_values;
  uint16_t *used, *raw;  // weights and gradients by rows, and gradients in words, where they are rounded
  uint32_t* words;
  uint64_t* seen;
  Positions* at;

  BackwardScratch(const Problem& p, Arena& arena) {
    const int64_t wide_d = padded<T>(p.head_dim), wide_v = padded<T>(p.value_dim);
    const auto take = [&arena](int64_t count) { return arena.take<T>(count); };
    for (Asked<T>& one : tiles) {
      one.by_lane = take(TILE * wide_d), one.by_row = take(TILE * wide_d), one.grad_query = take(TILE * wide_d);
      one.grad_by_lane = take(TILE * wide_v), one.grad_by_row = take(TILE * wide_v);
      one.shift = take(TILE), one.delta = take(TILE), one.inverse = take(TILE);
    }
    ones = take(TILE), factors = take(TILE);
    keys = take(TILE * wide_d), turned = take(TILE * wide_d), grad_keys = take(TILE * wide_d);
    values = take(TILE * wide_v), grad_values = take(TILE * wide_v);
    scores = take(TILE * TILE), grads = take(TILE * TILE), slope = take(TILE * TILE);
    bias = take(TILE * TILE), kept = take(TILE * TILE);
    rows = arena.take<T>(TILE * most(most(wide_d, wide_v), TILE));
    strip = arena.take<T>(STRIP_SIZE);
    used = arena.take<uint16_t>(TILE * TILE), raw = arena.take<uint16_t>(TILE * TILE);
    words = arena.take<uint32_t>(TILE / 2 * TILE);
    seen = arena.take<uint64_t>(TILE);
    at = arena.take<Positions>(1);
  }

  void prepare(const Problem&) {
    for (int64_t i = 0; i < TILE; ++i) ones[i] = 1;
  }
};

// Rows of a gradient that grow.
template <class T>
struct Sum {
  T* data;  // null: not wanted
  int64_t stride;
};

// A share of a tile as a backward unit is asked about it.
template <class T>
struct Grading {
  const Problem& problem;
  Shape<T> shape;
  Asked<T>& one;
  BackwardScratch<T>& scratch;
  const T* kept;  // null: no dropout
  T* slope;       // of the softcap, null: none
  bool gradient;  // whether gradients of scores are wanted as numbers, for a bias

  Range lanes() const { return shape.share.lanes; }
  Range keys() const { return shape.share.keys; }
  int64_t corner() const { return keys().first * one.width + lanes().first; }  // of the first key and lane
  int64_t rows() const { return least(lanes().stop, one.count) - lanes().first; }  // lanes that are queries
  Visible visible() const { return {scratch.seen + keys().first, lanes().first}; }
};

}  // namespace
