#include "pages.h"

#include <stdint.h>

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace qkv {

void prefer_large_pages([[maybe_unused]] void* data, [[maybe_unused]] size_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE)), at = reinterpret_cast<uintptr_t>(data);
  const uintptr_t first = (at + page - 1) / page * page, stop = (at + bytes) / page * page;
  if (first < stop) madvise(reinterpret_cast<void*>(first), stop - first, MADV_HUGEPAGE);  // NOLINT
#endif
}

}  // namespace qkv
