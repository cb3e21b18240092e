// Memory of a unit of work and of a whole call.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

namespace {

// Memory for one unit of work, handed out piece by piece; without a base it only counts.
class Arena {
 public:
  explicit Arena(void* base) : at_(static_cast<char*>(base)) {}

  template <class T>
  T* take(int64_t count) {
    const size_t bytes = (static_cast<size_t>(count) * sizeof(T) + 63) / 64 * 64;
    T* piece = reinterpret_cast<T*>(at_);
    if (at_) at_ += bytes;
    used_ += bytes;
    return piece;
  }

  size_t used() const { return used_; }

 private:
  char* at_;
  size_t used_ = 0;
};

// Memory that one call holds beside its tensors.
class Buffer {
 public:
  ~Buffer() { free(data_); }
  bool reserve(size_t bytes) { return bytes == 0 || (data_ = malloc(bytes)) != nullptr; }
  void* data() const { return data_; }

 private:
  void* data_ = nullptr;
};

}  // namespace
