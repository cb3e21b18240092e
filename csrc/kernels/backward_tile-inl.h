// The backward pass over tiles: the weights again from the saved sums, P = 2^(score - shift) / total, and
// dS = P (dP - delta); and what they add to every gradient.
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

// A tile's queries: scores' side by lanes, gradients' side by rows.
template <class T>
struct Asked {
  T *by_lane, *by_row;            // scaled queries: (D, width), in bits, and (TILE, padded D), in natural units
  T *grad_by_lane, *grad_by_row;  // of the output, over total: (V, width) and (TILE, padded V)
  T* grad_query;                  // (TILE, padded D)
  T *shift, *delta;               // (TILE); delta over total
  int64_t tile, count, width;
  Cursor cursor;
};

template <class T>
struct BackwardScratch {
  Asked<T> tiles[TOGETHER];
  T *ones, *factors, *rows, *keys, *values, *scores, *grads, *slope, *bias, *strip, *kept, *grad_keys, *grad_values;
  uint64_t* seen;
  Positions* at;

  BackwardScratch(const Problem& p, Arena& arena) {
    const int64_t wide_d = padded<T>(p.head_dim), wide_v = padded<T>(p.value_dim);
    const auto take = [&arena](int64_t count) { return arena.take<T>(count); };
    for (Asked<T>& one : tiles) {
      one.by_lane = take(TILE * wide_d), one.by_row = take(TILE * wide_d), one.grad_query = take(TILE * wide_d);
      one.grad_by_lane = take(TILE * wide_v), one.grad_by_row = take(TILE * wide_v);
      one.shift = take(TILE), one.delta = take(TILE);
    }
    ones = take(TILE), factors = take(TILE);
    keys = take(TILE * wide_d), grad_keys = take(TILE * wide_d);
    values = take(TILE * wide_v), grad_values = take(TILE * wide_v);
    scores = take(TILE * TILE), grads = take(TILE * TILE), slope = take(TILE * TILE);
    bias = take(TILE * TILE), kept = take(TILE * TILE);
    rows = arena.take<T>(TILE * most(most(wide_d, wide_v), TILE));
    strip = arena.take<T>(STRIP_SIZE);
    seen = arena.take<uint64_t>(TILE);
    at = arena.take<Positions>(1);
  }

  void prepare(const Problem&) {
    for (int64_t i = 0; i < TILE; ++i) ones[i] = 1;
  }
};

// Gradients of scores from weights and their gradients, a column of vectors at a time.
template <class T, bool CAREFUL>
void grade_column(const Asked<T>& one, int64_t lane, Range keys, T* s, T* ds, const T* kept, const uint64_t* seen) {
  const F<T> shift = load(one.shift + lane), delta = load(one.delta + lane);
  for (int64_t k = keys.first; k < keys.stop; ++k) {
    const int64_t at = k * one.width + lane;
    F<T> weight = exp2<T>(load(s + at) - shift), grad = load(ds + at), used = weight;
    if (kept) {
      const F<T> factor = load(kept + at);
      used = weight * factor;
      grad = grad * factor;
    }
    grad = weight * (grad - delta);
    if constexpr (CAREFUL) {
      const I<T> visible = bits_of<T>(seen[k], lane);
      used = visible ? used : F<T>{};
      grad = visible ? grad : F<T>{};
    }
    store(s + at, used);
    store(ds + at, grad);
  }
}

template <class T>
class TileGradients {
 public:
  const T* deltas = nullptr;  // of each row of the call, over its total
  bool careful = false;       // keep what is hidden from everything, NaN included

  // `add`: gradients of queries join those of earlier parts.
  TileGradients(const Problem& problem, const Backward& data, const BiasGradient<T>& bias, bool add)
      : p_(problem), data_(data), bias_(bias), add_(add) {}

  // Some tiles of queries over the key blocks of a region that they see.
  void walk(const Scene<T>& scene, const Region& region, int64_t first, int64_t count, BackwardScratch<T>& scratch,
            Worker& worker) {
    int64_t entries = 0;
    for (int64_t i = 0; i < count; ++i) {
      scratch.tiles[i].cursor = Cursor(scene.part.schedule, first + i, region.keys);
      entries += scratch.tiles[i].cursor.block() != NO_BLOCK;
    }
    if (!entries) return;
    for (int64_t i = 0; i < count; ++i) start(scene, first + i, scratch, scratch.tiles[i]);
    while (!worker.stopped()) {
      const int64_t block = next_block(scratch.tiles, count);
      if (block == NO_BLOCK) break;
      meet(scene, region, block, count, scratch);
    }
    if (!(region.wanted & FOR_QUERIES) || !data_.grad_query) return;
    for (int64_t i = 0; i < count; ++i) add_query_gradient(scene, scratch, scratch.tiles[i]);
  }

 private:
  // All that the backward pass needs of a tile's queries.
  void start(const Scene<T>& scene, int64_t tile, BackwardScratch<T>& scratch, Asked<T>& one) {
    const Rows rows = scene.query_rows(scene.query_side(data_.query, p_.type, p_.query_stride), tile);
    const Matrix grad_output = scene.query_side(data_.grad_output, p_.output_type, data_.grad_output_stride);
    const Rows grads = scene.query_rows(grad_output, tile);
    const int64_t wide_d = padded<T>(p_.head_dim), wide_v = padded<T>(p_.value_dim), at = scene.first_row();
    one.tile = tile;
    one.count = rows.count;
    one.width = padded<T>(rows.count);
    fill(scratch.factors, static_cast<T>(p_.scale * LOG2_E));
    load_lanes(rows, p_.head_dim, scratch.factors, one.by_row, wide_d);
    transpose(one.by_row, wide_d, one.width, wide_d, one.by_lane, one.width);
    fill(scratch.factors, static_cast<T>(p_.scale));
    load_lanes(rows, p_.head_dim, scratch.factors, one.by_row, wide_d);
    const T keep_scale = keep_scale_of<T>(p_);
    for (int64_t i = 0; i < TILE; ++i) {
      const int64_t row = i < rows.count ? rows.row(i) : -1;
      one.shift[i] = row < 0 ? 0 : static_cast<const T*>(data_.shift)[at + row];
      one.delta[i] = row < 0 ? 0 : deltas[at + row];
      scratch.factors[i] = row < 0 ? 0 : keep_scale / static_cast<const T*>(data_.total)[at + row];
    }
    load_lanes(grads, p_.value_dim, scratch.factors, one.grad_by_row, wide_v);
    transpose(one.grad_by_row, wide_v, one.width, wide_v, one.grad_by_lane, one.width);
    for (int64_t i = 0; i < one.count * wide_d; i += LANES<T>) store(one.grad_query + i, F<T>{});
  }

  static void fill(T* numbers, T x) {
    for (int64_t i = 0; i < TILE; ++i) numbers[i] = x;
  }

  // One key block and the tiles that see it.
  void meet(const Scene<T>& scene, const Region& region, int64_t block, int64_t count, BackwardScratch<T>& scratch) {
    const int64_t wide_d = padded<T>(p_.head_dim), wide_v = padded<T>(p_.value_dim);
    const Rows key_rows = scene.kept_rows(scene.key_side(data_.key, p_.key_stride), block);
    const Rows value_rows = scene.kept_rows(scene.key_side(data_.value, p_.value_stride), block);
    const Panel<T> keys = panel(key_rows, p_.head_dim, true, scratch.ones, scratch.keys);
    const Panel<T> values = panel(value_rows, p_.value_dim, false, scratch.ones, scratch.values);
    Sum grad_keys{}, grad_values{};
    if (region.wanted & FOR_KEYS) {
      grad_keys = open(scene, data_.grad_key, p_.head_dim, wide_d, block, scratch.grad_keys, scratch);
      grad_values = open(scene, data_.grad_value, p_.value_dim, wide_v, block, scratch.grad_values, scratch);
    }
    for (int64_t i = 0; i < count; ++i) {
      Asked<T>& one = scratch.tiles[i];
      if (one.cursor.block() != block) continue;
      careful ? grade<true>(scene, region, one, block, key_rows.count, keys, values, grad_keys, grad_values, scratch)
              : grade<false>(scene, region, one, block, key_rows.count, keys, values, grad_keys, grad_values, scratch);
      one.cursor.next();
    }
    close(grad_keys, p_.head_dim, scratch);
    close(grad_values, p_.value_dim, scratch);
  }

  // Rows of a gradient that grow: in place where they are whole vectors, else in a copy that is put back.
  struct Sum {
    T* data;  // null: not wanted
    int64_t stride;
    Rows rows;
    bool copied;
  };

  Sum open(const Scene<T>& scene, void* grad, int64_t width, int64_t wide, int64_t block, T* copy,
           BackwardScratch<T>& scratch) {
    if (!grad) return {};
    const T* const data = static_cast<const T*>(grad) + first_key_row(p_, scene.b, scene.group()) * width;
    const Rows rows = scene.key_rows({data, TypeOf<T>::VALUE, width, 1}, block);
    if (!rows.slots && width == wide) return {rows.place<T>(0), width, rows, false};
    load_rows(rows, width, scratch.ones, copy, wide);
    return {copy, wide, rows, true};
  }

  void close(const Sum& sum, int64_t width, BackwardScratch<T>& scratch) {
    if (sum.copied) store_rows(sum.data, sum.stride, width, scratch.ones, sum.rows);
  }

  // One tile: weights, their gradients, and what they add to everything.
  template <bool CAREFUL>
  void grade(const Scene<T>& scene, const Region& region, Asked<T>& one, int64_t block, int64_t key_count,
             const Panel<T>& keys, const Panel<T>& values, const Sum& grad_keys, const Sum& grad_values,
             BackwardScratch<T>& scratch) {
    const TileBias<T> bias = prepare_tile(scene, data_.bias, data_.seed, one, block, key_count, scratch);
    const Shares shares(one.cursor.mask(), one.width, key_count);
    for (int i = 0; i < shares.count; ++i) {
      const Share& share = shares.each[i];
      const Shape<T> shape{one.width, share, one.cursor.mask(), bias, static_cast<T>(p_.softcap * LOG2_E)};
      grade_share<CAREFUL>(shape, region, one, keys, values, grad_keys, grad_values, scratch);
      if (bias_.stage & region.wanted) add_bias_gradient(scene, one, block, share, scratch);
    }
  }

  template <bool CAREFUL>
  void grade_share(const Shape<T>& shape, const Region& region, Asked<T>& one, const Panel<T>& keys,
                   const Panel<T>& values, const Sum& grad_keys, const Sum& grad_values, BackwardScratch<T>& scratch) {
    const auto [lanes, seen] = shape.share;
    const int64_t width = one.width, depth = shape.share.depth(), rows = least(lanes.stop, one.count) - lanes.first;
    const int64_t wide_d = padded<T>(p_.head_dim), wide_v = padded<T>(p_.value_dim);
    const int64_t corner = seen.first * width + lanes.first;
    T *s = scratch.scores + corner, *ds = scratch.grads + corner;
    const T *key = keys.data + seen.first * keys.stride, *value = values.data + seen.first * values.stride;
    multiply<T, Order::rows>({Start::zero, nullptr, key, keys.stride, one.by_lane + lanes.first, width, s, width},
                             depth, shape.share.width(), p_.head_dim);
    T* slope = p_.softcap != 0 ? scratch.slope : nullptr;
    shape_scores(shape, scratch.scores, slope, static_cast<T*>(nullptr));
    if constexpr (CAREFUL) hide_carefully(shape, scratch.scores, scratch.seen);
    multiply<T, Order::rows>(
        {Start::zero, nullptr, value, values.stride, one.grad_by_lane + lanes.first, width, ds, width}, depth,
        shape.share.width(), p_.value_dim);
    const T* kept = p_.dropout_threshold ? scratch.kept : nullptr;
    for (int64_t lane = lanes.first; lane < lanes.stop; lane += LANES<T>) {
      grade_column<T, CAREFUL>(one, lane, seen, scratch.scores, scratch.grads, kept, scratch.seen);
    }
    const T* raw = ds;
    if (slope) raw = through_softcap<CAREFUL>(shape, scratch) + corner;
    const Visible visible{scratch.seen + seen.first, lanes.first};
    if (grad_values.data) {
      multiply_as<T, Order::rows, CAREFUL>(
          {Start::keep, nullptr, s, width, one.grad_by_row + lanes.first * wide_v, wide_v,
           grad_values.data + seen.first * grad_values.stride, grad_values.stride},
          depth, wide_v, rows, visible);
    }
    if (grad_keys.data) {
      multiply_as<T, Order::rows, CAREFUL>(
          {Start::keep, nullptr, raw, width, one.by_row + lanes.first * wide_d, wide_d,
           grad_keys.data + seen.first * grad_keys.stride, grad_keys.stride},
          depth, wide_d, rows, visible);
    }
    if ((region.wanted & FOR_QUERIES) && data_.grad_query) {
      multiply_as<T, Order::columns, CAREFUL>(
          {Start::keep, nullptr, raw, width, key, keys.stride, one.grad_query + lanes.first * wide_d, wide_d}, rows,
          wide_d, depth, visible);
    }
  }

  // Gradients before the softcap, in the place of its slopes.
  template <bool CAREFUL>
  static const T* through_softcap(const Shape<T>& shape, BackwardScratch<T>& scratch) {
    const auto [lanes, keys] = shape.share;
    for (int64_t k = keys.first; k < keys.stop; ++k) {
      for (int64_t lane = lanes.first; lane < lanes.stop; lane += LANES<T>) {
        const int64_t at = k * shape.width + lane;
        F<T> grad = load(scratch.grads + at) * load(scratch.slope + at);
        if constexpr (CAREFUL) grad = bits_of<T>(scratch.seen[k], lane) ? grad : F<T>{};
        store(scratch.slope + at, grad);
      }
    }
    return scratch.slope;
  }

  void add_bias_gradient(const Scene<T>& scene, const Asked<T>& one, int64_t block, const Share& share,
                         BackwardScratch<T>& scratch) {
    const Bias& bias = p_.bias;
    T* sums = bias_.sums;
    if (sums) sums += ((scene.b * p_.heads + scene.h) * bias_.chunks + one.tile / bias_.chunk) * bias_.slice;
    const TileGradient<T> grads{scratch.grads, one.width, least(share.lanes.stop, one.count), share};
    if (bias.kind != BiasKind::tensor) {
      add_rule_gradient(rule_of(scene, data_.bias), scene.natural(), *scratch.at, grads, scratch.strip, sums);
      return;
    }
    const int64_t row_stride = bias.size[2] > 1 ? bias.size[3] : 0, column_stride = bias.size[3] > 1 ? 1 : 0;
    const int64_t head = (bias.size[0] > 1 ? scene.b : 0) * bias.size[1] + (bias.size[1] > 1 ? scene.h : 0);
    const T* const data = sums ? sums : static_cast<const T*>(data_.grad_bias) + head * bias.size[2] * bias.size[3];
    const Matrix matrix{data, TypeOf<T>::VALUE, row_stride, column_stride};
    const Rows rows = scene.query_rows(matrix, one.tile), columns = scene.key_rows(matrix, block);
    if (row_stride != 0 && column_stride != 0 && scene.natural()) {
      add_turned_gradient(rows, block * TILE, grads, scratch.rows);
    } else {
      add_tensor_gradient(rows, columns, grads);
    }
  }

  void add_query_gradient(const Scene<T>& scene, BackwardScratch<T>& scratch, Asked<T>& one) {
    const int64_t wide = padded<T>(p_.head_dim);
    const T* const data = static_cast<const T*>(data_.grad_query) + scene.first_row() * p_.head_dim;
    const Rows rows = scene.query_rows({data, TypeOf<T>::VALUE, p_.head_dim, 1}, one.tile);
    if (add_) load_rows(rows, p_.head_dim, scratch.ones, scratch.rows, wide);
    for (int64_t i = 0; i < rows.count * wide; i += LANES<T>) {
      const F<T> sum = load(one.grad_query + i) * static_cast<T>(p_.scale);
      store(one.grad_query + i, add_ ? load(scratch.rows + i) + sum : sum);
    }
    store_rows(one.grad_query, wide, p_.head_dim, scratch.ones, rows);
  }

  const Problem& p_;
  const Backward& data_;
  const BiasGradient<T>& bias_;
  bool add_;
};

}  // namespace
