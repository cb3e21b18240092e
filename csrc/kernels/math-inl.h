// Elementary functions on vectors: powers of two, tanh, reciprocals. NaN comes out as NaN.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "vec.h"

namespace {

constexpr double LOG2_E = 1.4426950408889634;
constexpr double LN_2 = 0.6931471805599453;

// Minimax polynomials of 2^x on [-1/2, 1/2], exactly 1 at 0, in relative error: 9.1e-8 for float, 3e-18 for double.
template <class T>
struct Exp2;
template <>
struct Exp2<float> {
  static constexpr float COEFFICIENTS[] = {1.326472015e-3f, 9.671513127e-3f, 5.5507337667e-2f,
                                           2.4022242075e-1f, 6.9314697758e-1f, 1.0f};
  static constexpr float NEAR[] = {9.582855738699436e-3f, 5.590642988681793e-2f, 2.4024099111557007e-1f,
                                   6.931241750717163e-1f, 1.0f};
  static constexpr float LEAST = -126.0f;
  static constexpr float ROUND = 12582912.0f + 127.0f;  // 1.5 · 2^23 and the exponent's bias
  static constexpr int MANTISSA = 23;
};
template <>
struct Exp2<double> {
  static constexpr double COEFFICIENTS[] = {
      4.4352809446103361609e-10, 7.0741056262456593708e-9, 1.0178198033328527662e-7, 1.3215433089594629037e-6,
      1.52527334899608e-5,       1.54035304625146e-4,      1.33335581467897503e-3,   9.6181291075883350833e-3,
      5.5504108664819921483e-2,  2.4022650695910156205e-1, 6.9314718055994533046e-1, 1.0};
  static constexpr double LEAST = -1022.0;
  static constexpr double ROUND = 6755399441055744.0 + 1023.0;
  static constexpr int MANTISSA = 52;
};

// 2^x for x <= 127; exactly 0 where the result would not be a normal number.
template <class T>
inline F<T> exp2(F<T> x) {
  using E = Exp2<T>;
  const F<T> shifted = x + E::ROUND;  // its low bits are the whole part of x and the bias
  const F<T> part = x - (shifted - E::ROUND);
  F<T> power = splat<T>(E::COEFFICIENTS[0]);
#pragma GCC unroll 12
  for (size_t c = 1; c < sizeof(E::COEFFICIENTS) / sizeof(T); ++c) power = power * part + E::COEFFICIENTS[c];
  const F<T> scale = (F<T>)((I<T>)shifted << E::MANTISSA);
  return x < E::LEAST ? F<T>{} : power * scale;
}

// The same for weights that are rounded to bfloat16: 2.8e-6 in relative error, exactly 1 at 0.
inline F<float> exp2_near(F<float> x) {
  using E = Exp2<float>;
  const F<float> shifted = x + E::ROUND, part = x - (shifted - E::ROUND);
  F<float> power = splat(E::NEAR[0]);
#pragma GCC unroll 4
  for (size_t c = 1; c < sizeof(E::NEAR) / sizeof(float); ++c) power = power * part + E::NEAR[c];
  return x < E::LEAST ? F<float>{} : power * (F<float>)((I<float>)shifted << E::MANTISSA);
}

template <class T>
inline F<T> reciprocal(F<T> x) {
  return T(1) / x;
}
#if defined(__AVX512F__)
template <>
inline F<float> reciprocal<float>(F<float> x) {
  const F<float> guess = (F<float>)_mm512_maskz_rcp14_ps(0xffff, (__m512)x);
  return guess * (2.0f - x * guess);
}
#elif defined(__AVX2__)
template <>
inline F<float> reciprocal<float>(F<float> x) {
  const F<float> guess = (F<float>)_mm256_rcp_ps((__m256)x);
  return guess * (2.0f - x * guess);
}
#endif

// tanh to 4e-7 in relative error: an odd rational function, fitted on [-9.02, 9.02].
inline F<float> tanh_of(F<float> x) {
  constexpr float P[] = {1.33191954e-8f, 2.05835803e-5f, 3.49404111e-3f, 1.33797237e-1f, 9.99999979e-1f};
  constexpr float Q[] = {7.76207279e-7f, 3.28310314e-4f, 2.58710989e-2f, 4.67130390e-1f, 1.0f};
  x = x > 9.02f ? splat(9.02f) : x;
  x = x < -9.02f ? splat(-9.02f) : x;
  const F<float> square = x * x;
  F<float> above = splat(P[0]), below = splat(Q[0]);
#pragma GCC unroll 4
  for (int c = 1; c < 5; ++c) {
    above = above * square + P[c];
    below = below * square + Q[c];
  }
  return x * above * reciprocal<float>(below);
}

inline F<double> tanh_of(F<double> x) {
  for (int lane = 0; lane < LANES<double>; ++lane) x[lane] = __builtin_tanh(x[lane]);
  return x;
}

// The 64-bit products of the low halves of 64-bit lanes with a constant.
inline U<double> multiply_low(U<double> a, uint32_t factor) {
#if defined(__AVX512F__)
  return (U<double>)_mm512_maskz_mul_epu32(0xff, (__m512i)a, _mm512_set1_epi64(factor));
#elif defined(__AVX2__)
  return (U<double>)_mm256_mul_epu32((__m256i)a, _mm256_set1_epi64x(factor));
#elif defined(__SSE2__)
  return (U<double>)_mm_mul_epu32((__m128i)a, _mm_set1_epi64x(factor));
#else
  return (a & 0xffffffff) * factor;
#endif
}

}  // namespace
