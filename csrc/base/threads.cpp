#include "threads.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <utility>

namespace qkv {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::microseconds SPIN(30);  // how long a thread looks before it sleeps
constexpr std::chrono::milliseconds POLL(20);
constexpr std::align_val_t ALIGNMENT{64};
constexpr size_t KEPT = size_t{64} << 20;  // the most scratch memory that a thread keeps from call to call

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

template <class Ready>
bool spin(Ready ready) {
  for (const auto end = Clock::now() + SPIN; !ready(); pause()) {
    if (Clock::now() > end) return false;
  }
  return true;
}

struct Free {
  void operator()(void* memory) const { ::operator delete(memory, ALIGNMENT); }
};

struct Arena {
  std::unique_ptr<void, Free> memory;
  size_t size = 0;

  void* at_least(size_t bytes) {
    if (bytes > size) {
      memory.reset();
      memory.reset(::operator new(bytes, ALIGNMENT, std::nothrow));
      size = memory ? bytes : 0;
    }
    return memory.get();
  }
};

thread_local Arena idle_arena;  // of a thread that is in no call

// One call of `parallel`. It lives on its caller's stack.
struct Job {
  const Run& run;
  const int64_t units;
  const Body body;
  void* const state;
  std::atomic<int64_t> next{0};
  std::atomic<Status> status{Status::ok};
  std::atomic<int64_t> inside{0};  // workers at work on it
  int64_t seats = 0;               // workers that may still join; guarded by the pool
  Job* behind = nullptr;           // in the queue; guarded by the pool
  std::fenv_t rounding{};          // the caller's: results do not depend on who computes them
};

// One thread at one job.
class Hand final : public Worker {
 public:
  Hand(Job& job, bool calling) : job_(job), asks_(calling && job.run.poll != nullptr) {}

  ~Hand() {
    if (arena_.size <= KEPT) idle_arena = std::move(arena_);
  }

  void* scratch(size_t bytes) override { return arena_.at_least(bytes); }

  bool stopped() override {
    if (job_.status.load(std::memory_order_relaxed) != Status::ok) return true;
    if (!asks_ || Clock::now() - asked_ < POLL) return false;
    const bool ends = job_.run.poll(job_.run.context) != 0;
    if (ends) fail(Status::interrupted);
    asked_ = Clock::now();
    return ends;
  }

  void fail(Status why) override {
    Status none = Status::ok;
    job_.status.compare_exchange_strong(none, why);  // the first reason counts
  }

  void work() noexcept {
    while (!stopped()) {
      const int64_t unit = job_.next.fetch_add(1, std::memory_order_relaxed);
      if (unit >= job_.units) return;
      job_.body(job_.state, unit, *this);
    }
  }

 private:
  Job& job_;
  const bool asks_;
  Clock::time_point asked_ = Clock::now();
  Arena arena_ = std::exchange(idle_arena, Arena{});
};

// Workers and the jobs that have seats for them. Never destroyed: its workers sleep until the process ends.
class Pool {
 public:
  void open(Job& job, int64_t seats) {
    std::unique_lock lock(mutex_);
    while (workers_ < seats && hire()) ++workers_;
    job.seats = std::min(seats, workers_);
    if (job.seats == 0) return;
    Job** end = &queue_;
    while (*end != nullptr) end = &(*end)->behind;
    *end = &job;
    open_seats_ += job.seats;
    lock.unlock();
    wake();
  }

  // Nobody joins any more; those who have are waited for.
  void close(Job& job, Hand& caller) {
    const auto empty = [&job] { return job.inside.load(std::memory_order_acquire) == 0; };
    std::unique_lock lock(mutex_);
    open_seats_ -= job.seats;
    if (job.seats > 0) withdraw(job);
    lock.unlock();
    if (spin(empty)) return;
    for (lock.lock(); !done_.wait_for(lock, POLL, empty); lock.lock()) {
      lock.unlock();
      caller.stopped();  // asks
    }
  }

 private:
  // Each who wakes wakes two more, so that a caller pays for two.
  void wake() {
    for (int64_t i = std::min<int64_t>(open_seats_, 2); i > 0; --i) wake_.notify_one();
  }

  bool hire() {
    sigset_t before, here;  // signals are for the threads of the host, faults excepted
    sigfillset(&here);
    for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) sigdelset(&here, fault);
    pthread_sigmask(SIG_SETMASK, &here, &before);
    bool hired = true;
    try {
      std::thread(&Pool::serve, this).detach();
    } catch (...) {  // then with fewer
      hired = false;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return hired;
  }

  void serve() {
    const auto wanted = [this] { return open_seats_.load(std::memory_order_relaxed) > 0; };
    for (;;) {
      spin(wanted);
      std::unique_lock lock(mutex_);
      wake_.wait(lock, wanted);
      Job& job = *queue_;
      job.inside.fetch_add(1, std::memory_order_relaxed);
      if (--job.seats == 0) withdraw(job);
      --open_seats_;
      lock.unlock();
      wake();
      std::fesetenv(&job.rounding);
      Hand(job, false).work();
      leave(job);
    }
  }

  void leave(Job& job) {
    const std::lock_guard lock(mutex_);
    if (job.inside.fetch_sub(1, std::memory_order_release) == 1) done_.notify_all();  // the job may be gone by now
  }

  void withdraw(Job& job) {
    Job** at = &queue_;
    while (*at != &job) at = &(*at)->behind;
    *at = job.behind;
  }

  std::mutex mutex_;
  std::condition_variable wake_, done_;
  int64_t workers_ = 0;
  Job* queue_ = nullptr;                 // every job in it has an open seat
  std::atomic<int64_t> open_seats_{0};  // of all jobs; changed under the lock
};

std::atomic<Pool*> shared{nullptr};

// A forked child has none of its parent's workers, and perhaps their locks: it starts with another pool.
[[maybe_unused]] const int at_fork = pthread_atfork(nullptr, nullptr, [] { shared = nullptr; });

// The pool of this process; null: out of memory.
Pool* pool() {
  Pool* found = shared;
  if (found != nullptr) return found;
  Pool* fresh = new (std::nothrow) Pool;
  if (shared.compare_exchange_strong(found, fresh)) return fresh;
  delete fresh;  // another thread was faster
  return found;
}

}  // namespace

Status parallel(const Run& run, int64_t units, Body body, void* state) {
  Job job{run, units, body, state};
  const int64_t seats = std::min<int64_t>(run.threads, units) - 1;
  Pool* const helpers = seats > 0 ? pool() : nullptr;
  Hand caller(job, true);
  if (helpers != nullptr) {
    std::fegetenv(&job.rounding);
    helpers->open(job, seats);
  }
  caller.work();
  if (helpers != nullptr) helpers->close(job, caller);
  return job.status;
}

}  // namespace qkv
