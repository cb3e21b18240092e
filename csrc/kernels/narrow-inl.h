// Numbers of the caller's tensors, of any floating-point type, as numbers to compute with and back, in whole vectors.
#pragma once

#include "../abi.h"
#include "math-inl.h"

namespace {

using qkv::Type;

struct Half {
  uint16_t bits;
};
struct Bfloat {
  uint16_t bits;
};

template <class E>
struct TypeOf;
template <>
struct TypeOf<float> {
  static constexpr Type VALUE = Type::float32;
};
template <>
struct TypeOf<double> {
  static constexpr Type VALUE = Type::float64;
};
template <>
struct TypeOf<Half> {
  static constexpr Type VALUE = Type::float16;
};
template <>
struct TypeOf<Bfloat> {
  static constexpr Type VALUE = Type::bfloat16;
};

inline int64_t size_of(Type type) { return type == Type::float64 ? 8 : type == Type::float32 ? 4 : 2; }

// As many 16-bit numbers as a vector has lanes of 32 bits.
typedef uint16_t Narrow __attribute__((vector_size(QKV_BYTES / 2)));
typedef uint16_t LooseNarrow __attribute__((vector_size(QKV_BYTES / 2), aligned(2), may_alias));

inline U<float> widen(Narrow bits) { return __builtin_convertvector(bits, U<float>); }
inline Narrow narrow_bits(U<float> bits) { return __builtin_convertvector(bits, Narrow); }

// All conversions know subnormal numbers, infinities and NaN; those to fewer bits round to nearest, ties to even.
inline F<float> to_float(Narrow bits, Bfloat) { return (F<float>)(widen(bits) << 16); }

inline Narrow to_narrow(F<float> x, Bfloat) {
  const U<float> bits = (U<float>)x, rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return narrow_bits(x == x ? rounded : (bits >> 16) | 0x40);
}

#if defined(__AVX512F__)
inline F<float> to_float(Narrow bits, Half) { return (F<float>)_mm512_maskz_cvtph_ps(0xffff, (__m256i)bits); }
inline Narrow to_narrow(F<float> x, Half) {
  return (Narrow)_mm512_maskz_cvtps_ph(0xffff, (__m512)x, _MM_FROUND_TO_NEAREST_INT);
}
#elif defined(__F16C__)
inline F<float> to_float(Narrow bits, Half) { return (F<float>)_mm256_cvtph_ps((__m128i)bits); }
inline Narrow to_narrow(F<float> x, Half) { return (Narrow)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT); }
#else
inline F<float> to_float(Narrow bits, Half) {
  const U<float> wide = widen(bits), size = (wide & 0x7fff) << 13, sign = (wide & 0x8000) << 16;
  // No number on the way is subnormal, so that this also holds where such count as zero.
  const U<float> subnormal = (U<float>)((F<float>)(size + 0x38800000) - 0x1p-14f);
  const U<float> finite = size < (0x0400u << 13) ? subnormal : size + 0x38000000;
  return (F<float>)((size >= (0x7c00u << 13) ? size | 0x7f800000 : finite) | sign);
}

inline Narrow to_narrow(F<float> x, Half) {
  const U<float> bits = (U<float>)x, size = bits & 0x7fffffff, sign = (bits >> 16) & 0x8000;
  const U<float> subnormal = (U<float>)((F<float>)size + 0.5f) - 0x3f000000;  // the addition rounds
  const U<float> normal = (size - 0x38000000 + 0xfff + ((size >> 13) & 1)) >> 13;
  const U<float> infinite = 0x7c00 + (size > 0x7f800000 ? U<float>{} + 0x200 : U<float>{});
  return narrow_bits((size >= 0x47800000 ? infinite : size < 0x38800000 ? subnormal : normal) | sign);
}
#endif

// A vector of lanes from numbers of type E.
template <class T, class E>
inline F<T> load_as(const E* from) {
  if constexpr (sizeof(E) == 2) {
    return to_float(*reinterpret_cast<const LooseNarrow*>(from), E());
  } else {
    return load(from);
  }
}

template <class T, class E>
inline void store_as(E* to, F<T> value) {
  if constexpr (sizeof(E) == 2) {
    *reinterpret_cast<LooseNarrow*>(to) = to_narrow(value, E());
  } else {
    store(to, value);
  }
}

// One number.
template <class T, class E>
inline T number_as(E from) {
  if constexpr (sizeof(E) == 2) {
    return to_float(Narrow{} + from.bits, E())[0];
  } else {
    return static_cast<T>(from);
  }
}

template <class E, class T>
inline E number_from(T from) {
  if constexpr (sizeof(E) == 2) {
    return {to_narrow(splat(from), E())[0]};
  } else {
    return from;
  }
}

// work(E()) for the type E of stored numbers that are computed with as T: T itself, or a narrow one beside float.
template <class T, class Work>
inline void with_stored(Type type, Work work) {
  if constexpr (sizeof(T) == sizeof(float)) {
    if (type == Type::float16) return work(Half());
    if (type == Type::bfloat16) return work(Bfloat());
  }
  work(T());
}

}  // namespace
