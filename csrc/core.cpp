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

}  // namespace qkv
