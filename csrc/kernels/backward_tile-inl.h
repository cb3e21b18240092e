// The backward pass over tiles: the weights again from the saved sums, P = 2^(score - shift) / total, and
// dS = P (dP - delta); and what they add to every gradient. A unit (backward_plain-inl.h, backward_pairs-inl.h) makes
// the products.
#pragma once

#include "backward_plain-inl.h"

namespace {

template <class Unit>
class TileGradients {
  using T = typename Unit::Number;
  using Block = typename Unit::Block;

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
    if (!wants_queries(region)) return;
    for (int64_t i = 0; i < count; ++i) add_query_gradient(scene, scratch, scratch.tiles[i]);
  }

 private:
  // All that the backward pass needs of a tile's queries.
  void start(const Scene<T>& scene, int64_t tile, BackwardScratch<T>& scratch, Asked<T>& one) {
    const Rows rows = scene.query_rows(scene.query_side(data_.query, p_.type, p_.query_stride), tile);
    const Matrix grad_output = scene.query_side(data_.grad_output, p_.output_type, data_.grad_output_stride);
    const Rows grads = scene.query_rows(grad_output, tile);
    const int64_t at = scene.first_row();
    one.tile = tile;
    one.count = rows.count;
    one.width = padded<T>(rows.count);
    for (int64_t i = 0; i < TILE; ++i) {
      const int64_t row = i < rows.count ? rows.row(i) : -1;
      const T total = row < 0 ? 1 : static_cast<const T*>(data_.total)[at + row];
      one.shift[i] = row < 0 ? INFINITE<T> : static_cast<const T*>(data_.shift)[at + row];
      one.delta[i] = row < 0 ? 0 : Unit::delta(deltas[at + row], total);
      one.inverse[i] = row < 0 ? 0 : 1 / total;
    }
    Unit::pack(p_, rows, grads, one, scratch);
    const int64_t size = one.width * padded<T>(p_.head_dim);
    for (int64_t i = 0; i < size; i += LANES<T>) store(one.grad_query + i, F<T>{});
  }

  // One key block and the tiles that see it.
  void meet(const Scene<T>& scene, const Region& region, int64_t block, int64_t count, BackwardScratch<T>& scratch) {
    const int64_t wide_d = padded<T>(p_.head_dim), wide_v = padded<T>(p_.value_dim);
    const Matrix key = scene.key_side(data_.key, p_.key_stride), value = scene.key_side(data_.value, p_.value_stride);
    const Rows key_rows = scene.kept_rows(key, block), value_rows = scene.kept_rows(value, block);
    const Rows next_keys = scene.kept_rows(key, block + 1), next_values = scene.kept_rows(value, block + 1);
    [[maybe_unused]] const typename Unit::Session session;
    const Block rows = Unit::block(p_, key_rows, value_rows, wants_queries(region), scratch);
    Growing grad_keys{}, grad_values{};
    if (region.wanted & FOR_KEYS) {
      grad_keys = open(scene, data_.grad_key, p_.head_dim, wide_d, block, scratch.grad_keys, scratch);
      grad_values = open(scene, data_.grad_value, p_.value_dim, wide_v, block, scratch.grad_values, scratch);
    }
    for (int64_t i = 0; i < count; ++i) {
      ask_for_share(next_keys, p_.head_dim, i, count);
      ask_for_share(next_values, p_.value_dim, i, count);
      Asked<T>& one = scratch.tiles[i];
      if (one.cursor.block() != block) continue;
      careful ? grade<true>(scene, region, one, block, key_rows.count, rows, grad_keys.sum, grad_values.sum, scratch)
              : grade<false>(scene, region, one, block, key_rows.count, rows, grad_keys.sum, grad_values.sum, scratch);
      one.cursor.next();
    }
    close(grad_keys, p_.head_dim, scratch);
    close(grad_values, p_.value_dim, scratch);
  }

  bool wants_queries(const Region& region) const { return (region.wanted & FOR_QUERIES) && data_.grad_query; }

  // Rows of a gradient that grow: in place where they are whole vectors, else in a copy that is put back.
  struct Growing {
    Sum<T> sum;
    Rows rows;
    bool copied;
  };

  Growing open(const Scene<T>& scene, void* grad, int64_t width, int64_t wide, int64_t block, T* copy,
               BackwardScratch<T>& scratch) {
    if (!grad) return {};
    const T* const data = static_cast<const T*>(grad) + first_key_row(p_, scene.b, scene.group()) * width;
    const Rows rows = scene.key_rows({data, TypeOf<T>::VALUE, width, 1}, block);
    if (!rows.slots && width == wide && rows.count % Unit::ROWS == 0) return {{rows.place<T>(0), width}, rows, false};
    load_rows(rows, width, scratch.ones, copy, wide);
    return {{copy, wide}, rows, true};
  }

  void close(const Growing& grown, int64_t width, BackwardScratch<T>& scratch) {
    if (grown.copied) store_rows(grown.sum.data, grown.sum.stride, width, scratch.ones, grown.rows);
  }

  // One tile: weights, their gradients, and what they add to everything.
  template <bool CAREFUL>
  void grade(const Scene<T>& scene, const Region& region, Asked<T>& one, int64_t block, int64_t key_count,
             const Block& rows, const Sum<T>& grad_keys, const Sum<T>& grad_values, BackwardScratch<T>& scratch) {
    const TileBias<T> bias = prepare_tile(scene, data_.bias, data_.seed, one, block, key_count, scratch);
    const Shares shares(one.cursor.mask(), one.width, key_count, Unit::SHARE, Unit::GRAIN);
    const T* kept = p_.dropout_threshold ? scratch.kept : nullptr;
    T* slope = p_.softcap != 0 ? scratch.slope : nullptr;
    const bool for_bias = bias_.stage & region.wanted;
    for (int i = 0; i < shares.count; ++i) {
      const Share& share = shares.each[i];
      const Shape<T> shape{one.width, share, one.cursor.mask(), bias, static_cast<T>(p_.softcap * LOG2_E)};
      const Grading<T> at{p_, shape, one, scratch, kept, slope, for_bias};
      Unit::scores(at, rows);
      shape_scores(shape, scratch.scores, slope, static_cast<T*>(nullptr));
      if constexpr (CAREFUL) hide_carefully(shape, scratch.scores, scratch.seen);
      Unit::weight_grads(at, rows);
      Unit::template grade<CAREFUL>(at);
      if (grad_values.data) Unit::template add_values<CAREFUL>(at, grad_values);
      if (grad_keys.data) Unit::template add_keys<CAREFUL>(at, grad_keys);
      if (wants_queries(region)) Unit::template add_queries<CAREFUL>(at, rows);
      if (for_bias) add_bias_gradient(scene, one, block, share, scratch);
    }
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
    T* const made = Unit::query_rows(p_, one, scratch);
    for (int64_t i = 0; i < rows.count * wide; i += LANES<T>) {
      const F<T> sum = load(made + i) * Unit::query_scale(p_);
      store(made + i, add_ ? load(scratch.rows + i) + sum : sum);
    }
    store_rows(made, wide, p_.head_dim, scratch.ones, rows);
  }

  const Problem& p_;
  const Backward& data_;
  const BiasGradient<T>& bias_;
  bool add_;
};

}  // namespace
