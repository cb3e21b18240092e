// The short convolution, the norms and the projection of few rows for Python. As in bind.cpp, pointers are integers, 0
// for null, and the caller keeps what they point to. All arguments are positional: these calls can be short.
#include <nanobind/stl/array.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <vector>

#include "beside.h"
#include "bind_run.h"
#include "projection.h"

namespace qkv {
namespace {

using Two = std::array<int64_t, 2>;

// type of x, type of the weight, sizes N, L, C, K, strides of x, starts (empty: none), whether with SiLU, then tensors
Convolution convolution_of(int32_t type, int32_t weight_type, const std::array<int64_t, 4>& sizes, const Two& stride,
                           const std::vector<int64_t>& starts, bool silu, Address x, Address weight, Address bias,
                           Address before) {
  Convolution asked{};
  asked.type = static_cast<Type>(type);
  asked.weight_type = static_cast<Type>(weight_type);
  asked.sequences = sizes[0];
  asked.length = sizes[1];
  asked.channels = sizes[2];
  asked.taps = sizes[3];
  asked.x_stride[0] = stride[0];
  asked.x_stride[1] = stride[1];
  asked.starts = starts.empty() ? nullptr : starts.data();
  asked.silu = silu;
  asked.x = at(x);
  asked.weight = at(weight);
  asked.bias = at(bias);
  asked.before = at(before);
  return asked;
}

void convolve(int32_t threads, int32_t type, int32_t weight_type, const std::array<int64_t, 4>& sizes,
              const Two& stride, const std::vector<int64_t>& starts, bool silu, Address x, Address weight, Address bias,
              Address before, Address output, Address after) {
  Convolution asked = convolution_of(type, weight_type, sizes, stride, starts, silu, x, weight, bias, before);
  asked.output = at(output);
  asked.after = at(after);
  run(threads, [&](const Run& how) { return convolution(asked, how); });
}

void convolve_backward(int32_t threads, int32_t type, int32_t weight_type, const std::array<int64_t, 4>& sizes,
                       const Two& stride, const std::vector<int64_t>& starts, bool silu, Address x, Address weight,
                       Address bias, Address before, const Two& grad_output_stride, Address grad_output,
                       Address grad_after, Address grad_x, Address grad_weight, Address grad_bias,
                       Address grad_before) {
  const Convolution asked = convolution_of(type, weight_type, sizes, stride, starts, silu, x, weight, bias, before);
  const ConvolutionGradients gradients{at(grad_output), {grad_output_stride[0], grad_output_stride[1]},
                                       at(grad_after),  at(grad_x),
                                       at(grad_weight), at(grad_bias),
                                       at(grad_before)};
  run(threads, [&](const Run& how) { return convolution_backward(asked, gradients, how); });
}

// types of x, of the gate, of the weight; activation, whether the gate comes first, whether of the mean; sizes of rows
// (outer, inner), W and rows of the weight; strides of x and of the gate; epsilon, then tensors
Norm norm_of(const std::array<int32_t, 3>& types, int32_t activation, bool gate_first, bool mean,
             const std::array<int64_t, 4>& sizes, const Two& stride, const Two& gate_stride, double eps, Address x,
             Address gate, Address weight) {
  Norm asked{};
  asked.type = static_cast<Type>(types[0]);
  asked.gate_type = static_cast<Type>(types[1]);
  asked.weight_type = static_cast<Type>(types[2]);
  asked.activation = static_cast<Activation>(activation);
  asked.gate_first = gate_first;
  asked.mean = mean;
  asked.outer = sizes[0];
  asked.inner = sizes[1];
  asked.width = sizes[2];
  asked.weight_rows = sizes[3];
  for (int i = 0; i < 2; ++i) {
    asked.x_stride[i] = stride[i];
    asked.gate_stride[i] = gate_stride[i];
  }
  asked.eps = eps;
  asked.x = at(x);
  asked.gate = at(gate);
  asked.weight = at(weight);
  return asked;
}

void normalise(int32_t threads, const std::array<int32_t, 3>& types, int32_t activation, bool gate_first, bool mean,
               const std::array<int64_t, 4>& sizes, const Two& stride, const Two& gate_stride, double eps, Address x,
               Address gate, Address weight, Address output) {
  Norm asked = norm_of(types, activation, gate_first, mean, sizes, stride, gate_stride, eps, x, gate, weight);
  asked.output = at(output);
  run(threads, [&](const Run& how) { return norm(asked, how); });
}

void normalise_backward(int32_t threads, const std::array<int32_t, 3>& types, int32_t activation, bool gate_first,
                        bool mean, const std::array<int64_t, 4>& sizes, const Two& stride, const Two& gate_stride,
                        double eps, Address x, Address gate, Address weight, const Two& grad_output_stride,
                        Address grad_output, Address grad_x, Address grad_gate, Address grad_weight) {
  const Norm asked = norm_of(types, activation, gate_first, mean, sizes, stride, gate_stride, eps, x, gate, weight);
  const NormGradients gradients{at(grad_output), {grad_output_stride[0], grad_output_stride[1]},
                                at(grad_x),      at(grad_gate),
                                at(grad_weight)};
  run(threads, [&](const Run& how) { return norm_backward(asked, gradients, how); });
}

// type, sizes R, N, K, strides of x and the weight, then tensors
void project_rows(int32_t threads, int32_t type, int64_t rows, int64_t outputs, int64_t inputs, int64_t x_stride,
                  int64_t weight_stride, Address x, Address weight, Address bias, Address output) {
  const Projection asked{static_cast<Type>(type), rows,   outputs,    inputs,   x_stride,
                         weight_stride,           at(x), at(weight), at(bias), at(output)};
  run(threads, [&](const Run& how) { return project(asked, how); });
}

}  // namespace

void bind_beside(nb::module_& module) {
  module.def("convolution", &convolve);
  module.def("convolution_backward", &convolve_backward);
  module.def("norm", &normalise);
  module.def("norm_backward", &normalise_backward);
  module.def("project", &project_rows);
}

}  // namespace qkv
