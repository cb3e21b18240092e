// Moving rows between the caller's tensors and dense scratch, and turning scratch round.
#pragma once

#include "../abi.h"
#include "vec.h"

namespace {

// Some rows of a matrix of the caller: natural rows from `first` on, or those that slots name.
template <class T>
struct Rows {
  T* data;                // of row 0, column 0
  int64_t row_stride, column_stride;
  const int32_t* slots;   // row of each slot from `first` on, -1 for padding; null: slot i is row i
  int64_t first, count;

  operator Rows<const T>() const { return {data, row_stride, column_stride, slots, first, count}; }
  int64_t row(int64_t i) const { return slots ? slots[first + i] : first + i; }
  T* at(int64_t i) const { return data + row(i) * row_stride; }
};

// Row i of `to` = factors[i] · row i, in whole vectors, zero beyond the width and for padding.
template <class T>
void load_rows(const Rows<const T>& from, int64_t width, const T* factors, T* to, int64_t to_stride) {
  const int64_t whole = from.column_stride == 1 ? width / LANES<T> * LANES<T> : 0;
  for (int64_t i = 0; i < from.count; ++i, to += to_stride) {
    if (from.row(i) < 0) {
      for (int64_t c = 0; c < to_stride; c += LANES<T>) store(to + c, F<T>{});
      continue;
    }
    const T* row = from.at(i);
    for (int64_t c = 0; c < whole; c += LANES<T>) store(to + c, load(row + c) * factors[i]);
    for (int64_t c = whole; c < width; ++c) to[c] = row[c * from.column_stride] * factors[i];
    for (int64_t c = width; c < to_stride; ++c) to[c] = 0;
  }
}

// As load_rows, with rows of zeros up to whole vectors of lanes.
template <class T>
void load_lanes(const Rows<const T>& from, int64_t width, const T* factors, T* to, int64_t to_stride) {
  load_rows(from, width, factors, to, to_stride);
  const int64_t end = padded<T>(from.count) * to_stride;
  for (int64_t i = from.count * to_stride; i < end; i += LANES<T>) store(to + i, F<T>{});
}

// Row i of the caller = factors[i] · row i of `from`; padding is dropped.
template <class T>
void store_rows(const T* from, int64_t from_stride, int64_t width, const T* factors, const Rows<T>& to) {
  const int64_t whole = to.column_stride == 1 ? width / LANES<T> * LANES<T> : 0;
  for (int64_t i = 0; i < to.count; ++i, from += from_stride) {
    if (to.row(i) < 0) continue;
    T* row = to.at(i);
    for (int64_t c = 0; c < whole; c += LANES<T>) store(row + c, load(from + c) * factors[i]);
    for (int64_t c = whole; c < width; ++c) row[c * to.column_stride] = from[c] * factors[i];
  }
}

// The low or high halves of two vectors, interleaved.
template <class T, bool HIGH>
inline F<T> interleave(F<T> a, F<T> b) {
  I<T> from;
  for (int lane = 0; lane < LANES<T>; ++lane) {
    from[lane] = (HIGH ? LANES<T> / 2 : 0) + lane / 2 + (lane % 2 ? LANES<T> : 0);
  }
#if defined(__clang__)
  F<T> result;
  for (int lane = 0; lane < LANES<T>; ++lane) result[lane] = from[lane] < LANES<T> ? a[from[lane]] : b[from[lane] - LANES<T>];
  return result;
#else
  return __builtin_shuffle(a, b, from);
#endif
}

// A square of LANES rows and columns turned round: perfect shuffles, as many as the logarithm of its side.
template <class T>
inline void transpose_square(const T* from, int64_t from_stride, T* to, int64_t to_stride) {
  constexpr int N = LANES<T>;
  F<T> rows[N], next[N];
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) rows[i] = load(from + i * from_stride);
#pragma GCC unroll 4
  for (int step = 1; step < N; step *= 2) {
#pragma GCC unroll 16
    for (int i = 0; i < N / 2; ++i) {
      next[2 * i] = interleave<T, false>(rows[i], rows[i + N / 2]);
      next[2 * i + 1] = interleave<T, true>(rows[i], rows[i + N / 2]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) rows[i] = next[i];
  }
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) store(to + i * to_stride, rows[i]);
}

// to[c][r] = from[r][c]; both sizes in whole vectors.
template <class T>
void transpose(const T* from, int64_t from_stride, int64_t rows, int64_t columns, T* to, int64_t to_stride) {
  for (int64_t c = 0; c < columns; c += LANES<T>) {
    for (int64_t r = 0; r < rows; r += LANES<T>) {
      transpose_square(from + r * from_stride + c, from_stride, to + c * to_stride + r, to_stride);
    }
  }
}

}  // namespace
