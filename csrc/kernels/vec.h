// Vectors of QKV_BYTES bytes in the compiler's own vector types: arithmetic, loads, masks. Included once a target.
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifndef QKV_BYTES
#error "a target defines QKV_BYTES, QKV_PANEL and QKV_STRIP"
#endif

namespace {

template <size_t Size>
struct IntegerOf;
template <>
struct IntegerOf<4> {
  using Signed = int32_t;
  using Unsigned = uint32_t;
};
template <>
struct IntegerOf<8> {
  using Signed = int64_t;
  using Unsigned = uint64_t;
};

// The vector types over an element type T: F of T, I and U of integers of the same width. Comparisons give I.
template <class T>
struct Vec {
  using Signed = typename IntegerOf<sizeof(T)>::Signed;
  using Unsigned = typename IntegerOf<sizeof(T)>::Unsigned;
  typedef T F __attribute__((vector_size(QKV_BYTES)));
  typedef Signed I __attribute__((vector_size(QKV_BYTES)));
  typedef Unsigned U __attribute__((vector_size(QKV_BYTES)));
  typedef T Loose __attribute__((vector_size(QKV_BYTES), aligned(alignof(T)), may_alias));
  static constexpr int LANES = QKV_BYTES / sizeof(T);
};

template <class T>
using F = typename Vec<T>::F;
template <class T>
using I = typename Vec<T>::I;
template <class T>
using U = typename Vec<T>::U;

template <class T>
constexpr int64_t LANES = Vec<T>::LANES;

template <class T>
constexpr T INFINITE = static_cast<T>(__builtin_inff());

// How wide a row of n numbers is in whole vectors.
template <class T>
constexpr int64_t padded(int64_t n) {
  return (n + LANES<T> - 1) / LANES<T> * LANES<T>;
}

template <class T>
inline F<T> load(const T* from) {
  return *reinterpret_cast<const typename Vec<T>::Loose*>(from);
}

template <class T>
inline void store(T* to, F<T> value) {
  *reinterpret_cast<typename Vec<T>::Loose*>(to) = value;
}

template <class T>
inline F<T> splat(T x) {
  return x - F<T>{};
}

template <class T>
inline I<T> splat_bits(typename Vec<T>::Signed x) {
  return x - I<T>{};
}

// The greater of the two in each lane; where b is NaN: a.
template <class T>
inline F<T> greater(F<T> a, F<T> b) {
  return b > a ? b : a;
}

// 1, 2, 4, ... in the lanes.
template <class T>
inline I<T> lane_bits() {
  I<T> bits;
  for (int lane = 0; lane < LANES<T>; ++lane) bits[lane] = static_cast<typename Vec<T>::Signed>(1) << lane;
  return bits;
}

// Whether bit `first + lane` of a word is set, as a mask of lanes.
template <class T>
inline I<T> bits_of(uint64_t word, int64_t first) {
  const I<T> bits = lane_bits<T>();
  return (bits & splat_bits<T>(static_cast<typename Vec<T>::Signed>(word >> first))) != 0;
}

template <class T>
inline bool any(I<T> mask) {
  typename Vec<T>::Signed found = 0;
  for (int lane = 0; lane < LANES<T>; ++lane) found |= mask[lane];
  return found != 0;
}

}  // namespace
