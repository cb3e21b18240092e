// The forward pass in pairs of bfloat16 numbers: both products take them as the caller stores them, weights are rounded
// to bfloat16 between. The output stands by columns, so that it is of the same form as the scores: rows of values that
// are turned round meet words of weights.
#pragma once

#include "online-inl.h"
#include "pairs-inl.h"
#if defined(QKV_TILES)
#include "tiles-inl.h"
#endif

namespace {

struct PairForward {
  using T = float;
  using Number = T;
  static constexpr bool ROUNDS = true;
  using Session = Tiles;
  static constexpr int64_t SHARE = most(QUARTER, DEPTH_GRAIN), GRAIN = DEPTH_GRAIN;

  // Keys by rows; values turned round, (V up to whole vectors, TILE), zero where there are none.
  struct Block {
    PairRows keys;
    const uint16_t* values;
  };
  static Block block(const Problem& p, const Rows& keys, const Rows& values, ForwardScratch<T>& scratch) {
    auto* const turned = reinterpret_cast<uint16_t*>(scratch.values);
    turn_rows(values, p.value_dim, reinterpret_cast<uint32_t*>(scratch.rows), turned);
    return {pair_rows(keys, p.head_dim, reinterpret_cast<uint16_t*>(scratch.keys)), turned};
  }

  // Words (D / 2, width).
  static void pack_query(const Problem& p, const Rows& rows, Online<T>& one, ForwardScratch<T>& scratch) {
    const int64_t wide = padded_pairs(p.head_dim);
    auto* const copy = reinterpret_cast<uint16_t*>(scratch.rows);
    copy_pair_rows(rows, p.head_dim, one.width, copy, wide);
    turn_pairs(reinterpret_cast<const uint32_t*>(copy), wide / 2, one.width, wide / 2,
               reinterpret_cast<uint32_t*>(one.query), one.width);
  }

  static void scores(const Weighing<T>& at, const Block& block) {
    const int64_t width = at.one.width;
    multiply_pairs({Start::zero, nullptr, block.keys.data + at.keys().first * block.keys.stride, block.keys.stride,
                    reinterpret_cast<const uint32_t*>(at.one.query) + at.lanes().first, width, at.corner(), width,
                    at.scratch.scales[0]},
                   at.shape.share.depth(), at.shape.share.width(), at.problem.head_dim);
  }

  // A column of weights, rounded and put in words at the place of the scores, from the row of the first on.
  static void weigh(const Weighing<T>& at, int64_t lane) { at.aux ? weigh_as<true>(at, lane) : weigh_as<false>(at, lane); }

  template <bool AUX>
  static void weigh_as(const Weighing<T>& at, int64_t lane) {
    Online<T>& one = at.one;
    const int64_t width = one.width;
    const F<T> before = load(one.top + lane), top = greater<T>(before, load(at.scratch.peak + lane));
    const F<T> shift = top == -INFINITE<T> ? F<T>{} : top;
    const F<T> down = exp2_near(before - shift);
    F<T> sum = load(one.total + lane) * down, exact{}, energy{};
    if (AUX) exact = load(one.exact + lane) * down, energy = load(one.energy + lane) * down;
    const Range keys = at.keys();
    T* s = at.scratch.scores + keys.first * width + lane;
    const T* kept = at.kept ? at.kept + keys.first * width + lane : nullptr;
    auto* word = reinterpret_cast<uint32_t*>(s);
    for (int64_t k = keys.first; k < keys.stop; k += 2, s += 2 * width, word += width) {
      const F<T> none = splat(-INFINITE<T>), low = load(s), high = k + 1 < keys.stop ? load(s + width) : none;
      const F<T> first = exp2_near(low - shift), second = exp2_near(high - shift);
      U<T> a = round_pair(first), b = round_pair(second);
      sum += (F<T>)a + (F<T>)b;
      if (AUX) {
        exact += first + second;
        if (at.energy) energy += (first == 0 ? F<T>{} : first * low) + (second == 0 ? F<T>{} : second * high);
      }
      if (kept) {
        a = (U<T>)((F<T>)a * load(kept));  // a NaN stays one, so that the output tells of it
        b = k + 1 < keys.stop ? (U<T>)((F<T>)b * load(kept + width)) : U<T>{};
        kept += 2 * width;
      }
      const U<T> words = a >> 16 | b;
      __builtin_memcpy(word, &words, sizeof words);
    }
    const int64_t depth = keys.stop - keys.first;
    for (int64_t k = rounded_up(depth, 2); k < rounded_up(depth, DEPTH_GRAIN); k += 2, word += width) {
      const U<T> nothing{};
      __builtin_memcpy(word, &nothing, sizeof nothing);
    }
    store(one.top + lane, top);
    store(one.total + lane, sum);
    if (AUX) store(one.exact + lane, exact), store(one.energy + lane, energy);
    store(at.scratch.decay + lane, down);
  }

  template <bool CAREFUL>
  static void gather(const Weighing<T>& at, const Block& block) {
    const int64_t width = at.one.width, lane = at.lanes().first, first = at.keys().first;
    const int64_t rows = padded<T>(at.problem.value_dim), columns = at.shape.share.width(), depth = at.shape.share.depth();
    const auto* words = reinterpret_cast<const uint32_t*>(at.corner());
    const Product<Pairs> product{Start::fade, at.scratch.decay + lane, block.values + first, TILE, words, width,
                                 at.one.output + lane, width};
    if constexpr (CAREFUL) {
      multiply_seen_by_lanes(product, rows, columns, depth, {at.scratch.seen + first, lane},
                             reinterpret_cast<uint16_t*>(at.scratch.rows));
    } else {
      multiply_pairs(product, rows, columns, depth);
    }
  }

  static const T* by_rows(const Problem& p, const Online<T>& one, ForwardScratch<T>& scratch) {
    const int64_t wide = padded<T>(p.value_dim);
    transpose(one.output, one.width, wide, one.width, scratch.rows, wide);
    return scratch.rows;
  }
  static T* room_for_rows(Online<T>&, ForwardScratch<T>& scratch) { return scratch.rows; }
  static void take_rows(const Problem& p, Online<T>& one, ForwardScratch<T>& scratch) {
    const int64_t wide = padded<T>(p.value_dim);
    transpose(scratch.rows, wide, one.width, wide, one.output, one.width);
  }
};

}  // namespace
