#include "isa.h"

#include <cstdlib>
#include <cstring>
#include <string>

namespace qkv {
namespace {

struct Target {
  const Kernels& kernels;
  bool (*runs_here)();
};

#ifdef QKV_HAS_AVX512
bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("bmi2");
}
#endif

// What the build made, best first. A processor must have all that the compiler may use for the target.
const Target TARGETS[] = {
#ifdef QKV_HAS_AVX512BF16
    {KERNELS_AVX512BF16, [] { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }},
#endif
#ifdef QKV_HAS_AVX512
    {KERNELS_AVX512, has_avx512},
#endif
#ifdef QKV_HAS_AVX2
    {KERNELS_AVX2,
     [] {
       return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
              __builtin_cpu_supports("bmi2");
     }},
#endif
#ifdef QKV_HAS_V2
    {KERNELS_V2,
     [] {
       return __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("ssse3") && __builtin_cpu_supports("popcnt");
     }},
#endif
#ifdef QKV_HAS_NEON
    {KERNELS_NEON, [] { return true; }},  // part of every aarch64
#endif
};

const Kernels* find(const char* name) {
  const bool best = std::strcmp(name, "auto") == 0;
  for (const Target& target : TARGETS) {
    if ((best || std::strcmp(name, target.kernels.name) == 0) && target.runs_here()) return &target.kernels;
  }
  return nullptr;
}

std::string names() {
  std::string listed;
  for (const Target& target : TARGETS) {
    if (!target.runs_here()) continue;
    if (!listed.empty()) listed += ' ';
    listed += target.kernels.name;
  }
  return listed;
}

const Kernels* wanted() {
  const char* name = std::getenv("QKV_ISA");
  return find(name == nullptr ? "auto" : name);
}

const std::string AVAILABLE = names();
const Kernels* in_use = wanted();

}  // namespace

const Kernels* kernels() { return in_use; }

const char* available_isas() { return AVAILABLE.c_str(); }

const char* isa() { return in_use == nullptr ? "" : in_use->name; }

bool choose_isa(const char* name) {
  const Kernels* const found = find(name);
  if (found != nullptr) in_use = found;
  return found != nullptr;
}

}  // namespace qkv
