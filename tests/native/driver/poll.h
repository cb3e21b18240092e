// How a host stops a call.
#pragma once

#include <cstdint>

namespace driver {

// Stops a call at the n-th question, or never.
struct Poll {
  int64_t stop_at = -1, asked = 0;
  static int32_t ask(void* context) {
    Poll& poll = *static_cast<Poll*>(context);
    return ++poll.asked == poll.stop_at;
  }
  bool stopped() const { return stop_at >= 0 && asked >= stop_at; }
};

}  // namespace driver
