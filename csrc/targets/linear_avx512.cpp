#include "vectors512.h"
#include "../kernels/target_linear-inl.h"

namespace qkv {

const LinearKernels LINEAR_AVX512{run_recurrence,           run_recurrence_backward, run_convolution,
                                 run_convolution_backward, run_norm,                run_norm_backward,
                                 run_projection};

}  // namespace qkv
