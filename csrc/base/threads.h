// A small pool of threads: the caller works too, and never waits for a worker that has not started.
#pragma once

#include "../abi.h"

namespace qkv {

// The pool as one unit of work sees it.
class Worker {
 public:
  // Memory of this thread, aligned to 64 bytes, valid until the next call of `scratch` on it; null: out of memory.
  virtual void* scratch(size_t bytes) = 0;
  // Whether the call is to end early. Cheap; asked every few microseconds. In the calling thread it asks `poll` when 20
  // ms have passed since it last did.
  virtual bool stopped() = 0;
  // End the call early with this status.
  virtual void fail(Status) = 0;

 protected:
  ~Worker() = default;
};

using Body = void (*)(void* state, int64_t unit, Worker& worker);

// body(state, u, worker) for every u in 0..units-1, in ascending order of start, each on one thread. Returns when all
// have ended. `threads` counts the caller. Safe to call from several threads at once, and in a forked child.
Status parallel(const Run& run, int64_t units, Body body, void* state);

}  // namespace qkv
