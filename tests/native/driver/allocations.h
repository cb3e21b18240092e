// Allocations that fail on demand: the forms of `new` that say so by a null pointer, and malloc as the program's own
// files call it (linked with --wrap=malloc). In one file of a program.
#pragma once

#include <atomic>
#include <new>

namespace driver {

// How many more succeed; negative: all.
inline std::atomic<int64_t> allocations_left{-1};

inline bool may_allocate() {
  int64_t left = allocations_left;
  while (left > 0 && !allocations_left.compare_exchange_weak(left, left - 1)) continue;
  return left != 0;
}

template <class... Alignment>
void* allocate_or_null(size_t bytes, Alignment... alignment) noexcept {
  try {
    return may_allocate() ? ::operator new(bytes, alignment...) : nullptr;
  } catch (...) {
    return nullptr;
  }
}

}  // namespace driver

void* operator new(size_t bytes, const std::nothrow_t&) noexcept { return driver::allocate_or_null(bytes); }

void* operator new(size_t bytes, std::align_val_t alignment, const std::nothrow_t&) noexcept {
  return driver::allocate_or_null(bytes, alignment);
}

extern "C" void* __real_malloc(size_t bytes);

extern "C" void* __wrap_malloc(size_t bytes) { return driver::may_allocate() ? __real_malloc(bytes) : nullptr; }
