// Products of pairs of bfloat16 numbers, summed in float, and the forms in which their operands lie.
//
// A product takes A by rows, as the caller's rows of keys and values lie already, and B as words: word (p, lane) holds
// the numbers 2p and 2p + 1 of a column. What a unit of instructions does at once is its grain: rows of A and numbers of
// depth come in multiples of it, filled up with zeros. Subnormal numbers count as zeros.
#pragma once

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

#include "careful-inl.h"
#include "rows-inl.h"

namespace {

template <>
struct Factors<Pairs> {
  using Left = uint16_t;
  using Right = uint32_t;
  using Sum = float;
  static constexpr int64_t STEP = 2;

  static uint32_t left(const uint16_t* from) {
    uint32_t pair;
    __builtin_memcpy(&pair, from, sizeof pair);
    return pair;
  }
  static U<float> right(const uint32_t* from) {
    U<float> pairs;
    __builtin_memcpy(&pairs, from, sizeof pairs);
    return pairs;
  }
  static F<float> add(F<float> sum, uint32_t left, U<float> right) {
#if defined(__AVX512BF16__)
    return (F<float>)_mm512_dpbf16_ps((__m512)sum, (__m512bh)(__m512i)right, (__m512bh)_mm512_set1_epi32(left));
#else
    const U<float> word = U<float>{} + left, high = U<float>{} + 0xffff0000;
    sum += (F<float>)(word & high) * (F<float>)(right & high);
    return sum + (F<float>)(word << 16) * (F<float>)(right << 16);
#endif
  }
};

inline int64_t rounded_up(int64_t n, int64_t grain) { return (n + grain - 1) / grain * grain; }

#if defined(QKV_TILES)
constexpr int64_t ROW_GRAIN = 16, DEPTH_GRAIN = 32;
struct Tiles;  // held by a thread that multiplies
inline void multiply_tiles(const Product<Pairs>& p, int64_t rows, int64_t columns, int64_t depth);
#else
constexpr int64_t ROW_GRAIN = 1, DEPTH_GRAIN = 2;
struct Tiles {};
#endif

// C (rows, columns) from A (rows, depth) and B (depth / 2, columns): rows and depth are rounded up to the unit's grain.
inline void multiply_pairs(const Product<Pairs>& p, int64_t rows, int64_t columns, int64_t depth) {
#if defined(QKV_TILES)
  multiply_tiles(p, rounded_up(rows, ROW_GRAIN), columns, rounded_up(depth, DEPTH_GRAIN));
#else
  multiply<Pairs, Order::rows>(p, rows, columns, rounded_up(depth, DEPTH_GRAIN) / 2);
#endif
}

// How wide a row of n numbers is in factors of the unit, in whole vectors of words.
inline int64_t padded_pairs(int64_t n) { return rounded_up(n, 2 * LANES<float>); }

// Rows of bfloat16 numbers, dense: A of a product.
struct PairRows {
  const uint16_t* data;
  int64_t stride;
};

inline void round_pair_rows(const Rows& from, int64_t width, int64_t count, uint16_t* to, int64_t to_stride) {
  for (int64_t i = 0; i < count; ++i, to += to_stride) {
    const bool there = i < from.count && from.row(i) >= 0;
    const float* row = there ? from.at<float>(i) : nullptr;
    for (int64_t c = 0; c < to_stride; ++c) {
      to[c] = there && c < width ? number_from<Bfloat>(row[c * from.column_stride]).bits : 0;
    }
  }
}

// Copied as they are, or rounded where they are wider: zeros beyond the width, for padding, and from the last row to row
// `count`.
inline void copy_pair_rows(const Rows& from, int64_t width, int64_t count, uint16_t* to, int64_t to_stride) {
  if (from.type == Type::float32) return round_pair_rows(from, width, count, to, to_stride);
  for (int64_t i = 0; i < count; ++i, to += to_stride) {
    const bool there = i < from.count && from.row(i) >= 0;
    const uint16_t* row = there ? from.at<uint16_t>(i) : nullptr;
    if (there && from.column_stride == 1) {
      __builtin_memcpy(to, row, width * sizeof *to);
    } else {
      for (int64_t c = 0; c < width; ++c) to[c] = there ? row[c * from.column_stride] : 0;
    }
    for (int64_t c = width; c < to_stride; ++c) to[c] = 0;
  }
}

// Rows of the caller in place where they stand as a product needs them, else a copy.
inline PairRows pair_rows(const Rows& rows, int64_t width, uint16_t* scratch) {
  const bool whole = width % DEPTH_GRAIN == 0 && rows.count % ROW_GRAIN == 0;
  const bool dense = rows.even() && rows.column_stride == 1 && rows.row_stride < 2 * width;
  if (whole && dense) return {rows.at<uint16_t>(0), rows.row_stride};
  const int64_t stride = padded_pairs(width);
  copy_pair_rows(rows, width, rounded_up(rows.count, ROW_GRAIN), scratch, stride);
  return {scratch, stride};
}

// Words of a column of rows 2p and 2p + 1: B of a product over rows. `count` rows, zeros up to row `rows`.
inline void pair_up(const uint16_t* from, int64_t stride, int64_t count, int64_t rows, int64_t columns, uint32_t* to,
                    int64_t to_stride) {
  constexpr int64_t N = LANES<float>;
  for (int64_t i = 0; i < rows; i += 2, from += 2 * stride, to += to_stride) {
    for (int64_t c = 0; c < columns; c += N) {
      Narrow low{}, high{};
      if (i < count) __builtin_memcpy(&low, from + c, sizeof low);
      if (i + 1 < count) __builtin_memcpy(&high, from + stride + c, sizeof high);
      const U<float> words = widen(low) | widen(high) << 16;
      __builtin_memcpy(to + c, &words, sizeof words);
    }
  }
}

// Words as rows, turned round: to[c][r] = from[r][c].
inline void turn_pairs(const uint32_t* from, int64_t from_stride, int64_t rows, int64_t columns, uint32_t* to,
                       int64_t to_stride) {
  typedef float Bits __attribute__((may_alias));
  transpose<float>(reinterpret_cast<const Bits*>(from), from_stride, rows, columns, reinterpret_cast<Bits*>(to),
                   to_stride);
}

// Some rows turned round, (width up to whole vectors, TILE), zeros where there are none. `room`: TILE rows of words.
inline void turn_rows(const Rows& rows, int64_t width, uint32_t* room, uint16_t* to) {
  const int64_t wide = padded<float>(width);
  auto* const copy = reinterpret_cast<uint16_t*>(room + TILE / 2 * wide);
  PairRows from{copy, wide};
  if (rows.even() && rows.column_stride == 1 && wide == width) {
    from = {rows.at<uint16_t>(0), rows.row_stride};
  } else {
    copy_pair_rows(rows, width, rows.count, copy, wide);
  }
  pair_up(from.data, from.stride, rows.count, TILE, wide, room, wide);
  turn_pairs(room, wide, TILE / 2, wide, reinterpret_cast<uint32_t*>(to), TILE / 2);
}

inline float wide_number(uint16_t bits) { return number_as<float>(Bfloat{bits}); }
inline bool is_finite(uint16_t bits) { return (bits & 0x7f80) != 0x7f80; }
inline uint16_t half_of(uint32_t word, int64_t which) { return static_cast<uint16_t>(which ? word >> 16 : word); }

// As multiply_pairs where the depth counts keys and the columns are lanes: a number of A that is not finite reaches only
// the lanes that see its key. `finite`: room for A.
inline void multiply_seen_by_lanes(const Product<Pairs>& p, int64_t rows, int64_t columns, int64_t depth,
                                   const Visible& visible, uint16_t* finite) {
  const int64_t stride = rounded_up(depth, DEPTH_GRAIN);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t k = 0; k < stride; ++k) {
      const uint16_t number = p.a[r * p.a_stride + k];
      finite[r * stride + k] = k < depth && is_finite(number) ? number : 0;
    }
  }
  Product<Pairs> rest = p;
  rest.a = finite, rest.a_stride = stride;
  multiply_pairs(rest, rows, columns, depth);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t k = 0; k < depth; ++k) {
      const uint16_t number = p.a[r * p.a_stride + k];
      if (is_finite(number)) continue;
      for (int64_t lane = 0; lane < columns; ++lane) {
        if (!(visible.seen[k] >> (visible.first_lane + lane) & 1)) continue;
        p.c[r * p.c_stride + lane] += wide_number(number) * wide_number(half_of(p.b[k / 2 * p.b_stride + lane], k % 2));
      }
    }
  }
}

// As multiply_pairs where the rows are keys and the depth counts lanes: a number of B that is not finite reaches only the
// keys that its lane sees. `finite`: room for B.
inline void multiply_seen_by_keys(const Product<Pairs>& p, int64_t rows, int64_t columns, int64_t depth,
                                  const Visible& visible, uint32_t* finite) {
  const int64_t words = rounded_up(depth, DEPTH_GRAIN) / 2;
  for (int64_t i = 0; i < words; ++i) {
    for (int64_t c = 0; c < columns; ++c) {
      const uint32_t word = p.b[i * p.b_stride + c], low = word & 0xffff, high = word & 0xffff0000;
      finite[i * columns + c] = (is_finite(half_of(word, 0)) ? low : 0) | (is_finite(half_of(word, 1)) ? high : 0);
    }
  }
  Product<Pairs> rest = p;
  rest.b = finite, rest.b_stride = columns;
  multiply_pairs(rest, rows, columns, depth);
  for (int64_t k = 0; k < rows; ++k) {
    for (int64_t lane = 0; lane < depth; ++lane) {
      if (!(visible.seen[k] >> (visible.first_lane + lane) & 1)) continue;
      for (int64_t c = 0; c < columns; ++c) {
        const uint16_t number = half_of(p.b[lane / 2 * p.b_stride + c], lane % 2);
        if (!is_finite(number)) p.c[k * p.c_stride + c] += wide_number(p.a[k * p.a_stride + lane]) * wide_number(number);
      }
    }
  }
}

// A number of a weight or of a gradient as bfloat16: to nearest, ties away from zero.
inline U<float> round_pair(F<float> x) { return ((U<float>)x + 0x8000) & 0xffff0000; }

}  // namespace
