// Moving rows between the caller's tensors and dense scratch, and turning scratch round.
#pragma once

#include "narrow-inl.h"
#include "walk-inl.h"

namespace {

// Where the rows of a sequence lie: page c of a table holds rows c · size to (c + 1) · size; without a table, in order.
// Rows without a page, which no query sees, are taken from page 0.
struct PageTable {
  const int32_t* pages;
  int64_t size;

  int64_t row(int64_t i) const { return pages ? most(pages[i / size], 0) * size + i % size : i; }
};

// Some rows of a matrix of the caller: natural rows from `first` on, or those that slots name.
struct Rows {
  const void* data;  // of row 0, column 0
  Type type;         // of its numbers
  int64_t row_stride, column_stride;
  const int32_t* slots;  // row of each slot from `first` on, -1 for padding; null: slot i is row i
  int64_t first, count;
  PageTable table{};

  // The row of the call, -1 for padding; and where it begins.
  int64_t row(int64_t i) const { return slots ? slots[first + i] : first + i; }
  template <class E>
  const E* at(int64_t i) const {
    return static_cast<const E*>(data) + table.row(row(i)) * row_stride;
  }
  template <class E>
  E* place(int64_t i) const {  // in a matrix that is the caller's to be written
    return const_cast<E*>(at<E>(i));
  }
  // Whether the rows lie evenly, row_stride apart.
  bool even() const { return !slots && (!table.pages || first / table.size == (first + most(count, 1) - 1) / table.size); }
};

// Ask the memory for some rows that are read soon. Inlined by force: GCC takes what only prefetches for nothing.
__attribute__((always_inline)) inline void ask_for(const char* row, int64_t step, int64_t count, int64_t bytes) {
  for (int64_t i = 0; i < count; ++i, row += step) {
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(row + at, 0, 2);
  }
}
__attribute__((always_inline)) inline void ask_for(const Rows& rows, int64_t first, int64_t count, int64_t width) {
  const int64_t size = size_of(rows.type), step = rows.row_stride * size;
  const char* const row = static_cast<const char*>(rows.data) + rows.table.row(rows.first) * step;
  ask_for(row + first * step, step, count, width * size);
}

// Row i of `to` = factors[i] · row i, in whole vectors, zero beyond the width and for padding.
template <class T>
void load_rows(const Rows& from, int64_t width, const T* factors, T* to, int64_t to_stride) {
  with_stored<T>(from.type, [&](auto stored) {
    using E = decltype(stored);
    const int64_t whole = from.column_stride == 1 ? width / LANES<T> * LANES<T> : 0;
    for (int64_t i = 0; i < from.count; ++i, to += to_stride) {
      if (from.row(i) < 0) {
        for (int64_t c = 0; c < to_stride; c += LANES<T>) store(to + c, F<T>{});
        continue;
      }
      const E* row = from.at<E>(i);
      for (int64_t c = 0; c < whole; c += LANES<T>) store(to + c, load_as<T>(row + c) * factors[i]);
      for (int64_t c = whole; c < width; ++c) to[c] = number_as<T>(row[c * from.column_stride]) * factors[i];
      for (int64_t c = width; c < to_stride; ++c) to[c] = 0;
    }
  });
}

// As load_rows, with rows of zeros up to whole vectors of lanes.
template <class T>
void load_lanes(const Rows& from, int64_t width, const T* factors, T* to, int64_t to_stride) {
  load_rows(from, width, factors, to, to_stride);
  const int64_t end = padded<T>(from.count) * to_stride;
  for (int64_t i = from.count * to_stride; i < end; i += LANES<T>) store(to + i, F<T>{});
}

// Row i of the caller = factors[i] · row i of `from`; padding is dropped.
template <class T>
void store_rows(const T* from, int64_t from_stride, int64_t width, const T* factors, const Rows& to) {
  with_stored<T>(to.type, [&](auto stored) {
    using E = decltype(stored);
    const int64_t whole = to.column_stride == 1 ? width / LANES<T> * LANES<T> : 0;
    for (int64_t i = 0; i < to.count; ++i, from += from_stride) {
      if (to.row(i) < 0) continue;
      E* row = to.place<E>(i);
      for (int64_t c = 0; c < whole; c += LANES<T>) store_as<T>(row + c, load(from + c) * factors[i]);
      for (int64_t c = whole; c < width; ++c) row[c * to.column_stride] = number_from<E>(from[c] * factors[i]);
    }
  });
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
