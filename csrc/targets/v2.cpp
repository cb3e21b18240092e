#define QKV_BYTES 16  // of a vector
#define QKV_PANEL 3  // vectors of a panel, and rows of a strip beside it: what the registers hold
#define QKV_STRIP 4
#include "../kernels/target-inl.h"

namespace qkv {

const Kernels KERNELS_V2{"v2", run_forward, run_backward, &LINEAR_V2};

}  // namespace qkv
