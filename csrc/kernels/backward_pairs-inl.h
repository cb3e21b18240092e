// The backward pass in pairs of bfloat16 numbers: all operands as the caller stores them; weights and gradients of scores
// are rounded to bfloat16 for the products that they go into. Gradients of queries stand by columns, as the scores do.
#pragma once

#include "graded-inl.h"
#include "pairs-inl.h"
#if defined(QKV_TILES)
#include "tiles-inl.h"
#endif

namespace {

struct PairBackward {
  using T = float;
  using Number = T;
  using Session = Tiles;
  static constexpr int64_t SHARE = most(QUARTER, DEPTH_GRAIN), GRAIN = DEPTH_GRAIN;
  static constexpr int64_t ROWS = ROW_GRAIN;

  // By rows; and keys turned round, (D up to whole vectors, TILE), zero where there are none.
  struct Block {
    PairRows keys, values;
    const uint16_t* turned;
  };
  static Block block(const Problem& p, const Rows& keys, const Rows& values, bool queries,
                     BackwardScratch<T>& scratch) {
    const PairRows by_row = pair_rows(keys, p.head_dim, reinterpret_cast<uint16_t*>(scratch.keys));
    auto* const turned = reinterpret_cast<uint16_t*>(scratch.turned);
    if (queries) turn_rows(keys, p.head_dim, reinterpret_cast<uint32_t*>(scratch.rows), turned);
    return {by_row, pair_rows(values, p.value_dim, reinterpret_cast<uint16_t*>(scratch.values)), turned};
  }

  // Words of columns by lanes, (D / 2, width), and of rows, (TILE / 2, padded D); gradients likewise.
  static void pack(const Problem& p, const Rows& queries, const Rows& grads, Asked<T>& one,
                   BackwardScratch<T>& scratch) {
    pack_side(queries, p.head_dim, one.width, one.by_lane, one.by_row, scratch);
    pack_side(grads, p.value_dim, one.width, one.grad_by_lane, one.grad_by_row, scratch);
    for (int64_t i = 0; i < TILE; ++i) scratch.factors[i] = static_cast<T>(p.scale * LOG2_E);
  }
  static void pack_side(const Rows& rows, int64_t size, int64_t width, T* by_lane, T* by_row,
                        BackwardScratch<T>& scratch) {
    const int64_t wide = padded_pairs(size);
    auto* const copy = reinterpret_cast<uint16_t*>(scratch.rows);
    copy_pair_rows(rows, size, width, copy, wide);
    turn_pairs(reinterpret_cast<const uint32_t*>(copy), wide / 2, width, wide / 2, reinterpret_cast<uint32_t*>(by_lane),
               width);
    pair_up(copy, wide, width, rounded_up(width, DEPTH_GRAIN), padded<T>(size), reinterpret_cast<uint32_t*>(by_row),
            padded<T>(size));
  }

  static T delta(T over_total, T total) {
    const T delta = over_total * total;
    return delta == delta ? delta : __builtin_nanf("");  // of no other form: see round_pair
  }

  static void scores(const Grading<T>& at, const Block& block) {
    by_lanes(at, block.keys, at.one.by_lane, at.problem.head_dim, at.scratch.scores, at.scratch.factors[0]);
  }
  static void weight_grads(const Grading<T>& at, const Block& block) {
    by_lanes(at, block.values, at.one.grad_by_lane, at.problem.value_dim, at.scratch.grads, 1);
  }
  static void by_lanes(const Grading<T>& at, const PairRows& rows, const T* lanes, int64_t depth, T* to, T scale) {
    const int64_t width = at.one.width;
    multiply_pairs({Start::zero, nullptr, rows.data + at.keys().first * rows.stride, rows.stride,
                    reinterpret_cast<const uint32_t*>(lanes) + at.lanes().first, width, to + at.corner(), width, scale},
                   at.shape.share.depth(), at.shape.share.width(), depth);
  }

  // Weights by rows, gradients of raw scores by rows and in words of keys; all zero up to whole grains.
  template <bool CAREFUL>
  static void grade(const Grading<T>& at) {
    const auto [lanes, keys] = at.shape.share;
    const int64_t last = rounded_up(lanes.stop, DEPTH_GRAIN > 2 ? DEPTH_GRAIN : LANES<T>);
    for (int64_t lane = lanes.first; lane < lanes.stop; lane += LANES<T>) {
      for (int64_t k = keys.first; k < keys.stop; k += 2) grade_two<CAREFUL>(at, k, lane);
      const int64_t depth = keys.stop - keys.first;
      for (int64_t k = rounded_up(depth, 2); k < rounded_up(depth, DEPTH_GRAIN); k += 2) {
        const U<T> nothing{};
        __builtin_memcpy(at.scratch.words + (keys.first + k) / 2 * TILE + lane, &nothing, sizeof nothing);
      }
    }
    for (int64_t k = keys.first; k < keys.stop; ++k) {
      for (int64_t i = k * TILE + lanes.stop; i < k * TILE + last; ++i) at.scratch.used[i] = at.scratch.raw[i] = 0;
    }
  }

  template <bool CAREFUL>
  static void grade_two(const Grading<T>& at, int64_t k, int64_t lane) {
    const U<T> low = grade_one<CAREFUL>(at, k, lane);
    const U<T> high = k + 1 < at.keys().stop ? grade_one<CAREFUL>(at, k + 1, lane) : U<T>{};
    const U<T> words = low >> 16 | high;
    __builtin_memcpy(at.scratch.words + k / 2 * TILE + lane, &words, sizeof words);
  }

  template <bool CAREFUL>
  static U<T> grade_one(const Grading<T>& at, int64_t k, int64_t lane) {
    const int64_t i = k * at.one.width + lane;
    const F<T> weight = exp2_near(load(at.scratch.scores + i) - load(at.one.shift + lane)) * load(at.one.inverse + lane);
    F<T> grad = load(at.scratch.grads + i), used = weight;
    if (at.kept) {
      const F<T> factor = load(at.kept + i) * keep_scale_of<T>(at.problem);
      used = weight * factor;
      grad = grad * factor;
    }
    grad = weight * (grad - load(at.one.delta + lane));
    // Lanes that are no queries take part in the products, so they must see nothing, whatever the mask says.
    const I<T> visible = CAREFUL ? bits_of<T>(at.scratch.seen[k], lane) & (load(at.one.inverse + lane) != 0) : I<T>{};
    if (CAREFUL) used = visible ? used : F<T>{}, grad = visible ? grad : F<T>{};
    if (at.gradient) store(at.scratch.grads + i, grad);
    F<T> raw = grad * static_cast<T>(at.problem.scale);
    if (at.slope) raw *= load(at.slope + i);
    if (CAREFUL) raw = visible ? raw : F<T>{};
    const U<T> rounded = round_pair(raw);
    store_halves(round_pair(used), at.scratch.used + k * TILE + lane);
    store_halves(rounded, at.scratch.raw + k * TILE + lane);
    return rounded;
  }

  static void store_halves(U<T> rounded, uint16_t* to) {
    const Narrow numbers = narrow_bits(rounded >> 16);
    __builtin_memcpy(to, &numbers, sizeof numbers);
  }

  template <bool CAREFUL>
  static void add_values(const Grading<T>& at, const Sum<T>& sum) {
    by_keys<CAREFUL>(at, at.scratch.used, at.one.grad_by_row, at.problem.value_dim, sum);
  }
  template <bool CAREFUL>
  static void add_keys(const Grading<T>& at, const Sum<T>& sum) {
    by_keys<CAREFUL>(at, at.scratch.raw, at.one.by_row, at.problem.head_dim, sum);
  }
  template <bool CAREFUL>
  static void by_keys(const Grading<T>& at, const uint16_t* factors, const T* rows, int64_t size, const Sum<T>& sum) {
    const auto [lanes, keys] = at.shape.share;
    const int64_t wide = padded<T>(size), depth = at.shape.share.width();
    const Product<Pairs> product{Start::keep, nullptr, factors + keys.first * TILE + lanes.first, TILE,
                                 reinterpret_cast<const uint32_t*>(rows) + lanes.first / 2 * wide, wide,
                                 sum.data + keys.first * sum.stride, sum.stride};
    if constexpr (CAREFUL) {
      multiply_seen_by_keys(product, at.shape.share.depth(), wide, depth, at.visible(),
                            reinterpret_cast<uint32_t*>(at.scratch.rows));
    } else {
      multiply_pairs(product, at.shape.share.depth(), wide, depth);
    }
  }

  template <bool CAREFUL>
  static void add_queries(const Grading<T>& at, const Block& block) {
    const auto [lanes, keys] = at.shape.share;
    const int64_t wide = padded<T>(at.problem.head_dim), columns = at.shape.share.width();
    const Product<Pairs> product{Start::keep, nullptr, block.turned + keys.first, TILE,
                                 at.scratch.words + keys.first / 2 * TILE + lanes.first, TILE,
                                 at.one.grad_query + lanes.first, at.one.width};
    if constexpr (CAREFUL) {
      multiply_seen_by_lanes(product, wide, columns, at.shape.share.depth(), at.visible(),
                             reinterpret_cast<uint16_t*>(at.scratch.rows));
    } else {
      multiply_pairs(product, wide, columns, at.shape.share.depth());
    }
  }

  static T* query_rows(const Problem& p, Asked<T>& one, BackwardScratch<T>& scratch) {
    const int64_t wide = padded<T>(p.head_dim);
    transpose(one.grad_query, one.width, wide, one.width, scratch.turned, wide);
    return scratch.turned;
  }
  static T query_scale(const Problem&) { return 1; }
};

}  // namespace
