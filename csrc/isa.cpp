#include "isa.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#ifdef QKV_HAS_AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <cstdlib>
#include <cstring>
#include <string>

namespace qkv {
namespace {

#ifdef QKV_HAS_AMX
constexpr long ARCH_REQUEST_TILES = 0x1023, TILE_DATA = 18;  // of arch_prctl: ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
#endif

struct Target {
  const Kernels& kernels;
  bool (*runs_here)();
  bool by_name_only = false;
};

#ifdef QKV_HAS_AVX2
bool has_f16c() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) && (c >> 29 & 1);
}
#endif

#ifdef QKV_HAS_AVX512
bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("bmi2");
}
#endif

#ifdef QKV_HAS_AMX
// Whether the processor has tiles and products of bfloat16 on them, and the system keeps them: not all compilers know.
bool has_tiles() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c >> 27 & 1)) return false;  // xgetbv
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d >> 22 & 1) || !(d >> 24 & 1)) return false;
  unsigned low = 0, high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low >> 17 & 3) == 3;
}

// Tiles are large, so that Linux wants to be asked for them, once a process: only where they may be used.
bool has_amx() {
  const char* name = std::getenv("QKV_ISA");
  if (name != nullptr && std::strcmp(name, "auto") != 0 && std::strcmp(name, "amx") != 0) return false;
  static const bool found = has_avx512() && __builtin_cpu_supports("avx512bf16") && has_tiles() &&
                            syscall(SYS_arch_prctl, ARCH_REQUEST_TILES, TILE_DATA) == 0 && amx_works();
  return found;
}
#endif

// What the build made, best first. A processor must have all that the compiler may use for the target.
const Target TARGETS[] = {
#ifdef QKV_HAS_AMX
    {KERNELS_AMX, has_amx},
#endif
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
              __builtin_cpu_supports("bmi2") && has_f16c();
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
#ifdef QKV_HAS_TILES
    {KERNELS_TILES, has_avx512, true},
#endif
};

const Kernels* find(const char* name) {
  const bool best = std::strcmp(name, "auto") == 0;
  for (const Target& target : TARGETS) {
    const bool asked = best ? !target.by_name_only : std::strcmp(name, target.kernels.name) == 0;
    if (asked && target.runs_here()) return &target.kernels;
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
