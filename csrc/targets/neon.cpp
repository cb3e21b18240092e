#define QKV_BYTES 16  // of a vector
#define QKV_PANEL 4  // vectors of a panel, and rows of a strip beside it: what the registers hold
#define QKV_STRIP 6
#include "../kernels/target-inl.h"

namespace qkv {

const Kernels KERNELS_NEON{"neon", run_forward, run_backward, &LINEAR_NEON};

}  // namespace qkv
