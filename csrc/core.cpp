#include <cstdio>
#include <cstdlib>

#include "isa.h"

namespace qkv {
namespace {

const Kernels& chosen() {
  if (kernels() != nullptr) return *kernels();
  std::fprintf(stderr, "qkv: QKV_ISA must name an instruction set of this build and this processor; there are: %s\n",
               available_isas());
  std::abort();
}

}  // namespace

Status forward(const Problem& problem, const Forward& tensors, const Run& run) {
  return chosen().forward(problem, tensors, run);
}

Status backward(const Problem& problem, const Backward& tensors, const Run& run) {
  return chosen().backward(problem, tensors, run);
}

Status recur(const Recurrence& problem, const RecurrenceForward& tensors, const Run& run) {
  return chosen().linear->recur(problem, tensors, run);
}

Status recur_backward(const Recurrence& problem, const RecurrenceBackward& tensors, const Run& run) {
  return chosen().linear->recur_backward(problem, tensors, run);
}

Status convolution(const Convolution& asked, const Run& run) { return chosen().linear->convolution(asked, run); }

Status convolution_backward(const Convolution& asked, const ConvolutionGradients& gradients, const Run& run) {
  return chosen().linear->convolution_backward(asked, gradients, run);
}

Status norm(const Norm& asked, const Run& run) { return chosen().linear->norm(asked, run); }

Status norm_backward(const Norm& asked, const NormGradients& gradients, const Run& run) {
  return chosen().linear->norm_backward(asked, gradients, run);
}

Status project(const Projection& asked, const Run& run) { return chosen().linear->project(asked, run); }

}  // namespace qkv
