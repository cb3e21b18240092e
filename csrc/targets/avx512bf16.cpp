#include "vectors512.h"
#define QKV_BESIDE qkv::KERNELS_AVX512
#include "../kernels/target_pairs-inl.h"

namespace qkv {

const Kernels KERNELS_AVX512BF16{"avx512bf16", run_pairs_forward, run_pairs_backward, &LINEAR_AVX512};

}  // namespace qkv
