// What one instruction set offers; each translation unit in targets/ defines one.
#pragma once

#include "../beside.h"
#include "../linear.h"
#include "../projection.h"

namespace qkv {

// What is written once for all numbers, and is not made anew for units of bfloat16 products.
struct LinearKernels {
  Status (*recur)(const Recurrence&, const RecurrenceForward&, const Run&);
  Status (*recur_backward)(const Recurrence&, const RecurrenceBackward&, const Run&);
  Status (*convolution)(const Convolution&, const Run&);
  Status (*convolution_backward)(const Convolution&, const ConvolutionGradients&, const Run&);
  Status (*norm)(const Norm&, const Run&);
  Status (*norm_backward)(const Norm&, const NormGradients&, const Run&);
  Status (*project)(const Projection&, const Run&);
};

struct Kernels {
  const char* name;
  Status (*forward)(const Problem&, const Forward&, const Run&);
  Status (*backward)(const Problem&, const Backward&, const Run&);
  const LinearKernels* linear;
};

extern const Kernels KERNELS_V2, KERNELS_AVX2, KERNELS_AVX512, KERNELS_AVX512BF16, KERNELS_AMX, KERNELS_NEON;
extern const Kernels KERNELS_TILES;  // for tests
extern const LinearKernels LINEAR_V2, LINEAR_AVX2, LINEAR_AVX512, LINEAR_NEON;

bool amx_works();  // to be asked where the system has permitted tiles

}  // namespace qkv
