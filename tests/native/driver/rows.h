// Tensors of the linear family, whose numbers lie side by side along the last axis, and results by name.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <utility>

#include "poll.h"
#include "tensors.h"

namespace driver {

// One of the orders, with the gaps, that a caller may come with. Those that are `written` have a place for each number.
inline Tensor in_rows(Random& random, Type type, int64_t a, int64_t b, int64_t c, int64_t d, bool written = false) {
  Tensor tensor;
  tensor.type = type;
  const int64_t size[4] = {a, b, c, d};
  std::copy(size, size + 4, tensor.size);
  int order[3] = {0, 1, 2};  // from the slowest axis to the fastest
  if (random.chance(0.4)) std::swap(order[1], order[2]);
  if (random.chance(0.2)) std::swap(order[0], order[1]);
  int64_t reach = d + (random.chance(0.3) ? random.between(1, 9) : 0);
  tensor.stride[3] = 1;
  for (int n = 2; n >= 0; --n) {
    tensor.stride[order[n]] = reach;
    reach *= std::max<int64_t>(size[order[n]], 1);
    if (random.chance(0.15)) reach += random.between(1, 9);
  }
  for (int axis = 0; axis < 3; ++axis) {
    if (!written && random.chance(0.05)) tensor.stride[axis] = 0;              // expanded
    if (size[axis] == 1 && random.chance(0.2)) tensor.stride[axis] = 1000003;  // of no meaning
  }
  tensor.start = random.chance(0.3) ? random.between(1, 5) : 0;
  allocate(tensor);
  return tensor;
}

// Of a stream beside one of `type`: that, the computing type, or one of 16 bits beside float32.
inline Type type_beside(Random& random, Type type) {
  if (computing(type) == Type::float64 || random.chance(0.4)) return type;
  return random.chance(0.5) ? Type::float32 : Type(random.between(2, 3));
}

template <class Make>
void fill(Tensor& tensor, Make make) {
  tensor.each([&](int64_t a, int64_t b, int64_t c, int64_t d) { tensor.set(a, b, c, d, make()); });
}

inline void fill_with_nan(Tensor& tensor) {
  if (tensor.bytes) std::memset(tensor.memory.get(), 0xFF, tensor.bytes);
}

inline Tensor copy_of(const Tensor& tensor) {
  Tensor made;
  made.type = tensor.type, made.start = tensor.start;
  std::copy(tensor.size, tensor.size + 4, made.size);
  std::copy(tensor.stride, tensor.stride + 4, made.stride);
  allocate(made);
  if (made.bytes) std::memcpy(made.memory.get(), tensor.memory.get(), made.bytes);
  return made;
}

// Whether all bytes beside the numbers are as they were allocated.
inline bool gaps_are_left(const Tensor& tensor) {
  std::vector<bool> own(tensor.bytes);
  const int64_t width = width_of(tensor.type);
  tensor.each([&](int64_t a, int64_t b, int64_t c, int64_t d) {
    const auto first = own.begin() + (tensor.start + tensor.place(a, b, c, d)) * width;
    std::fill(first, first + width, true);
  });
  for (size_t n = 0; n < tensor.bytes; ++n) {
    if (!own[n] && tensor.memory[n] != 0xFF) return false;
  }
  return true;
}

// Tokens of sequences in a row, some of them none: where each begins, and the end.
inline Exact<int64_t> packed(Random& random, int64_t sequences, const std::function<int64_t()>& length) {
  std::vector<int64_t> begin = {0};
  for (int64_t n = 0; n < sequences; ++n) begin.push_back(begin.back() + (random.chance(0.2) ? 0 : length()));
  return Exact<int64_t>(begin);
}

using Numbers = std::vector<double>;              // of a tensor, in the order of its axes
using Truth = std::map<std::string, Numbers>;     // by the names of results

// What one forward and one backward pass wrote; those not asked for are absent.
struct Outcome {
  qkv::Status status = qkv::Status::ok;
  std::map<std::string, Tensor> results;

  Tensor& add(const std::string& name, Tensor tensor) { return results[name] = std::move(tensor); }
  void* at(const std::string& name) const {
    const auto found = results.find(name);
    return found == results.end() ? nullptr : found->second.data();
  }
};

struct How {
  int32_t threads = 1;
  bool in_place = false;       // the state after is written over the state before
  bool forward_alone = false;  // and nothing kept for a backward pass
  Poll* poll = nullptr;

  qkv::Run run() const { return {threads, poll ? Poll::ask : nullptr, poll}; }
};

}  // namespace driver
