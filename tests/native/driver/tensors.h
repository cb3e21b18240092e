// Numbers on the heap, each array an allocation of exactly its size: AddressSanitizer sees the first byte beyond it.
#pragma once

#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "../../../csrc/abi.h"

namespace driver {

using qkv::Type;

constexpr double INF = std::numeric_limits<double>::infinity();

// SplitMix64: everything about a case follows from one integer.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  uint64_t next() {
    uint64_t z = state_ += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }
  int64_t below(int64_t n) { return int64_t(next() % uint64_t(n)); }
  int64_t between(int64_t low, int64_t high) { return low + below(high - low + 1); }
  double uniform() { return double(next() >> 11) * 0x1p-53; }
  double normal() { return std::sqrt(-2 * std::log(1 - uniform())) * std::cos(6.283185307179586 * uniform()); }
  bool chance(double p) { return uniform() < p; }
  template <size_t N>
  int64_t pick(const int64_t (&values)[N]) {
    return values[below(N)];
  }
  template <class T>
  void shuffle(std::vector<T>& values) {
    for (size_t n = values.size(); n > 1; --n) std::swap(values[n - 1], values[size_t(below(int64_t(n)))]);
  }

 private:
  uint64_t state_;
};

template <class T>
class Exact {
 public:
  Exact() = default;
  explicit Exact(const std::vector<T>& values) : size_(values.size()), data_(new T[values.size()]) {
    std::copy(values.begin(), values.end(), data_.get());
  }
  const T* data() const { return data_.get(); }
  size_t size() const { return size_; }

 private:
  size_t size_ = 0;
  std::unique_ptr<T[]> data_;
};

// The type that numbers of a call are computed in.
inline Type computing(Type type) { return type == Type::float64 ? Type::float64 : Type::float32; }

inline int64_t width_of(Type type) { return type == Type::float64 ? 8 : type == Type::float32 ? 4 : 2; }

// The 16 bits of a number, cut rather than rounded: any representable number will do.
inline uint16_t cut(Type type, double x) {
  if (type == Type::bfloat16) {
    const float narrow = float(x);
    uint32_t bits;
    std::memcpy(&bits, &narrow, sizeof bits);
    return uint16_t(bits >> 16);
  }
  if (std::isnan(x)) return 0x7e00;
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  const int exponent = std::abs(x) >= 65536 ? 16 : x == 0 ? -15 : std::max(-15, std::ilogb(x));
  const double fraction = exponent == 16 ? 0 : std::ldexp(std::abs(x), 10 - std::max(-14, exponent));
  return uint16_t(sign | (exponent + 15) << 10 | (int(fraction) & 1023));
}

inline double widen(Type type, uint16_t bits) {
  if (type == Type::bfloat16) {
    const uint32_t wide = uint32_t(bits) << 16;
    float x;
    std::memcpy(&x, &wide, sizeof x);
    return double(x);
  }
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const int digits = exponent ? 1024 + fraction : fraction;
  if (exponent == 31 && fraction) return std::nan("");
  const double size = exponent == 31 ? INF : std::ldexp(digits, std::max(exponent, 1) - 25);
  return bits & 0x8000 ? -size : size;
}

inline double load(Type type, const void* data, int64_t n) {
  if (type == Type::float64) return static_cast<const double*>(data)[n];
  if (type == Type::float32) return double(static_cast<const float*>(data)[n]);
  return widen(type, static_cast<const uint16_t*>(data)[n]);
}

inline void store(Type type, void* data, int64_t n, double value) {
  if (type == Type::float64) {
    static_cast<double*>(data)[n] = value;
  } else if (type == Type::float32) {
    static_cast<float*>(data)[n] = float(value);
  } else {
    static_cast<uint16_t*>(data)[n] = cut(type, value);
  }
}

// Up to four axes with strides. All bytes start as NaN, so that gaps between rows are NaN too.
struct Tensor {
  Type type = Type::float32;
  int64_t size[4] = {0, 0, 0, 0}, stride[4] = {0, 0, 0, 0};
  int64_t start = 0;  // elements before the first
  size_t bytes = 0;
  std::unique_ptr<unsigned char[]> memory;

  int64_t count() const { return size[0] * size[1] * size[2] * size[3]; }
  void* data() const { return bytes ? memory.get() + start * width_of(type) : nullptr; }  // null also where empty
  int64_t place(int64_t a, int64_t b, int64_t c, int64_t d) const {
    return a * stride[0] + b * stride[1] + c * stride[2] + d * stride[3];
  }
  double at(int64_t a, int64_t b, int64_t c, int64_t d) const { return load(type, data(), place(a, b, c, d)); }
  void set(int64_t a, int64_t b, int64_t c, int64_t d, double value) {
    store(type, data(), place(a, b, c, d), value);
  }
  bool aliased() const {
    for (int axis = 0; axis < 4; ++axis) {
      if (size[axis] > 1 && stride[axis] == 0) return true;
    }
    return false;
  }
  template <class F>
  void each(F&& visit) const {
    for (int64_t a = 0; a < size[0]; ++a) {
      for (int64_t b = 0; b < size[1]; ++b) {
        for (int64_t c = 0; c < size[2]; ++c) {
          for (int64_t d = 0; d < size[3]; ++d) visit(a, b, c, d);
        }
      }
    }
  }
};

// Memory for a tensor whose type, sizes, strides and start are set: up to its last element and no further.
inline void allocate(Tensor& tensor) {
  int64_t last = 0;
  for (int axis = 0; axis < 4; ++axis) last += (tensor.size[axis] - 1) * tensor.stride[axis];
  tensor.bytes = tensor.count() ? size_t((tensor.start + last + 1) * width_of(tensor.type)) : 0;
  if (!tensor.count()) tensor.start = 0;
  tensor.memory.reset(new unsigned char[tensor.bytes]);
  if (tensor.bytes) std::memset(tensor.memory.get(), 0xFF, tensor.bytes);
}

inline Tensor contiguous(Type type, int64_t a, int64_t b, int64_t c, int64_t d) {
  Tensor tensor;
  tensor.type = type;
  const int64_t size[4] = {a, b, c, d}, stride[4] = {b * c * d, c * d, d, 1};
  std::copy(size, size + 4, tensor.size);
  std::copy(stride, stride + 4, tensor.stride);
  allocate(tensor);
  return tensor;
}

// The same sizes in one of the layouts that a caller may come with.
inline Tensor in_some_layout(Random& random, Type type, int64_t a, int64_t b, int64_t c, int64_t d) {
  Tensor tensor;
  tensor.type = type;
  const int64_t size[4] = {a, b, c, d};
  std::copy(size, size + 4, tensor.size);
  int order[4] = {0, 1, 2, 3};  // from the slowest axis to the fastest
  if (random.chance(0.3)) std::swap(order[1], order[2]);  // (B, L, H, D) underneath
  if (random.chance(0.1)) std::swap(order[2], order[3]);  // (B, H, D, L) underneath, or more mixed
  int64_t reach = random.chance(0.15) ? random.between(2, 3) : 1;  // last axis strided
  for (int n = 3; n >= 0; --n) {
    const int axis = order[n];
    tensor.stride[axis] = reach;
    reach *= std::max<int64_t>(size[axis], 1);
    if (random.chance(0.15)) reach += random.between(1, 9);  // padded
  }
  for (int axis = 0; axis < 4; ++axis) {
    if (random.chance(0.05)) tensor.stride[axis] = 0;                          // expanded
    if (size[axis] == 1 && random.chance(0.2)) tensor.stride[axis] = 1000003;  // of no meaning
  }
  tensor.start = random.chance(0.3) ? random.between(1, 5) : 0;
  allocate(tensor);
  return tensor;
}

}  // namespace driver
