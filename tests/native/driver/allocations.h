// Allocations that fail on demand: the forms of `new` that say so by a null pointer, and malloc as the program's own
// files call it (linked with --wrap=malloc).
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <thread>

namespace driver {

// How many more succeed; negative: all.
inline std::atomic<int64_t> allocations_left{-1};

inline bool may_allocate() {
  int64_t left = allocations_left;
  while (left > 0 && !allocations_left.compare_exchange_weak(left, left - 1)) continue;
  return left != 0;
}

// A new thread has no memory from earlier calls: the first, second, ... allocation of `call` fails in it. What
// `find(made, true)` says of that, and `find(made, false)` of the next call, which has memory; nothing where all is
// right.
template <class Call, class Find>
std::string without_memory(Call call, Find find) {
  std::string found;
  for (int64_t left = 0; left < 10 && found.empty(); ++left) {
    bool enough = false;
    std::thread host([&] {
      allocations_left = left;
      const auto made = call();
      enough = allocations_left != 0;
      allocations_left = -1;
      found = find(made, true);
      if (found.empty()) found = find(call(), false);
    });
    host.join();
    if (enough) break;
  }
  return found;
}

}  // namespace driver
