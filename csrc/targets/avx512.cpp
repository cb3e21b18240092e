#include "vectors512.h"
#include "../kernels/target-inl.h"

namespace qkv {

const Kernels KERNELS_AVX512{"avx512", run_forward, run_backward, &LINEAR_AVX512};

}  // namespace qkv
