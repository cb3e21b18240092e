// Products of small matrices, the one inner loop of everything: C = start + A · B, a strip of rows by a panel of vectors.
//
// B and C are stored by rows in whole vectors. Every number of C is one chain of multiplications and additions in the
// order of k, whatever the sizes of strips and panels, so that its bits do not depend on them.
#pragma once

#include "vec.h"

namespace {

enum class Start { zero, keep, decay };  // of C: nothing, C itself, C times a factor a row

// How A stores element (row, k).
enum class Order { rows, columns };  // a[row * stride + k], or a[k * stride + row]

template <class T>
struct Product {
  Start start;
  const T* decay;  // one a row, where start says so
  const T* a;
  int64_t a_stride;
  const T* b;
  int64_t b_stride;
  T* c;
  int64_t c_stride;
};

// Rows that a strip may have beside a panel of so many vectors: enough chains to hide latency, few enough for registers.
constexpr int strip_rows(int vectors) {
  return vectors >= QKV_PANEL ? QKV_STRIP : vectors == 1 ? 2 * QKV_STRIP : QKV_STRIP * QKV_PANEL / vectors;
}

template <class T, Order ORDER, int ROWS, int VECTORS>
inline void strip(const Product<T>& p, int64_t row, int64_t column, int64_t depth) {
  F<T> sum[ROWS][VECTORS];
  T* c = p.c + row * p.c_stride + column;
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; ++v) {
      const F<T> before = p.start == Start::zero ? F<T>{} : load(c + r * p.c_stride + v * LANES<T>);
      sum[r][v] = p.start == Start::decay ? before * p.decay[row + r] : before;
    }
  }
  if (p.start == Start::keep) {  // the next strip of C, which stands in a slower cache
#pragma GCC unroll 16
    for (int r = ROWS; r < 2 * ROWS; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; ++v) __builtin_prefetch(c + r * p.c_stride + v * LANES<T>, 1);
    }
  }
  const T* a = p.a + (ORDER == Order::rows ? row * p.a_stride : row);
  const T* b = p.b + column;
  for (int64_t k = 0; k < depth; ++k) {
    F<T> right[VECTORS];
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; ++v) right[v] = load(b + v * LANES<T>);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
      const T left = ORDER == Order::rows ? a[r * p.a_stride] : a[r];
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; ++v) sum[r][v] += left * right[v];
    }
    a += ORDER == Order::rows ? 1 : p.a_stride;
    b += p.b_stride;
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; ++v) store(c + r * p.c_stride + v * LANES<T>, sum[r][v]);
  }
}

// The last rows, fewer than a whole strip.
template <class T, Order ORDER, int ROWS, int VECTORS>
inline void rest(const Product<T>& p, int64_t row, int64_t rows, int64_t column, int64_t depth) {
  if constexpr (ROWS > 0) {
    if (rows == ROWS) {
      strip<T, ORDER, ROWS, VECTORS>(p, row, column, depth);
    } else {
      rest<T, ORDER, ROWS - 1, VECTORS>(p, row, rows, column, depth);
    }
  }
}

template <class T, Order ORDER, int VECTORS>
__attribute__((noinline)) void panel(const Product<T>& p, int64_t rows, int64_t column, int64_t depth) {
  constexpr int STRIP = strip_rows(VECTORS);
  int64_t row = 0;
  for (; row + STRIP <= rows; row += STRIP) strip<T, ORDER, STRIP, VECTORS>(p, row, column, depth);
  rest<T, ORDER, STRIP - 1, VECTORS>(p, row, rows - row, column, depth);
}

// The last vectors, fewer than a whole panel.
template <class T, Order ORDER, int VECTORS>
inline void narrow(const Product<T>& p, int64_t rows, int64_t column, int64_t vectors, int64_t depth) {
  if constexpr (VECTORS > 0) {
    if (vectors == VECTORS) {
      panel<T, ORDER, VECTORS>(p, rows, column, depth);
    } else {
      narrow<T, ORDER, VECTORS - 1>(p, rows, column, vectors, depth);
    }
  }
}

// C (rows, columns) from A (rows, depth) and B (depth, columns); columns in whole vectors.
template <class T, Order ORDER>
void multiply(const Product<T>& p, int64_t rows, int64_t columns, int64_t depth) {
  constexpr int64_t WIDE = QKV_PANEL * LANES<T>;
  int64_t column = 0;
  for (; column + WIDE <= columns; column += WIDE) panel<T, ORDER, QKV_PANEL>(p, rows, column, depth);
  narrow<T, ORDER, QKV_PANEL - 1>(p, rows, column, (columns - column) / LANES<T>, depth);
}

}  // namespace
