// In place of the library's.
#include "allocations.h"

#include <new>

namespace {

template <class... Alignment>
void* allocate_or_null(size_t bytes, Alignment... alignment) noexcept {
  try {
    return driver::may_allocate() ? ::operator new(bytes, alignment...) : nullptr;
  } catch (...) {
    return nullptr;
  }
}

}  // namespace

void* operator new(size_t bytes, const std::nothrow_t&) noexcept { return allocate_or_null(bytes); }

void* operator new(size_t bytes, std::align_val_t alignment, const std::nothrow_t&) noexcept {
  return allocate_or_null(bytes, alignment);
}

extern "C" void* __real_malloc(size_t bytes);

extern "C" void* __wrap_malloc(size_t bytes) { return driver::may_allocate() ? __real_malloc(bytes) : nullptr; }
