// What one instruction set offers; each translation unit in targets/ defines one.
#pragma once

#include "../abi.h"

namespace qkv {

struct Kernels {
  const char* name;
  Status (*forward)(const Problem&, const Forward&, const Run&);
  Status (*backward)(const Problem&, const Backward&, const Run&);
};

extern const Kernels KERNELS_V2, KERNELS_AVX2, KERNELS_AVX512, KERNELS_AVX512BF16, KERNELS_AMX, KERNELS_NEON;
extern const Kernels KERNELS_TILES;  // for tests

bool amx_works();  // to be asked where the system has permitted tiles

}  // namespace qkv
