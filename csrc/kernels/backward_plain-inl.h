// The backward pass in numbers of the computing type. Factors that all products share go into the operands once: queries
// are scaled, gradients of the output are over the totals.
#pragma once

#include "graded-inl.h"

namespace {

template <class T>
struct PlainBackward {
  using Number = T;
  struct Session {};  // what a thread holds while it works on a block of keys
  static constexpr int64_t SHARE = QUARTER, GRAIN = 1, ROWS = 1;  // ROWS: of a gradient of keys that grow together

  struct Block {
    Panel<T> keys, values;
  };
  static Block block(const Problem& p, const Rows& keys, const Rows& values, bool, BackwardScratch<T>& scratch) {
    return {panel(keys, p.head_dim, true, scratch.ones, scratch.keys),
            panel(values, p.value_dim, false, scratch.ones, scratch.values)};
  }

  // Queries (D, width) in bits and (TILE, padded D) in natural units; gradients (V, width) and (TILE, padded V).
  static void pack(const Problem& p, const Rows& queries, const Rows& grads, Asked<T>& one, BackwardScratch<T>& scratch) {
    const int64_t wide_d = padded<T>(p.head_dim), wide_v = padded<T>(p.value_dim);
    fill(scratch.factors, static_cast<T>(p.scale * LOG2_E));
    load_lanes(queries, p.head_dim, scratch.factors, one.by_row, wide_d);
    transpose(one.by_row, wide_d, one.width, wide_d, one.by_lane, one.width);
    fill(scratch.factors, static_cast<T>(p.scale));
    load_lanes(queries, p.head_dim, scratch.factors, one.by_row, wide_d);
    const T keep_scale = keep_scale_of<T>(p);
    for (int64_t i = 0; i < TILE; ++i) scratch.factors[i] = keep_scale * one.inverse[i];
    load_lanes(grads, p.value_dim, scratch.factors, one.grad_by_row, wide_v);
    transpose(one.grad_by_row, wide_v, one.width, wide_v, one.grad_by_lane, one.width);
  }

  static void fill(T* numbers, T x) {
    for (int64_t i = 0; i < TILE; ++i) numbers[i] = x;
  }

  static T delta(T over_total, T) { return over_total; }

  static void scores(const Grading<T>& at, const Block& block) {
    by_lanes(at, block.keys, at.one.by_lane, at.problem.head_dim, at.scratch.scores);
  }
  static void weight_grads(const Grading<T>& at, const Block& block) {
    by_lanes(at, block.values, at.one.grad_by_lane, at.problem.value_dim, at.scratch.grads);
  }
  static void by_lanes(const Grading<T>& at, const Panel<T>& rows, const T* lanes, int64_t depth, T* to) {
    const int64_t width = at.one.width;
    multiply<T, Order::rows>({Start::zero, nullptr, rows.data + at.keys().first * rows.stride, rows.stride,
                              lanes + at.lanes().first, width, to + at.corner(), width},
                             at.shape.share.depth(), at.shape.share.width(), depth);
  }

  // Gradients of scores from weights and their gradients, a column of vectors at a time.
  template <bool CAREFUL>
  static void grade(const Grading<T>& at) {
    for (int64_t lane = at.lanes().first; lane < at.lanes().stop; lane += LANES<T>) grade_column<CAREFUL>(at, lane);
    if (at.slope) through_softcap<CAREFUL>(at);
  }

  template <bool CAREFUL>
  static void grade_column(const Grading<T>& at, int64_t lane) {
    const F<T> shift = load(at.one.shift + lane), delta = load(at.one.delta + lane);
    T *scores = at.scratch.scores, *grads = at.scratch.grads;
    for (int64_t k = at.keys().first; k < at.keys().stop; ++k) {
      const int64_t i = k * at.one.width + lane;
      F<T> weight = exp2<T>(load(scores + i) - shift), grad = load(grads + i), used = weight;
      if (at.kept) {
        const F<T> factor = load(at.kept + i);
        used = weight * factor;
        grad = grad * factor;
      }
      grad = weight * (grad - delta);
      if constexpr (CAREFUL) {
        const I<T> visible = bits_of<T>(at.scratch.seen[k], lane);
        used = visible ? used : F<T>{};
        grad = visible ? grad : F<T>{};
      }
      store(scores + i, used);
      store(grads + i, grad);
    }
  }

  // Gradients before the softcap, in the place of its slopes.
  template <bool CAREFUL>
  static void through_softcap(const Grading<T>& at) {
    const auto [lanes, keys] = at.shape.share;
    for (int64_t k = keys.first; k < keys.stop; ++k) {
      for (int64_t lane = lanes.first; lane < lanes.stop; lane += LANES<T>) {
        const int64_t i = k * at.one.width + lane;
        F<T> grad = load(at.scratch.grads + i) * load(at.slope + i);
        if constexpr (CAREFUL) grad = bits_of<T>(at.scratch.seen[k], lane) ? grad : F<T>{};
        store(at.slope + i, grad);
      }
    }
  }

  static const T* raw(const Grading<T>& at) { return (at.slope ? at.slope : at.scratch.grads) + at.corner(); }

  template <bool CAREFUL>
  static void add_values(const Grading<T>& at, const Sum<T>& sum) {
    by_keys<CAREFUL>(at, at.scratch.scores + at.corner(), at.one.grad_by_row, padded<T>(at.problem.value_dim), sum);
  }
  template <bool CAREFUL>
  static void add_keys(const Grading<T>& at, const Sum<T>& sum) {
    by_keys<CAREFUL>(at, raw(at), at.one.by_row, padded<T>(at.problem.head_dim), sum);
  }
  template <bool CAREFUL>
  static void by_keys(const Grading<T>& at, const T* factors, const T* rows, int64_t wide, const Sum<T>& sum) {
    multiply_as<T, Order::rows, CAREFUL>(
        {Start::keep, nullptr, factors, at.one.width, rows + at.lanes().first * wide, wide,
         sum.data + at.keys().first * sum.stride, sum.stride},
        at.shape.share.depth(), wide, at.rows(), at.visible());
  }

  template <bool CAREFUL>
  static void add_queries(const Grading<T>& at, const Block& block) {
    const int64_t wide = padded<T>(at.problem.head_dim);
    multiply_as<T, Order::columns, CAREFUL>(
        {Start::keep, nullptr, raw(at), at.one.width, block.keys.data + at.keys().first * block.keys.stride,
         block.keys.stride, at.one.grad_query + at.lanes().first * wide, wide},
        at.rows(), wide, at.shape.share.depth(), at.visible());
  }

  // The gradient of the queries by rows, and what it is still to be multiplied by.
  static T* query_rows(const Problem&, Asked<T>& one, BackwardScratch<T>&) { return one.grad_query; }
  static T query_scale(const Problem& p) { return static_cast<T>(p.scale); }
};

}  // namespace
