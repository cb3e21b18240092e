// The forward pass: the online softmax over the key blocks that a block of queries sees. Queries of up to TOGETHER tiles
// share each block of keys and values. A unit (forward_plain-inl.h, forward_pairs-inl.h) makes the products.
// Source: Rabe, Staats, "Self-attention does not need O(n^2) memory" (2021); Dao et al., "FlashAttention" (2022).
#pragma once

#include "decode-inl.h"

namespace {

template <class Unit>
class ForwardPass {
  using T = typename Unit::Number;
  using Block = typename Unit::Block;

 public:
  ForwardPass(const Problem& problem, const Forward& data) : p_(problem), data_(data), size_(problem.plan) {}

  Status run(const Run& run) {
    const int64_t heads = p_.batch * p_.heads, rows = blocks_of(p_.queries, TILE);
    if (size_.merged && !keep_state()) return Status::out_of_memory;
    Status status = Status::ok;
    if (size_.merged) status = each(*this, p_, run, heads * rows, &ForwardPass::begin_unit);
    together_ = tiles_together(run.threads);
    for (stage_ = 0; stage_ < size_.parts && status == Status::ok; ++stage_) {
      status = each(*this, p_, run, heads * blocks_of(size_.tiles, together_), &ForwardPass::part_unit);
    }
    if (size_.merged && status == Status::ok) status = each(*this, p_, run, heads * rows, &ForwardPass::finish_unit);
    return status;
  }

 private:
  // Between parts the states of all rows wait in the results, and where those cannot hold them in memory of their own.
  bool keep_state() {
    const int64_t rows = all_rows(p_), sums = p_.output_type == TypeOf<T>::VALUE ? 0 : rows * p_.value_dim;
    const int64_t totals = data_.shift ? 0 : 2 * rows, used = Unit::ROUNDS ? rows : 0;
    if (!state_.reserve((sums + totals + used) * sizeof(T))) return false;
    T* const own = static_cast<T*>(state_.data());
    sums_ = sums ? own : static_cast<T*>(data_.output);
    if (totals) data_.shift = own + sums, data_.total = own + sums + rows;
    used_ = own + sums + totals;
    return true;
  }

  // Tiles that walk together: fewer where threads would have nothing to do.
  int64_t tiles_together(int64_t threads) const {
    int64_t count = TOGETHER;
    while (count > 1 && threads > 1 && p_.batch * p_.heads * blocks_of(size_.tiles, count) < 4 * threads) count /= 2;
    return count;
  }

  // The longest rows of a causal pattern come first, so that threads end together.
  void part_unit(int64_t unit, ForwardScratch<T>& scratch, Worker& worker) {
    const int64_t per_head = blocks_of(size_.tiles, together_);
    const int64_t head = unit / per_head, first = (per_head - 1 - unit % per_head) * together_;
    const int64_t b = head / p_.heads, h = head % p_.heads;
    if (stage_ >= member_of(p_, b, h).count) return;
    const Scene<T> scene{p_, member_of(p_, b, h).parts[stage_], b, h};
    const int64_t count = least(together_, scene.part.schedule.rows - first);
    if (count <= 0) return;
    for (int64_t i = 0; i < count; ++i) start(scene, first + i, scratch, scratch.tiles[i]);
    walk<false>(scene, scratch.tiles, count, scratch, worker);
    for (int64_t i = 0; i < count; ++i) {
      if (worker.stopped()) return;
      Online<T>& one = scratch.tiles[i];
      if (!finite(one.output, 0, 1, one.width * padded<T>(p_.value_dim))) {
        start(scene, one.tile, scratch, one);
        walk<true>(scene, &one, 1, scratch, worker);
      }
      if (size_.merged) {
        keep(scene.query_rows(sums(scene.first_row()), one.tile), scene.first_row(), one, scratch);
      } else {
        finish(p_, data_, scene.query_rows(output(scene.first_row()), one.tile), scene.first_row(), scene.h, one,
               Unit::by_rows(p_, one, scratch), scratch.decay);
      }
    }
  }

  void start(const Scene<T>& scene, int64_t tile, ForwardScratch<T>& scratch, Online<T>& one) {
    const Rows rows = scene.query_rows(scene.query_side(data_.query, p_.type, p_.query_stride), tile);
    one.tile = tile;
    one.count = rows.count;
    one.width = padded<T>(rows.count);
    one.cursor = Cursor(scene.part.schedule, tile, {0, NO_BLOCK});
    Unit::pack_query(p_, rows, one, scratch);
    if (size_.merged) {
      resume(scene.query_rows(sums(scene.first_row()), tile), scene.first_row(), one, scratch);
    } else {
      reset(one);
    }
  }

  void reset(Online<T>& one) {
    const int64_t size = one.width * padded<T>(p_.value_dim);
    for (int64_t i = 0; i < size; i += LANES<T>) store(one.output + i, F<T>{});
    for (int64_t i = 0; i < TILE; ++i) one.top[i] = -INFINITE<T>, one.total[i] = one.exact[i] = one.energy[i] = 0;
  }

  template <bool CAREFUL>
  void walk(const Scene<T>& scene, Online<T>* tiles, int64_t count, ForwardScratch<T>& scratch, Worker& worker) {
    const Matrix key = scene.key_side(data_.key, p_.key_stride), value = scene.key_side(data_.value, p_.value_stride);
    while (!worker.stopped()) {
      const int64_t block = next_block(tiles, count);
      if (block == NO_BLOCK) return;
      const Rows key_rows = scene.kept_rows(key, block), value_rows = scene.kept_rows(value, block);
      [[maybe_unused]] const typename Unit::Session session;
      const Block rows = Unit::block(p_, key_rows, value_rows, scratch);
      const Rows next_keys = scene.kept_rows(key, block + 1), next_values = scene.kept_rows(value, block + 1);
      for (int64_t i = 0; i < count; ++i) {
        ask_for_share(next_keys, p_.head_dim, i, count);
        ask_for_share(next_values, p_.value_dim, i, count);
        if (tiles[i].cursor.block() != block) continue;
        attend<CAREFUL>(scene, tiles[i], block, key_rows.count, rows, scratch);
        tiles[i].cursor.next();
      }
    }
  }

  template <bool CAREFUL>
  void attend(const Scene<T>& scene, Online<T>& one, int64_t block, int64_t key_count, const Block& rows,
              ForwardScratch<T>& scratch) {
    const TileBias<T> bias = prepare_tile(scene, data_.bias, data_.seed, one, block, key_count, scratch);
    const Shares shares(one.cursor.mask(), one.width, key_count, Unit::SHARE, Unit::GRAIN);
    for (int i = 0; i < shares.count; ++i) {
      const Share& share = shares.each[i];
      const Shape<T> shape{one.width, share, one.cursor.mask(), bias, static_cast<T>(p_.softcap * LOG2_E)};
      attend_share<CAREFUL>(shape, one, rows, scratch);
    }
  }

  template <bool CAREFUL>
  void attend_share(const Shape<T>& shape, Online<T>& one, const Block& block, ForwardScratch<T>& scratch) {
    const T* kept = p_.dropout_threshold ? scratch.kept : nullptr;
    const bool aux = data_.lse || data_.total || data_.entropy;
    const Weighing<T> at{p_, shape, one, scratch, kept, aux, data_.entropy != nullptr};
    const Range lanes = at.lanes();
    Unit::scores(at, block);
    shape_scores(shape, scratch.scores, static_cast<T*>(nullptr), scratch.peak);
    if constexpr (CAREFUL) {
      hide_carefully(shape, scratch.scores, scratch.seen);
      for (int64_t lane = lanes.first; lane < lanes.stop; lane += LANES<T>) {
        store(scratch.peak + lane, peak_of_column(shape, scratch.scores, lane));
      }
    }
    for (int64_t lane = lanes.first; lane < lanes.stop; lane += LANES<T>) Unit::weigh(at, lane);
    Unit::template gather<CAREFUL>(at, block);
  }

  // The output of a (b, h), and what waits for it between parts; `first`: its first row.
  Matrix output(int64_t first) const { return output_of(p_, data_, first); }
  Matrix sums(int64_t first) const { return {sums_ + first * p_.value_dim, TypeOf<T>::VALUE, p_.value_dim, 1}; }

  // A state put away between parts, and taken up again; `first`: row 0 of the (b, h).
  void keep(const Rows& rows, int64_t first, const Online<T>& one, ForwardScratch<T>& scratch) {
    store_rows(Unit::by_rows(p_, one, scratch), padded<T>(p_.value_dim), p_.value_dim, scratch.ones, rows);
    for (int64_t i = 0; i < rows.count; ++i) {
      if (rows.row(i) < 0) continue;
      const int64_t at = first + rows.row(i);
      static_cast<T*>(data_.shift)[at] = one.top[i];
      static_cast<T*>(data_.total)[at] = one.exact[i];
      if (Unit::ROUNDS) used_[at] = one.total[i];
      if (data_.entropy) static_cast<T*>(data_.entropy)[at] = one.energy[i];
    }
  }

  void resume(const Rows& rows, int64_t first, Online<T>& one, ForwardScratch<T>& scratch) {
    one.count = rows.count;
    one.width = padded<T>(rows.count);
    reset(one);
    load_lanes(rows, p_.value_dim, scratch.ones, Unit::room_for_rows(one, scratch), padded<T>(p_.value_dim));
    Unit::take_rows(p_, one, scratch);
    for (int64_t i = 0; i < rows.count; ++i) {
      if (rows.row(i) < 0) continue;
      const int64_t at = first + rows.row(i);
      one.top[i] = static_cast<const T*>(data_.shift)[at];
      one.exact[i] = static_cast<const T*>(data_.total)[at];
      one.total[i] = Unit::ROUNDS ? used_[at] : one.exact[i];
      if (data_.entropy) one.energy[i] = static_cast<const T*>(data_.entropy)[at];
    }
  }

  // Rows of the call in natural order, whatever the parts' orders.
  struct Natural {
    int64_t h, first, tile, count;

    Rows rows(const Matrix& m) const {
      return {m.data, m.type, m.row_stride, m.column_stride, nullptr, tile * TILE, count};
    }
  };
  Natural natural_unit(int64_t unit) const {
    const int64_t tiles = blocks_of(p_.queries, TILE), head = unit / tiles, tile = unit % tiles, b = head / p_.heads;
    const Range queries = queries_of(p_, b);
    const int64_t count = most(0, least(TILE, queries.stop - queries.first - tile * TILE));
    return {head % p_.heads, first_row(p_, b, head % p_.heads), tile, count};
  }

  void begin_unit(int64_t unit, ForwardScratch<T>& scratch, Worker&) {
    const Natural at = natural_unit(unit);
    Online<T>& one = scratch.tiles[0];
    one.count = at.count;
    one.width = padded<T>(at.count);
    reset(one);
    keep(at.rows(sums(at.first)), at.first, one, scratch);
  }

  void finish_unit(int64_t unit, ForwardScratch<T>& scratch, Worker&) {
    const Natural at = natural_unit(unit);
    Online<T>& one = scratch.tiles[0];
    resume(at.rows(sums(at.first)), at.first, one, scratch);
    finish(p_, data_, at.rows(output(at.first)), at.first, at.h, one, Unit::by_rows(p_, one, scratch), scratch.decay);
  }

  const Problem& p_;
  Forward data_;
  PlanSize size_;
  Buffer state_;
  T *sums_ = nullptr, *used_ = nullptr;  // of outputs, and of weights as they are used
  int64_t stage_ = 0, together_ = TOGETHER;
};

inline Status run_forward(const Problem& problem, const Forward& data, const Run& run) {
  const bool few = decodes(problem);
  if (problem.type == Type::float64) {
    return few ? DecodePass<double>(problem, data).run(run) : ForwardPass<PlainForward<double>>(problem, data).run(run);
  }
  return few ? DecodePass<float>(problem, data).run(run) : ForwardPass<PlainForward<float>>(problem, data).run(run);
}

}  // namespace
