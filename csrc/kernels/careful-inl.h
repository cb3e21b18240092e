// Products in which a NaN or an infinity reaches only what sees it. Bits of all else are those of `multiply`.
#pragma once

#include "gemm-inl.h"

namespace {

// As `multiply`, leaving out the pairs of a tile that are not seen: seen[key] has bit `first_lane` + lane set.
// Order::rows: the rows of A are keys, k counts lanes; Order::columns: the rows of A are lanes, k counts keys.
template <class T, Order ORDER>
void multiply_seen(const Product<T>& p, int64_t rows, int64_t columns, int64_t depth, const uint64_t* seen,
                   int64_t first_lane) {
  for (int64_t r = 0; r < rows; ++r) {
    T* c = p.c + r * p.c_stride;
    for (int64_t n = 0; n < columns; n += LANES<T>) {
      F<T> sum = p.start == Start::zero ? F<T>{} : load(c + n);
      if (p.start == Start::decay) sum = sum * p.decay[r];
      for (int64_t k = 0; k < depth; ++k) {
        const int64_t key = ORDER == Order::rows ? r : k, lane = ORDER == Order::rows ? k : r;
        if (!(seen[key] >> (first_lane + lane) & 1)) continue;
        const T left = ORDER == Order::rows ? p.a[r * p.a_stride + k] : p.a[k * p.a_stride + r];
        sum += left * load(p.b + k * p.b_stride + n);
      }
      store(c + n, sum);
    }
  }
}

// Which pairs of a product are seen, as `multiply_seen` takes it.
struct Visible {
  const uint64_t* seen;
  int64_t first_lane;
};

template <class T, Order ORDER, bool CAREFUL>
void multiply_as(const Product<T>& p, int64_t rows, int64_t columns, int64_t depth, const Visible& visible) {
  if constexpr (CAREFUL) {
    multiply_seen<T, ORDER>(p, rows, columns, depth, visible.seen, visible.first_lane);
  } else {
    multiply<T, ORDER>(p, rows, columns, depth);
  }
}

// Whether all numbers of some rows are finite: x - x is 0 for those and NaN for the others.
template <class T>
bool finite(const T* data, int64_t stride, int64_t rows, int64_t columns) {
  F<T> sum{};
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t n = 0; n < columns; n += LANES<T>) {
      const F<T> x = load(data + r * stride + n);
      sum += x - x;
    }
  }
  return !any<T>(sum != 0);
}

}  // namespace
