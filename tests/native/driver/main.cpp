// The core without Python: random calls against a plain reference.
//
//   driver MODE N SEED     N cases from SEED on; each failure prints the line that replays it
//
// calls      on every instruction set, by one to three threads, interrupted, with other hidden content
// schedules  the same for many small calls, each on one instruction set
// at_once    from several host threads at the same time
// no_memory  an allocation of it fails
// interrupt  calls of a second and more stop when they are told to
// linear     recurrences forward, backward and carried on in place, with every set of kernels
// beside     short convolutions, norms and projections of few rows, likewise
#include <csignal>
#include <cstdio>
#include <cstdlib>

#include "../../../csrc/isa.h"
#include "check.h"
#include "lifecycle.h"
#include "linear.h"

// Sanitizers call back before they end the process.
extern "C" void __sanitizer_set_death_callback(void (*)()) __attribute__((weak));

namespace {

using namespace driver;

constexpr int64_t LARGE = 1500000, SMALL = 150000;  // B·H·L·S·(D + V), a tenth of the cases eight times that

char replay[100];  // the line that makes the present case again

void say_replay() { std::fprintf(stderr, "\nSTOPPED  %s\n", replay); }

void on_signal(int number) {
  say_replay();
  std::signal(number, SIG_DFL);
  std::raise(number);
}

void say_replay_at_death() {
  if (__sanitizer_set_death_callback) return __sanitizer_set_death_callback(say_replay);
  for (const int number : {SIGSEGV, SIGABRT, SIGFPE, SIGILL}) std::signal(number, on_signal);
}

std::vector<std::string> words(const char* text) {
  std::istringstream stream(text);
  std::vector<std::string> found;
  for (std::string word; stream >> word;) found.push_back(word);
  return found;
}

// One instruction set for each set of kernels of the linear family: some share theirs.
std::vector<std::string> sets_of_linear_kernels() {
  std::vector<std::string> found;
  std::vector<const qkv::LinearKernels*> seen;
  for (const std::string& isa : words(qkv::available_isas())) {
    qkv::choose_isa(isa.c_str());
    if (std::find(seen.begin(), seen.end(), qkv::kernels()->linear) != seen.end()) continue;
    seen.push_back(qkv::kernels()->linear);
    found.push_back(isa);
  }
  return found;
}

// What is wrong with one case; nothing where all is right.
std::vector<std::string> failures(const std::string& mode, uint64_t seed) {
  const std::vector<std::string> isas = words(qkv::available_isas());
  const std::vector<std::string> one = {isas[seed % isas.size()]};
  if (mode == "calls") return Checker().check(seed, LARGE, isas);
  if (mode == "schedules") return Checker().check(seed, SMALL, one);
  if (mode == "linear") return check_recurrence(seed, sets_of_linear_kernels());
  if (mode == "beside") return check_beside(seed, sets_of_linear_kernels());
  qkv::choose_isa(one[0].c_str());
  std::string found = "no such mode";
  if (mode == "at_once") found = calls_at_once(seed, SMALL);
  if (mode == "no_memory") found = call_without_memory(seed, SMALL);
  if (mode == "interrupt") found = interrupted_call() + interrupted_linear_calls();
  return found.empty() ? std::vector<std::string>() : std::vector<std::string>{found};
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) {
    std::fprintf(stderr, "usage: driver calls|schedules|at_once|no_memory|interrupt|linear|beside N SEED\n");
    return 2;
  }
  say_replay_at_death();
  const std::string mode = argv[1];
  const unsigned long long count = std::strtoull(argv[2], nullptr, 0), seed = std::strtoull(argv[3], nullptr, 0);
  unsigned long long failed = 0;
  for (unsigned long long n = 0; n < count; ++n) {
    std::snprintf(replay, sizeof replay, "driver %.20s 1 %llu", mode.c_str(), seed + n);
    const auto lines = failures(mode, seed + n);
    for (const std::string& line : lines) std::printf("FAILED  %s  %s\n", replay, line.c_str());
    failed += !lines.empty();
    std::fflush(stdout);
  }
  std::printf("%llu %s from seed %llu on %s: %llu failed\n", count, mode.c_str(), seed, qkv::available_isas(), failed);
  return failed != 0;
}
