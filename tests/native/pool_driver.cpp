// Drives the thread pool alone: `pool_driver SCENARIO` returns 0 when what the scenario says holds.
#include <pthread.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cfenv>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <map>
#include <string>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "base/threads.h"

using namespace qkv;

namespace {

#define CHECK(condition)                                                        \
  do {                                                                          \
    if (!(condition)) {                                                         \
      std::fprintf(stderr, "line %d: not so: %s\n", __LINE__, #condition);      \
      std::_Exit(1);                                                            \
    }                                                                           \
  } while (false)

using Unit = std::function<void(int64_t, Worker&)>;
using Poll = std::function<int32_t()>;

Status run(int32_t threads, int64_t units, Unit unit, Poll poll = nullptr) {
  const auto ask = [](void* context) { return (*static_cast<Poll*>(context))(); };
  const auto body = [](void* state, int64_t u, Worker& worker) { (*static_cast<Unit*>(state))(u, worker); };
  return parallel(Run{threads, poll ? +ask : nullptr, &poll}, units, body, &unit);
}

void rest(int milliseconds) { std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds)); }

// Every unit exactly once, ascending in each thread.
void check_once(int32_t threads, int64_t units) {
  static std::atomic<int64_t> jobs{0};
  static thread_local int64_t last, job;
  const int64_t mine = ++jobs;
  std::vector<std::atomic<int>> times(static_cast<size_t>(units));
  const Status status = run(threads, units, [&](int64_t u, Worker&) {
    CHECK(job != mine || last < u);
    job = mine;
    last = u;
    ++times[static_cast<size_t>(u)];
  });
  CHECK(status == Status::ok);
  for (const auto& count : times) CHECK(count == 1);
}

void many_jobs(int32_t seed, int jobs) {
  for (int i = 0; i < jobs; ++i) check_once(1 + (i + seed) % 6, (i * 37 + seed) % 200);
}

void once() {
  many_jobs(0, 3000);
  check_once(4, 2000000);
  check_once(1000, 3);
  check_once(0, 5);
}

void all_have_ended() {
  for (int i = 0; i < 20; ++i) {
    std::atomic<int> ended{0};
    run(4, 8, [&](int64_t, Worker&) { rest(1), ++ended; });
    CHECK(ended == 8);
  }
}

void callers() {
  std::vector<std::thread> threads;
  for (int t = 0; t < 6; ++t) threads.emplace_back(many_jobs, t, 500);
  for (auto& each : threads) each.join();
}

void nested() {
  const auto inner = [](int64_t, Worker& outer) {
    auto* mine = static_cast<int64_t*>(outer.scratch(4096));
    mine[0] = 7;
    check_once(3, 20);
    run(3, 20, [](int64_t, Worker& worker) { std::memset(worker.scratch(4096), 0, 4096); });
    CHECK(mine[0] == 7);  // the memory of the unit outside
  };
  for (int i = 0; i < 100; ++i) CHECK(run(4, 10, inner) == Status::ok);
}

void forks() {
  std::atomic<bool> done{false};
  std::vector<std::thread> busy;
  for (int t = 0; t < 2; ++t) busy.emplace_back([&done, t] { while (!done) many_jobs(t, 20); });
  for (int i = 0; i < 100; ++i) {
    check_once(4, 50);
    const pid_t child = fork();
    if (child == 0) {
      alarm(20);
      many_jobs(i, 20);
      std::_Exit(0);
    }
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
  }
  done = true;
  for (auto& each : busy) each.join();
}

void failure() {
  std::atomic<int64_t> ran{0};
  const auto unit = [&](int64_t u, Worker& worker) {
    ++ran;
    if (u >= 10) worker.fail(u == 10 ? Status::out_of_memory : Status::interrupted);
    while (u > 10 && !worker.stopped()) {
    }
  };
  for (const int32_t threads : {1, 4}) {
    ran = 0;
    CHECK(run(threads, 1000000, unit) != Status::ok);
    CHECK(ran >= 11 && ran < 100);  // nobody starts another unit
    check_once(threads, 100);
  }
  CHECK(run(1, 100, unit) == Status::out_of_memory);
  CHECK(run(1, 5, [](int64_t, Worker& w) { w.fail(Status::interrupted), w.fail(Status::out_of_memory); }) ==
        Status::interrupted);
}

void endless(int64_t, Worker& worker) {
  while (!worker.stopped()) {
  }
}

void poll() {
  const auto caller = std::this_thread::get_id();
  for (const int32_t threads : {1, 4}) {
    int asked = 0;
    const auto third = [&] {
      CHECK(std::this_thread::get_id() == caller);
      return static_cast<int32_t>(++asked == 3);
    };
    const auto unit = [](int64_t u, Worker& worker) {
      endless(u, worker);
      rest(30);
      CHECK(worker.stopped());
    };
    CHECK(run(threads, 4, unit, third) == Status::interrupted);
    CHECK(asked == 3);  // and never again
  }
}

// The caller is through with its units and waits for a worker's: it asks all the same.
void poll_while_waiting() {
  const auto caller = std::this_thread::get_id();
  std::atomic<bool> started{false};
  int asked = 0;
  const auto unit = [&](int64_t, Worker& worker) {
    if (std::this_thread::get_id() != caller) {
      started = true;
      endless(0, worker);
    }
    while (!started) rest(1);
  };
  CHECK(run(2, 2, unit, [&] { return static_cast<int32_t>(++asked == 3); }) == Status::interrupted);
  CHECK(asked == 3);
}

void caller_waits_for_nobody_absent() {
  std::atomic<int> inside{0};
  std::atomic<bool> leave{false};
  std::thread other([&] {
    run(4, 4, [&](int64_t, Worker&) {
      ++inside;
      while (!leave) rest(1);
    });
  });
  while (inside < 4) rest(1);  // every worker sits in the other job
  for (int i = 0; i < 100; ++i) check_once(4, 50);
  leave = true;
  other.join();
}

size_t resident() {
  size_t total = 0, pages = 0;
  std::ifstream("/proc/self/statm") >> total >> pages;
  return pages * static_cast<size_t>(sysconf(_SC_PAGESIZE));
}

void scratch() {
  const auto fill = [](size_t bytes) {
    return [bytes](int64_t u, Worker& worker) {
      auto* memory = static_cast<unsigned char*>(worker.scratch(bytes));
      CHECK(memory != nullptr && reinterpret_cast<uintptr_t>(memory) % 64 == 0);
      const int value = static_cast<int>(u % 251);
      std::memset(memory, value, bytes);
      std::this_thread::yield();
      CHECK(memory[0] == value && memory[bytes - 1] == value);  // nobody else's
    };
  };
  for (const size_t bytes : {size_t{1}, size_t{100}, size_t{1000000}, size_t{64}}) run(4, 300, fill(bytes));

  void* first = nullptr;
  void* second = nullptr;
  run(1, 1, [&](int64_t, Worker& worker) { first = worker.scratch(1000); });
  run(1, 1, [&](int64_t, Worker& worker) { second = worker.scratch(1000); });
  CHECK(first == second);  // kept

  const size_t before = resident();
  run(4, 4, fill(size_t{200} << 20));
  CHECK(resident() < before + (size_t{150} << 20));  // what is large is not

  const auto too_much = [](int64_t, Worker& worker) {
    if (worker.scratch(size_t{1} << 60) == nullptr) worker.fail(Status::out_of_memory);
  };
  CHECK(run(4, 16, too_much) == Status::out_of_memory);
  run(4, 300, fill(1000));
}

bool blocked(int signal) {
  sigset_t mask;
  pthread_sigmask(SIG_SETMASK, nullptr, &mask);
  return sigismember(&mask, signal) == 1;
}

void signals() {
  const auto caller = std::this_thread::get_id();
  std::atomic<int> workers{0};
  for (int i = 0; i < 200 && workers == 0; ++i) {
    run(4, 40, [&](int64_t, Worker&) {
      const bool worker = std::this_thread::get_id() != caller;
      workers += worker;
      CHECK(blocked(SIGINT) == worker && blocked(SIGTERM) == worker && !blocked(SIGSEGV));
      rest(1);
    });
  }
  CHECK(workers > 0 && !blocked(SIGINT));
}

void rounding() {
  for (int i = 0; i < 50; ++i) {
    const int mode = i % 2 ? FE_UPWARD : FE_TONEAREST;
    std::fesetround(mode);
#if defined(__x86_64__)
    _mm_setcsr((_mm_getcsr() & ~0x8040u) | (i % 3 ? 0x8040u : 0u));  // subnormal numbers are zero
    const unsigned control = _mm_getcsr() & ~0x3fu;
#endif
    run(4, 40, [&](int64_t, Worker&) {
      CHECK(std::fegetround() == mode);
#if defined(__x86_64__)
      CHECK((_mm_getcsr() & ~0x3fu) == control);
#endif
      std::this_thread::yield();
    });
  }
}

int64_t threads_now() {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    int64_t count = 0;
    if (word == "Threads:" && status >> count) return count;
  }
  return -1;
}

void few_threads() {
  const int64_t before = threads_now();
  for (int i = 0; i < 100; ++i) check_once(4, 100);
  CHECK(threads_now() <= before + 3);
}

void no_threads_to_be_had() {
  const int64_t before = threads_now();
  size_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  const size_t mapped = pages * static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const rlimit limit{mapped + (size_t{64} << 20), RLIM_INFINITY};  // a stack does not fit
  pthread_attr_t large;
  pthread_attr_init(&large);
  pthread_attr_setstacksize(&large, size_t{256} << 20);
  pthread_setattr_default_np(&large);
  CHECK(setrlimit(RLIMIT_AS, &limit) == 0);
  for (int i = 0; i < 20; ++i) check_once(4, 100);
  CHECK(threads_now() == before);
}

void idle() {
  check_once(4, 1000);
  rest(20);
  const std::clock_t before = std::clock();  // of all threads
  rest(400);
  CHECK(std::clock() - before < CLOCKS_PER_SEC / 20);
}

// The process ends while workers sleep and others work.
void leave() {
  std::thread([] { run(4, 1000, endless, [] { return 0; }); }).detach();
  rest(50);
}

const std::map<std::string, void (*)()> SCENARIOS = {
    {"once", once},
    {"all_have_ended", all_have_ended},
    {"callers", callers},
    {"nested", nested},
    {"forks", forks},
    {"failure", failure},
    {"poll", poll},
    {"poll_while_waiting", poll_while_waiting},
    {"caller_waits_for_nobody_absent", caller_waits_for_nobody_absent},
    {"scratch", scratch},
    {"signals", signals},
    {"rounding", rounding},
    {"few_threads", few_threads},
    {"no_threads_to_be_had", no_threads_to_be_had},
    {"idle", idle},
    {"leave", leave},
};

}  // namespace

int main(int count, char** words) {
  if (count == 2 && SCENARIOS.count(words[1]) != 0) {
    SCENARIOS.at(words[1])();
    return 0;
  }
  for (const auto& [name, scenario] : SCENARIOS) std::puts(name.c_str());
  return count == 1 ? 0 : 2;
}
