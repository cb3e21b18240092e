// The AMX kernels on tiles in software, for tests: built where QKV_SOFTWARE_TILES is asked for, used only by name.
#include "vectors512.h"
#define QKV_TILES
#define QKV_SOFTWARE_TILES
#define QKV_BESIDE qkv::KERNELS_AVX512
#include "../kernels/target_pairs-inl.h"

namespace qkv {

const Kernels KERNELS_TILES{"tiles", run_pairs_forward, run_pairs_backward, &LINEAR_AVX512};

}  // namespace qkv
