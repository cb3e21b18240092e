// Products of small matrices, the one inner loop of everything: C = start + A · B, a strip of rows by a panel of vectors.
//
// B and C are stored by rows in whole vectors. Every number of C is one chain of multiplications and additions in the
// order of k, whatever the sizes of strips and panels, so that its bits do not depend on them.
#pragma once

#include "vec.h"

namespace {

enum class Start { zero, keep, decay, fade };  // of C: nothing, C itself, C times a factor a row, or one a column

// How A stores element (row, k).
enum class Order { rows, columns };  // a[row * stride + k], or a[k * stride + row]

// What is multiplied and added: numbers of type T; or Pairs, two products of bfloat16 numbers at a time in float. Of A
// the two lie side by side in a row, of B in the halves of one word, the first in the low one.
struct Pairs;
template <class T>
struct Factors {
  using Left = T;
  using Right = T;
  using Sum = T;
  static constexpr int64_t STEP = 1;  // numbers of A in a factor

  static Left left(const T* from) { return *from; }
  static F<T> right(const T* from) { return load(from); }
  static F<T> add(F<T> sum, T left, F<T> right) { return sum + left * right; }
};

template <class T>
struct Product {
  using Sum = typename Factors<T>::Sum;

  Start start;
  const Sum* decay;  // where start says so
  const typename Factors<T>::Left* a;
  int64_t a_stride;
  const typename Factors<T>::Right* b;
  int64_t b_stride;
  Sum* c;
  int64_t c_stride;
  Sum scale = 1;  // of the whole; of Pairs only
};

// Rows that a strip may have beside a panel of so many vectors: enough chains to hide latency, few enough for registers.
constexpr int strip_rows(int vectors) {
  return vectors >= QKV_PANEL ? QKV_STRIP : vectors == 1 ? 2 * QKV_STRIP : QKV_STRIP * QKV_PANEL / vectors;
}

template <class T, Order ORDER, int ROWS, int VECTORS>
inline void strip(const Product<T>& p, int64_t row, int64_t column, int64_t depth) {
  using By = Factors<T>;
  using Sum = typename By::Sum;
  constexpr int64_t N = LANES<Sum>;
  F<Sum> sum[ROWS][VECTORS];
  Sum* c = p.c + row * p.c_stride + column;
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; ++v) {
      F<Sum> before = p.start == Start::zero ? F<Sum>{} : load(c + r * p.c_stride + v * N);
      if (p.start == Start::decay) before *= p.decay[row + r];
      if (p.start == Start::fade) before *= load(p.decay + column + v * N);
      sum[r][v] = before;
    }
  }
  if (p.start == Start::keep) {  // the next strip of C, which stands in a slower cache
#pragma GCC unroll 16
    for (int r = ROWS; r < 2 * ROWS; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; ++v) __builtin_prefetch(c + r * p.c_stride + v * N, 1);
    }
  }
  const auto* a = p.a + (ORDER == Order::rows ? row * p.a_stride : row);
  const auto* b = p.b + column;
  for (int64_t k = 0; k < depth; ++k) {
    decltype(By::right(b)) right[VECTORS];
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; ++v) right[v] = By::right(b + v * N);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
      const auto left = By::left(a + (ORDER == Order::rows ? r * p.a_stride : r));
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; ++v) sum[r][v] = By::add(sum[r][v], left, right[v]);
    }
    a += ORDER == Order::rows ? By::STEP : p.a_stride;
    b += p.b_stride;
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; ++v) {
      if constexpr (By::STEP > 1) sum[r][v] *= p.scale;
      store(c + r * p.c_stride + v * N, sum[r][v]);
    }
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

// C (rows, columns) from A (rows, depth) and B (depth, columns); columns in whole vectors, depth in factors.
template <class T, Order ORDER>
void multiply(const Product<T>& p, int64_t rows, int64_t columns, int64_t depth) {
  constexpr int64_t N = LANES<typename Factors<T>::Sum>, WIDE = QKV_PANEL * N;
  int64_t column = 0;
  for (; column + WIDE <= columns; column += WIDE) panel<T, ORDER, QKV_PANEL>(p, rows, column, depth);
  narrow<T, ORDER, QKV_PANEL - 1>(p, rows, column, (columns - column) / N, depth);
}

}  // namespace
