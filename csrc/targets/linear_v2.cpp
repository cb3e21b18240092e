#define QKV_BYTES 16  // of a vector
#define QKV_PANEL 3  // vectors of a panel, and rows of a strip beside it: what the registers hold
#define QKV_STRIP 4
#include "../kernels/target_linear-inl.h"

namespace qkv {

const LinearKernels LINEAR_V2{run_recurrence,           run_recurrence_backward, run_convolution,
                                 run_convolution_backward, run_norm,                run_norm_backward,
                                 run_projection};

}  // namespace qkv
