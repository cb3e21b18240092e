// The forward pass in numbers of the computing type: whatever the caller's are, they are turned into these first.
// The output stands by rows.
#pragma once

#include "online-inl.h"

namespace {

template <class T>
struct PlainForward {
  using Number = T;
  struct Session {};  // what a thread holds while it works on a block of keys
  static constexpr bool ROUNDS = false;      // whether weights are rounded before they are used
  static constexpr int64_t SHARE = QUARTER;  // lanes of a masked tile that are walked together
  static constexpr int64_t GRAIN = 1;        // keys that come together

  // Keys and values of a block.
  struct Block {
    Panel<T> keys, values;
  };
  static Block block(const Problem& p, const Rows& keys, const Rows& values, ForwardScratch<T>& scratch) {
    return {panel(keys, p.head_dim, false, scratch.ones, scratch.keys),
            panel(values, p.value_dim, true, scratch.ones, scratch.values)};
  }

  // (D, width), scaled.
  static void pack_query(const Problem& p, const Rows& rows, Online<T>& one, ForwardScratch<T>& scratch) {
    const int64_t wide = padded<T>(p.head_dim);
    load_lanes(rows, p.head_dim, scratch.scales, scratch.rows, wide);
    transpose(scratch.rows, wide, one.width, wide, one.query, one.width);
  }

  static void scores(const Weighing<T>& at, const Block& block) {
    const int64_t width = at.one.width;
    multiply<T, Order::rows>({Start::zero, nullptr, block.keys.data + at.keys().first * block.keys.stride,
                              block.keys.stride, at.one.query + at.lanes().first, width, at.corner(), width},
                             at.shape.share.depth(), at.shape.share.width(), at.problem.head_dim);
  }

  // What one weight costs: exp2 of a column of scores, summed, thinned by dropout.
  static void weigh(const Weighing<T>& at, int64_t lane) {
    Online<T>& one = at.one;
    const F<T> before = load(one.top + lane), top = greater<T>(before, load(at.scratch.peak + lane));
    const F<T> shift = top == -INFINITE<T> ? F<T>{} : top;
    const F<T> down = exp2<T>(before - shift);
    F<T> sum = load(one.total + lane) * down, energy = load(one.energy + lane) * down;
    for (int64_t k = at.keys().first; k < at.keys().stop; ++k) {
      T* s = at.scratch.scores + k * one.width + lane;
      const F<T> score = load(s), weight = exp2<T>(score - shift);
      sum += weight;
      if (at.energy) energy += weight == 0 ? F<T>{} : weight * score;
      store(s, at.kept ? weight * load(at.kept + k * one.width + lane) : weight);
    }
    store(one.top + lane, top);
    store(one.total + lane, sum);
    store(one.exact + lane, sum);
    store(one.energy + lane, energy);
    store(at.scratch.decay + lane, down);
  }

  template <bool CAREFUL>
  static void gather(const Weighing<T>& at, const Block& block) {
    const auto [lanes, seen] = at.shape.share;
    const int64_t wide = padded<T>(at.problem.value_dim);
    const Product<T> product{Start::decay, at.scratch.decay + lanes.first, at.corner(), at.one.width,
                             block.values.data + seen.first * block.values.stride, block.values.stride,
                             at.one.output + lanes.first * wide, wide};
    const int64_t rows = least(lanes.stop, at.one.count) - lanes.first;
    multiply_as<T, Order::columns, CAREFUL>(product, rows, wide, at.shape.share.depth(),
                                            {at.scratch.seen + seen.first, lanes.first});
  }

  // The sums by rows, padded V wide, and back.
  static const T* by_rows(const Problem&, const Online<T>& one, ForwardScratch<T>&) { return one.output; }
  static T* room_for_rows(Online<T>& one, ForwardScratch<T>&) { return one.output; }
  static void take_rows(const Problem&, Online<T>&, ForwardScratch<T>&) {}
};

}  // namespace
