// The forward pass: the online softmax over the key blocks that a block of queries sees.
// Source: Milakov, Gimelshein, "Online normalizer calculation for softmax" (2018); Rabe, Staats (2021).
//
// Scores of a tile stand with the queries in the lanes, so that the greatest, the sum and the decay of a query are plain
// vector operations; the output stands by rows. Queries of up to TOGETHER tiles share each block of keys and values.
#pragma once

#include "careful-inl.h"
#include "pass-inl.h"
#include "scores-inl.h"

namespace {

using qkv::Forward;

// The running state of a tile's queries. A query's weights are 2^(score - top); `energy` sums weights · scores.
template <class T>
struct Online {
  T* query;   // (D, width), scaled
  T* output;  // (TILE, padded V), sums of weights · values
  T *top, *total, *energy;  // (TILE)
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
    for (Online<T>& one : tiles) {
      one.query = arena.take<T>(wide_d * TILE);
      one.output = arena.take<T>(TILE * wide_v);
      one.top = arena.take<T>(TILE);
      one.total = arena.take<T>(TILE);
      one.energy = arena.take<T>(TILE);
    }
    ones = arena.take<T>(TILE);
    scales = arena.take<T>(TILE);
    rows = arena.take<T>(TILE * most(most(wide_d, wide_v), TILE));
    keys = arena.take<T>(TILE * wide_d);
    values = arena.take<T>(TILE * wide_v);
    scores = arena.take<T>(TILE * TILE);
    bias = arena.take<T>(TILE * TILE);
    kept = arena.take<T>(TILE * TILE);
    peak = arena.take<T>(TILE);
    decay = arena.take<T>(TILE);
    seen = arena.take<uint64_t>(TILE);
    at = arena.take<Positions>(1);
  }

  void prepare(const Problem& p) {
    for (int64_t i = 0; i < TILE; ++i) ones[i] = 1, scales[i] = static_cast<T>(p.scale * LOG2_E);
  }
};

// What one weight costs: exp2 of a column of scores, summed, thinned by dropout.
template <class T>
void weigh_column(const Online<T>& one, int64_t lane, Range keys, T* s, const T* kept, bool energy, const T* peak,
                  T* decay) {
  const F<T> before = load(one.top + lane), top = greater<T>(before, load(peak + lane));
  const F<T> shift = top == -INFINITE<T> ? F<T>{} : top;
  const F<T> down = exp2<T>(before - shift);
  F<T> sum = load(one.total + lane) * down, energy_sum = load(one.energy + lane) * down;
  for (int64_t k = keys.first; k < keys.stop; ++k) {
    T* at = s + k * one.width + lane;
    const F<T> score = load(at), weight = exp2<T>(score - shift);
    sum += weight;
    if (energy) energy_sum += weight == 0 ? F<T>{} : weight * score;
    store(at, kept ? weight * load(kept + k * one.width + lane) : weight);
  }
  store(one.top + lane, top);
  store(one.total + lane, sum);
  store(one.energy + lane, energy_sum);
  store(decay + lane, down);
}

template <class T>
class ForwardPass {
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
    const int64_t totals = data_.shift ? 0 : 2 * rows;
    if (!state_.reserve((sums + totals) * sizeof(T))) return false;
    T* const own = static_cast<T*>(state_.data());
    sums_ = sums ? own : static_cast<T*>(data_.output);
    if (totals) data_.shift = own + sums, data_.total = own + sums + rows;
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
      if (!finite(one.output, padded<T>(p_.value_dim), one.count, padded<T>(p_.value_dim))) {
        start(scene, one.tile, scratch, one);
        walk<true>(scene, &one, 1, scratch, worker);
      }
      if (size_.merged) {
        keep(scene.query_rows(sums(scene.first_row()), one.tile), scene.first_row(), one, scratch);
      } else {
        finish(scene.query_rows(output(scene.first_row()), one.tile), scene.first_row(), scene.h, one, scratch);
      }
    }
  }

  void start(const Scene<T>& scene, int64_t tile, ForwardScratch<T>& scratch, Online<T>& one) {
    const Rows rows = scene.query_rows(scene.query_side(data_.query, p_.type, p_.query_stride), tile);
    one.tile = tile;
    one.count = rows.count;
    one.width = padded<T>(rows.count);
    one.cursor = Cursor(scene.part.schedule, tile, {0, NO_BLOCK});
    const int64_t wide = padded<T>(p_.head_dim);
    load_lanes(rows, p_.head_dim, scratch.scales, scratch.rows, wide);
    transpose(scratch.rows, wide, one.width, wide, one.query, one.width);
    if (size_.merged) {
      resume(scene.query_rows(sums(scene.first_row()), tile), scene.first_row(), one, scratch);
    } else {
      reset(one);
    }
  }

  void reset(Online<T>& one) {
    const int64_t wide = padded<T>(p_.value_dim);
    for (int64_t i = 0; i < one.count * wide; i += LANES<T>) store(one.output + i, F<T>{});
    for (int64_t i = 0; i < TILE; ++i) one.top[i] = -INFINITE<T>, one.total[i] = one.energy[i] = 0;
  }

  template <bool CAREFUL>
  void walk(const Scene<T>& scene, Online<T>* tiles, int64_t count, ForwardScratch<T>& scratch, Worker& worker) {
    const Matrix key = scene.key_side(data_.key, p_.key_stride), value = scene.key_side(data_.value, p_.value_stride);
    while (!worker.stopped()) {
      const int64_t block = next_block(tiles, count);
      if (block == NO_BLOCK) return;
      const Rows key_rows = scene.kept_rows(key, block), value_rows = scene.kept_rows(value, block);
      const Panel<T> keys = panel(key_rows, p_.head_dim, false, scratch.ones, scratch.keys);
      const Panel<T> values = panel(value_rows, p_.value_dim, true, scratch.ones, scratch.values);
      for (int64_t i = 0; i < count; ++i) {
        if (tiles[i].cursor.block() != block) continue;
        attend<CAREFUL>(scene, tiles[i], block, key_rows.count, keys, values, scratch);
        tiles[i].cursor.next();
      }
    }
  }

  template <bool CAREFUL>
  void attend(const Scene<T>& scene, Online<T>& one, int64_t block, int64_t key_count, const Panel<T>& keys,
              const Panel<T>& values, ForwardScratch<T>& scratch) {
    const TileBias<T> bias = prepare_tile(scene, data_.bias, data_.seed, one, block, key_count, scratch);
    const Shares shares(one.cursor.mask(), one.width, key_count);
    for (int i = 0; i < shares.count; ++i) {
      const Share& share = shares.each[i];
      const Shape<T> shape{one.width, share, one.cursor.mask(), bias, static_cast<T>(p_.softcap * LOG2_E)};
      attend_share<CAREFUL>(shape, one, keys, values, scratch);
    }
  }

  template <bool CAREFUL>
  void attend_share(const Shape<T>& shape, Online<T>& one, const Panel<T>& keys, const Panel<T>& values,
                    ForwardScratch<T>& scratch) {
    const auto [lanes, seen] = shape.share;
    const int64_t width = one.width, depth = shape.share.depth(), wide = padded<T>(p_.value_dim);
    T* s = scratch.scores + seen.first * width + lanes.first;
    multiply<T, Order::rows>({Start::zero, nullptr, keys.data + seen.first * keys.stride, keys.stride,
                              one.query + lanes.first, width, s, width},
                             depth, shape.share.width(), p_.head_dim);
    shape_scores(shape, scratch.scores, static_cast<T*>(nullptr), scratch.peak);
    if constexpr (CAREFUL) {
      hide_carefully(shape, scratch.scores, scratch.seen);
      for (int64_t lane = lanes.first; lane < lanes.stop; lane += LANES<T>) {
        store(scratch.peak + lane, peak_of_column(shape, scratch.scores, lane));
      }
    }
    const T* kept = p_.dropout_threshold ? scratch.kept : nullptr;
    for (int64_t lane = lanes.first; lane < lanes.stop; lane += LANES<T>) {
      weigh_column(one, lane, seen, scratch.scores, kept, data_.entropy != nullptr, scratch.peak, scratch.decay);
    }
    const Product<T> product{Start::decay, scratch.decay + lanes.first, s, width,
                             values.data + seen.first * values.stride, values.stride,
                             one.output + lanes.first * wide, wide};
    const int64_t rows = least(lanes.stop, one.count) - lanes.first;
    multiply_as<T, Order::columns, CAREFUL>(product, rows, wide, depth, {scratch.seen + seen.first, lanes.first});
  }

  // The output of a (b, h), and what waits for it between parts; `first`: its first row.
  Matrix output(int64_t first) const {
    const char* const data = static_cast<const char*>(data_.output) + first * p_.value_dim * size_of(p_.output_type);
    return {data, p_.output_type, p_.value_dim, 1};
  }
  Matrix sums(int64_t first) const { return {sums_ + first * p_.value_dim, TypeOf<T>::VALUE, p_.value_dim, 1}; }

  // Divide by the sums; a sink joins here, since it has no value.
  void finish(const Rows& rows, int64_t first, int64_t h, const Online<T>& one, ForwardScratch<T>& scratch) {
    const T keep_scale = keep_scale_of<T>(p_);
    for (int64_t i = 0; i < rows.count; ++i) {
      const T keys = one.total[i];
      T shift = one.top[i], total = keys, factor = 1;
      if (data_.sinks) {
        const T sink = in_bits(static_cast<const T*>(data_.sinks)[h], T());
        shift = sink > shift ? sink : shift;
        const F<T> parts = exp2<T>(shift == -INFINITE<T> ? F<T>{one.top[i], sink} : F<T>{one.top[i] - shift, sink - shift});
        factor = parts[0];
        total = keys * factor + parts[1];
      }
      shift = shift == -INFINITE<T> ? 0 : shift;
      const bool nothing = total == 0;
      total = nothing ? 1 : total;
      scratch.decay[i] = factor * keep_scale / total;
      if (rows.row(i) < 0) continue;
      const int64_t at = first + rows.row(i);
      if (data_.shift) static_cast<T*>(data_.shift)[at] = shift;
      if (data_.total) static_cast<T*>(data_.total)[at] = total;
      if (data_.max_scores) static_cast<T*>(data_.max_scores)[at] = one.top[i] * static_cast<T>(LN_2);
      if (!data_.lse && !data_.entropy) continue;
      const T lse = nothing ? -INFINITE<T> : shift * static_cast<T>(LN_2) + static_cast<T>(__builtin_log(total));
      if (data_.lse) static_cast<T*>(data_.lse)[at] = lse;
      if (data_.entropy) {
        const T energy = one.energy[i] * static_cast<T>(LN_2);
        static_cast<T*>(data_.entropy)[at] = nothing ? 0 : factor * (keys * lse - energy) / total;
      }
    }
    store_rows(one.output, padded<T>(p_.value_dim), p_.value_dim, scratch.decay, rows);
  }

  // A state put away between parts, and taken up again; `first`: row 0 of the (b, h).
  void keep(const Rows& rows, int64_t first, const Online<T>& one, ForwardScratch<T>& scratch) {
    store_rows(one.output, padded<T>(p_.value_dim), p_.value_dim, scratch.ones, rows);
    for (int64_t i = 0; i < rows.count; ++i) {
      if (rows.row(i) < 0) continue;
      const int64_t at = first + rows.row(i);
      static_cast<T*>(data_.shift)[at] = one.top[i];
      static_cast<T*>(data_.total)[at] = one.total[i];
      if (data_.entropy) static_cast<T*>(data_.entropy)[at] = one.energy[i];
    }
  }

  void resume(const Rows& rows, int64_t first, Online<T>& one, ForwardScratch<T>& scratch) {
    one.count = rows.count;
    reset(one);
    load_rows<T>(rows, p_.value_dim, scratch.ones, one.output, padded<T>(p_.value_dim));
    for (int64_t i = 0; i < rows.count; ++i) {
      if (rows.row(i) < 0) continue;
      const int64_t at = first + rows.row(i);
      one.top[i] = static_cast<const T*>(data_.shift)[at];
      one.total[i] = static_cast<const T*>(data_.total)[at];
      if (data_.entropy) one.energy[i] = static_cast<const T*>(data_.entropy)[at];
    }
  }

  // Rows of the call in natural order, whatever the parts' orders.
  struct Unit {
    int64_t h, first, tile, count;

    Rows rows(const Matrix& m) const { return {m.data, m.type, m.row_stride, m.column_stride, nullptr, tile * TILE, count}; }
  };
  Unit natural_unit(int64_t unit) const {
    const int64_t tiles = blocks_of(p_.queries, TILE), head = unit / tiles, tile = unit % tiles, b = head / p_.heads;
    const Range queries = queries_of(p_, b);
    const int64_t count = most(0, least(TILE, queries.stop - queries.first - tile * TILE));
    return {head % p_.heads, first_row(p_, b, head % p_.heads), tile, count};
  }

  void begin_unit(int64_t unit, ForwardScratch<T>& scratch, Worker&) {
    const Unit at = natural_unit(unit);
    Online<T>& one = scratch.tiles[0];
    one.count = at.count;
    reset(one);
    keep(at.rows(sums(at.first)), at.first, one, scratch);
  }

  void finish_unit(int64_t unit, ForwardScratch<T>& scratch, Worker&) {
    const Unit at = natural_unit(unit);
    Online<T>& one = scratch.tiles[0];
    resume(at.rows(sums(at.first)), at.first, one, scratch);
    finish(at.rows(output(at.first)), at.first, at.h, one, scratch);
  }

  const Problem& p_;
  Forward data_;
  PlanSize size_;
  Buffer state_;
  T* sums_ = nullptr;
  int64_t stage_ = 0, together_ = TOGETHER;
};

inline Status run_forward(const Problem& problem, const Forward& data, const Run& run) {
  if (problem.type == Type::float64) return ForwardPass<double>(problem, data).run(run);
  return ForwardPass<float>(problem, data).run(run);
}

}  // namespace
